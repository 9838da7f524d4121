"""Fill a disk while a run saves checkpoints: rank 0 changes the size of a file, so that little space is free."""

import itertools
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save import save_checkpoint, saver
from pretrain.paths import free_bytes


def fill_during_saves(disk: Path, levels: list[float]) -> None:
    """Leave `level` x the size of a checkpoint free on the disk while a save writes its files, after the space check.

    Saves number 2, 3, ... use the levels in order. All others find an empty disk. The space remains as it is until the
    next save begins; then the checkpoints are listed in the file DISK.saves: step, damage, and names of other folders.
    """
    begin_save = saver.begin_save
    assert begin_save is save_checkpoint.begin_save
    numbers = itertools.count(-1)

    def begin_and_fill(plan: Any, checkpoints: Path, step: int) -> Any:
        ballast, number = disk / "ballast", next(numbers)
        if dist.get_rank() == 0:
            ballast.unlink(missing_ok=True)
            _list(checkpoints, disk.with_suffix(".saves"))
        result = begin_save(plan, checkpoints, step)
        if dist.get_rank() == 0 and 0 <= number < len(levels):
            (_, manifest), *_ = complete_checkpoints(checkpoints)[0]
            size = sum(record.bytes for record in manifest.files.values())
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(free_bytes(disk) - int(levels[number] * size), 1))
        dist.barrier()
        return result

    saver.begin_save = save_checkpoint.begin_save = begin_and_fill


def _list(checkpoints: Path, into: Path) -> None:
    found, errors = complete_checkpoints(checkpoints)
    damage = [line for folder, manifest in found for line in find_damage(folder, manifest)]
    temporary = sorted(path.name for path in checkpoints.glob(".tmp-*"))
    with open(into, "a", encoding="utf-8") as file:
        file.write(f"{[manifest.step for _, manifest in found]} {errors + damage} {temporary}\n")
