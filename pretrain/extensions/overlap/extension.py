"""Text of evaluation sets in training data: a subcommand of `ds-pretrain data`."""

from pretrain.extension import Extension

EXTENSION = Extension("overlap", "Finds text of evaluation sets in training data, and writes the data without it.",
                      extends={"data": "find_overlap:add_overlap"})
