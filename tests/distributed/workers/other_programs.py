"""Programs of other people: a plain DeepSpeed loop, and transformers.Trainer with and without DeepSpeed.

Program `other_programs.py CASES.json RESULTS.json`: one rank, which trains each case with code of DeepSpeed,
transformers and accelerate alone. A case: {"name", "program" ("plain", "trainer" or "accelerate"), "model" (a
config.json), "config" (DeepSpeed JSON; None: the Trainer without DeepSpeed), "samples" (an .npy file [samples,
tokens]), "save_at", "steps"}.
It saves the checkpoint of step `save_at` in the folder NAME, and the complete weights and optimizer states that
DeepSpeed reports at this step in NAME/live.pt. The result: the loss of each step, as a mean over the ranks.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from pretrain.distributed.process_group import remove_shared_memory_names

Case = dict[str, Any]
STATES = ("exp_avg", "exp_avg_sq")


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of an .npy file, which are their own labels: transformers shifts them.

    The first label is masked. It has no prediction, but the Trainer would count it, and divide the loss by it.
    """

    def __init__(self, path: str) -> None:
        self.rows = torch.from_numpy(np.load(path).astype(np.int64))
        self.labels = self.rows.clone()
        self.labels[:, 0] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of the case with weights that are the same on all ranks, and large enough to matter."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**case["model"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if case.get("freeze"):
        model.get_parameter(case["freeze"]).requires_grad_(False)
    return model


def parameter_groups(case: Case, model: torch.nn.Module) -> Any:
    """Return all parameters, or two groups: weight decay for matrices, none for vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not case.get("groups"):
        return parameters
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]


def flat_tensors(engine: deepspeed.DeepSpeedEngine) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each tensor that an optimizer without ZeRO updates, with the parameters whose values it has."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_Optimizer):
        return [*zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)]
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return [(master, [parameter]) for groups in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
                for master, parameter in zip(*groups, strict=True)]
    return [(parameter, [parameter]) for parameter in engine.module.parameters()]


def live_states(engine: deepspeed.DeepSpeedEngine) -> dict[tuple[str, str], torch.Tensor]:
    """Return the complete fp32 weights and optimizer states of the engine by name and state; collective."""
    named, optimizer = [*engine.module.named_parameters()], engine.optimizer
    live: dict[tuple[str, str], torch.Tensor] = {}
    if engine.zero_optimization_stage() == 0:
        base, names = getattr(optimizer, "optimizer", optimizer), {id(parameter): name for name, parameter in named}
        for flat, parameters in flat_tensors(engine):
            for state in ("fp32", *STATES):
                values = flat.detach() if state == "fp32" else base.state[flat][state]
                parts = values.view(-1).split([parameter.numel() for parameter in parameters])
                live |= {(names[id(parameter)], state): part.view(parameter.shape)
                         for parameter, part in zip(parameters, parts, strict=True)}
        return live
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # ZeRO-1 and 2 link torch's optimizers before these have states (DeepSpeed 0.19.8)
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in named:
        if parameter.requires_grad:
            live[name, "fp32"] = safe_get_full_fp32_param(parameter)
            live |= {(name, state): safe_get_full_optimizer_state(parameter, state) for state in STATES}
    return live


def train_step(engine: deepspeed.DeepSpeedEngine, rows: torch.Tensor) -> float:
    """Train a step on the first samples of `rows`, and return the mean loss over the ranks; collective."""
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    total = torch.zeros((), dtype=torch.float64)
    for number in range(accumulation):
        own = rows[(number * dist.get_world_size() + dist.get_rank()) * micro:][:micro]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / accumulation
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def write_live_states(engine: deepspeed.DeepSpeedEngine, path: Path) -> None:
    """Write the states of the engine; collective."""
    live = live_states(engine)
    if dist.get_rank() == 0:
        torch.save({key: value.float().clone() for key, value in live.items()}, path)


def plain(case: Case) -> list[float]:
    """Train with a DeepSpeed engine and a loop."""
    model = model_of(case)
    optimizer = torch.optim.AdamW(parameter_groups(case, model), lr=1e-2) if case.get("own_optimizer") else None
    schedule: Callable[[Any], Any] | None = None
    if case.get("own_schedule"):
        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case["config"], lr_scheduler=schedule,
                                      model_parameters=None if optimizer else parameter_groups(case, model))
    rows, losses = Samples(case["samples"]).rows, []
    for step in range(1, case["steps"] + 1):
        losses.append(train_step(engine, rows[len(losses) * engine.train_batch_size():]))
        if step == case["save_at"]:
            engine.save_checkpoint(case["name"], tag=case.get("tag"))
            write_live_states(engine, Path(case["name"]) / "live.pt")
    engine.destroy()
    return losses


class InOrder(transformers.Trainer):
    """The Trainer, with the samples in the order of the dataset. It records the loss of each micro-batch.

    The Trainer logs losses with 4 decimal places.
    """

    micro_losses: list[torch.Tensor]  # cross-entropy, without label smoothing and the losses of experts

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **settings: Any) -> Any:
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **settings)
        logits = outputs["logits"].detach()[:, :-1].float()
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        self.micro_losses.append(plain.double() / self.args.gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss


class LiveStates(transformers.TrainerCallback):
    """Writes the complete states when the Trainer saves."""

    def __init__(self, run: InOrder, path: Path) -> None:
        self.run, self.path = run, path

    def on_save(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        if state.global_step == args.save_steps and isinstance(self.run.model_wrapped, deepspeed.DeepSpeedEngine):
            write_live_states(self.run.model_wrapped, self.path)


def trainer(case: Case) -> list[float]:
    """Train with transformers.Trainer."""
    values = {"output_dir": case["name"], "deepspeed": case["config"], "use_cpu": True, "max_steps": case["steps"],
              "save_strategy": "steps", "save_steps": case["save_at"], "logging_steps": 1, "report_to": [],
              "dataloader_pin_memory": False, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(**{**values, **case["arguments"]})
    run = InOrder(model=model_of(case), args=arguments, train_dataset=Samples(case["samples"]))
    run.micro_losses = []
    run.add_callback(LiveStates(run, Path(case["name"]) / "live.pt"))
    run.train()
    losses = torch.stack(run.micro_losses).view(case["steps"], -1).sum(1)
    dist.all_reduce(losses)
    return [float(loss) / dist.get_world_size() for loss in losses]


def with_accelerate(case: Case) -> list[float]:
    """Train with a loop that uses accelerate, which makes the engine."""
    accelerate.PartialState(cpu=True)  # otherwise it runs one rank, as there is no GPU
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(case["config"]))
    model = model_of(case)
    optimizer = torch.optim.AdamW(parameter_groups(case, model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.DataLoader(Samples(case["samples"]), batch_size=2)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses: list[torch.Tensor] = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().double()).mean())
        if len(losses) == case["save_at"]:
            accelerator.save_state(case["name"])
            write_live_states(model, Path(case["name"]) / "live.pt")
        if len(losses) == case["steps"]:
            break
    return [float(loss) for loss in losses]


def forget_settings() -> None:
    """Make accelerate and transformers forget the DeepSpeed JSON of the last case."""
    unset_hf_deepspeed_config()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


PROGRAMS = {"plain": plain, "trainer": trainer, "accelerate": with_accelerate}


def main(programs: dict[str, Callable[[Case], list[float]]]) -> None:
    deepspeed.init_distributed("gloo")
    remove_shared_memory_names(dist.get_rank())
    get_accelerator().is_fp16_supported = lambda: True  # torch has the operators
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        results[case["name"]] = programs[case["program"]](case)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))
        forget_settings()
        dist.barrier()
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(PROGRAMS)
