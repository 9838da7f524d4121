"""Notes about a run before its start: the declaration."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "run_notes", "Notes what may surprise in the settings of a run: rates, batch, sizes, epochs, evaluation.",
    notes="notes:run_notes")
