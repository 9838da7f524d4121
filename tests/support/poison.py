"""A file of a checkpoint replaced by a pickle that makes a file, under a manifest with the right hashes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST, read_manifest


class Poison:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def poison(folder: Path, name: str, canary: str) -> None:
    """Whoever unpickles the file makes the file `canary`."""
    put_into(folder, name, {"module": Poison(canary), "tensor": torch.zeros(3)})


def put_into(folder: Path, name: str, value: Any) -> None:
    """Replace a file of a checkpoint by the pickle of `value`, with a manifest that agrees."""
    manifest = read_manifest(folder)
    torch.save(value, folder / name)
    record = FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
    (folder / MANIFEST).write_text(replace(manifest, files={**manifest.files, name: record}).to_json())
