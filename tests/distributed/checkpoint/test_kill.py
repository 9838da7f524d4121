"""Kill runs with SIGKILL during saves. Each restart must resume from the newest complete checkpoint.

All losses and the final state must equal an undisturbed run's, bit for bit. `pytest -m slow` kills the runs of
each layout, with synchronous and with background saves, 7 times at random and once after each sub-step of the commit.
By default, two runs are killed 3 times each.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.monitor.read_run_folder import read_metrics
from tests.conftest import selected_params
from tests.distributed.workers.killed_writer import SUB_STEPS
from tests.support.cases import DROPOUT, config, flags, nvme
from tests.support.launch import run_forked


@dataclass(frozen=True)
class Case:
    """A run with a few kills. With `thorough`, there is a kill after each sub-step, and more kills at random times."""

    layout: str
    is_async: bool
    thorough: bool

    @property
    def name(self) -> str:
        return f"{self.layout}_{'async' if self.is_async else 'sync'}{'_thorough' * self.thorough}"

    @property
    def reference(self) -> str:
        """Name of the undisturbed run."""
        return f"{self.name}_reference"

    @property
    def steps(self) -> int:
        return 60 if self.thorough else 20

    def kills(self) -> list[str]:
        """Return when to kill the run: at a random time, after a sub-step of the commit, or after a snapshot."""
        if self.thorough:
            return ["random"] * 6 + ["one rank"] + list(SUB_STEPS) + ["snapshot"] * self.is_async
        return ["snapshot", "publish", "random"] if self.is_async else ["one rank", "write_manifest", "random"]


CASES = [Case("zero1", is_async=False, thorough=False), Case("nvme", is_async=True, thorough=False),
         *(pytest.param(Case(layout, is_async, thorough=True), marks=pytest.mark.slow)
           for layout in ("zero1", "zero3", "nvme", "pipeline2") for is_async in (False, True))]


def ds_config(layout: str, disk: Path) -> dict[str, Any]:
    if layout == "zero1":
        return config(1, precision="bf16")
    if layout == "pipeline2":
        return config(1, precision="bf16", stages=2)
    return config(3, precision="bf16", **({"offload_optimizer": nvme(disk)} if layout == "nvme" else {}))


def words(corpus: str, run: Path, json_file: Path, steps: int, **more: Any) -> list[str]:
    values = flags(corpus, overrides=DROPOUT, steps=steps, deepspeed_config=json_file, save=run, log_interval=1,
                   eval_interval=0, **more)
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of forked.py for every case, by name, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("kill")
    jobs: dict[str, dict[str, Any]] = {}
    for case in selected_params(request, "case"):
        json_file = folder / f"{case.layout}.json"
        json_file.write_text(json.dumps(ds_config(case.layout, tmp_path_factory.mktemp("nvme"))))
        reference, run = folder / case.reference, folder / case.name
        jobs[case.reference] = {"name": case.reference, "kind": "run", "run": str(reference),
                                "flags": words(corpus, reference, json_file, case.steps, save_interval=0)}
        more = {"save_interval": 1, "keep_checkpoints": 3, **({"async_save": "true"} if case.is_async else {})}
        jobs[case.name] = {"name": case.name, "kind": "killed", "run": str(run), "async": case.is_async,
                           "window_s": 0.5, "steps": case.steps, "kills": case.kills(),
                           "flags": words(corpus, run, json_file, case.steps, **more)}
    return {"folder": folder, **run_forked(list(jobs.values()), folder)}


def tensors(folder: Path) -> list[torch.Tensor]:
    """Return every tensor of every file."""
    return [leaf for file in sorted(folder.glob("*.pt")) for leaf in tree_leaves(load_pickle(file))
            if torch.is_tensor(leaf)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_start_resumes_from_the_newest_complete_checkpoint(outcome: dict[str, Any], case: Case) -> None:
    resumed = outcome[case.name]["resumed"]
    print(f"{case.name}: {len(resumed) - 1} kills; (newest complete, resumed from): {resumed}")
    assert all(expected == found for expected, found in resumed)
    assert resumed[-1][1] > 0, "nothing was resumed"
    assert outcome[case.name]["status"] == [0, 0]
    # after the death of one rank, the other one ended, without a launcher; 30 s is the limit on an idle machine
    seconds = outcome[case.name]["peers_s"]
    assert len(seconds) == case.kills().count("one rank")
    assert all(value < 120 for value in seconds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_result_equals_that_of_an_undisturbed_run(outcome: dict[str, Any], case: Case) -> None:
    reference, run = outcome["folder"] / case.reference, outcome["folder"] / case.name
    losses = {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(reference) if "loss" in row}
    assert len(losses) == case.steps
    found = [(row["step"], (row["loss"], row["grad_norm"])) for row in read_metrics(run) if "loss" in row]
    assert {step for step, _ in found} == set(losses)
    assert all(losses[step] == values for step, values in found)
    ours, theirs = (tensors(path / "checkpoints" / f"global_step{case.steps}") for path in (run, reference))
    assert len(ours) == len(theirs) > 20
    assert all(map(torch.equal, ours, theirs))
