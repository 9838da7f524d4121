"""Faults of files: damage to a checkpoint, to `latest`, and to the training data.

The files of the training data are never changed: the run reads them through links, and a link is replaced for one
start.
"""

import os
from pathlib import Path
from random import Random

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import LATEST_FILE
from pretrain.errors import ConfigError
from tests.extensions.supervise.chaos.processes import NotAppliedError

_KEPT_BYTES = 2**16  # bytes that remain of a truncated .bin


def damage_checkpoint(kind: str, folder: Path, manifest: Manifest, random: Random) -> str:
    """Flip a bit, truncate or delete one file of a checkpoint. Return what was done."""
    files = [name for name, record in manifest.files.items() if record.bytes > 0]
    path = folder / random.choice([*sorted(files), MANIFEST])
    try:
        if kind == "delete":
            path.unlink()
            return f"{path.parent.name}/{path.name} deleted"
        size = path.stat().st_size
        if kind == "truncate":
            length = random.randrange(size)
            os.truncate(path, length)
            return f"{path.parent.name}/{path.name} cut off after {length} of {size} bytes"
        return f"{path.parent.name}/{path.name}: {_flip_bit(path, size, random)}"
    except OSError as error:  # the checkpoint was pruned in the meantime
        raise NotAppliedError(f"{path}: {error.strerror}") from None


def _flip_bit(path: Path, size: int, random: Random) -> str:
    position, bit = random.randrange(size), random.randrange(8)
    with open(path, "r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))
    return f"bit {bit} of byte {position} flipped"


def damage_latest(checkpoints: Path, random: Random) -> str:
    """Overwrite `latest` with nothing, with bytes that are no text, or with a checkpoint that does not exist."""
    content = random.choice((b"", b"\xff\x00\xfe", b"global_step999999999"))
    (checkpoints / LATEST_FILE).write_bytes(content)
    return f"latest contains {content!r}"


class LinkedData:
    """Links in the run folder to the files of --train_data."""

    def __init__(self, prefix: str, folder: Path) -> None:
        source = Path(prefix).absolute()
        self.prefix = folder / "data" / source.name
        self._bin = Path(f"{self.prefix}.bin")
        self._source = Path(f"{source}.bin")
        if not self._source.is_file():
            raise ConfigError("--train_data", problem=f"{self._source} does not exist",
                              remedy="name the prefix of a .bin/.idx pair")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.parent.glob(f"{source.name}.*")):
            link = self.prefix.parent / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)

    def truncate(self) -> str:
        """Replace the link to the .bin by a copy of its first bytes. Return what was done."""
        length = min(_KEPT_BYTES, self._source.stat().st_size // 2)
        with open(self._source, "rb") as source:
            kept = source.read(length)
        self._bin.unlink()
        self._bin.write_bytes(kept)
        return f"the .bin ends after {length} bytes"

    def restore(self) -> bool:
        """Restore the link. Return whether the data was truncated."""
        if self._bin.is_symlink():
            return False
        self._bin.unlink(missing_ok=True)
        self._bin.symlink_to(self._source)
        return True
