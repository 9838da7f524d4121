"""Plant faults into training runs, question them by replays, and count the right verdicts, by kind and layout.

    python -m tests.support.planted_replays FOLDER [LAYOUT ...] [CASE ...]

Each layout is one launch: a healthy run to step 2, with a checkpoint; then each case continues a copy of it to step 6
with a fault in step 4 or 5, and is questioned. The faults stand in tests/support/plants.py.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.token_files.writer import IndexedWriter
from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_worker

FROM, FAULT, LAST = 2, 4, 6  # step of the checkpoint; of most faults; last one
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, DeepSpeed JSON
    "zero1": (2, config(1, micro=2, accumulation=2)),
    "zero3_offload": (2, config(3, precision="bf16", micro=2, accumulation=2, offload_optimizer=CPU)),
    "pipeline": (4, config(1, precision="bf16", micro=1, accumulation=4, stages=2)),
    "tensor": (4, {**config(1, micro=2, accumulation=2), "tensor_parallel": {"autotp_size": 2}}),
}
_LIMIT_S = 4 * 3600.0
POISONS = ("repeated token", "binary garbage", "wrong tokenizer")
PARTNERS = {"tensor": {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}}  # ranks whose outputs are one sum


@dataclass(frozen=True)
class Planted:
    """A case: a fault in the run, one in the replays, and the right verdict."""

    name: str
    group: str  # row of the table
    plant: dict[str, Any] | None
    kinds: tuple[str, ...]
    rank: int | None = None  # that a right verdict names
    replay_plant: dict[str, Any] | None = None
    replay_plants: list[dict[str, Any]] | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    damaged: bool = False  # the second source of the blend is cut before the replay
    step: int = LAST


def planted_cases(layout: str) -> list[Planted]:
    """Return the 25 cases of a layout."""
    ranks = LAYOUTS[layout][0]
    last = ranks - 1
    blocks = {rank: ("1" if layout != "pipeline" or rank < 2 else "3") for rank in range(ranks)}

    def weight(rank: int, bit: int) -> dict[str, Any]:
        return {"kind": "weight", "rank": rank, "step": FAULT, "name": "weight", "bit": bit}

    def operator(rank: int, **more: Any) -> dict[str, Any]:
        return {"kind": "operator", "rank": rank, "step": FAULT, "name": blocks[rank], **more}

    def state(rank: int, name: str, bit: int) -> dict[str, Any]:
        return {"kind": "state", "rank": rank, "step": FAULT, "name": name, "bit": bit}

    top = 15 if layout in ("pipeline", "zero3_offload") else 30  # of the 16-bit weights
    found = [Planted(f"poison_{number}", f"poisoned documents: {poison}", None, ("reproducible",), step=4 + number)
             for number, poison in enumerate(POISONS)]
    found += [
        Planted("weight_high", "bit flipped in a weight", weight(0, top - 2), ("memory_weights",), 0),
        Planted("weight_low", "bit flipped in a weight", weight(last, 3), ("memory_weights",), last),
        Planted("weight_sign", "bit flipped in a weight", weight(1, top), ("memory_weights",), 1),
        Planted("state_first", "bit flipped in an optimizer state", state(0, "exp_avg", 29), ("memory_states",), 0),
        Planted("state_second", "bit flipped in an optimizer state", state(last, "exp_avg_sq", 20),
                ("memory_states",), last),
        Planted("state_low", "bit flipped in an optimizer state", state(1, "exp_avg", 5), ("memory_states",), 1),
        Planted("reduced_high", "bit flipped in a gradient during the reduction",
                {"kind": "reduced", "rank": 0, "step": FAULT, "bit": 27}, ("reduction",), 0),
        Planted("reduced_low", "bit flipped in a gradient during the reduction",
                {"kind": "reduced", "rank": last, "step": FAULT, "bit": 2}, ("reduction",), last),
        Planted("reduced_sign", "bit flipped in a gradient during the reduction",
                {"kind": "reduced", "rank": 1, "step": FAULT + 1, "bit": 31}, ("reduction",), 1),
        Planted("gradient", "bit flipped in a gradient before the reduction",
                {"kind": "gradient", "rank": 1, "step": FAULT, "name": "weight", "bit": 10}, ("backward",), 1),
        Planted("operator_large", "operator wrong once", operator(0, value=3.0), ("forward",), 0),
        Planted("operator_small", "operator wrong once", operator(last, value=1e-2), ("forward",), last),
        Planted("operator_late", "operator wrong once", {**operator(1), "step": FAULT + 1}, ("forward",), 1),
        Planted("flaky", "operator wrong now and then", operator(1), ("forward",), 1,
                replay_plants=[operator(1, value=0.5), operator(1, value=0.7)]),
        Planted("always", "operator always wrong", operator(1, persistent=True), ("wrong_rank",), 1,
                replay_plant=operator(1, persistent=True)),
        Planted("was_always", "operator always wrong, on a host that is gone", operator(0, persistent=True),
                ("forward",), 0),
        Planted("lr_higher", "learning rate changed by hand", {"kind": "lr", "step": FAULT, "value": 3.0},
                ("settings_changed",)),
        Planted("lr_little", "learning rate changed by hand", {"kind": "lr", "step": FAULT + 1, "value": 1.001},
                ("settings_changed",)),
        Planted("random", "a random number drawn", {"kind": "random", "rank": last, "step": FAULT}, ("random_state",),
                last),
        Planted("sparse_weight", "bit flipped in a weight, in a step without checksums", weight(1, top - 2),
                ("memory_weights",), 1, flags={"flight_interval": 100}),
        Planted("sparse_operator", "operator wrong once, in a step without checksums", operator(1), ("forward",), 1,
                flags={"flight_interval": 100}),
        Planted("truncated", "blend source cut after the run", None, ("data_changed",), damaged=True),
    ]
    return found


def write_sources(folder: Path) -> None:
    """Write two sources of a blend. The first one has the three kinds of poisoned documents."""
    numbers = np.random.default_rng(1)
    for name in ("a", "b"):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for number in range(120):
                length = int(numbers.integers(20, 300))
                tokens = np.cumsum(numbers.integers(0, 3, length)) % 250 + 1
                if name == "a" and number % 4 == 1:
                    tokens = np.full(length, 7) if number % 3 == 0 else numbers.integers(1, 250, length) \
                        if number % 3 == 1 else (tokens * 37) % 250 + 1
                tokens[-1] = 0
                writer.add_document(tokens.astype(np.uint16))
            writer.finalize({"vocab_size": 256, "eod_token": 0, "max_token": 250})


def cases_of(layout: str, folder: Path, planted: list[Planted]) -> list[dict[str, Any]]:
    """Return the cases of replay_worker.py."""
    values = LAYOUTS[layout][1]
    common = flags("", layers=2, steps=LAST, save_interval=FROM, eval_interval=0, log_interval=1, flight_interval=1,
                   replica_check_interval=0, max_bad_steps=100, step_timeout=0, first_step_timeout=0)
    common["train_data"] = ["0.7", str(folder / "a"), "0.3", str(folder / "b")]
    base = case("base", "train", values, {**common, "exit_step": FROM})
    found = [base]
    for each in planted:
        found.append(case(each.name, "train", values, {**common, **each.flags, "save_interval": 100}, after="base",
                          plant=each.plant))
        if each.damaged:
            found.append({"name": f"cut_{each.name}", "job": "damage", "file": str(folder / "b.bin"), "keep": 9000})
        found.append({"name": f"{each.name}_verdict", "job": "replay", "run": f"run-{each.name}", "step": each.step,
                      "plant": each.replay_plant, "plants": each.replay_plants})
    return found


def grade(layout: str, planted: Planted, verdict: dict[str, Any]) -> str:
    """Return right, unsure or wrong."""
    may_be = {*planted.kinds} & {verdict["kind"], *verdict.get("also", [])}
    expected = PARTNERS.get(layout, {}).get(planted.rank, [planted.rank]) if planted.rank is not None else None
    names = expected is None or (planted.rank in verdict["ranks"] and (
        verdict["certainty"] == "unsure" or set(verdict["ranks"]) <= set(expected)))
    if verdict["certainty"] == "sure":
        return "right" if verdict["kind"] in planted.kinds and names else "wrong"
    return "unsure" if may_be and names else "unsure, cause not named"


def run_planted(layout: str, folder: Path, planted: list[Planted]) -> dict[str, dict[str, Any]]:
    """Train and question the cases of a layout in one launch. Returns the verdicts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sources(folder)
    results = run_worker("replay_worker.py", cases_of(layout, folder, planted), LAYOUTS[layout][0], folder,
                         timeout=_LIMIT_S)
    return {each.name: results.get(f"{each.name}_verdict", {"kind": "none", "certainty": "sure", "ranks": []})
            for each in planted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", help="layouts and faults (default: all)")
    given = parser.parse_args()
    folder, words = given.out.absolute(), given.words
    names = [word for word in words if word in LAYOUTS] or list(LAYOUTS)
    only = {*words} - {*LAYOUTS}
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for layout in names:
        began = time.monotonic()
        planted = [each for each in planted_cases(layout) if not only or each.name in only]
        verdicts = run_planted(layout, folder / layout, planted)
        for each in planted:
            verdict = verdicts[each.name]
            result = grade(layout, each, verdict)
            counts[each.group][result] += 1
            counts[f"layout {layout}"][result] += 1
            counts["all"][result] += 1
            if result != "right":
                print(f"{layout} {each.name}: {result}: {json.dumps(verdict)}")
        print(f"{layout}: {len(planted)} cases in {time.monotonic() - began:.0f} s", flush=True)
    columns = ("right", "unsure", "unsure, cause not named", "wrong")
    print(f"| fault | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    def order(row: tuple[str, Any]) -> tuple[bool, bool, str]:
        return row[0] == "all", row[0].startswith("layout"), row[0]

    for group, found in sorted(counts.items(), key=order):
        print(f"| {group} | {' | '.join(str(found[name]) for name in columns)} |")
    return int(counts["all"]["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
