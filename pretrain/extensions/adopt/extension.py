"""Runs of other programs that continue here: the subcommand `import`, which imports weights alone, too."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "adopt", "Adopts runs of other training programs: weights, optimizer states, step and data position.",
    commands={"import": Command("weights and checkpoints", "adopt a run of another program; import weights of "
                                "transformers", ".main", replaces=True)})
