"""Recomputation and offload of activations on real engines: the losses are those without it, and less is kept."""

from typing import Any

import pytest

from tests.support.cases import DROPOUT, case, config, flags
from tests.support.launch import run_cases

LAYOUTS = {"zero1": (1, {}), "zero3": (3, {}), "pipeline2": (1, {"stages": 2, "accumulation": 4})}
OFFLOAD = {"activation_checkpointing": {"cpu_checkpointing": True}}
# name -> (flags, interval of the JSON, its other blocks)
MODES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "none": ({}, 0, {}),
    "attention": ({"recompute": "attention"}, 0, {}),
    "mlp": ({"recompute": "mlp"}, 0, {}),
    "every2": ({"recompute": "blocks", "recompute_every": 2}, 0, {}),
    "blocks": ({"recompute": "blocks"}, 0, {}),
    "blocks_offload": ({"recompute": "blocks"}, 0, OFFLOAD),
    "groups_offload": ({}, 2, OFFLOAD),
}
NAMES = [f"{layout}_{mode}" for layout in LAYOUTS for mode in MODES]


def reference_of(name: str) -> str:
    """Return the name of the case with the same layout and precision, without recomputation."""
    return next(name.partition(layout)[0] + f"{layout}_none" for layout in LAYOUTS if layout in name)


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all cases on two ranks, with dropout and with attention inside documents."""
    cases = []
    for layout, (stage, settings) in LAYOUTS.items():
        for mode, (given, interval, blocks) in MODES.items():
            values = {**config(stage, checkpoint_every=interval, **settings), **blocks}
            run = flags(corpus, overrides=DROPOUT, steps=2, document_attention=True, **given)
            cases.append(case(f"{layout}_{mode}", "kept", values, run))
            if layout != "zero1" and mode in ("none", "attention", "mlp"):  # the custom kernels of CPUs
                low = config(stage, precision="bf16", **settings)
                cases.append(case(f"bf16_{layout}_{mode}", "kept", low, flags(corpus, steps=2, **given)))
    return run_cases(cases, 2, tmp_path_factory.mktemp("recompute"))


@pytest.mark.parametrize("name", [*NAMES, *(f"bf16_{layout}_{mode}" for layout in ("zero3", "pipeline2")
                                            for mode in ("attention", "mlp"))])
def test_losses_and_gradients_are_those_without_recomputation(results: dict[str, Any], name: str) -> None:
    reference = results[reference_of(name)]
    assert results[name]["loss"] == reference["loss"]
    assert results[name]["grad_norm"] == reference["grad_norm"]
    assert len(reference["loss"]) == 2
    assert reference["loss"][0] != reference["loss"][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_mode_keeps_less(results: dict[str, Any], layout: str) -> None:
    """An offloaded input is no saved tensor of this process's autograd any more, but a copy."""
    kept = {mode: results[f"{layout}_{mode}"]["kept_bytes"] for mode in MODES}
    print(layout, kept)
    assert kept["attention"] < 0.8 * kept["none"]
    assert kept["mlp"] < 0.95 * kept["none"]
    assert kept["blocks"] < kept["every2"] < 0.8 * kept["none"]
    assert kept["blocks"] < 0.5 * min(kept["attention"], kept["mlp"])
    assert kept["blocks_offload"] < kept["blocks"]
    assert kept["groups_offload"] < kept["blocks"]
