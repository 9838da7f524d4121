"""Models with experts on real engines: gradients with the routers' losses equal autograd's in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_cases, run_worker
from tests.support.layouts import relative_difference

ADAM = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0, 0], "eps": 1.0, "weight_decay": 0}}  # see recipe_worker.py
# In fp16, rounding may choose other experts than autograd in fp32. If each token uses all experts, it cannot; the scale
# of the losses is then tested by the z-loss.
ALL_EXPERTS = {"num_experts_per_tok": 5, "router_z_loss": 0.5}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10}}
MODEL = {"model_type": "qwen2_moe", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
         "shared_expert_intermediate_size": 40, "norm_topk_prob": True}
LOSSES = {"router_aux_loss": 0.5, "router_z_loss": 0.05}
TOLERANCES = {"fp32": 2e-5, "fp16": 2e-2}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # JSON and flags; all on 2 ranks
    "fp32_zero0": (config(0), {}),
    "fp32_zero0_recomputed": (config(0), {"recompute": "blocks"}),
    "fp32_zero1_pipeline2": (config(1, stages=2), {"z_loss": 0.01}),
    "fp32_zero2_mlp_recomputed": (config(2, offload_optimizer=CPU), {"recompute": "mlp"}),
    "fp32_zero3": (config(3), {"label_smoothing": 0.1}),
    "fp16_zero0_pipeline2": ({**config(0, stages=2), **FP16}, ALL_EXPERTS),
    "fp16_zero1": ({**config(1), **FP16}, ALL_EXPERTS),
    "fp16_zero3": ({**config(3), **FP16}, ALL_EXPERTS),
}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("experts")
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL))
    cases = [step_case(name, values, model, corpus, **others) for name, (values, others) in LAYOUTS.items()]
    return run_worker("recipe_worker.py", cases, 2, folder)


def step_case(name: str, values: dict[str, Any], model: Path, corpus: str, **others: Any) -> dict[str, Any]:
    per_token = others.pop("num_experts_per_tok", 2)
    run_flags = flags(corpus, lr_schedule="constant", lr_warmup_steps=0, steps=4, **{**LOSSES, **others})
    run_flags |= {"model": str(model), "model_overrides": f"num_experts_per_tok={per_token}", "init_std": 0.3}
    values = {**values, "optimizer": ADAM, "gradient_clipping": 0}
    return case(name, "one_step", values, run_flags | ({"emulate_fp16": True} if "fp16" in values else {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_with_the_losses_of_routers_equals_that_of_autograd(layout: str, results: dict[str, Any]) -> None:
    result, tolerance = results[layout], TOLERANCES[layout[:4]]
    assert result["error"] < tolerance
    assert result["norm"][0] == pytest.approx(result["norm"][1], rel=tolerance)
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=tolerance), "not the cross-entropy alone"
    assert len(set(result["evaluation"])) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_have_the_mean_statistics_of_the_routers(layout: str, results: dict[str, Any]) -> None:
    values, (balance, squares) = results[layout]["routers"]
    tolerance = TOLERANCES[layout[:4]]
    assert values["load_balancing_loss"] == pytest.approx(balance, rel=tolerance)
    assert values["router_z_loss"] == pytest.approx(squares, rel=tolerance)
    assert 1 < values["expert_load_max"] < 5 or layout.startswith("fp16")
    assert 0 < values["router_entropy"] < 1.61  # log(5)
    assert values["dropped_tokens"] == 0


def test_losses_depend_on_the_micro_batch_only_by_the_losses_of_routers(corpus: str, tmp_path: Path) -> None:
    """pretrain/pages/experts.md: equal micro-batches give equal losses; other ones do without the losses of routers."""
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    sizes = {"micro4": {"micro": 4, "accumulation": 2}, "micro1": {"micro": 1, "accumulation": 8}}
    usual = flags(corpus, steps=4) | {"model": str(model), "model_overrides": "vocab_size=256"}
    cases = [case(f"{losses}_{size}_zero{stage}", "losses", config(stage, **sizes[size]),
                  {**usual, "router_aux_loss": coefficient})
             for losses, coefficient, stages in (("with", 0.01, (1, 3)), ("without", 0.0, (1,)))
             for size in sizes for stage in stages]
    found = {name: result["loss"] for name, result in run_cases(cases, 2, tmp_path).items()}
    for name in found:
        other_stage = name.replace("zero3", "zero1")
        assert relative_difference(found[name], found[other_stage]) <= 1e-6
    assert relative_difference(found["without_micro1_zero1"], found["without_micro4_zero1"]) <= 1e-6
    assert 1e-6 < relative_difference(found["with_micro1_zero1"], found["with_micro4_zero1"]) < 1e-3
