"""Tensor, sequence and expert parallelism give the losses and gradient norms of one rank.

A case is (variant of the model and data, DeepSpeed JSON). Its reference is the same variant on one rank with ZeRO-0.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_cases

STEPS = 10
FP32_TOLERANCE = 1e-6  # relative
BF16_TOLERANCE = 5e-4
GROUPED = {"model_type": "llama", "vocab_size": 251, "hidden_size": 64, "intermediate_size": 160,
           "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
           "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}

Cases = dict[str, tuple[str, dict[str, Any]]]


def _tensor(stage: int, **settings: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with two tensor-parallel ranks. The global batch is 16."""
    return {**config(stage, **settings), "tensor_parallel": {"autotp_size": 2}}


def _sequence(stage: int, **settings: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with two ranks that share each sequence. The global batch is 16."""
    return {**config(stage, **settings), "sequence_parallel_size": 2}


TWO_RANKS: Cases = {
    **{f"tensor2_zero{stage}": ("tied", _tensor(stage, accumulation=4)) for stage in (0, 1, 2, 3)},
    "tensor2_zero1_cpu": ("tied", _tensor(1, accumulation=4, offload_optimizer=CPU)),
    "tensor2_zero3_cpu": ("tied", _tensor(3, accumulation=4, offload_optimizer=CPU)),
    "tensor2_zero1_grouped": ("grouped", _tensor(1, accumulation=4)),
    "tensor2_zero3_grouped": ("grouped", _tensor(3, accumulation=4)),
    "tensor2_zero0_masked": ("masked", _tensor(0, accumulation=4)),
    "tensor2_zero2_documents": ("documents", _tensor(2, accumulation=4)),
    "tensor2_zero0_bf16": ("tied", _tensor(0, accumulation=4, precision="bf16")),
    "tensor2_zero1_bf16": ("tied", _tensor(1, accumulation=4, precision="bf16")),
    **{f"sequence2_zero{stage}": ("tied", _sequence(stage, accumulation=4)) for stage in (0, 1, 2, 3)},
    "sequence2_zero1_masked": ("masked", _sequence(1, accumulation=4)),
    "sequence2_zero3_documents": ("documents", _sequence(3, accumulation=4)),
    "sequence2_zero2_grouped": ("grouped", _sequence(2, accumulation=4)),
    "sequence2_zero3_single_kv": ("single_kv", _sequence(3, accumulation=4, reduce_scatter=False)),
    "sequence2_zero3_cpu": ("tied", _sequence(3, accumulation=4, offload_optimizer=CPU, offload_param=CPU)),
    **{f"sequence2_zero{stage}_bf16": ("tied", _sequence(stage, accumulation=4, precision="bf16"))
       for stage in (0, 1, 3)},
}
FOUR_RANKS: Cases = {
    "tensor2_data2_zero1": ("tied", _tensor(1)),
    "tensor2_data2_zero2": ("masked", _tensor(2)),
    "tensor2_data2_zero3": ("grouped", _tensor(3)),
    "sequence2_data2_zero1": ("masked", _sequence(1)),
    "sequence2_data2_zero2": ("documents", _sequence(2)),
    "sequence2_data2_zero3": ("single_kv", _sequence(3)),
    "sequence4_zero3": ("single_kv", {**config(3, accumulation=4), "sequence_parallel_size": 4}),
    "tensor2_pipeline2_zero0": ("tied", _tensor(0, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1": ("documents", _tensor(1, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1_grouped": ("grouped", _tensor(1, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1_bf16": ("tied", _tensor(1, stages=2, accumulation=4, precision="bf16")),
}


def _variants(corpus: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the flags of each variant. The clipping at 1.0 acts in all of them."""
    grouped, single_kv = folder / "grouped.json", folder / "single_kv.json"
    grouped.write_text(json.dumps(GROUPED))
    single_kv.write_text(json.dumps({**GROUPED, "num_key_value_heads": 1}))
    return {
        "tied": flags(corpus, steps=STEPS),
        "masked": flags(corpus, steps=STEPS, eod_mask_loss=True, overrides="tie_word_embeddings=false"),
        "documents": flags(corpus, steps=STEPS, document_attention=True, eod_mask_loss=True),
        "grouped": {**flags(corpus, steps=STEPS), "model": str(grouped), "model_overrides": "vocab_size=251"},
        "single_kv": {**flags(corpus, steps=STEPS), "model": str(single_kv), "model_overrides": "vocab_size=251"},
    }


def _is_bf16(name: str) -> bool:
    return name.endswith("bf16")


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of all cases by name, and of the references by variant."""
    folder = tmp_path_factory.mktemp("model_parallel")
    variants = _variants(corpus, folder)
    references: Cases = {variant: (variant, config(0, accumulation=4)) for variant in variants}
    references["tied_bf16"] = ("tied", config(0, accumulation=4, precision="bf16"))
    found: dict[str, dict[str, Any]] = {}
    for ranks, cases in {1: references, 2: TWO_RANKS, 4: FOUR_RANKS}.items():
        found |= run_cases([case(name, "losses", values, variants[variant])
                            for name, (variant, values) in cases.items()], ranks, folder / str(ranks))
    return found


def _worst(row: dict[str, Any], reference: dict[str, Any], key: str) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(row[key], reference[key], strict=True))


@pytest.mark.parametrize("name", [name for name in {**TWO_RANKS, **FOUR_RANKS} if not _is_bf16(name)])
def test_fp32_losses_and_gradient_norms_are_those_of_one_rank(name: str, results: dict[str, dict[str, Any]]) -> None:
    variant, _ = {**TWO_RANKS, **FOUR_RANKS}[name]
    row, reference = results[name], results[variant]
    assert len(row["loss"]) == STEPS
    assert _worst(row, reference, "loss") <= FP32_TOLERANCE
    assert _worst(row, reference, "grad_norm") <= 10 * FP32_TOLERANCE
    assert abs(row["eval_loss"] - reference["eval_loss"]) / reference["eval_loss"] <= FP32_TOLERANCE


@pytest.mark.parametrize("name", [name for name in {**TWO_RANKS, **FOUR_RANKS} if _is_bf16(name)])
def test_bf16_losses_are_close_to_those_of_one_rank(name: str, results: dict[str, dict[str, Any]]) -> None:
    variant, _ = {**TWO_RANKS, **FOUR_RANKS}[name]
    row, reference = results[name], results[f"{variant}_bf16"]
    assert _worst(row, reference, "loss") <= BF16_TOLERANCE
    assert _worst(row, reference, "grad_norm") <= 2e-2
    assert abs(row["eval_loss"] - reference["eval_loss"]) / reference["eval_loss"] <= BF16_TOLERANCE


def test_clipping_acts_in_all_variants(results: dict[str, dict[str, Any]]) -> None:
    assert all(max(results[variant]["grad_norm"]) > 1.0 for variant in ("tied", "masked", "documents", "grouped"))


def test_copies_of_parameters_are_equal(results: dict[str, dict[str, Any]]) -> None:
    """Norms, biases of row-parallel layers and learned positions are on all tensor-parallel ranks."""
    assert {name: results[name]["differing_copies"] for name in {**TWO_RANKS, **FOUR_RANKS}
            if results[name]["differing_copies"]} == {}
    assert results["tensor2_zero0"]["copies"][0] > 0
