"""The subcommands of `ds-pretrain`: what each one is for, and which function runs it.

The table imports none of them, so that `ds-pretrain --help` takes no longer than the start of Python. Extensions add
theirs.
"""

from dataclasses import replace

from pretrain.active_extensions import for_each_extension
from pretrain.errors import ConfigError
from pretrain.extension import Command, Extension

_HERE = __name__
_RUN, _BEFORE, _DATA, _AFTER, _WEIGHTS, _FILES = (
    "run", "before a run", "data", "during and after a run", "weights and checkpoints", "files and machine")
COMMANDS = {
    "train": Command(_RUN, "train on this host or on the hosts of --hostfile (the default)",
                     "pretrain.cluster.ds_pretrain", other_words="run start pretrain launch fit"),
    "check": Command(_BEFORE, "validate a run without training", f"{_HERE}.check",
                     other_words="validate verify dry-run lint"),
    "compare": Command(_BEFORE, "compare layouts: memory", "pretrain.memory.compare.compare_zero"),
    "corpus": Command(_DATA, "write a small corpus, the source code of Python's library", f"{_HERE}.corpus"),
    "tokenizer": Command(_DATA, "train a SentencePiece tokenizer", f"{_HERE}.prepare", "tokenizer_main",
                         is_extensible=True),
    "prepare": Command(_DATA, "tokenize text into token files (.bin and .idx)", f"{_HERE}.prepare", "prepare_main",
                       is_extensible=True, other_words="preprocess tokenize encode preprocess_data"),
    "data": Command(_DATA, "describe and verify token files, and more", f"{_HERE}.data", is_extensible=True),
    "summary": Command(_AFTER, "progress and losses of a run", "pretrain.analysis.summary",
                       other_words="status progress show"),
    "evaluate": Command(_AFTER, "loss and bits per byte on data", f"{_HERE}.evaluate", is_extensible=True,
                        other_words="eval perplexity score"),
    "import": Command(_WEIGHTS, "import weights of transformers", f"{_HERE}.import_weights"),
    "export": Command(_WEIGHTS, "write a checkpoint for transformers, DeepSpeed or the Trainer",
                      f"{_HERE}.export", other_words="convert save to_hf"),
    "checkpoint": Command(_WEIGHTS, "list, verify, prune, convert and compare checkpoints", f"{_HERE}.checkpoint",
                          is_extensible=True),
    "config": Command(_FILES, "list the DeepSpeed JSONs of this package, or print one", f"{_HERE}.templates",
                      "config_main"),
    "template": Command(_FILES, "list scripts for SLURM, MPI, Kubernetes ..., or print one", f"{_HERE}.templates",
                        "template_main"),
    "reference": Command(_FILES, "print all flags, JSON keys, metrics, events or exit codes",
                         f"{_HERE}.reference"),
    "extensions": Command(_FILES, "list the extensions: flags, commands, origin", f"{_HERE}.extensions"),
}
_OF_THE_CORE = dict(COMMANDS)


def add_commands(extension: Extension) -> None:
    """Add the subcommands of an extension to the table. Raises ConfigError for one that is there already."""
    for name, command in extension.commands.items():
        if name in COMMANDS and not (command.replaces and COMMANDS[name] is _OF_THE_CORE.get(name)):
            raise ConfigError(f"extension {extension.name}", problem=f"there is a subcommand {name} already",
                              remedy="give its subcommand another name")
        COMMANDS[name] = replace(command, module=extension.full_name(command.module))
    for name in extension.extends:
        if name not in COMMANDS or not COMMANDS[name].is_extensible:
            raise ConfigError(f"extension {extension.name}", problem=f"nothing can be added to a subcommand {name}",
                              remedy="give it a subcommand of its own")


for_each_extension(add_commands)
