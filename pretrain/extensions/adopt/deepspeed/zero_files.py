"""Read the checkpoint of a DeepSpeed engine whose module is a model of transformers: ZeRO stage 0 to 3, any offload."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.deepspeed.engine_files import (
    SAME_CHECKPOINT,
    SUFFIX,
    EngineFiles,
    map_numbers,
    module_tensors,
    open_files,
    param_groups,
)
from pretrain.extensions.adopt.deepspeed.trainer_settings import Effects, effects_of_module
from pretrain.extensions.adopt.deepspeed.zero_layout import FoundParameters, find_parameters
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, Shape, understood
from pretrain.extensions.adopt.mapping import is_rounded, load_foreign_pickle, loss_scale_of
from pretrain.extensions.adopt.optimizers import recognize
from pretrain.model.hf_names import is_buffer

# what engine.save_checkpoint writes; other keys are the program's own (client_state)
_ENGINE_KEYS = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
                "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
                "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
                "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "csr_tensor_module_names"}
_ACCELERATE = "pytorch_model"  # folder of the engine's files in a folder of Accelerator.save_state
# prefixes of programs that wrap the model
_PREFIXES = ("module.", "_orig_mod.")


class ForeignReader(CheckpointReader):
    """Reads the fragments of another program's files, also of those that were swapped to NVMe."""

    def __init__(self, files: EngineFiles, found: FoundParameters) -> None:
        super().__init__(files.folder, found.stored)
        self._files = dict(files.contents)

    def _load_file(self, file: str) -> Any:
        if file not in self._files and file.endswith(SUFFIX):
            self._files[file] = map_numbers(self.folder / file)
        return super()._load_file(file)


@dataclass(frozen=True)
class _States:
    """Reads complete states by transformers' names. Each fp32 weight is compared with the module's own weight."""

    files: EngineFiles
    found: FoundParameters
    reader: ForeignReader
    prefix: str
    module: Mapping[str, torch.Tensor]

    def read(self, name: str, state: str) -> torch.Tensor:
        stored_name = self.prefix + name
        if state != FP32 and stored_name in self.found.frozen:
            return torch.zeros(self.found.frozen[stored_name])
        tensor = self.reader.tensor(stored_name, state)
        weights = self.module.get(stored_name)
        if state == FP32 and weights is not None and weights.shape == tensor.shape and \
                weights.is_floating_point() and not is_rounded(tensor, weights):
            dtype = str(weights.dtype).removeprefix("torch.")
            raise ConfigError(f"{self.files.folder}: {name}", problem=f"the {dtype} weights in "
                              f"{self.files.model_files[0]} are not its fp32 weights in the optimizer's files, rounded",
                              remedy=SAME_CHECKPOINT)
        return tensor


def read(folder: Path, config: dict[str, Any] | None, *, with_labels: bool = True) -> ForeignRun:
    """Return what an engine's checkpoint holds.

    Args:
        folder: with `mp_rank_00_model_states.pt` or `zero_pp_rank_0_mp_rank_00_model_states.pt`.
        config: content of the transformers config.json, which such a checkpoint lacks.
        with_labels: see `effects_of_module`.

    Raises ConfigError if a file is missing, damaged or not understood.
    """
    if config is None:
        raise ConfigError(str(folder), problem="a DeepSpeed checkpoint does not describe its model",
                          remedy="name the model's config.json by --model")
    with understood(folder):
        return _read(folder, config, effects_of_module(config, with_labels=with_labels))


def _read(folder: Path, config: dict[str, Any], effects: Effects) -> ForeignRun:
    files = open_files(folder)
    found = find_parameters(files)
    model, groups, ds_config = files.model, param_groups(files), _ds_config(files)
    prefix = _prefix(found.stored.shapes)
    dtype = precision_of(ds_config)
    run = ForeignRun(
        program=f"DeepSpeed {model.get('ds_version', '')}".strip() + f", ZeRO-{files.stage}", folder=folder,
        files=tuple(sorted({*(folder / name for name in files.contents), *found.files})), config=config,
        shapes={name.removeprefix(prefix): shape for name, shape in found.stored.shapes.items()},
        read=_States(files, found, ForeignReader(files, found), prefix, module_tensors(files)).read, states=(),
        step=int(model["global_steps"]), skipped_steps=int(model.get("skipped_steps") or 0),
        global_batch_size=global_batch_size(model, ds_config), consumed_samples=model.get("global_samples"),
        precision=dtype, loss_scale=_loss_scale(files) if dtype == "fp16" else None, ds_config=ds_config,
        buffers={name.removeprefix(prefix): tensor for name, tensor in model["module"].items()
                 if name in (model.get("buffer_names") or ()) and not is_buffer(name)},
        flags=effects.flags, omissions=(*_omissions(files, found), *effects.omissions),
        notes=(*_notes(files), *effects.notes))
    where = str(folder / (files.optimizer_files or files.model_files)[0])
    run = with_optimizer(run, where, found, groups, prefix)
    state, scheduler = model.get("lr_scheduler"), folder.parent / "scheduler.bin"
    if state is None and folder.name == _ACCELERATE and scheduler.is_file():
        state = load_foreign_pickle(scheduler)
    return run if state is None else with_schedule(run, state)


def with_optimizer(run: ForeignRun, where: str, found: FoundParameters, groups: list[dict[str, Any]],
                   prefix: str = "") -> ForeignRun:
    """Return the run with its optimizer and the rate of the next step. Raises ConfigError for an unknown optimizer.

    Args:
        where: the optimizer's file, for messages.
        groups: its parameter groups; none if the checkpoint has no optimizer.
        prefix: of the stored names.
    """
    if not groups:
        known = found.stored.states.keys() - {FP32}
        omission = Omission("optimizer", "the checkpoint (elastic) has states without the optimizer's settings")
        return replace(run, omissions=(*run.omissions, omission)) if known else run
    recognized = recognize(where, groups, (state for state in found.stored.states if state != FP32), run.ds_config)
    scheduler, rate = (run.ds_config or {}).get("scheduler") or {}, float(groups[0]["lr"])
    counts = [found.stored.scalars.get("step", 0.0), *(group["step"] for group in groups if "step" in group)]
    return replace(
        run, states=recognized.states, optimizer={"type": recognized.type, "params": recognized.params},
        # some optimizers count steps for each parameter, others for each group
        optimizer_step=max(float(count) for count in counts), omissions=(*run.omissions, *recognized.omissions),
        weight_decay={name.removeprefix(prefix): float(fragments[0].group["weight_decay"])
                      for name, fragments in found.stored.fragments.items() if "weight_decay" in fragments[0].group},
        schedule={"next_rate": rate}, learning_rate=None if scheduler.get("type") else rate)


def with_schedule(run: ForeignRun, state: Mapping[str, Any]) -> ForeignRun:
    """Return the run with the position in its learning-rate schedule.

    Args:
        state: the state_dict of a scheduler of DeepSpeed or torch.
    """
    applied, scheduler = run.step - run.skipped_steps, (run.ds_config or {}).get("scheduler") or {}
    schedule = dict(run.schedule)
    if scheduler.get("type"):
        params = scheduler.get("params") or {}
        known = {"warmup_steps": params.get("warmup_num_steps"), "total_steps": params.get("total_num_steps")}
        schedule |= {"type": scheduler["type"], "params": params,
                     **{key: value for key, value in known.items() if isinstance(value, int)}}
    if not isinstance(state, dict) or not state.keys() & {"last_batch_iteration", "last_epoch"}:
        omission = Omission("schedule", "the state of the learning-rate scheduler has no count of steps")
        return replace(run, schedule=schedule, learning_rate=None, omissions=(*run.omissions, omission))
    if "base_lrs" in state:
        schedule["peak_rate"] = float(state["base_lrs"][0])
    # DeepSpeed's schedulers count from -1, torch's from 0
    counted = int(state["last_batch_iteration"]) + 1 if "last_batch_iteration" in state else state["last_epoch"]
    if counted == applied:
        return replace(run, schedule={**schedule, "last_step": applied}, learning_rate=None)
    omission = Omission("schedule", f"the learning-rate scheduler has counted {counted} steps, and the optimizer "
                        f"{applied} updates")
    return replace(run, schedule=schedule, learning_rate=None, omissions=(*run.omissions, omission))


def _prefix(shapes: Mapping[str, Shape]) -> str:
    """Return what a wrapper of the model has put before all names."""
    prefix = ""
    while found := next((each for each in _PREFIXES if all(name.startswith(prefix + each) for name in shapes)), ""):
        prefix += found
    return prefix


def _ds_config(files: EngineFiles) -> dict[str, Any]:
    found = files.model.get("ds_config")
    if found is None and files.optimizer_files:
        found = files.contents[files.optimizer_files[0]].get("ds_config")
    return dict(found) if isinstance(found, dict) else {}


def precision_of(ds_config: Mapping[str, Any]) -> str:
    """Return "fp32", "bf16" or "fp16": the precision that a DeepSpeed JSON selects."""
    if (ds_config.get("fp16") or {}).get("enabled"):
        return "fp16"
    is_bf16 = any((ds_config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16"))
    autocast = ds_config.get("torch_autocast") or {}
    return "bf16" if is_bf16 or (autocast.get("enabled") and "bfloat16" in str(autocast.get("dtype"))) else "fp32"


def global_batch_size(model: Mapping[str, Any], ds_config: Mapping[str, Any]) -> int | None:
    """Return the samples of a step, from the counters of an engine's model-states file or the DeepSpeed JSON."""
    samples, steps = model.get("global_samples"), model["global_steps"]
    if samples and steps and samples % steps == 0:
        return int(samples // steps)
    batch = ds_config.get("train_batch_size")
    return batch if isinstance(batch, int) else None


def _loss_scale(files: EngineFiles) -> dict[str, float] | None:
    """Return the state of fp16's loss scaler, an object with ZeRO and a few values without."""
    optimizer = files.first_optimizer or {}
    return loss_scale_of(optimizer.get("loss_scaler", optimizer))


def _omissions(files: EngineFiles, found: FoundParameters) -> list[Omission]:
    omissions = []
    if found.frozen and found.stored.states.keys() - {FP32}:
        first, others = next(iter(found.frozen)), len(found.frozen) - 1
        untrained = f"{shorten(first)} " + (f"and {others} other parameters were" if others else "was")
        omissions.append(Omission("other_states", f"{untrained} not trained; here all parameters are trained, and "
                                  "these begin with optimizer states of 0"))
    for key, what in (("data_sampler", "DeepSpeed's curriculum over samples"), ("random_ltd", "random layer dropping")):
        if files.model.get(key) is not None:
            omissions.append(Omission("other_states", f"the state of {what}"))
    return omissions


def _notes(files: EngineFiles) -> tuple[str, ...]:
    own = sorted(str(key) for key in files.model.keys() - _ENGINE_KEYS)
    return (f"not used, values that the program itself has saved: {shorten(', '.join(own))}",) if own else ()
