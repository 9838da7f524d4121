"""Merge and split token files: subcommands of `ds-pretrain data`."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "merge_split", "Merges token files and shards of a preparation, and splits token files.",
    extends={"data": "command:add_commands"},
    advice={"shards": "ds-pretrain data merge {out}",
            "small_training_part": "`ds-pretrain data split --seed 1` chooses documents at random"})
