"""torchtitan's own Trainer on CPUs: `python torchtitan_run.py CASE.json LOSSES.json` on each rank.

torchtitan 0.2 must be installed. It expects GPUs: what it asks of the device is answered here, and FSDP2 sums gradients
without gloo's missing PREMUL_SUM. Model, optimizer, schedule, training and checkpoints are torchtitan's.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule


def without_gpus() -> None:
    """Make torchtitan use CPUs."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "cpu"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**34)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    torch.cpu.memory_stats = lambda device=None: {}
    original = FSDPModule.set_gradient_divide_factor

    def divide(module: Any, factor: float) -> None:
        original(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide


def arguments_of(model: dict[str, Any], known: Any) -> Any:
    """Return torchtitan's arguments of a model, from those of its smallest one."""
    common = {"dim": model["hidden_size"], "n_layers": model["num_hidden_layers"], "vocab_size": model["vocab_size"],
              "n_heads": model["num_attention_heads"], "n_kv_heads": model["num_key_value_heads"],
              "rope_theta": model["rope_theta"], "norm_eps": model["rms_norm_eps"]}
    if model["model_type"] == "qwen3":
        return replace(known, **common, head_dim=model["head_dim"], hidden_dim=model["intermediate_size"], qk_norm=True,
                       enable_weight_tying=model["tie_word_embeddings"])
    return replace(known, **common, multiple_of=model["intermediate_size"])  # 8/3 of the size, rounded up


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    without_gpus()
    import torchtitan.distributed.utils
    import torchtitan.tools.utils as tools
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import JobConfig
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    tools.get_peak_flops = lambda name: 1e12
    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None
    rows = torch.from_numpy(np.load(case["samples"]).astype(np.int64))

    class InOrder(BaseDataLoader):
        """Each rank's micro-batches, in the order of the samples."""

        def __init__(self, rank: int, ranks: int) -> None:
            self.rank, self.ranks, self.number = rank, ranks, 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                first = (self.number * self.ranks + self.rank) * case["micro"]
                self.number += 1
                part = rows[first:first + case["micro"]]
                yield {"input": part[:, :-1].contiguous()}, part[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {f"dp_rank_{self.rank}": self.number, "world_size": self.ranks}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.number = state_dict[f"dp_rank_{self.rank}"]

    spec = train_spec.get_train_spec({"llama": "llama3"}.get(case["model"]["model_type"], case["model"]["model_type"]))
    spec = replace(spec, model_args={"tiny": arguments_of(case["model"], spec.model_args["debugmodel"])},
                   build_tokenizer_fn=None, build_dataloader_fn=lambda dp_world_size, dp_rank, **_: InOrder(
                       dp_rank, dp_world_size))
    train_spec.get_train_spec = lambda name: spec
    job = JobConfig()
    job.job.dump_folder, job.model.flavor = case["name"], "tiny"
    job.training.local_batch_size, job.training.global_batch_size = case["micro"], case["batch"]
    job.training.seq_len, job.training.steps, job.training.max_norm = rows.shape[1] - 1, case["steps"], case["clipping"]
    job.training.mixed_precision_param = {"fp32": "float32", "bf16": "bfloat16"}[case["precision"]]
    job.optimizer.implementation, job.optimizer.lr = "for-loop", case["rate"]
    job.lr_scheduler.warmup_steps, job.lr_scheduler.decay_ratio = case["warmup"], None
    job.checkpoint.enable, job.checkpoint.interval, job.checkpoint.last_save_model_only = True, case["save_at"], False
    job.metrics.log_freq = 1
    for name, value in case["parallelism"].items():
        setattr(job.parallelism, name, value)
    trainer, losses = Trainer(job), []
    trainer.metrics_processor.log = lambda step, mean, *_, **__: losses.append(float(mean))
    trainer.train()
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:  # the stage with the loss, of a pipeline
        Path(sys.argv[2]).write_text(json.dumps(losses))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
