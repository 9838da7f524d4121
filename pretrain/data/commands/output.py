"""Checks before a command writes token files, so that nothing is overwritten and no disk fills up halfway."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pretrain.data.files.indexed import IndexedDataset
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

_ENDINGS = ("bin", "idx", "meta.json", "sha256.json", "summary.json")
_SEQUENCE_BYTES = 32  # in the .idx, and in temporary files


def check_output(outputs: Sequence[str], sources: Sequence[IndexedDataset], where: str, *, overwrite: bool,
                 num_bytes: int) -> None:
    """Raise ConfigError if an output exists or is an input, or if the disk has less than `num_bytes` free."""
    names = [Path(output).resolve() for output in outputs]
    for output, name in zip(outputs, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(where, problem=f"{output} is given twice")
        if any(name == source.prefix.resolve() for source in sources):
            raise ConfigError(where, problem=f"{output} is also an input", remedy="give another prefix")
        existing = next((f"{output}.{ending}" for ending in _ENDINGS if os.path.lexists(f"{output}.{ending}")), None)
        if existing is not None and not overwrite:
            raise ConfigError(where, problem=f"{existing} exists",
                              remedy="give another prefix, or replace the files by --overwrite")
        check_folder(Path(output).absolute().parent, where)
    _check_space(Path(outputs[0]), where, num_bytes + _SEQUENCE_BYTES * sum(data.num_sequences for data in sources))


def _check_space(path: Path, where: str, num_bytes: int) -> None:
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(where, problem=f"{folder} has {free / 1e9:,.1f} GB free, and {num_bytes / 1e9:,.1f} GB are "
                          "needed", remedy="choose another folder")
