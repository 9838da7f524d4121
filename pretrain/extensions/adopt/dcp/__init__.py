"""Read checkpoints of torch.distributed.checkpoint that torchtitan and Megatron Core have written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.dcp import megatron_core, torchtitan
from pretrain.extensions.adopt.dcp.files import METADATA, read_dcp
from pretrain.extensions.adopt.foreign_run import ForeignRun

_SHOWN = 3  # names in a message


def read(folder: Path, config: Mapping[str, Any] | None) -> ForeignRun:
    """Return what a checkpoint folder holds. Raises ConfigError for a checkpoint of a program that is not known.

    Args:
        config: content of a config.json; None: it is made from the arguments in the checkpoint, which only Megatron
            Core stores.
    """
    files = read_dcp(folder)
    if megatron_core.is_megatron_core(files):
        return megatron_core.read(files, config)
    if torchtitan.is_torchtitan(files):
        return torchtitan.read(files, config)
    some = ", ".join(sorted(files.tensors)[:_SHOWN])
    raise ConfigError(str(folder / METADATA), found=f"tensors with names such as {shorten(some) or '(none)'}",
                      expected="names of torchtitan (tok_embeddings.weight) or of Megatron Core "
                      "(embedding.word_embeddings.weight)", remedy="other programs' names are not known: export their "
                      "weights for transformers, and use --init_from")
