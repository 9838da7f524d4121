"""Emulated fp16 with dynamic loss scaling: an overflow skips the step and halves the scale, on both engines."""

from typing import Any

import pytest

from tests.conftest import selected_params
from tests.support.cases import case, config, flags
from tests.support.launch import run_cases
from tests.support.layouts import TENSOR2

PIPELINE2 = {"pipeline": {"stages": 2}}
EXPERTS2 = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
QUICK = {"zero1": (2, 1, {}), "zero2": (2, 2, {}), "zero3": (2, 3, {}), "zero0": (2, 0, {}),
         "pipeline2_zero0": (2, 0, PIPELINE2), "pipeline2_zero1": (2, 1, PIPELINE2)}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # name -> (ranks, ZeRO stage, keys of the JSON)
    **QUICK,
    **{f"tensor2_zero{stage}": (2, stage, TENSOR2) for stage in (0, 1, 3)},
    **{f"experts2_zero{stage}": (2, stage, EXPERTS2) for stage in (1, 2, 3)},
    **{f"experts2_tensor2_data2_zero{stage}": (4, stage, {**EXPERTS2, **TENSOR2}) for stage in (1, 2, 3)},
    **{f"tensor2_pipeline2_zero{stage}": (4, stage, {**PIPELINE2, **TENSOR2}) for stage in (0, 1)},
    "experts2_pipeline2_zero1": (4, 1, {**EXPERTS2, **PIPELINE2}),
    "experts2_tensor2_pipeline2_zero1": (4, 1, {**EXPERTS2, **TENSOR2, **PIPELINE2}),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, corpus: str,
            tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, found = tmp_path_factory.mktemp("fp16"), dict[str, dict[str, Any]]()
    scale = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
    dense = flags(corpus, layers=2, emulate_fp16=True, steps=6, lr_warmup_steps=6)
    mixture = {**dense, "model": "tiny-moe",
               "model_overrides": "vocab_size=256,hidden_size=64,intermediate_size=96,num_hidden_layers=2"}
    for ranks in (2, 4):
        found |= run_cases([case(name, "overflow", {**config(stage), **degrees, "fp16": scale},
                                 mixture if name.startswith("experts") else dense)
                            for name, (launched, stage, degrees) in LAYOUTS.items()
                            if launched == ranks and name in selected_params(request, "layout")],
                           ranks, folder / str(ranks))
    return found


@pytest.mark.parametrize("layout", [
    *QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in QUICK)])
def test_overflow_skips_the_step_and_halves_the_scale(layout: str, results: dict[str, dict[str, Any]]) -> None:
    row = results[layout]
    assert row["scale"][:2] == [1024, 512]
    assert row["skipped"] == [0, 1, 1, 1, 1, 1]
    assert row["state"][1] == row["state"][0], "the skipped step changed the weights"
    assert len(set(row["state"])) == 5, "the other steps must change the weights"
    assert row["lr"][1] == row["lr"][0], "a skipped step must not advance the schedule"
    assert row["lr"][2] > row["lr"][1]
    assert row["scale"][-1] == 1024, "the scale grows back after loss_scale_window good steps"
