"""Learning-rate schedules and global-batch ramp-up on real engines, through a resume in the middle of the ramp."""

from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_worker

RAMP = "0:4,700:8,2e3:16"  # tokens; samples have 64 tokens, so the stages begin at samples 0, 11 and 32
SIZES = [4, 4, 4, 8, 8, 8, 16, 16, 16]
SAVED_STEP = 5  # in the middle of the second stage
FP32_TOLERANCE, NORM_TOLERANCE, BF16_TOLERANCE = 1e-6, 1e-5, 5e-4  # relative

WSD = {"lr_schedule": "wsd", "lr_decay_shape": "1-sqrt", "lr_warmup_tokens": 700, "lr_wsd_tokens": 2000}
ONE_CYCLE = {"lr_schedule": "one_cycle"}
STEPPED = {"lr_schedule": "step", "lr_milestone_tokens": "800,2e3", "lr_milestone_factor": 0.5, "lr_warmup_steps": 2}
INVERSE = {"lr_schedule": "inverse_sqrt", "lr_warmup_steps": 3, "lr_reference_batch": 64, "lr_scaling": "sqrt"}


def data2(stage: int, **others: Any) -> dict[str, Any]:
    return config(stage, micro=2, accumulation=4, **others)


def pipeline2(stage: int = 1, **others: Any) -> dict[str, Any]:
    return config(stage, micro=2, accumulation=8, stages=2, **others)


def fp16(stage: int) -> dict[str, Any]:
    scaling = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    return {**data2(stage), "fp16": scaling}


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # first JSON, JSON of the resume, flags
    "zero1": (data2(1), pipeline2(), WSD),
    "zero2_cpu": (data2(2, offload_optimizer=CPU), data2(2, offload_optimizer=CPU), {"lr_schedule": "linear"}),
    "zero3": (data2(3), data2(1), STEPPED),
    "pipeline2": (pipeline2(), data2(3), ONE_CYCLE),
    "pipeline2_zero0": (pipeline2(0), pipeline2(0), INVERSE),
    "zero0": (data2(0), config(0, micro=1, accumulation=8), {"min_lr": 1e-6}),
    "bf16_zero1": ({**data2(1, precision="bf16"), "data_types": {"grad_accum_dtype": "fp32"}},
                   pipeline2(precision="bf16"), {"lr_schedule": "constant"}),
    "fp16_zero2": (fp16(2), fp16(2), WSD),
}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = []
    for name, (first, resumed, schedule) in LAYOUTS.items():
        values = flags(corpus, layers=2, hidden=32, steps=len(SIZES), batch_schedule=RAMP,
                       emulate_fp16="fp16" in name, **schedule)
        cases.append(case(name, "ramp", first, values, resumed_config=resumed, saved_step=SAVED_STEP, sizes=SIZES))
    return run_worker("ramp_worker.py", cases, 2, tmp_path_factory.mktemp("schedules"))


def worst(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "16" not in name])
def test_a_ramp_equals_plain_torch(layout: str, results: dict[str, Any]) -> None:
    found, expected = results[layout], results[layout]["reference"]
    assert worst(found["loss"], expected["loss"]) <= FP32_TOLERANCE
    assert worst(found["grad_norm"], expected["grad_norm"]) <= NORM_TOLERANCE
    assert worst(found["evaluated"], expected["evaluated"]) <= FP32_TOLERANCE, "evaluations have the final batch"
    assert found["global_samples"] == sum(SIZES), "the x axis of DeepSpeed's monitors"


def test_a_ramp_in_bf16(results: dict[str, Any]) -> None:
    found, expected = results["bf16_zero1"], results["bf16_zero1"]["reference"]
    assert worst(found["loss"], expected["loss"]) <= BF16_TOLERANCE
    assert worst(found["grad_norm"], expected["grad_norm"]) <= 2e-2


def test_skipped_updates_of_fp16_move_no_rate(results: dict[str, Any]) -> None:
    found, rates = results["fp16_zero2"], results["fp16_zero2"]["reference"]["lr"]
    skipped = [0, *found["skipped"]]
    assert 0 < skipped[-1] < len(SIZES), "the first loss scale overflows"
    assert found["lr"] == pytest.approx([rates[step - skipped[step]] for step in range(len(SIZES))], rel=1e-12)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "fp16" not in name])
def test_engines_have_exactly_the_rates_of_the_schedule(layout: str, results: dict[str, Any]) -> None:
    assert results[layout]["lr"] == pytest.approx(results[layout]["reference"]["lr"], rel=1e-12)


def test_rates_in_tokens_follow_the_ramp(results: dict[str, Any]) -> None:
    """700 tokens are read in 3 steps of 4 samples; the final 2000 tokens begin in the step before the last two."""
    peak = 1e-3
    assert results["zero1"]["lr"][:7] == pytest.approx([peak / 3, peak * 2 / 3, *[peak] * 5], rel=1e-12)
    assert results["zero1"]["lr"][8] == pytest.approx(0.1 * peak, rel=1e-12)
    assert results["zero3"]["lr"] == pytest.approx([*[peak / 2], peak, peak, peak, *[peak / 2] * 2, *[peak / 4] * 3],
                                                   rel=1e-12)
    assert results["pipeline2_zero0"]["lr"][2] == pytest.approx(peak / 2, rel=1e-12), "scaled by sqrt(16 / 64)"
