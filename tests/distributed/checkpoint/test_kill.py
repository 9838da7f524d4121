"""Runs that are killed with SIGKILL in the middle of saves: the next start goes on from the newest whole checkpoint,
and in the end every loss and every bit of the state is that of a run that nobody disturbed.

All of it (DS_PRETRAIN_ALL_KILLS=1): 7 random moments and each sub-step of the commit, for each layout, synchronous
and not.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.format.pickles import load_pickle
from tests.distributed.workers.killed_writer import SUB_STEPS
from tests.support.cases import DROPOUT, config, flags, nvme
from tests.support.launch import run_forked

ALL = bool(os.environ.get("DS_PRETRAIN_ALL_KILLS"))
STEPS = 60 if ALL else 20
LAYOUTS = ("zero1", "zero3", "nvme", "pipeline2")
NAMES = [f"{layout}_{how}" for layout in LAYOUTS for how in ("sync", "async")]


def ds_config(layout: str, disk: Path) -> dict[str, Any]:
    if layout == "zero1":
        return config(1, precision="bf16")
    if layout == "pipeline2":
        return config(1, precision="bf16", stages=2)
    return config(3, precision="bf16", **({"offload_optimizer": nvme(disk)} if layout == "nvme" else {}))


def kills(number: int, how: str) -> list[str]:
    if ALL:
        return ["random"] * 7 + list(SUB_STEPS) + ["snapshot"] * (how == "async")
    return ["snapshot" if how == "async" else "random", SUB_STEPS[number % len(SUB_STEPS)], "random"]


def words(corpus: str, run: Path, json_file: Path, **more: Any) -> list[str]:
    values = flags(corpus, overrides=DROPOUT, steps=STEPS, deepspeed_config=json_file, save=run, log_interval=1,
                   eval_interval=0, **more)
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def outcome(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `kill_worker.py` reports of every case, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("kill")
    cases: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        json_file = folder / f"{layout}.json"
        json_file.write_text(json.dumps(ds_config(layout, tmp_path_factory.mktemp("nvme"))))
        reference = folder / f"{layout}_reference"
        cases.append({"name": reference.name, "kind": "run", "run": str(reference),
                      "flags": words(corpus, reference, json_file, save_interval=0)})
        for how in ("sync", "async"):
            run = folder / f"{layout}_{how}"
            more = {"save_interval": 1, "keep_checkpoints": 3, **({"async_save": "true"} if how == "async" else {})}
            cases.append({"name": run.name, "kind": "killed", "run": str(run), "async": how == "async", "window_s": 0.5,
                          "steps": STEPS, "kills": kills(len(cases), how),
                          "flags": words(corpus, run, json_file, **more)})
    return {"folder": folder, **run_forked(cases, folder)}


def rows(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl, without a line that a kill cut short."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}"):
            found.append(json.loads(line))
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file, by its path."""
    found: dict[str, torch.Tensor] = {}

    def add(path: str, value: Any) -> None:
        if torch.is_tensor(value):
            found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                add(f"{path}/{key}", item)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                add(f"{path}/{i}", item)

    for file in sorted(folder.glob("*.pt")):
        add(file.name, load_pickle(file))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_start_goes_on_from_the_newest_whole_checkpoint(outcome: dict[str, Any], name: str) -> None:
    resumed = outcome[name]["resumed"]
    print(f"{name}: {len(resumed) - 1} kills; (newest whole, resumed from): {resumed}")
    assert all(expected == found for expected, found in resumed)
    assert resumed[-1][1] > 0, "nothing was resumed"
    assert outcome[name]["status"] == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_that_of_an_undisturbed_run(outcome: dict[str, Any], name: str) -> None:
    reference = outcome["folder"] / f"{name.split('_')[0]}_reference"
    run = outcome["folder"] / name
    losses = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(reference) if "loss" in row}
    assert len(losses) == STEPS
    found = [(row["step"], (row["loss"], row["grad_norm"])) for row in rows(run) if "loss" in row]
    assert {step for step, _ in found} == set(losses)
    assert all(losses[step] == values for step, values in found)
    ours, theirs = (tensors(path / "checkpoints" / f"global_step{STEPS}") for path in (run, reference))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
