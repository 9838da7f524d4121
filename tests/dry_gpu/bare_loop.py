"""A loop over steps of a DeepSpeed engine, as its documentation has it, around a model of this project, on one GPU.

    dry-gpu python -m tests.dry_gpu.bare_loop FLAGS of pretrain.train
"""

import runpy
import sys
from types import SimpleNamespace

import deepspeed
import torch

from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.data.loader import Loader
from pretrain.distributed.device import detect_device
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.optimizer import parameter_groups
from pretrain.model.layer_specs import as_module
from tests.support.launch import ROOT


def main() -> None:
    init_process_group(running_environment())
    plan = check_start(parse_arguments(sys.argv[1:]), world_size=1, device=detect_device()).plan
    model = as_module(plan.model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model.named_parameters()),
                                      config=plan.ds_config)
    accumulation = plan.layout.gradient_accumulation_steps
    loader = Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                    gradient_accumulation_steps=accumulation, pin_memory=True)

    def train_batch(step: int) -> None:
        for tokens_BT, (labels_BT, weights_BT) in loader.step(step * plan.layout.global_batch_size):
            loss = engine(*(x.to(engine.device, non_blocking=True) for x in (tokens_BT, labels_BT, weights_BT)))
            engine.backward(loss)
            engine.step()

    loop = SimpleNamespace(train_batch=train_batch)
    runpy.run_path(str(ROOT / "tools" / "dry_gpu" / "waits.py"))["watch"](loop)
    for step in range(plan.train_steps):
        loop.train_batch(step)
    loader.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
