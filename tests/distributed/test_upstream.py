"""Every defect of DeepSpeed 0.19.8 that `pretrain/upstream.py` lists: the right result with us, and the wrong one of
DeepSpeed as it is. The second half fails on the day that upstream mends a defect, and says what can then be removed.
"""

import json
import math
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from pretrain.arguments import parse_arguments
from pretrain.check import check_run
from pretrain.device import Device
from pretrain.distributed import World, world_from_environment
from pretrain.errors import ConfigError
from tests.distributed.launch import ROOT, run_ranks

Results = dict[str, Any]

HERE = Path(__file__).parent
CPU = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
SCALE = 2.0**8  # fp16's first loss scale here
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
BF16 = {"bf16": {"enabled": True}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
TWO_STAGES = {"pipeline": {"stages": 2}}
CPU_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
EMULATE: dict[str, Any] = {"emulate_fp16": True, "train_steps": 6}
NEEDS_LIBAIO = pytest.mark.skipif(find_library("aio") is None, reason="NVMe offload needs libaio")


def ds_config(stage: int, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000, **(zero or {})}, **changes}


def flags(corpus: str, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "train_data": corpus,
            "seq_length": 32, "train_steps": 4, "lr_schedule": "constant", "lr_warmup_steps": 0, "split": "9,1,0",
            "eval_steps": 1, **changes}


def both(name: str, job: str, config: dict[str, Any], given: dict[str, Any]) -> list[dict[str, Any]]:
    """The same case with our work-arounds and without."""
    return [{"name": f"{name}_{kind}", "job": job, "config": config, "flags": given, "plain": kind == "plain"}
            for kind in ("ours", "plain")]


def one(name: str, config: dict[str, Any], given: dict[str, Any], job: str = "train") -> dict[str, Any]:
    return {"name": name, "job": job, "config": config, "flags": given}


def pipeline_cases(corpus: str) -> list[dict[str, Any]]:
    """A, B, K and the checkpoint of bf16 at stage 0: two pipeline stages that share the embedding."""
    fp16, tied = flags(corpus, **EMULATE), flags(corpus)
    half = {"fp16": FP16, **TWO_STAGES}
    torch_adam = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0.5, **TWO_STAGES}
    return [
        *both("fp16_stage_0", "train", ds_config(0, **half), fp16),
        one("fp16_stage_0_torch_adam", ds_config(0, **{**half, "optimizer": torch_adam}), fp16),
        one("fp16_stage_1", ds_config(1, **half), fp16),
        *both("fp16_construction", "construction", ds_config(0, **half), fp16),
        *both("tied_bf16", "train", ds_config(1, CPU_OPTIMIZER, **BF16, **FP32_SUM, **TWO_STAGES), tied),
        one("tied_bf16_optimizer", ds_config(1, **BF16, **FP32_SUM, **TWO_STAGES), tied),
        *both("tied_fp16", "train", ds_config(1, **half, **FP32_SUM), fp16),
        *both("fp32_stage_0", "train", ds_config(0, **sgd), tied),
        one("fp32_stage_1", ds_config(1, **sgd, zero_allow_untested_optimizer=True), tied),
        *both("bf16_stage_0", "resume", ds_config(0, **BF16, **TWO_STAGES), tied),
        one("initial_pipeline", ds_config(1, **BF16, **TWO_STAGES), tied, job="initial_weights"),
    ]


def nvme_cases(corpus: str, folder: Path) -> list[dict[str, Any]]:
    """C: sub-groups that stay in memory (under 1 MiB), and ones that are swapped."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    large = flags(corpus, model_overrides="vocab_size=256,n_layer=4,n_embd=256")
    few = {"buffer_size": 200_000, "max_in_cpu": 0}
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 1000, "sub_group_size": 1_000_000}
    return [
        *both("nvme_small", "nvme", ds_config(3, {**zero, "offload_optimizer": nvme}, **BF16), flags(corpus)),
        *both("nvme_large", "nvme", ds_config(3, {**zero, "offload_optimizer": nvme}, **BF16), large),
        *both("nvme_params", "resume", ds_config(3, {**zero, "offload_param": {**nvme, **few}, **CPU_OPTIMIZER}, **BF16), large),
    ]


def plain_cases(corpus: str, folder: Path) -> list[dict[str, Any]]:
    """What DeepSpeed alone does (D to I), and our ZeRO-3 start."""
    return [
        one("initial_zero3", ds_config(3, **BF16), flags(corpus), job="initial_weights"),
        {"name": "nvme_below_stage_3", "job": "nvme_below_stage_3", "folder": str(folder)},
        *({"name": job, "job": job} for job in ("autocast_norm", "init_in_parent", "equal_stages", "unknown_key",
                                                "sequence_parallel_pipeline")),
    ]


def run_worker(cases: list[dict[str, Any]], folder: Path) -> Results:
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks([str(HERE / "upstream_worker.py"), "cases.json", "results.json"], 2, cwd=folder)
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stdout[-4000:] for rank in done)
    return dict(json.loads((folder / "results.json").read_text()))
