"""Layouts and helpers for tests that save a checkpoint in one layout and load it in another."""

from pathlib import Path
from typing import Any

from pretrain.distributed.requirements import EXPERTS_SINCE, is_at_least
from tests.support.cases import config
from tests.support.launch import run_worker

HAS_EXPERTS = is_at_least(EXPERTS_SINCE)  # this DeepSpeed has expert parallelism
SAVED, STEPS = 2, 5  # optimizer steps before the checkpoint, and in total

TENSOR2 = {"tensor_parallel": {"autotp_size": 2}}

MODEL_WITH_EXPERTS = {
    "model_type": "qwen2_moe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False, "router_aux_loss_coef": 0.01}


def dp2(stage: int, **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for two data-parallel ranks and 8 samples per step."""
    return config(stage, micro=2, accumulation=2, **others)


def pp2(stage: int, **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for two pipeline stages and 8 samples per step."""
    return config(stage, micro=2, accumulation=4, stages=2, **others)


def tensor2(stage: int, *, micro: int = 4, accumulation: int = 2, **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for two tensor-parallel ranks and, on two ranks, 8 samples per step."""
    return {**config(stage, micro=micro, accumulation=accumulation, **others), **TENSOR2}


def sequence2(stage: int, *, micro: int = 4, accumulation: int = 2, **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for two sequence-parallel ranks and, on two ranks, 8 samples per step."""
    return {**config(stage, micro=micro, accumulation=accumulation, **others), "sequence_parallel_size": 2}


def experts2(stage: int, *, micro: int = 2, accumulation: int = 2, **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON for two ranks that share the experts and, on two ranks, 8 samples per step."""
    return {**config(stage, micro=micro, accumulation=accumulation, **others),
            "expert_parallel": {"enabled": True, "autoep_size": 2}}


def fp16(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with fp16 and a loss scale that grows during the test."""
    return {**values, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


def relative_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def run_layouts(cases: dict[str, tuple[int, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """Run `layout_worker.py` once for each number of ranks, and return the results by case name."""
    results: dict[str, Any] = {}
    for ranks in sorted({ranks for ranks, _ in cases.values()}):
        own = [case for n, case in cases.values() if n == ranks]
        results |= run_worker("layout_worker.py", own, ranks, folder / str(ranks))
    return results
