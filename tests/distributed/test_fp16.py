"""Emulated fp16 with dynamic loss scaling: an overflow skips the step and halves the scale, on both engines."""

from typing import Any

import pytest

from tests.support.cases import case, config, flags
from tests.support.launch import run_cases

LAYOUTS = {"zero1": (1, 1), "zero2": (2, 1), "zero3": (3, 1), "zero0": (0, 1), "pipeline2_zero0": (0, 2),
           "pipeline2_zero1": (1, 2)}  # name -> (ZeRO stage, number of pipeline stages)


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = []
    for name, (stage, stages) in LAYOUTS.items():
        values = config(stage, precision="fp16", stages=stages)
        values["fp16"] |= {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
        cases.append(case(name, "overflow", values, flags(corpus, layers=2, emulate_fp16=True, steps=6,
                                                         lr_warmup_steps=6)))
    return run_cases(cases, 2, tmp_path_factory.mktemp("fp16"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overflow_skips_the_step_and_halves_the_scale(layout: str, results: dict[str, dict[str, Any]]) -> None:
    row = results[layout]
    assert row["scale"][:2] == [1024, 512]
    assert row["skipped"] == [0, 1, 1, 1, 1, 1]
    assert row["state"][1] == row["state"][0], "the skipped step changed the weights"
    assert len(set(row["state"])) == 5, "the other steps must change the weights"
    assert row["lr"][1] == row["lr"][0], "a skipped step must not advance the schedule"
    assert row["lr"][2] > row["lr"][1]
    assert row["scale"][-1] == 1024, "the scale grows back after loss_scale_window good steps"
