"""The row that the flight recorder of one rank keeps for one step. Imports no torch.

A step is a chain of stages, and each stage computes its results from those of the stages before it. Two recordings of
the same step, on the same rank in the same layout, are compared in this order: the first key that differs names the
stage in which they part. All checksums and all floats are compared bit by bit.
"""

from collections.abc import Mapping
from typing import Any

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
