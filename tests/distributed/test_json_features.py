"""Optimizers, schedulers and monitors of DeepSpeed JSONs that no file of ds_configs/ has."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_cases
from tests.support.layouts import relative_difference

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


def _decaying(kind: str, stage: int, **params: Any) -> dict[str, Any]:
    """Return a JSON with a weight decay so high that its kind changes the losses."""
    return _optimizer(kind, stage, weight_decay=3.0, **params)


CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-3, "cycle_first_step_size": 2, "decay_step_size": 1,
         "decay_lr_rate": 1.0}
RANGE = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
RATES = {  # by the formulas of DeepSpeed's documentation
    "one_cycle": [1e-3, 1.5e-3, 2e-3, 1.5e-3, 1e-3, 0.5e-3],
    "range_test": [1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 3.5e-3],
    "range_test_stairs": [1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3],
}
# Each has the losses of "zero1", up to the rounding of its precision.
SAME_LOSSES: dict[str, tuple[float, dict[str, Any]]] = {
    "prescaled": (1e-6, {**config(1, lr=PEAK, reduce_scatter=False), "prescale_gradients": True}),
    "predivided": (1e-6, {**config(1, lr=PEAK, reduce_scatter=False), "gradient_predivide_factor": 3.0}),
    "predivided_zero0": (1e-6, {**config(0, lr=PEAK), "gradient_predivide_factor": 3.0}),
    "reduced_in_bf16": (2e-4, {**config(1, lr=PEAK), "communication_data_type": "bf16"}),
    "breakdown": (1e-6, {**config(1, lr=PEAK), "wall_clock_breakdown": True}),
    "communication_log": (1e-6, {**config(1, lr=PEAK), "comms_logger": {"enabled": True}}),
    "fp16_zero3_all_cpu": (5e-4, {**config(3, lr=PEAK, offload_optimizer=CPU, offload_param=CPU),
                                  "fp16": {"enabled": True, "initial_scale_power": 8}}),
}


SAME_BITS = ("breakdown", "communication_log", "prescaled")  # a division by 2 ranks is exact
CASES: dict[str, dict[str, Any]] = {
    "adamw_torch": _optimizer("AdamW", 2, torch_adam=True),
    "adam": _optimizer("Adam", 0, betas=[0, 0.95]),
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
    "one_cycle": _scheduler("OneCycle", **CYCLE),
    "range_test": _scheduler("LRRangeTest", **RANGE),
    "range_test_stairs": _scheduler("LRRangeTest", lr_range_test_staircase=True, **RANGE),
    "decoupled_decay": _decaying("Adam", 2),
    "decay_in_gradient": _decaying("Adam", 2, adam_w_mode=False),
    "decay_in_gradient_cpu": _offloaded(_decaying("Adam", 2, adam_w_mode=False)),
    "zero1": config(1, lr=PEAK),
    **{name: values for name, (_, values) in SAME_LOSSES.items()},
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
    own = {"muon_zero2": untied, "fp16_zero3_all_cpu": {**run_flags, "emulate_fp16": True}}
    cases = [case(name, "losses", values, own.get(name, run_flags)) for name, values in CASES.items()]
    return run_cases(cases, 2, folder)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("decay_in_gradient")])
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


@pytest.mark.parametrize("name", RATES)
def test_cycles_and_range_tests_have_the_documented_rates(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["lr"] == pytest.approx(RATES[name])


@pytest.mark.parametrize("name", SAME_LOSSES)
def test_keys_that_change_no_result(name: str, results: dict[str, dict[str, Any]]) -> None:
    found, wanted = results[name], results["zero1"]
    assert relative_difference(found["loss"], wanted["loss"]) < SAME_LOSSES[name][0]
    assert all(found[key] == wanted[key] for key in ("loss", "grad_norm")) == (name in SAME_BITS)


def test_without_adam_w_mode_the_decay_is_part_of_the_gradient(results: dict[str, dict[str, Any]]) -> None:
    """torch.optim.Adam, and DeepSpeed's Adam for the CPU, which is another implementation."""
    found = results["decay_in_gradient"]["loss"]
    assert relative_difference(results["decay_in_gradient_cpu"]["loss"], found) < 1e-6
    assert relative_difference(results["decoupled_decay"]["loss"], found) > 1e-3


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
