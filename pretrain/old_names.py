"""Names that have changed. An old name of a flag, also as a key of a YAML file, is still read, with a note."""

from collections.abc import Mapping

# old name -> name today, of the flags of all programs; with _ instead of -
OLD_NAMES: Mapping[str, str] = {
    "accept_loss_of": "accept_without",
    "exit_at_step": "exit_step",
}
# word that is no subcommand of `ds-pretrain` -> remedy
NO_COMMANDS: Mapping[str, str] = {
    "bench": "it is a script of the source code now, bench.py in the folder tools",
    "resume": "the command that started the run resumes it: ds-pretrain --config RUN.yaml",
    "finetune": "--init_from MODEL begins a run with existing weights",
    "serve": "`ds-pretrain export` writes a model that other programs serve",
}


def current_name(name: str) -> str:
    """Return the name of a flag today, with _ instead of -."""
    name = name.replace("-", "_")
    return OLD_NAMES.get(name, name)
