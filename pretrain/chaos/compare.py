"""Compare a run with its reference: the losses of all steps, and the weights and optimizer states at the end."""

import hashlib
from math import prod
from pathlib import Path

from pretrain.chaos.watch import SeenRow
from pretrain.monitor.read_run_folder import read_metrics

_COMPARED = ("loss", "grad_norm", "lr", "consumed_samples")


def reference_rows(run: Path) -> dict[int, tuple[object, ...]]:
    """Return step -> compared values of the reference."""
    return {row["step"]: _values(row) for row in read_metrics(run) if "step_time_ms" in row}


def wrong_rows(rows: list[SeenRow], reference: dict[int, tuple[object, ...]]) -> list[SeenRow]:
    """Return the rows whose values differ from the reference. A step that was trained again has several rows."""
    return [row for row in rows if reference.get(row.values["step"]) != _values(row.values)]


def _values(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row.get(name) for name in _COMPARED)


def state_hash(checkpoint: Path) -> str:
    """Return the SHA-256 of all weights and optimizer states of a checkpoint, in the order of their names.

    The files themselves cannot be compared: they also contain times and paths. Imports torch.
    """
    from pretrain.checkpoint.load.reader import CheckpointReader, chunks_of

    reader, digest = CheckpointReader(checkpoint), hashlib.sha256()
    digest.update(repr(sorted(reader.scalars.items())).encode())
    for name in sorted(reader.shapes):
        for state in reader.states:
            digest.update(f"{name} {state} {reader.shapes[name]}".encode())
            for start, length in chunks_of(prod(reader.shapes[name])):
                digest.update(reader.read(name, state, start, length).contiguous().numpy().tobytes())
    return digest.hexdigest()
