"""Curves of runs as a page, live or as a file, and comparisons of runs: the subcommand, and who recommends it."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "report", "Draws the curves of runs as a page, follows them in a browser, and compares runs.",
    commands={"report": Command("during and after a run",
                                "curves of runs as a page, live or as a file; comparison of runs", ".main",
                                other_words="plot curves tensorboard dashboard")},
    advice={"finished": "ds-pretrain report {run}", "more_incidents": "in the page of `ds-pretrain report`"})
