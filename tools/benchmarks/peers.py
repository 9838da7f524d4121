"""Other training programs as baselines.

Each function with a `job` is the main function of a process, which ends when there are no more requests. The programs
train the same config.json with this project's initial weights, on the same samples in the same order. The labels are
already shifted, as in this project, so that every position has a loss.

Shapes: B batch, T positions.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from pretrain.config.plan import Plan
from pretrain.data.loader import Loader
from pretrain.data.samples.dataset import SampleDataset
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import deepspeed_output
from pretrain.engine.optimizer import parameter_groups
from pretrain.errors import require_package
from pretrain.model.hf_weights import to_transformers
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tools.benchmarks.processes import LEARNING_RATE, BaselineJob
from tools.benchmarks.worker import RequestLoop


def transformers_model(plan: Plan) -> nn.Module:
    """Return the transformers model in training mode, with this project's initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = as_module(plan.model)
    initialize_parameters(ours, plan.model, seed=plan.args.seed)
    values = {key: value for key, value in plan.model.hf_config.items() if key != "architectures"}
    config = AutoConfig.for_model(**values)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(to_transformers(ours.state_dict(), plan.model))
    return model.train()


def _micro_batches(plan: Plan, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, labels) of consecutive micro-batches without end, both int64 [B, T]."""
    loader = Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                    gradient_accumulation_steps=1, pin_memory=device.type == "cuda")
    for consumed_samples in itertools.count(0, plan.layout.micro_batch_size):
        for tokens_BT, (labels_BT, _) in loader.step(consumed_samples):
            assert isinstance(tokens_BT, torch.Tensor)  # this loader gives no positions
            yield tokens_BT.to(device, non_blocking=True), labels_BT.to(device, non_blocking=True)


def plain(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train with a plain PyTorch loop, as in tutorials: fp32 weights, autocast, clipping, torch's fused AdamW."""
    plan = job.plan()
    device = torch.device("cuda" if job.device_kind == "cuda" else "cpu")
    model = transformers_model(plan).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters()), lr=LEARNING_RATE, betas=(0.9, 0.95),
                                  eps=1e-8, weight_decay=0.1, fused=True)
    batches, is_bf16 = _micro_batches(plan, device), plan.layout.precision == "bf16"
    if job.options.get("compiled"):
        model.compile()

    requests.report_build(model)
    while True:
        tokens_BT, labels_BT = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss = _loss(model, tokens_BT, labels_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        requests.after_step(loss)


def _loss(model: Callable[..., Any], tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the loss of a transformers model."""
    loss: torch.Tensor = model(input_ids=tokens_BT, labels=labels_BT, shift_labels=labels_BT).loss
    return loss


def deepspeed_loop(job: BaselineJob, requests: RequestLoop) -> None:
    """Train the transformers model with the engine of deepspeed.initialize: forward, backward and step."""
    import deepspeed

    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        model = transformers_model(plan)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model.named_parameters()),
                                          config=str(job.ds_config))
    requests.report_build(model)
    for tokens_BT, labels_BT in _micro_batches(plan, engine.device):
        loss = _loss(engine, tokens_BT, labels_BT)
        engine.backward(loss)
        engine.step()
        requests.after_step(loss)


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dataset for the Trainer's data loader. Each item is one sample."""

    def __init__(self, dataset: SampleDataset, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = torch.from_numpy(self._dataset.samples([index])[0].astype(np.int64))
        return {"input_ids": sample[:-1], "labels": sample[1:], "shift_labels": sample[1:]}


def trainer(job: BaselineJob, requests: RequestLoop) -> None:
    """Train with transformers.Trainer and the same DeepSpeed JSON. It neither logs nor saves."""
    require_package("accelerate", "accelerate", "bench",
                    "transformers.Trainer needs this package, which is not installed")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    with deepspeed_output("error"):
        init_process_group(running_environment())
    plan = job.plan()
    losses: list[torch.Tensor] = []

    class RecordingTrainer(Trainer):
        def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
            losses.append(super().training_step(*inputs, **named))
            return losses[-1]

    class ReportSteps(TrainerCallback):
        def on_train_begin(self, *unused: Any, **named: Any) -> None:
            requests.report_build(model)

        def on_step_end(self, *unused: Any, **named: Any) -> None:
            requests.after_step(losses.pop())

    arguments = TrainingArguments(
        output_dir=str(job.folder), max_steps=plan.train_steps,
        per_device_train_batch_size=plan.layout.micro_batch_size, learning_rate=LEARNING_RATE, weight_decay=0.1,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, lr_scheduler_type="constant",
        bf16=plan.layout.precision == "bf16", deepspeed=str(job.ds_config), use_cpu=job.device_kind == "cpu",
        train_sampling_strategy="sequential", remove_unused_columns=False, save_strategy="no", report_to="none",
        logging_strategy="no", disable_tqdm=True)
    model = transformers_model(plan)
    length = plan.train_steps * plan.layout.micro_batch_size
    with deepspeed_output("error"):
        RecordingTrainer(model=model, args=arguments, train_dataset=_Samples(plan.datasets["train"], length),
                         callbacks=[ReportSteps()]).train()
