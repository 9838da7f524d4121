"""Read what GPT-NeoX and Megatron-DeepSpeed record besides layer files: settings, schedule, optimizer states.

With ZeRO stage 1, master weights and optimizer states are in zero_pp_rank files. Without it, the file of each mp rank
has those of its pipeline stage: in fp32 the optimizer is torch's, in fp16 each parameter group is one flat vector
(DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py), and in bf16 DeepSpeed writes ZeRO files. These parameters have no
names: they follow from the order of the layers, and from shapes or values.

To DeepSpeed, the files of one mp rank are a checkpoint of an engine without model parallelism, and are read as such.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.shard_index import FP32
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.deepspeed.engine_files import EngineFiles, param_groups
from pretrain.extensions.adopt.deepspeed.zero_files import ForeignReader
from pretrain.extensions.adopt.deepspeed.zero_layout import FoundParameters, find_parameters
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, understood
from pretrain.extensions.adopt.mapping import loss_scale_of, number, whole_number
from pretrain.extensions.adopt.megatron.config import read_neox_settings
from pretrain.extensions.adopt.megatron.layer_files import LayerFiles, load
from pretrain.extensions.adopt.megatron.names import NEOX, PeerLayout

Weights = dict[str, torch.Tensor]  # by names such as 2.mlp.linear1.bias, on one pipeline stage and rank
Layers = Mapping[int, Sequence[Mapping[str, torch.Tensor]]]  # as `load_layers` returns them
_OTHER = "use a checkpoint with ZeRO stage 1, or adopt the weights alone: remove the key optimizer"
_ADAM = {"exp_avg", "exp_avg_sq"}
# runtime/utils.py, clip_grad_norm_: its rank 0 of the "model parallel" ranks of a pipeline is one of the first stage
_CLIPPING = ("without ZeRO, DeepSpeed clips the gradients of a pipeline by a norm that leaves out norms and biases of "
             "later stages, and counts a tied embedding twice; here the norm is complete")
_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant"}


@dataclass(frozen=True)
class RankStates:
    """Master weights and optimizer states of one mp rank. Raises ConfigError unless all sizes agree."""

    files: EngineFiles

    @cached_property
    def found(self) -> FoundParameters:
        """The fragments of each parameter."""
        with understood(self.path):
            return find_parameters(self.files)

    @cached_property
    def _reader(self) -> ForeignReader:
        return ForeignReader(self.files, self.found)

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.files.folder / (self.files.optimizer_files or self.files.model_files)[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return self.found.stored.shapes

    @property
    def states(self) -> tuple[str, ...]:
        """States of the optimizer with a number for each weight."""
        return tuple(sorted({*self.found.stored.states} - {FP32}))

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's parameter groups; none with zero_optimization.elastic_checkpoint."""
        return param_groups(self.files)

    @property
    def step(self) -> float:
        """The optimizer's own count of steps."""
        counts = (group["step"] for group in self.groups if "step" in group)
        return max(map(float, (self.found.stored.scalars.get("step", 0), *counts)))

    def group(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the optimizer for a parameter."""
        return self.found.stored.fragments[name][0].group

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a parameter's values of one state, in fp32 and in the parameter's shape."""
        return self._reader.tensor(name, state)


def read_ranks(files: LayerFiles, layers: Layers, layout: PeerLayout) -> tuple[RankStates, ...]:
    """Return the states of each mp rank; () if the files have no optimizer. Raises ConfigError."""
    contents = [load(path) for path in files.mp_ranks]
    if files.zero:
        return tuple(RankStates(_partitioned(files.folder, path, content, paths))
                     for path, content, paths in zip(files.mp_ranks, contents, files.zero, strict=True))
    ranks, optimizers = files.tensor_parallel_size, [content.get("optimizer") for content in contents]
    if not all(isinstance(optimizer, dict) for optimizer in optimizers):
        return ()
    found = []
    for rank, (path, content) in enumerate(zip(files.mp_ranks, contents, strict=True)):
        with understood(path):
            stages = _weights_of_stages(files, layers, layout, optimizers[rank % ranks::ranks], rank % ranks)
        model = {**content, "module": stages[rank // ranks]}
        found.append(RankStates(EngineFiles(files.folder, model, (path.name,), (), {path.name: model})))
    return tuple(found)


def _partitioned(folder: Path, path: Path, content: dict[str, Any], paths: Sequence[Path]) -> EngineFiles:
    """Return the files of one mp rank with ZeRO stage 1. Weights of the module are not its optimizer's."""
    model = {"param_shapes": None, **content, "module": {}}
    return EngineFiles(folder, model, (path.name,), tuple(each.name for each in paths),
                       {path.name: model, **{each.name: load(each) for each in paths}}, stage=1)


def _weights_of_stages(files: LayerFiles, layers: Layers, layout: PeerLayout, optimizers: Sequence[Any],
                       rank: int) -> list[Weights]:
    """Return the weights of each pipeline stage of a tensor-parallel rank, in the order of the module.

    A stage has whole layers. Which ones follows from the number of parameters, or of weights, in its optimizer.
    """
    count: Callable[[torch.Tensor], int] = lambda tensor: 1  # noqa: E731
    if "fp32_groups_flat" in optimizers[0]:
        count = torch.Tensor.numel
        sizes = [sum(flat.numel() for flat in each["fp32_groups_flat"]) for each in optimizers]
    else:
        sizes = [sum(len(group["params"]) for group in each["param_groups"]) for each in optimizers]
    remaining = sorted(layout.names)
    stages = []
    for stage, size in enumerate(sizes):
        is_copy = stage > 0 and stage == len(sizes) - 1 and layout.head is None
        own: Weights = _weights_of(layers, layout, layout.embedding, rank) if is_copy else {}
        while remaining and sum(map(count, own.values())) < size:
            own |= _weights_of(layers, layout, remaining.pop(0), rank)
        if sum(map(count, own.values())) != size or (stage == len(sizes) - 1 and remaining):
            raise ConfigError(f"{files.mp_ranks[stage * files.tensor_parallel_size + rank]}: optimizer",
                              problem=f"its {size} parameters or weights are not those of whole layers", remedy=_OTHER)
        stages.append(own)
    return stages


def _weights_of(layers: Layers, layout: PeerLayout, index: int, rank: int) -> Weights:
    return {f"{index}.{name}": tensor for name, tensor in layers[index][rank].items() if name in layout.names[index]}


@dataclass(frozen=True)
class Settings:
    """The settings of a run, with underscores in the names."""

    values: Mapping[str, Any] | None  # None: the checkpoint has none
    where: str  # text that begins errors
    files: tuple[Path, ...] = ()


def read_settings(folder: Path, state: Mapping[str, Any], program: str) -> Settings:
    """Return the settings: of GPT-NeoX in configs/, of Megatron-DeepSpeed under "args" in the file of mp rank 0.

    Raises ConfigError.
    """
    if program == NEOX:
        values = read_neox_settings(folder)
        files = tuple(sorted((folder / "configs").glob("*"))) if values is not None else ()
        return Settings(values, f"{folder}/configs", files)
    args = state.get("args")
    return Settings(vars(args) if isinstance(args, argparse.Namespace) else None,
                    f"{folder}/mp_rank_00_model_states.pt: args")


def read_step(files: LayerFiles) -> int:
    """Return the number of steps that the model-states files of all mp ranks record. Raises ConfigError."""
    steps = {path: _count(load(path), "global_steps", path) for path in files.mp_ranks}
    first = steps[files.mp_ranks[0]]
    for path, step in steps.items():
        if step is None or step != first:
            raise ConfigError(f"{path}: global_steps", found="nothing" if step is None else step,
                              expected="a number of steps, the same in all files of mp ranks",
                              remedy="copy the files of one checkpoint")
    assert first is not None
    return first


def with_states(run: ForeignRun, state: Mapping[str, Any], settings: Settings, rank: RankStates | None,
                files: LayerFiles) -> ForeignRun:
    """Return the run with what the files of mp rank 0 record.

    Args:
        state: content of its model-states file.
        rank: its optimizer; None: the checkpoint has none.

    Raises ConfigError.
    """
    path, values = files.mp_ranks[0], settings.values or {}
    ds_config = state.get("ds_config") if isinstance(state.get("ds_config"), dict) else None
    batch = whole_number((ds_config or {}).get("train_batch_size")) or whole_number(values.get("global_batch_size"))
    samples = whole_number(values.get("consumed_train_samples"))
    if samples is None:
        samples = _count(state, "global_samples", path)
    if samples is None and batch is not None:
        samples = run.step * batch
    schedule, notes = read_schedule(state.get("lr_scheduler"), batch)
    if rank and not files.zero and len(files.layers) and (ds_config or {}).get("gradient_clipping"):
        notes.append(_CLIPPING)
    omissions, rate = [], number(rank.groups[0].get("lr")) if rank and rank.groups else None
    if not rank:
        omissions.append(Omission("optimizer", "the checkpoint has no optimizer, which is in zero_pp_rank files"))
        if run.precision != "fp32":
            omissions.append(Omission("master_weights", "the checkpoint has no zero_pp_rank files"))
    return replace(
        run, files=(*run.files, *settings.files), optimizer_step=rank.step if rank else 0,
        skipped_steps=_count(state, "skipped_steps", path) or 0, optimizer=_optimizer(rank, values, schedule),
        learning_rate=rate if not schedule else None,
        schedule=schedule if rate is None else {**schedule, "next_rate": rate},
        global_batch_size=batch, consumed_samples=samples, seq_length=whole_number(values.get("seq_length")),
        loss_scale=_loss_scale(files), seed=whole_number(values.get("seed")), ds_config=ds_config,
        omissions=(*omissions, *run.omissions), notes=(*notes, *run.notes))


def _count(values: Mapping[str, Any], key: str, path: Path) -> int | None:
    """Return a number of steps or samples; None: it is not there. Raises ConfigError for anything else."""
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"{path}: {key}", found=value, expected="a whole number", remedy="use another checkpoint")
    return value


def _optimizer(rank: RankStates | None, values: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return type and parameters. The programs' Adam is AdamW on GPUs: FusedAdam of apex or DeepSpeed."""
    if not rank:
        return {}
    given = values.get("optimizer")
    kind = given.get("type") if isinstance(given, dict) else values.get("optimizer")
    settings = max(rank.groups, key=lambda each: number(each.get("weight_decay")) or 0.0, default={})
    params: dict[str, Any] = {}
    if {*rank.states} >= _ADAM and str(kind or "adam").lower() in ("adam", "adamw", "cpu_adam"):
        is_coupled = settings.get("decoupled_weight_decay") is False  # torch.optim.Adam
        kind = "Adam" if is_coupled else "AdamW"
        params = {"adam_w_mode": False} if is_coupled else {}
        params |= {"bias_correction": False} if settings.get("bias_correction") is False else {}
    for key in ("betas", "eps", "weight_decay"):
        value = settings.get(key)
        if isinstance(value, (list, tuple)):
            params[key] = [float(item) for item in value]
        elif number(value) is not None:
            params[key] = number(value)
    rate = schedule.get("peak_rate", number(settings.get("lr")))
    return {"type": str(kind), "params": params if rate is None else {"lr": rate, **params}}


def read_schedule(state: Any, batch: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the schedule, and notes.

    GPT-NeoX (megatron/learning_rates.py, AnnealingLR) counts steps; its linear decay ends at 0 and is cut at min_lr.
    Megatron-DeepSpeed (megatron/optimizer_param_scheduler.py; AnnealingLR of BigScience) counts samples, and some
    schedules tokens. In all of them, step k has the rate of position k - 1.
    """
    if not isinstance(state, dict):
        return {}, ["the checkpoint has no state of a learning-rate schedule"]
    if "num_iters" in state:
        found = {"peak": state.get("start_lr"), "warmup": state.get("warmup_iter"), "total": state.get("end_iter"),
                 "position": state.get("num_iters"), "style": state.get("decay_style"), "lowest": state.get("min_lr")}
        unit = 1
        exact = found["style"] != "linear" or not found["lowest"]
    else:
        found = {"peak": state.get("max_lr"), "position": state.get("num_steps"), "lowest": state.get("min_lr")}
        found |= {name: state.get(f"lr_{key}", state.get(key)) for name, key in
                  (("warmup", "warmup_steps"), ("total", "decay_steps"), ("style", "decay_style"))}
        unit = batch or 0
        exact = not any(state.get(f"{prefix}{key}_tokens") for prefix in ("", "lr_") for key in ("warmup", "decay"))
    known: dict[str, Any] = {"peak_rate": number(found["peak"]), "min_lr": number(found["lowest"]),
                             "first_rate_is_0": True, "last_step": _steps(found["position"], unit)}
    warmup, total, style = _steps(found["warmup"], unit), _steps(found["total"], unit), _STYLES.get(str(found["style"]))
    if exact and None not in (warmup, total, style):
        known |= {"type": style, "warmup_steps": warmup, "total_steps": total}
    notes = [] if "type" in known else [f"the learning-rate schedule ({found['style']}, warm-up {found['warmup']}, end "
                                        f"{found['total']}) has no counterpart: give the flags of a similar one"]
    return {name: value for name, value in known.items() if value is not None}, notes


def _steps(value: Any, unit: int) -> int | None:
    """Return a length in steps; None if it is no multiple of the unit. GPT-NeoX multiplies a fraction and a number."""
    length = number(value)
    if length is None or not unit or abs(length / unit - round(length / unit)) > 1e-6:
        return None
    return round(length / unit)


def _loss_scale(files: LayerFiles) -> dict[str, float] | None:
    """Return the state of fp16's dynamic loss scaler; None: there is none."""
    if files.zero:
        return loss_scale_of(load(files.zero[0][0])["optimizer_state_dict"].get("loss_scaler"))
    return loss_scale_of(load(files.mp_ranks[0]).get("optimizer"))
