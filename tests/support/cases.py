"""DeepSpeed JSONs and flags for the cases of worker.py. Each case takes about a second."""

from typing import Any

from pretrain.distributed.requirements import NVME_SINCE, is_at_least
from pretrain.engine.build_ops import why_not_compilable

# why NVMe offload cannot be tested here; "" if it can
NO_NVME = why_not_compilable("AsyncIOBuilder") if is_at_least(NVME_SINCE) else f"needs DeepSpeed {NVME_SINCE}"
CPU = {"device": "cpu"}


def nvme(folder: Any) -> dict[str, Any]:
    """Return the value of offload_optimizer for NVMe offload to `folder`."""
    return {"device": "nvme", "nvme_path": str(folder)}


def nvme_param(folder: Any) -> dict[str, Any]:
    """Return the value of offload_param for NVMe. Its buffers have 4 MB, because pinning the default 200 MB is slow."""
    return {**nvme(folder), "buffer_size": 2_000_000}


def config(stage: int, *, precision: str = "fp32", stages: int = 1, micro: int = 4, accumulation: int = 2,
           lr: float = 1e-3, checkpoint_every: int = 0, **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON. `zero` goes into its zero_optimization block; `stage` is the ZeRO stage.

    Buckets are small, so that each step uses several of them.
    """
    if stage > 0:
        zero["reduce_bucket_size"] = 500_000
        zero["stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"] = 500_000
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    }
    if precision != "fp32":
        values[precision] = {"enabled": True}
    if stages > 1 or checkpoint_every:
        values["pipeline"] = {"stages": stages, "activation_checkpoint_interval": checkpoint_every}
    return values


def flags(corpus: str, *, layers: int = 4, hidden: int = 64, overrides: str = "", steps: int = 10,
          **others: Any) -> dict[str, Any]:
    """Return the flags of a run of a tiny GPT-2-style model on the small corpus."""
    model = f"vocab_size=256,n_layer={layers},n_embd={hidden}" + (f",{overrides}" if overrides else "")
    return {"model": "tiny", "model_overrides": model, "train_data": corpus, "split": "80,20,0", "seq_length": 64,
            "train_steps": steps, "eval_steps": 1, **others}


def fused(values: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON with torch's fused optimizer, which runs on CUDA without nvcc, too."""
    optimizer = values["optimizer"]
    return {**values, "optimizer": {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}}


DROPOUT = "resid_pdrop=0.1,attn_pdrop=0.1,embd_pdrop=0.1"


def case(name: str, job: str, values: dict[str, Any], run_flags: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return a case: a DeepSpeed JSON, flags, and `job`, the function of the worker that runs it."""
    return {"name": name, "job": job, "config": values, "flags": run_flags, **others}
