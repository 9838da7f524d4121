"""A non-finite loss or gradient on one rank skips the update on all ranks: nothing changes, and the run continues.

Each case compares a run with faults between its steps with a run without faults: all weights, optimizer states and the
schedule have the same bits on every rank. Defects M, N, O, AD and AE of DeepSpeed prevent this.
"""

import math
from typing import Any

import pytest

from tests.conftest import selected_params
from tests.distributed.test_upstream import NEEDS_NVME
from tests.support.cases import CPU, case, config, flags, fused, nvme
from tests.support.launch import run_worker

FAULTS = ["nan_loss", "inf_loss", "nan_gradient", "inf_gradient", "veto"]
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
NO_CLIPPING = {"gradient_clipping": 0}
STATIC = {"loss_scale": 128}
FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
TENSOR2 = {"tensor_parallel": {"autotp_size": 2}}
AT_MINIMUM = {"initial_scale_power": 1}


def bf16(stage: int, **others: Any) -> dict[str, Any]:
    return config(stage, precision="bf16", **others)


def fp16(stage: int, *, scaling: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {**config(stage, **others), "fp16": {**FP16, **(scaling or {})}}


LAYOUTS = {  # in the default run; all on 2 ranks
    "fp32_zero0_pipeline2": config(0, stages=2),
    "fp32_zero2": config(2),
    "bf16_zero1_pipeline2": bf16(1, stages=2),
    "bf16_zero3": bf16(3),
    "bf16_zero1_fp32_sum": {**bf16(1), **FP32_SUM},
    "bf16_zero1_pipeline2_cpu_fp32_sum": {**bf16(1, stages=2, offload_optimizer=CPU), **FP32_SUM},
    "fp16_zero1": fp16(1),
    "bf16_zero0_pipeline2_fused": fused(bf16(0, stages=2)),
}
MORE_LAYOUTS = {
    "fp32_zero0": config(0),
    "fp32_zero0_unclipped": {**config(0, stages=2), **NO_CLIPPING},
    "fp32_zero0_sgd": {**config(0), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "fp32_zero1": config(1),
    "fp32_zero1_pipeline2": config(1, stages=2),
    "fp32_zero2_cpu": config(2, offload_optimizer=CPU),
    "fp32_zero3": config(3),
    "fp32_zero3_cpu": config(3, offload_optimizer=CPU),
    "bf16_zero0": bf16(0),
    "bf16_zero0_pipeline2": bf16(0, stages=2),
    "bf16_zero1": bf16(1),
    "bf16_zero1_cpu": bf16(1, offload_optimizer=CPU),
    "bf16_zero1_immediate": {**bf16(1), **FP32_SUM, "bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16_zero1_pipeline2_cpu": bf16(1, stages=2, offload_optimizer=CPU),
    "bf16_zero1_pipeline2_checkpointed": bf16(1, stages=2, checkpoint_every=1),
    "bf16_zero1_pipeline2_fp32_sum": {**bf16(1, stages=2), **FP32_SUM},
    "bf16_zero2": bf16(2),
    "bf16_zero2_unclipped": {**bf16(2), **NO_CLIPPING},
    "bf16_zero2_overlap": bf16(2, overlap_comm=True, contiguous_gradients=False),
    "bf16_zero2_cpu": bf16(2, offload_optimizer=CPU),
    "bf16_zero2_cpu_fp32_sum": {**bf16(2, offload_optimizer=CPU), **FP32_SUM},
    "bf16_zero3_cpu": bf16(3, offload_optimizer=CPU),
    "bf16_zero3_cpu_parameters": bf16(3, offload_optimizer=CPU, offload_param=CPU),
    "bf16_zero3_unclipped": {**bf16(3), **NO_CLIPPING},
    "bf16_zero3_fp32_sum": {**bf16(3), **FP32_SUM},
    "bf16_zero1_muon": {**bf16(1), **MUON},
    "bf16_zero3_muon": {**bf16(3, reduce_scatter=False), **MUON},
    "fp16_zero0_pipeline2": fp16(0, stages=2),
    "fp16_zero0_torch_adam": {**fp16(0, stages=2),
                              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
    "fp16_zero1_pipeline2": fp16(1, stages=2),
    "fp16_zero2": fp16(2),
    "fp16_zero2_cpu": fp16(2, offload_optimizer=CPU),
    "fp16_zero3": fp16(3),
    "fp16_zero3_muon": {**fp16(3, reduce_scatter=False), **MUON},
    **{f"bf16_zero{stage}_fused": fused(bf16(stage)) for stage in (0, 1, 2, 3)},
    "bf16_zero1_fp32_sum_fused": fused({**bf16(1), **FP32_SUM}),
    "fp32_zero2_fused": fused(config(2, overlap_comm=True)),
    **{f"fp32_zero{stage}_tensor2": {**config(stage), **TENSOR2} for stage in (0, 1, 3)},
}
OVERFLOWS = {  # more overflows than the loss scale can be halved
    "fp16_zero1_minimum": fp16(1, scaling=AT_MINIMUM), "fp16_zero0_minimum": fp16(0, stages=2, scaling=AT_MINIMUM),
    "fp16_zero1_static": fp16(1, scaling=STATIC), "fp16_zero0_static": fp16(0, stages=2, scaling=STATIC),
}


def faults_of(layout: str) -> list[str]:
    """Return the faults of a layout: with a veto, the device does not decide alone whether it skips an update."""
    return FAULTS[:-1] if layout.endswith("fused") else FAULTS


def skip_case(name: str, values: dict[str, Any], corpus: str, faults: list[str],
              **others: Any) -> dict[str, Any]:
    if "fp16" in values:
        others["emulate_fp16"] = True
        faults = sorted(faults, key=lambda fault: "gradient" in fault)  # last, because they change the loss scale
    return case(name, "skip", values, flags(corpus, layers=2, steps=9, lr_warmup_steps=9, **others), faults=faults)


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [*(skip_case(name, values, corpus, faults_of(name)) for name, values in LAYOUTS.items()),
             *(skip_case(name, values, corpus, ["inf_gradient"] * 3) for name, values in OVERFLOWS.items())]
    return run_worker("skip_worker.py", cases, 2, tmp_path_factory.mktemp("skip"))


def assert_faults_change_nothing(layout: str, result: dict[str, Any]) -> None:
    is_fp16, is_muon = layout.startswith("fp16"), layout.endswith("muon")  # Muon's norm belongs to normalized gradients
    for row in result["rows"]:
        fault = row["fault"]
        assert row["applied"] == [True, True], f"after {fault}, the next update was skipped too"
        overflow = is_fp16 and "gradient" in fault
        assert row["next_is_equal"] or overflow, f"after {fault}, the next step has another result"
        if fault:
            assert row["unchanged"], f"{fault} changed weights, optimizer states or schedule"
            assert row["counted"] == [1, 1]
            assert row["decided_late"] == layout.endswith("fused")
            assert (row["scale"][0] != row["scale"][1]) == overflow, f"{fault} changed the loss scale"
            reason = {"nan_loss": "non-finite loss", "inf_loss": "non-finite loss", "veto": "veto"}.get(
                fault, "fp16 overflow" if overflow else "non-finite gradient")
            assert row["skipped"] == [[reason, not overflow]] * 2
            assert math.isfinite(row["reported"][1]) == (fault == "veto"), "wrong gradient norm in the log"
    norm, applied = result["zero"]
    assert norm == 0 or is_muon, "the gradients of the last step are not zero"
    assert applied == [True, True], "an update with zero gradients was skipped"
    assert len(result["veto_inputs"]) == len(result["rows"]) + ("veto" in faults_of(layout))
    for asked in result["asked"] if "veto" in faults_of(layout) else ():
        assert [value for pair in asked for value in pair] == pytest.approx(
            [value for pair in result["veto_inputs"] for value in pair], rel=1e-5), "veto got another loss or norm"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_on_one_rank_changes_nothing(layout: str, results: dict[str, Any]) -> None:
    assert_faults_change_nothing(layout, results[layout])


@pytest.mark.parametrize("layout", ["fp16_zero1_minimum", "fp16_zero0_minimum"])
def test_fp16_overflows_are_bad_steps_at_the_minimum_loss_scale_only(layout: str, results: dict[str, Any]) -> None:
    rows = results[layout]["rows"][1:]
    assert [row["scale"] for row in rows] == [[2, 1], [1, 1], [1, 1]]
    assert [row["skipped"] for row in rows] == [[["fp16 overflow", is_bad]] * 2 for is_bad in (False, True, True)]
    assert all(row["unchanged"] and row["applied"] == [True, True] for row in rows)


@pytest.mark.parametrize("layout", ["fp16_zero1_static", "fp16_zero0_static"])
def test_every_overflow_of_a_static_loss_scale_is_a_bad_step(layout: str, results: dict[str, Any]) -> None:
    for row in results[layout]["rows"][1:]:
        assert row["scale"] == [128, 128]
        assert row["skipped"] == [["fp16 overflow", True]] * 2
        assert row["unchanged"]
        assert row["applied"] == [True, True]


@pytest.fixture(scope="module")
def more_results(request: pytest.FixtureRequest, corpus: str,
                 tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, disk = (tmp_path_factory.mktemp(name) for name in ("skip", "nvme"))
    small = bf16(3, offload_optimizer=nvme(disk), sub_group_size=500_000)  # sub-groups of more than 1 MiB are swapped
    layouts = selected_params(request, "layout")
    cases = [skip_case(name, MORE_LAYOUTS[name], corpus, faults_of(name)) for name in layouts if name in MORE_LAYOUTS]
    if "bf16_zero3_nvme" in layouts:
        cases.append(skip_case("bf16_zero3_nvme", small, corpus, FAULTS, hidden=256))
    return run_worker("skip_worker.py", cases, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*MORE_LAYOUTS, pytest.param("bf16_zero3_nvme", marks=NEEDS_NVME)])
def test_a_fault_changes_nothing_in_more_layouts(layout: str, more_results: dict[str, Any]) -> None:
    assert_faults_change_nothing(layout, more_results[layout])
