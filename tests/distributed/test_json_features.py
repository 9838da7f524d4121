"""Optimizers, schedulers and monitors of DeepSpeed JSONs that no file of ds_configs/ has."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_cases

STEPS = 6
PEAK = 2e-3


def _optimizer(kind: str, stage: int, stages: int = 1, **params: Any) -> dict[str, Any]:
    values = config(stage, stages=stages)
    values["optimizer"] = {"type": kind, "params": {"lr": PEAK, **params}}
    return values


def _offloaded(values: dict[str, Any]) -> dict[str, Any]:
    values["zero_optimization"]["offload_optimizer"] = CPU
    return values


def _scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {**config(2, lr=PEAK), "scheduler": {"type": kind, "params": params}}


CASES: dict[str, dict[str, Any]] = {
    "adamw_torch": _optimizer("AdamW", 2, torch_adam=True),
    "adam": _optimizer("Adam", 0),
    "lion": _offloaded(_optimizer("Lion", 2, betas=[0.9, 0.99])),  # without offload DeepSpeed's Lion needs CUDA
    "lion_pipeline": _offloaded(_optimizer("Lion", 1, 2, betas=[0.9, 0.99])),
    "muon_zero1": _optimizer("Muon", 1),
    "muon_zero2": _optimizer("Muon", 2),
    "muon_pipeline": _optimizer("Muon", 1, 2),
    "cpu_adam": {**config(2, lr=PEAK, offload_optimizer=CPU)},
    "warmup": _scheduler("WarmupLR", warmup_min_lr=0, warmup_max_lr=PEAK, warmup_num_steps=4, warmup_type="linear"),
    "warmup_decay": _scheduler("WarmupDecayLR", warmup_min_lr=0, warmup_max_lr=PEAK, warmup_num_steps=2,
                               total_num_steps=STEPS, warmup_type="linear"),
    "warmup_cosine": _scheduler("WarmupCosineLR", total_num_steps=STEPS, warmup_num_steps=2),
    "monitors": {**config(2, lr=PEAK), "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "job"},
                 "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def results(corpus: str, folder: Path) -> dict[str, dict[str, Any]]:
    run_flags = flags(corpus, layers=2, steps=STEPS)
    untied = flags(corpus, layers=2, steps=STEPS, overrides="tie_word_embeddings=false")
    cases = [case(name, "losses", values, untied if name == "muon_zero2" else run_flags)
             for name, values in CASES.items()]
    return run_cases(cases, 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str, results: dict[str, dict[str, Any]]) -> None:
    losses = results[name]["loss"]
    assert losses[-1] < losses[0] - 0.02, losses


def test_schedulers_of_the_json_are_followed(results: dict[str, dict[str, Any]]) -> None:
    rates = results["warmup"]["lr"]
    assert rates[-1] == pytest.approx(PEAK)
    assert rates[0] <= rates[1] < rates[2] < rates[3] <= PEAK
    assert max(results["warmup_decay"]["lr"]) == pytest.approx(PEAK)
    assert results["warmup_decay"]["lr"][-1] <= 0.5 * PEAK
    cosine = results["warmup_cosine"]["lr"]
    assert cosine[-1] < max(cosine)


def test_the_schedule_of_the_flags_is_followed(results: dict[str, dict[str, Any]]) -> None:
    rates = results["adam"]["lr"]
    assert rates[0] == pytest.approx(PEAK)
    assert rates[-1] == pytest.approx(0.1 * PEAK)


def test_muon_updates_only_the_matrices_of_blocks(results: dict[str, dict[str, Any]]) -> None:
    """DeepSpeed recognizes embeddings and head by name, and updates them with Adam."""
    names = results["muon_zero2"]["muon"]
    assert len(names) == 2 * 4
    assert all(".attention." in name or ".mlp." in name for name in names), names


def test_monitors_write_files(results: dict[str, dict[str, Any]], folder: Path) -> None:
    assert results["monitors"]["loss"]
    assert list((folder / "tb" / "job").glob("events*"))
    assert [path.name for path in (folder / "csv" / "job").glob("*lr.csv")]
