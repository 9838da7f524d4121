"""The supervisor: a subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "supervise", "Starts a run again after crashes and lost hosts.",
    commands={"supervise": Command("run", "start a run again after crashes and lost hosts", ".main")},
    advice={"start_again": "use `ds-pretrain supervise`",
            "not_started": "with --min_hosts, `ds-pretrain supervise` trains without it"})
