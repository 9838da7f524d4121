"""Find the first difference between two recordings of the same steps. This module imports no torch and reads no files.

A row has the digest of one step on one rank. A step is a chain of stages, and each stage computes its results from
those of the stages before it. Two recordings of the same step, on the same rank in the same layout, are compared in
this order: the first key that differs names the stage in which they part. All checksums and all floats are compared bit
by bit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.extensions.replay.record_files import Header, RankRecord

DATA, SETTINGS, RANDOM, WEIGHTS, FORWARD, BACKWARD, REDUCTION, UPDATE = STAGES = (
    "data", "settings", "random", "weights", "forward", "backward", "reduction", "update")

# key -> (stage, definition); a row has the keys of its step only. Those of the intervals are in rows of the steps of
# --flight_interval; there, "layer" is a layer of this rank, in the order of the header's `layers`.
DIGEST = {
    "samples": (DATA, "[first, end): positions of the step's global batch in the order of the training data"),
    "tokens": (DATA, "CRC-32 of the tokens, labels and loss weights that this rank was given"),
    "lr": (SETTINGS, "learning rate of this step"),
    "loss_scale": (SETTINGS, "of fp16, before this step; otherwise 1"),
    "random": (RANDOM, "CRC-32 of the states of torch's random number generators, of host and device, before the step"),
    "weights": (WEIGHTS, "interval: for each layer, checksum of what this rank holds of its parameters, before the "
                         "step"),
    "states": (WEIGHTS, "interval: {name: checksum} of this rank's optimizer states, and of its fp32 master weights "
                        "under `master`, before the step; not with offload to NVMe"),
    "layers_forward": (FORWARD, "interval: for each layer, checksum of its outputs, over the micro-batches; 0 for a "
                                "layer without an output of its own"),
    "operators_forward": (FORWARD, "interval: {name: checksum} of the outputs of the modules inside the layers, such "
                                   "as `3.mlp.up`, in the order of the computation; not of compiled blocks"),
    "rank_loss": (FORWARD, "mean loss of this data-parallel rank's tokens"),
    "layers_backward": (BACKWARD, "interval: for each layer, checksum of the gradients of its outputs, over the "
                                  "micro-batches"),
    "operators_backward": (BACKWARD, "interval: {name: checksum} of the gradients of the same outputs, in the order of "
                                     "the backward pass"),
    "gradient_bits": (BACKWARD, "interval: for each layer, checksum of the gradients of its parameters before the "
                                "reduction, over the micro-batches"),
    "gradients": (BACKWARD, "interval: for each layer, 2-norm of the same gradients, with fp16's loss scale"),
    "loss": (REDUCTION, "mean loss of the global batch"),
    "reduced": (REDUCTION, "interval: checksum of this rank's part of the reduced gradients, before clipping"),
    "grad_norm": (REDUCTION, "2-norm of the reduced gradient of all parameters before clipping"),
    "skipped": (UPDATE, "why the update was skipped; empty: it was made"),
    "weights_after": (UPDATE, "interval: `weights`, after the update"),
    "states_after": (UPDATE, "interval: `states`, after the update"),
}
# keys that are recorded, but differ between two recordings of equal steps
UNCOMPARED = {
    "step": "number of the step, from 1",
    "time": "seconds since 1970, at the end of the step",
    "ms": "milliseconds of this rank's host in the step: without loading data, saves and evaluations",
}
# keys that do not depend on the layout, and are computed in another order of operations there
ANY_LAYOUT = ("samples", "lr", "loss_scale", "loss", "grad_norm", "skipped")
ROUNDED = {"loss": 1.0, "grad_norm": 10.0}  # key -> factor of the tolerance
Rows = Mapping[int, Mapping[str, Any]]  # by rank


def stage_of(key: str) -> str:
    """Return the stage of a step that a key of a row shows."""
    return DIGEST[key][0]


def differing_keys(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys that both rows have with different values, in the order of the stages. NaN equals NaN."""
    shared = [key for key in DIGEST if key in row and key in other]
    return [key for key in shared if not _equal(row[key], other[key])]


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other or (value != value and other != other))


def reference() -> str:
    """Return the keys as Markdown, for `ds-pretrain reference flight`."""
    from pretrain.commands.reference import code, prose, table

    stages = [("", key, text) for key, text in UNCOMPARED.items()]
    stages += [(stage, key, text) for key, (stage, text) in DIGEST.items()]
    return "Each row of `RUN/flight/start_N/rank_R.jsonl` is of one step of a rank. Keys of the same stage of a step " \
        'are computed together. "interval": the key is in the rows of each `--flight_interval`-th step only.\n\n' + \
        table(["key", "stage", "definition"], ((code(key), stage, prose(text)) for stage, key, text in stages))


@dataclass(frozen=True)
class Comparison:
    """Two recordings, compared from step `first` to `last`."""

    first: int
    last: int
    headers: dict[int, Header] = field(default_factory=dict)  # by rank, of ranks that both have
    compared: list[int] = field(default_factory=list)  # steps that both have, of at least one rank
    complete: list[int] = field(default_factory=list)  # the steps with all keys, among these
    missing_ranks: list[int] = field(default_factory=list)  # missing ranks of the first recording
    step: int | None = None  # the first step with a difference
    differing: dict[int, list[str]] = field(default_factory=dict)  # rank -> keys that differ there
    one: Rows = field(default_factory=dict)  # the rows of this step by rank, in the first recording
    other: Rows = field(default_factory=dict)
    before: Rows = field(default_factory=dict)  # the rows of the step before, in the first recording

    @property
    def stage(self) -> str | None:
        """The first stage that differs, over all ranks."""
        found = {stage_of(key) for keys in self.differing.values() for key in keys}
        return next((stage for stage in STAGES if stage in found), None)

    def ranks_with(self, keys: Iterable[str]) -> list[int]:
        """Return the ranks on which one of these keys differs."""
        wanted = set(keys)
        return sorted(rank for rank, found in self.differing.items() if wanted & set(found))

    def has(self, key: str) -> bool:
        """Return whether both recordings have a key in the differing step, on all ranks."""
        return bool(self.one) and all(key in row for rows in (self.one, self.other) for row in rows.values())

    def positions(self, rank: int, key: str) -> list[int]:
        """Return the indices at which a list of a rank differs."""
        one, other = self.one[rank].get(key), self.other[rank].get(key)
        if not isinstance(one, list) or not isinstance(other, list):
            return []
        return [number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b and (a == a or b == b)]

    def names(self, rank: int, key: str) -> list[str]:
        """Return the names whose values differ on a rank: of states, or of operators in the order of the row."""
        one, other = self.one[rank].get(key), self.other[rank].get(key)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return []
        return [name for name in one if one[name] != other.get(name)]

    def coordinate(self, rank: int, name: str) -> int:
        """Return the place of a rank along a dimension of the layout: pipeline, data, sequence or tensor."""
        return self.headers[rank].coordinates.get(name, 0)

    @property
    def data_ranks(self) -> set[int]:
        """The data-parallel ranks."""
        return {self.coordinate(rank, "data") for rank in self.headers}

    def is_everywhere(self, ranks: Iterable[int]) -> bool:
        """Return whether the ranks are of all data-parallel ranks."""
        return {self.coordinate(rank, "data") for rank in ranks} == self.data_ranks

    def pipeline_stage(self, ranks: Iterable[int]) -> int | None:
        """Return the pipeline stage of the ranks; None if they are of several ones, or if there is only one."""
        stages = {self.coordinate(rank, "pipeline") for rank in self.headers}
        own = {self.coordinate(rank, "pipeline") for rank in ranks}
        return own.pop() if len(stages) > 1 and len(own) == 1 else None

    def layer(self, rank: int, position: int) -> str:
        """Return the name of a layer of a rank."""
        layers = self.headers[rank].layers
        return layers[position] if position < len(layers) else str(position)

    def first_output(self, rank: int) -> tuple[float, float, str | None]:
        """Return where the outputs of a rank begin to differ: number of the layer, of the operator in it, and its name.

        The output of a layer comes after those of the operators inside it. Numbers are infinite where none differs.
        """
        operators = list(self.one[rank].get("operators_forward") or {})
        layers = [f"{layer}." for layer in self.headers[rank].layers]
        inside = [(float(number), float(operators.index(name)), name) for name in self.names(rank, "operators_forward")
                  for number, layer in enumerate(layers) if name.startswith(layer)]
        outputs = [(float(number), math.inf, None) for number in self.positions(rank, "layers_forward")]
        return min([*inside, *outputs, (math.inf, math.inf, None)], key=lambda each: each[:2])

    def hosts(self, ranks: Iterable[int]) -> list[str]:
        """Return the hosts of the ranks."""
        return list(dict.fromkeys(self.headers[rank].host for rank in ranks if rank in self.headers))


def compare(one: Mapping[int, RankRecord], other: Mapping[int, RankRecord], first: int, last: int, *,
            world_size: int = 0) -> Comparison:
    """Compare two recordings in the same layout bit by bit, up to the first step that differs."""
    return _compare(one, other, first, last, world_size, differing_keys)


def compare_loosely(one: Mapping[int, RankRecord], other: Mapping[int, RankRecord], first: int, last: int, *,
                    tolerance: float) -> Comparison:
    """Compare two recordings in different layouts: the keys of rank 0 that do not depend on the layout.

    `tolerance`: largest relative difference of the loss; of the gradient norm 10 times as much.
    """
    def differing(row: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[str]:
        shared = [key for key in ANY_LAYOUT if key in row and key in replayed]
        exact = differing_keys({key: row[key] for key in shared}, replayed)
        return [key for key in exact if key not in ROUNDED
                or not _is_near(row[key], replayed[key], tolerance * ROUNDED[key])]

    lowest = [{rank: RankRecord(record.header, {step: {key: row[key] for key in ANY_LAYOUT if key in row}
                                                for step, row in record.rows.items()})
               for rank, record in sorted(each.items())[:1]} for each in (one, other)]
    renamed = [{0: record} for each in lowest for record in each.values()]
    if len(renamed) < 2:
        return Comparison(first, last)
    return _compare(renamed[0], renamed[1], first, last, 1, differing)


def _is_near(value: Any, other: Any, tolerance: float) -> bool:
    return isinstance(value, float | int) and isinstance(other, float | int) and \
        abs(value - other) <= tolerance * max(abs(value), abs(other))


def _compare(one: Mapping[int, RankRecord], other: Mapping[int, RankRecord], first: int, last: int, world_size: int,
             differing: Any) -> Comparison:
    ranks = sorted(set(one) & set(other))
    headers = {rank: one[rank].header for rank in ranks}
    missing = [rank for rank in range(max(world_size, len(one))) if rank not in ranks]
    compared: list[int] = []
    complete: list[int] = []
    for step in range(first, last + 1):
        rows = {rank: (one[rank].rows[step], other[rank].rows[step]) for rank in ranks
                if step in one[rank].rows and step in other[rank].rows}
        if not rows:
            continue
        compared.append(step)
        if all("weights" in row for pair in rows.values() for row in pair):
            complete.append(step)
        found = {rank: keys for rank, pair in rows.items() if (keys := differing(*pair))}
        if found:
            lost = [rank for rank in ranks if rank not in rows]
            return Comparison(first, last, headers, compared, complete, sorted({*missing, *lost}), step, found,
                              {rank: pair[0] for rank, pair in rows.items()},
                              {rank: pair[1] for rank, pair in rows.items()},
                              {rank: one[rank].rows.get(step - 1, {}) for rank in ranks})
    return Comparison(first, last, headers, compared, complete, missing)
