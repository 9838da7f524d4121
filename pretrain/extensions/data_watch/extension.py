"""Watch of the training data: the declaration."""

from pretrain.extension import Extension, Problem

EXTENSION = Extension(
    "data_watch", "Hashes the training data while a run trains, and stops the run when its files change.",
    callbacks="watch:callbacks",
    events={
        "data_changed": ("", "a file of the data was written to while the run was training, and is hashed again"),
        "data_replaced": ("", "a file of the data was replaced or removed; the run reads the old one")},
    problems={
        "data_changed": Problem("a file of the data was changed: {reason}", "do not write to the data of a run"),
        "data_replaced": Problem("a file of the data was replaced or removed: {reason}",
                                 "restore the file before the next start", ("start", "finished"))})
