"""One rank of GPT-NeoX or Megatron-DeepSpeed on a CPU: their own model, parameter groups, schedule and saving code.

Program `peer_program.py JOB.json`, where a job has: "program" ("neox" or "megatron"), "clone" (folder of its
repository), "settings" (path of a YAML file, or a list of arguments), "config" (DeepSpeed JSON), "samples" (an .npy
file), "save_at", "steps", "losses" (the file to write). tests/extensions/adopt/peer_programs.py makes the jobs.

The programs are written for GPUs. Replaced are packages that are not installed (apex, whose FusedAdam is AdamW), CUDA's
devices and random states, and in Megatron-DeepSpeed a `view` that fails without FlashAttention.
"""

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import packaging.version
import torch

Job = dict[str, Any]


def module(name: str, **values: Any) -> types.ModuleType:
    """Let `name` be an importable module with these values."""
    made = types.ModuleType(name)
    for key, value in values.items():
        setattr(made, key, value)
    sys.modules[name] = made
    return made


def replace_packages() -> None:
    """Replace what the programs import and do not need here."""
    apex = module("apex", optimizers=module("apex.optimizers", FusedAdam=torch.optim.AdamW, FusedSGD=torch.optim.SGD))
    apex.normalization = module("apex.normalization")
    module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=None)
    module("apex.multi_tensor_apply", multi_tensor_applier=None)
    module("amp_C")
    module("pkg_resources", packaging=packaging, parse_version=packaging.version.parse)
    for name in ("ftfy", "best_download", "shortuuid", "wandb"):
        module(name)


def with_config(config: dict[str, Any]) -> None:
    """Let `deepspeed.initialize` use this JSON."""
    initialize = deepspeed.initialize

    def own(**arguments: Any) -> Any:
        return initialize(**{key: value for key, value in arguments.items() if key not in ("args", "config")},
                          config=config)

    deepspeed.initialize = own


def batches(job: Job, ranks: int, rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the micro-batches of a data-parallel rank."""
    rows, micro = torch.from_numpy(np.load(job["samples"]).astype(np.int64)), job["config"][
        "train_micro_batch_size_per_gpu"]
    for start in range(rank * micro, len(rows), ranks * micro):
        yield {"text": rows[start:start + micro]}


def train(job: Job, next_loss: Callable[[], Any], save: Callable[[int], None]) -> None:
    """Train, and save at one step."""
    losses = []
    for step in range(1, job["steps"] + 1):
        losses.append(float(next_loss()))
        if step == job["save_at"]:
            save(step)
    if torch.distributed.get_rank() == 0:
        Path(job["losses"]).write_text(json.dumps(losses))


def neox(job: Job) -> None:
    """Train with GPT-NeoX."""
    cpu, rank = torch.device("cpu"), torch.distributed.get_rank()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 8
    cuda.LongTensor = lambda sizes: torch.tensor(sizes, dtype=torch.long)
    cuda.get_rng_state = torch.get_rng_state
    torch.Tensor.cuda = lambda self, *_, **__: self
    initialize, mpu, training, checkpointing, arguments = map(import_module, (
        "megatron.initialize", "megatron.mpu", "megatron.training", "megatron.checkpointing",
        "megatron.neox_arguments"))
    args = arguments.NeoXArgs.from_ymls([job["settings"]])
    args.config_files = {"settings.yml": Path(job["settings"]).read_text()}
    args.rank = args.local_rank = rank
    args.world_size = torch.distributed.get_world_size()
    args.build_tokenizer()
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext, get_states=dict)
    for name, each in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(each, "get_cuda_rng_tracker"):
            setattr(each, "get_cuda_rng_tracker", lambda: tracker)  # noqa: B010 (a module has no such attribute)
    initialize._initialize_distributed(args)
    torch.manual_seed(args.seed)
    engine, optimizer, schedule, _ = training.setup_model_and_optimizer(args)
    data = batches(job, mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank())
    timers = types.SimpleNamespace(start=int, stop=int, reset=int)

    def next_loss() -> Any:
        if args.is_pipe_parallel:
            return engine.train_batch(data_iter=data)
        return training.train_step(args, lambda name: timers, data, engine, optimizer, schedule)[0]["lm_loss"]

    train(job, next_loss, lambda step: checkpointing.save_checkpoint(args, step, engine, optimizer, schedule))


def megatron(job: Job) -> None:
    """Train with Megatron-DeepSpeed."""
    class LayerNorm(torch.nn.LayerNorm):
        """torch's LayerNorm, which older versions use on a CPU with an argument that it does not have."""

        def __init__(self, size: int, eps: float = 1e-5, *, sequence_parallel: bool = False) -> None:
            super().__init__(size, eps=eps)

    torch.nn.LayerNorm = LayerNorm
    module("megatron.model.vision.knn_monitor", compute_feature_bank=None)  # needs torchvision
    module("deepspeed.compression")
    module("deepspeed.compression.compress", init_compression=None, redundancy_clean=None)
    sys.argv = ["pretrain_gpt.py", *job["settings"]]
    modules: list[Any] = list(map(import_module, (
        "pretrain_gpt", "megatron.initialize", "megatron.optimizer", "megatron.training", "megatron.checkpointing",
        "megatron.core", "megatron.core.enums", "megatron.model.transformer")))
    program, initialize, optimizer, training, checkpointing, core, enums, transformer = modules
    attention, mpu = transformer.CoreAttention, core.mpu
    forward = attention.forward
    attention.forward = lambda self, q, k, v, mask: forward(self, q.contiguous(), k.contiguous(), v.contiguous(), mask)
    optimizer.Adam = torch.optim.AdamW  # as apex's, which is used on GPUs
    initialize._compile_dependencies = lambda: None
    initialize.initialize_megatron(allow_no_cuda=True)
    args = training.get_args()
    args.deepspeed_config_dict = job["config"]  # as pretrain() does
    model, own, schedule = training.setup_model_and_optimizer(program.model_provider,
                                                              enums.ModelType.encoder_or_decoder)
    engine = model[0]
    engine.set_batch_fn(engine.module._megatron_batch_fn)

    def save(step: int) -> None:
        args.consumed_train_samples = step * job["config"]["train_batch_size"]  # as training.py does after each step
        checkpointing.save_checkpoint(step, model, own, schedule)

    data = batches(job, mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank())
    train(job, lambda: engine.train_batch(data_iter=data), save)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    replace_packages()
    with_config(job["config"])
    sys.path.insert(0, job["clone"])
    {"neox": neox, "megatron": megatron}[job["program"]](job)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
