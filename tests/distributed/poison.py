"""Put a pickle that makes a file into a file of a checkpoint, and a manifest with the right hashes:

    python -m tests.distributed.poison CHECKPOINT FILE CANARY
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.files import FileRecord, sha256_of
from pretrain.checkpoint.manifest import MANIFEST, read_manifest


class Poison:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def poison(folder: Path, name: str, canary: Path) -> None:
    put_into(folder, name, {"module": Poison(str(canary)), "tensor": torch.zeros(3)})


def put_into(folder: Path, name: str, value: Any) -> None:
    """Replace a file of a checkpoint by the pickle of `value`, with a manifest that agrees."""
    manifest = read_manifest(folder)
    torch.save(value, folder / name)
    record = FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
    (folder / MANIFEST).write_text(replace(manifest, files={**manifest.files, name: record}).to_json())


if __name__ == "__main__":
    poison(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
