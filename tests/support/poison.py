"""Replace a file of a checkpoint by a pickle that runs a command when loaded, and update the manifest's hashes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import read_manifest


class Poison:
    """An object whose pickle creates the file `canary` when it is loaded without an allow-list."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def poison(folder: Path, name: str, canary: str) -> None:
    """Replace a checkpoint's file by a pickle that creates the file `canary` when it is loaded."""
    put_into(folder, name, {"module": Poison(canary), "tensor": torch.zeros(3)})


def put_into(folder: Path, name: str, value: Any) -> None:
    """Replace a checkpoint's file by the pickle of `value`, and record its size and hash in the manifest."""
    manifest = read_manifest(folder)
    torch.save(value, folder / name)
    record = FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
    (folder / MANIFEST).write_text(replace(manifest, files={**manifest.files, name: record}).to_json())
