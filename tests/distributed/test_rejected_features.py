"""Why partial offload, SuperOffload and ZenFlow are rejected (deepspeed_json.md): they run here in plain DeepSpeed.

If an assertion fails, DeepSpeed has changed the feature: read its code again, and support it or correct the reason.
"""

import inspect
from typing import Any

import pytest
from deepspeed.runtime.superoffload import superoffload_stage3, superoffload_utils
from deepspeed.runtime.zenflow import zenflow_stage_1_and_2

from tests.support.launch import run_worker

_CPU = {"device": "cpu", "pin_memory": False}


def _case(job: str, stage: int, zero: dict[str, Any], *, accumulation: int = 1) -> dict[str, Any]:
    return {"name": job, "job": job, "config": {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage, **zero}}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [_case("partial_offload", 3, {"offload_optimizer": {**_CPU, "ratio": 0.5}, "sub_group_size": 256}),
             _case("zenflow", 2, {"offload_optimizer": _CPU, "overlap_comm": True, "zenflow": {
                 "topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 1}},
                 accumulation=2),
             _case("super_offload", 3, {"offload_optimizer": {**_CPU, "super_offload": True}})]
    return run_worker("feature_worker.py", cases, 1, tmp_path_factory.mktemp("features"))


def test_partial_offload_loses_rates_and_states(results: dict[str, Any]) -> None:
    found = results["partial_offload"]
    assert found["on_device"] > 0
    scheduled, on_device = found["rates"]
    assert scheduled == pytest.approx(1e-3 * 0.5**3)
    assert on_device == pytest.approx(1e-3), "the optimizer on the device now follows the schedule"
    in_cpu, in_device = found["states_of_both"]
    assert in_device > 0
    assert found["saved"] == in_cpu, "checkpoints now have the optimizer states of the device"


def test_zenflow_replaces_the_accumulation_steps(results: dict[str, Any]) -> None:
    found = results["zenflow"]
    assert found["asked"] == 2
    assert found["found"] != 2, "ZenFlow now keeps gradient_accumulation_steps"
    assert found["steps"] != 4 // 2, "the engine now counts the steps that were asked for"
    assert "state_dict" not in inspect.getsource(zenflow_stage_1_and_2), "checkpoints now have ZenFlow's optimizer"
    assert not any("selective" in name for name in found["saved"])


def test_super_offload_needs_cuda_and_saves_no_states(results: dict[str, Any]) -> None:
    assert "only supports NVIDIA CUDA GPUs" in results["super_offload"]
    for module in (superoffload_stage3, superoffload_utils):
        assert "state_dict" not in inspect.getsource(module), "SuperOffload now saves its optimizer states"
