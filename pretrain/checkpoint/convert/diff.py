"""Compare the weights and optimizer states of two checkpoints, which may have different layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from pretrain.checkpoint.load.reader import CheckpointReader, chunks_of
from pretrain.progress import ProgressBar


@dataclass(frozen=True)
class Difference:
    """One weight or optimizer state in which two checkpoints differ."""

    name: str  # the parameter's name; "optimizer" for a difference that no single parameter has
    state: str  # "fp32" (the weights), "exp_avg" ..., "buffer"; "" if the parameter's shapes differ
    max_abs: float | None  # largest absolute difference; None: it cannot be computed, and `reason` says why
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.state}: {self.reason or f'differs by up to {self.max_abs:.3g}'}"


def diff(a: Path, b: Path) -> list[Difference]:
    """List every weight, optimizer state and buffer in which the checkpoints in folders `a` and `b` differ."""
    first, second = CheckpointReader(a), CheckpointReader(b)
    found = [Difference("optimizer", key, abs(first.scalars.get(key, 0) - second.scalars.get(key, 0)))
             for key in sorted(first.scalars.keys() | second.scalars.keys())
             if first.scalars.get(key) != second.scalars.get(key)]
    common = [name for name in first.states if name in second.states]
    found += [Difference("optimizer", state, None, f"only in {(first if state in first.states else second).folder}")
              for state in sorted(set(first.states) ^ set(second.states))]
    total = sum(prod(shape) for shape in first.shapes.values()) * 4 * len(common)
    with ProgressBar("comparing", total) as progress:
        for name in sorted(first.shapes.keys() | second.shapes.keys()):
            shapes = [reader.shapes.get(name) for reader in (first, second)]
            if shapes[0] != shapes[1]:
                where = ", ".join(f"{shape or 'absent'} in {reader.folder}"
                                  for shape, reader in zip(shapes, (first, second), strict=True))
                found.append(Difference(name, "", None, where))
                continue
            for state in common:
                found += _different_state(first, second, name, state)
                progress.advance(4 * prod(first.shapes[name]), name)
    return found + _different_buffers(first.buffers(), second.buffers())


def _different_buffers(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[Difference]:
    """List the buffers of the model that differ."""
    found = [Difference(name, "buffer", None, "only in one of them") for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys()):
        x, y = first[name].float(), second[name].float()
        if not torch.equal(x, y):
            found.append(Difference(name, "buffer", (x - y).abs().max().item() if x.shape == y.shape else None,
                                    "" if x.shape == y.shape else "its shapes differ"))
    return found


def _different_state(first: CheckpointReader, second: CheckpointReader, name: str, state: str) -> list[Difference]:
    """Compare one state of a parameter, which only some parameters may have: Muon updates the others by Adam."""
    having = [reader for reader in (first, second) if reader.has_state(name, state)]
    if len(having) == 1:
        return [Difference(name, state, None, f"only in {having[0].folder}")]
    difference = _max_abs(first, second, name, state) if having else 0.0
    return [Difference(name, state, difference)] if difference > 0 else []


def _max_abs(first: CheckpointReader, second: CheckpointReader, name: str, state: str) -> float:
    """Return the largest absolute difference; 0 if all bits are equal, so a NaN equals the same NaN."""
    largest = 0.0
    for start, length in chunks_of(prod(first.shapes[name])):
        x, y = (reader.read(name, state, start, length) for reader in (first, second))
        if not torch.equal(x.view(torch.int32), y.view(torch.int32)):
            difference = (x - y).abs().nan_to_num(nan=float("inf")).max().item()
            largest = max(largest, difference, torch.finfo(torch.float32).tiny)  # 0 and -0 have different bits
    return largest
