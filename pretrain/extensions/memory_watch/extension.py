"""The memory of a run, compared with its prediction: the declaration."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "memory_watch", "Compares the memory of a run with its prediction, and says what helps if it was not enough.",
    callbacks="watch:callbacks")
