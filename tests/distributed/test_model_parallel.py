"""Tensor, sequence and expert parallelism give the losses and gradient norms of one rank.

A case is (variant of the model and data, DeepSpeed JSON). Its reference is the same variant on one rank with ZeRO-0.
Cases that are not in QUICK are marked as slow.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import selected_params
from tests.support.cases import CPU, DROPOUT, case, config, flags
from tests.support.launch import run_cases

STEPS = 5
CLIPPING = 0.5  # below all gradient norms
FP32_TOLERANCE = 1e-6  # relative
BF16_TOLERANCE = 5e-4
GROUPED = {"model_type": "llama", "vocab_size": 251, "hidden_size": 64, "intermediate_size": 160,
           "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
           "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
EXPERTS = {**GROUPED, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "router_aux_loss_coef": 0.02}
TIED_EXPERTS = {**GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "tie_word_embeddings": True, "router_aux_loss_coef": 0.02}

Cases = dict[str, tuple[str, dict[str, Any]]]


def _tensor(stage: int, **settings: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with two tensor-parallel ranks. The global batch is 16."""
    return {**config(stage, **settings), "tensor_parallel": {"autotp_size": 2}}


def _with_torch_adam(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with torch's Adam, for which DeepSpeed has another fp16 optimizer."""
    optimizer = values["optimizer"]
    return {**values, "optimizer": {**optimizer, "params": {**optimizer["params"], "torch_adam": True}}}


def _sequence(stage: int, **settings: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with two ranks that share each sequence. The global batch is 16."""
    return {**config(stage, **settings), "sequence_parallel_size": 2}


def _experts(stage: int, degree: int = 2, **settings: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with ranks that share the experts. Each rank has its own samples.

    Every micro-batch has 4 samples, as in the reference: a router's losses are computed in micro-batches.
    """
    return {**config(stage, **settings), "expert_parallel": {"enabled": True, "autoep_size": degree}}


def _with_tensor2(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "tensor_parallel": {"autotp_size": 2}}


OFFLOAD = {"activation_checkpointing": {"cpu_checkpointing": True}}
TWO_RANKS: Cases = {
    **{f"tensor2_zero{stage}": ("tied", _tensor(stage, accumulation=4)) for stage in (0, 1, 2, 3)},
    "tensor2_zero1_cpu": ("tied", _tensor(1, accumulation=4, offload_optimizer=CPU)),
    "tensor2_zero3_cpu": ("tied", _tensor(3, accumulation=4, offload_optimizer=CPU)),
    "tensor2_zero1_grouped": ("grouped", _tensor(1, accumulation=4)),
    "tensor2_zero3_grouped": ("grouped", _tensor(3, accumulation=4)),
    "tensor2_zero3_masked": ("masked", _tensor(3, accumulation=4)),
    "tensor2_zero2_documents": ("documents", _tensor(2, accumulation=4)),
    "tensor2_zero0_bf16": ("tied", _tensor(0, accumulation=4, precision="bf16")),
    "tensor2_zero1_bf16": ("tied", _tensor(1, accumulation=4, precision="bf16")),
    "tensor2_zero0_fp16": ("emulated", _tensor(0, accumulation=4, precision="fp16")),
    "tensor2_zero0_unfused_fp16": ("emulated", _with_torch_adam(_tensor(0, accumulation=4, precision="fp16"))),
    "tensor2_zero1_fp16": ("emulated", _tensor(1, accumulation=4, precision="fp16")),
    "tensor2_zero1_dropout": ("dropout", _tensor(1, accumulation=4)),
    **{f"sequence2_zero{stage}": ("tied", _sequence(stage, accumulation=4)) for stage in (0, 1, 2, 3)},
    "sequence2_zero1_masked": ("masked", _sequence(1, accumulation=4)),
    "sequence2_zero3_documents": ("documents", _sequence(3, accumulation=4)),
    "sequence2_zero2_grouped": ("grouped", _sequence(2, accumulation=4)),
    "sequence2_zero3_single_kv": ("single_kv", _sequence(3, accumulation=4, reduce_scatter=False)),
    "tensor2_zero1_tiled": ("tiled_tied", _tensor(1, accumulation=4)),
    "sequence2_zero2_tiled": ("tiled_tied", _sequence(2, accumulation=4)),
    "sequence2_zero3_tiled_offload": ("tiled_tied", {**_sequence(3, accumulation=4), **OFFLOAD}),
    "sequence2_zero3_cpu": ("tied", _sequence(3, accumulation=4, offload_optimizer=CPU, offload_param=CPU)),
    **{f"sequence2_zero{stage}_bf16": ("tied", _sequence(stage, accumulation=4, precision="bf16"))
       for stage in (0, 1, 3)},
    "experts2_zero1": ("experts", _experts(1)),
    "experts2_zero2": ("tied_experts", _experts(2)),
    "experts2_zero2_cpu": ("experts", _experts(2, offload_optimizer=CPU)),
    "experts2_zero3": ("experts", _experts(3)),
    "experts2_zero2_capacity": ("capacity", _experts(2)),
    "experts2_zero2_bf16": ("experts", _experts(2, precision="bf16")),
    "experts2_tensor2_zero1": ("experts", _with_tensor2(_experts(1, accumulation=4))),
    "experts2_tensor2_zero2": ("tied_experts", _with_tensor2(_experts(2, accumulation=4, offload_optimizer=CPU))),
    "experts2_tensor2_zero3": ("experts", _with_tensor2(_experts(3, accumulation=4))),
    "experts2_tensor2_fp32_accumulation_bf16": ("experts", {
        **_with_tensor2(_experts(1, precision="bf16", accumulation=4)), "data_types": {"grad_accum_dtype": "fp32"}}),
    "experts2_fp32_accumulation_bf16": ("experts", {
        **_experts(1, precision="bf16"), "data_types": {"grad_accum_dtype": "fp32"}}),
    **{f"experts2_zero{stage}_fp16": ("emulated_experts", _experts(stage, precision="fp16")) for stage in (1, 2, 3)},
    **{f"experts2_tensor2_zero{stage}_fp16": (
        "emulated_experts", _with_tensor2(_experts(stage, accumulation=4, precision="fp16"))) for stage in (1, 2, 3)},
}
FOUR_RANKS: Cases = {
    "tensor2_data2_zero1": ("tied", _tensor(1)),
    "tensor2_data2_zero2_masked": ("masked", _tensor(2)),
    "tensor2_data2_zero3_grouped": ("grouped", _tensor(3)),
    "sequence2_data2_zero1": ("masked", _sequence(1)),
    "sequence2_data2_zero2": ("documents", _sequence(2)),
    "sequence2_data2_zero3": ("single_kv", _sequence(3)),
    "sequence4_zero3": ("single_kv", {**config(3, accumulation=4), "sequence_parallel_size": 4}),
    "experts2_data2_zero1": ("tied_experts", _experts(1, accumulation=1)),
    "experts2_data2_zero2": ("experts", _experts(2, accumulation=1)),
    "experts2_data2_zero3": ("tied_experts", _experts(3, accumulation=1, stage3_param_persistence_threshold=0)),
    "experts2_pipeline2_zero1": ("tied_experts", _experts(1, stages=2)),
    "experts2_pipeline2_zero1_bf16": ("experts", {
        **_experts(1, stages=2, precision="bf16"), "data_types": {"grad_accum_dtype": "fp32"}}),
    "experts2_tensor2_pipeline2_zero1": ("experts", _with_tensor2(_experts(1, stages=2, accumulation=4))),
    "experts4_tensor2_zero1": ("tied_experts", _with_tensor2(_experts(1, 4))),
    "experts2_tensor2_data2_zero2": ("experts", _with_tensor2(_experts(2))),
    "experts4_tensor2_zero3": ("tied_experts", _with_tensor2(_experts(3, 4))),
    "experts4_zero2": ("experts", _experts(2, 4, accumulation=1)),
    "tensor2_pipeline2_zero0": ("tied", _tensor(0, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1_documents": ("documents", _tensor(1, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1_grouped": ("grouped", _tensor(1, stages=2, accumulation=4)),
    "tensor2_pipeline2_zero1_bf16": ("tied", _tensor(1, stages=2, accumulation=4, precision="bf16")),
    **{f"tensor2_pipeline2_zero{stage}_fp16": (
        "emulated", _tensor(stage, stages=2, accumulation=4, precision="fp16")) for stage in (0, 1)},
    "experts2_pipeline2_zero1_fp16": ("emulated_experts", _experts(1, stages=2, precision="fp16")),
    "experts2_tensor2_pipeline2_zero1_fp16": (
        "emulated_experts", _with_tensor2(_experts(1, stages=2, accumulation=4, precision="fp16"))),
    "experts2_tensor2_data2_zero2_fp16": ("emulated_experts", _with_tensor2(_experts(2, precision="fp16"))),
}

CASES = {**TWO_RANKS, **FOUR_RANKS}
QUICK = (
    "tensor2_zero0", "tensor2_zero1_grouped", "tensor2_zero2_documents", "tensor2_zero3_masked",
    "tensor2_zero1_bf16", "tensor2_data2_zero1", "tensor2_pipeline2_zero0",
    "tensor2_pipeline2_zero1_grouped",
    "sequence2_zero1_masked", "sequence2_zero2_grouped", "sequence2_zero3_documents",
    "sequence2_zero3_bf16", "sequence2_zero3_tiled_offload",
    "sequence2_data2_zero3",
    "experts2_zero1", "experts2_zero2", "experts2_zero3", "experts2_zero2_capacity", "experts2_fp32_accumulation_bf16",
    "experts2_data2_zero1", "experts2_tensor2_zero2", "experts2_tensor2_pipeline2_zero1")


def _variants(corpus: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the flags of each variant. CLIPPING acts in all of them."""
    grouped, single_kv = folder / "grouped.json", folder / "single_kv.json"
    grouped.write_text(json.dumps({**GROUPED, "model_type": "olmo2"}))  # with norms of queries and keys over all heads
    single_kv.write_text(json.dumps({**GROUPED, "num_key_value_heads": 1}))
    experts, tied_experts = folder / "experts.json", folder / "tied_experts.json"
    experts.write_text(json.dumps(EXPERTS))
    tied_experts.write_text(json.dumps(TIED_EXPERTS))
    return {
        "tied": flags(corpus, layers=2, steps=STEPS),
        "emulated": flags(corpus, layers=2, steps=STEPS, emulate_fp16=True),
        "dropout": flags(corpus, layers=2, steps=10, overrides=DROPOUT),
        "masked": flags(corpus, layers=2, steps=STEPS, eod_mask_loss=True, overrides="tie_word_embeddings=false"),
        "documents": flags(corpus, layers=2, steps=STEPS, document_attention=True, eod_mask_loss=True),
        "grouped": {**flags(corpus, layers=2, steps=STEPS), "model": str(grouped), "model_overrides": "vocab_size=251"},
        "tiled_tied": flags(corpus, layers=2, steps=STEPS, mlp_tiles=3, recompute="blocks"),
        "single_kv": {**flags(corpus, layers=2, steps=STEPS), "model": str(single_kv),
                      "model_overrides": "vocab_size=251"},
        "experts": {**flags(corpus, steps=STEPS, router_z_loss=0.01), "model": str(experts),
                    "model_overrides": "vocab_size=251"},
        "tied_experts": {**flags(corpus, steps=STEPS, eod_mask_loss=True), "model": str(tied_experts),
                         "model_overrides": "vocab_size=251"},
        "capacity": {**flags(corpus, steps=STEPS, expert_capacity_factor=1.0), "model": str(experts),
                     "model_overrides": "vocab_size=251"},
        "emulated_experts": {**flags(corpus, steps=STEPS, emulate_fp16=True), "model": str(experts),
                             "model_overrides": "vocab_size=251"},
    }


def _params(*precisions: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES
            if _precision(name) in precisions and not name.endswith("dropout")]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, corpus: str,
            tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of the selected cases by name, and of their references by variant."""
    folder = tmp_path_factory.mktemp("model_parallel")
    variants, selected = _variants(corpus, folder), selected_params(request, "name")
    references: Cases = {_reference(name): (_plain_variant(name), config(0, accumulation=4, precision=_precision(name)))
                         for name in selected}
    found: dict[str, dict[str, Any]] = {}
    for ranks, cases in {1: references, 2: TWO_RANKS, 4: FOUR_RANKS}.items():
        found |= run_cases([case(name, "losses", {**values, "gradient_clipping": CLIPPING}, variants[variant])
                            for name, (variant, values) in cases.items() if name in selected or ranks == 1],
                           ranks, folder / str(ranks))
    return found


def _precision(name: str) -> str:
    return next((precision for precision in ("bf16", "fp16") if name.endswith(precision)), "fp32")


def _reference(name: str) -> str:
    """Return the name of the case with which a case is compared."""
    return f"{_plain_variant(name)} on one rank in {_precision(name)}"


def _plain_variant(name: str) -> str:
    """Return the variant of a case, without recomputation."""
    return CASES[name][0].removeprefix("tiled_")


def _worst(row: dict[str, Any], reference: dict[str, Any], key: str) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(row[key], reference[key], strict=True))


def _assert_close(name: str, results: dict[str, dict[str, Any]], loss_tolerance: float, norm_tolerance: float) -> None:
    row, reference = results[name], results[_reference(name)]
    assert len(row["loss"]) == STEPS
    assert _worst(row, reference, "loss") <= loss_tolerance
    assert _worst(row, reference, "grad_norm") <= norm_tolerance
    assert abs(row["eval_loss"] - reference["eval_loss"]) / reference["eval_loss"] <= loss_tolerance
    assert min(reference["grad_norm"]) > CLIPPING
    assert row["differing_copies"] == ""
    if name.startswith("tensor"):
        assert sum(row["copies"]) > 0, "norms, biases of row-parallel layers and learned positions"


@pytest.mark.parametrize("name", _params("fp32"))
def test_fp32_losses_and_gradient_norms_are_those_of_one_rank(name: str, results: dict[str, dict[str, Any]]) -> None:
    _assert_close(name, results, FP32_TOLERANCE, 10 * FP32_TOLERANCE)


@pytest.mark.parametrize("name", _params("bf16", "fp16"))
def test_16bit_losses_are_close_to_those_of_one_rank(name: str, results: dict[str, dict[str, Any]]) -> None:
    _assert_close(name, results, BF16_TOLERANCE, 2e-2)


@pytest.mark.parametrize("name", ["tensor2_zero1_dropout"])
def test_dropout_has_other_masks_and_the_same_mean_loss(name: str, results: dict[str, dict[str, Any]]) -> None:
    differences = [found - expected for found, expected in
                   zip(results[name]["loss"], results[_reference(name)]["loss"], strict=True)]
    assert min(map(abs, differences)) > 0
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    assert abs(statistics.mean(differences)) < 4 * spread < 0.01
