"""Layouts whose collectives and reads of the device are counted (tests/distributed/workers/traffic_worker.py)."""

from pathlib import Path
from typing import Any

from tests.support.cases import CPU, config, flags, fused
from tests.support.model_shapes import SHAPES, write_config

RANKS = 2
DIVIDE_ALL = {"stage3_param_persistence_threshold": 0}  # small parameters are partitioned, too


def _small_zero3(live: int, reuse: int, prefetch: int = 20_000, **others: Any) -> dict[str, Any]:
    """Return a JSON for ZeRO stage 3. Its limits (in elements) are small, so that the small test model reaches them."""
    values = config(3, precision="bf16", stage3_max_reuse_distance=reuse, stage3_max_live_parameters=live,
                    **DIVIDE_ALL, **others)
    values["zero_optimization"]["stage3_prefetch_bucket_size"] = prefetch
    return values


# those of the page have torch's fused AdamW, as on GPUs; of the others, some have the AdamW of CPUs
CONFIGS: dict[str, dict[str, Any]] = {
    "zero0_fp32": config(0), "zero0_bf16": fused(config(0, precision="bf16")),
    "zero0_fp16": config(0, precision="fp16"), "zero1": fused(config(1, precision="bf16")),
    "zero1_fp32_accumulation": {**config(1, precision="bf16"), "data_types": {"grad_accum_dtype": "fp32"}},
    "zero2": fused(config(2, precision="bf16", accumulation=4)),
    "zero2_offload": config(2, precision="bf16", offload_optimizer=CPU),
    "zero3": fused(config(3, precision="bf16", **DIVIDE_ALL)), "zero3_fp32": config(3, **DIVIDE_ALL),
    "zero3_live": _small_zero3(200_000, 60_000), "zero3_reuse": _small_zero3(60_000, 300_000),
    "zero3_no_prefetch": _small_zero3(300_000, 200_000, 0),
    "zero3_recompute": _small_zero3(200_000, 60_000, checkpoint_every=1),
    "zero3_recompute_no_prefetch": _small_zero3(300_000, 200_000, 0, checkpoint_every=1),
    "pipeline2": fused(config(1, precision="bf16", stages=2, accumulation=4)),
}
MASKED = {"eod_mask_loss": True, "packing": "best_fit"}  # the number of labels that count differs between steps
MASKED_CONFIGS = {"zero1_masked": CONFIGS["zero1"], "pipeline2_masked": CONFIGS["pipeline2"]}
# two ranks share matrices, sequences or experts; the last three train a model whose 3 blocks have experts
_TENSOR, _SEQUENCE, _EXPERTS = ({"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2},
                                {"expert_parallel": {"enabled": True, "autoep_size": 2}})
SHARED_CONFIGS = {name: fused(values) for name, values in {
    "tensor2_zero1": config(1, precision="bf16") | _TENSOR, "tensor2_zero3": config(3, precision="bf16") | _TENSOR,
    "sequence2_zero1": config(1, precision="bf16") | _SEQUENCE,
    "sequence2_zero3": config(3, precision="bf16", **DIVIDE_ALL) | _SEQUENCE,
    "experts2_zero1": config(1, precision="bf16") | _EXPERTS,
    "experts2_capacity": config(1, precision="bf16") | _EXPERTS,
    "experts2_tensor2": config(1, precision="bf16") | _TENSOR | _EXPERTS,
}.items()}
# the same with recomputation and grouped queries: (shape of tests/support/model_shapes.py, JSON, flags)
_MOE, _CAPACITY = "qwen3_moe", {"expert_capacity_factor": 1.0}
RECOMPUTED_CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor2_blocks": ("llama", config(1, precision="bf16") | _TENSOR, {"recompute": "blocks"}),
    "tensor2_shared_norm": ("gptj", config(3, precision="bf16") | _TENSOR, {"recompute": "mlp"}),
    "tensor2_groups": ("llama", config(0, precision="bf16", checkpoint_every=2) | _TENSOR, {}),
    "tensor2_tiles": ("llama", config(1, precision="bf16") | _TENSOR, {"mlp_tiles": 2, "recompute": "blocks"}),
    "tensor2_experts": ("qwen2_moe", config(1, precision="bf16") | _TENSOR | _EXPERTS, {"recompute": "blocks"}),
    "sequence2_attention": ("llama", config(1, precision="bf16") | _SEQUENCE, {"recompute": "attention"}),
    "experts2_attention": (_MOE, config(1, precision="bf16") | _EXPERTS, {**_CAPACITY, "recompute": "attention"}),
    "experts2_mlp": (_MOE, config(1, precision="bf16") | _EXPERTS, {**_CAPACITY, "recompute": "mlp"}),
}
_FOUR = {"precision": "bf16", "accumulation": 4}
FOUR_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor2_pipeline2": ("llama", config(1, stages=2, **_FOUR) | _TENSOR, {}),
    "tensor2_data2": ("llama", config(2, **_FOUR) | _TENSOR, {}),
    "experts2_pipeline2": (_MOE, config(1, stages=2, **_FOUR) | _EXPERTS, _CAPACITY),
    "sequence2_data2": ("llama", config(3, **_FOUR, **DIVIDE_ALL) | _SEQUENCE, {}),
}
FLAGS = {"steps": 3, "hidden": 64, "layers": 8}
NVME_FLAGS = {"steps": 3, "hidden": 512}  # a wide model, because DeepSpeed keeps tensors below 1 MiB on the host


def shared_flags(name: str, corpus: str, folder: Path) -> dict[str, Any]:
    """Return the flags of a case of SHARED_CONFIGS."""
    if not name.startswith("experts"):
        return flags(corpus, **FLAGS)
    model = {"model": write_config(folder / name, SHAPES["qwen3_moe"]), "model_overrides": "vocab_size=256"}
    return {**flags(corpus, steps=3), **model, **({"expert_capacity_factor": 1.0} if "capacity" in name else {})}


# extensions compute on CPUs, or read for DeepSpeed; only CPUs loop over experts; the flag of the step before is on the
# host
NOT_COUNTED = ("pretrain/extensions/", "pretrain/model/layers/experts.py", "pretrain/engine/patches/late_skip.py")
CHECK = "pretrain/engine/patches/skip.py"  # of an update in fp32 at ZeRO-0
EXCHANGE = "pretrain/model/parallel/token_exchange.py"


def reads(rank: dict[str, Any], start: str) -> int:
    """Return the number of values that files whose paths start so read from the device."""
    return sum(count for place, count in rank["reads"].items()
               if place.startswith(start) and not place.startswith(NOT_COUNTED))
