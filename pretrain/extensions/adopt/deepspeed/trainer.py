"""Read a folder checkpoint-N of transformers.Trainer, with DeepSpeed or with one optimizer file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.shard_index import StoredParameters
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder
from pretrain.errors import ConfigError, reason_of
from pretrain.extensions.adopt.deepspeed import zero_files
from pretrain.extensions.adopt.deepspeed.engine_files import EngineFiles
from pretrain.extensions.adopt.deepspeed.trainer_settings import (
    TRAINING_ARGS,
    Effects,
    effects_of_arguments,
    effects_of_module,
    read_training_arguments,
    schedule_of,
)
from pretrain.extensions.adopt.deepspeed.zero_layout import FoundParameters, add_torch_optimizer
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, understood
from pretrain.extensions.adopt.mapping import load_foreign_pickle
from pretrain.extensions.adopt.optimizers import UNKNOWN_DECAY
from pretrain.model.hf_names import HEAD
from pretrain.model.own_models import transformers_config
from pretrain.stored_json import build, read_json

_STATE, _OPTIMIZER, _SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"


class _TrainerState(TypedDict):
    global_step: int
    max_steps: int
    log_history: list[dict[str, Any]]


def read(folder: Path, config: dict[str, Any] | None) -> ForeignRun:
    """Return what a folder checkpoint-N holds.

    Args:
        folder: with `trainer_state.json`.
        config: content of its config.json.

    Raises ConfigError if a file is missing, damaged or not understood.
    """
    if config is None:
        raise ConfigError(str(folder), problem="it has no config.json",
                          remedy="name the model's config.json by --model")
    path = folder / _STATE
    try:
        state = build(_TrainerState, read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=f"it cannot be read: {reason_of(error)}",
                          remedy="use another checkpoint") from None
    with understood(folder):
        return _read(folder, config, state)


def _read(folder: Path, config: dict[str, Any], state: _TrainerState) -> ForeignRun:
    path, arguments, step = folder / _STATE, read_training_arguments(folder), state["global_step"]
    engine = _engine_folder(folder, step)
    effects = effects_of_arguments(arguments, ranks=_ranks(folder))
    with_labels = "label_smoothing" not in effects.flags
    run = zero_files.read(engine, config, with_labels=with_labels) if engine else _without_deepspeed(
        folder, config, state, arguments, effects_of_module(config, with_labels=with_labels))
    if run.step != step:
        raise ConfigError(str(path), found=f"step {step}", expected=f"{run.step}, as in the other files",
                          remedy="use the files of one checkpoint")
    if str(arguments.get("optim", "")).startswith("adamw"):
        run = replace(run, omissions=tuple(omission for omission in run.omissions if omission != UNKNOWN_DECAY))
    used = [path, *(folder / name for name in (_SCHEDULER, TRAINING_ARGS) if (folder / name).is_file())]
    run = replace(run, program=f"transformers.Trainer, {run.program}", folder=folder,
                  files=(*used, *run.files), seed=_seed(arguments), flags={**run.flags, **effects.flags},
                  omissions=(*run.omissions, *effects.omissions),
                  notes=(*run.notes, *_notes(folder, arguments), *effects.notes))
    if (folder / _SCHEDULER).is_file():
        run = zero_files.with_schedule(run, load_foreign_pickle(folder / _SCHEDULER))
    elif "last_step" not in run.schedule and not any(omission.name == "schedule" for omission in run.omissions):
        run = replace(run, omissions=(*run.omissions, Omission("schedule", f"there is no file {_SCHEDULER}")))
    if "type" not in run.schedule:
        schedule, omissions = schedule_of(arguments, state["max_steps"], step - run.skipped_steps)
        run = replace(run, schedule={**run.schedule, **schedule}, omissions=(*run.omissions, *omissions))
    return replace(run, learning_rate=_last_rate(state))


def _engine_folder(folder: Path, step: int) -> Path | None:
    """Return the folder with the files of DeepSpeed's engine; None: the Trainer has run without DeepSpeed."""
    found = folder / f"global_step{step}"
    if found.is_dir():
        return found
    others = sorted(path.name for path in folder.glob("global_step*"))
    if others or (folder / "latest").is_file():
        raise ConfigError(str(folder), problem=f"the folder {found.name} of DeepSpeed is missing"
                          + (f", and there is {others[0]}" if others else ""), remedy="copy the complete checkpoint")
    return None


def _without_deepspeed(folder: Path, config: dict[str, Any], state: _TrainerState,
                       arguments: Mapping[str, Any], effects: Effects) -> ForeignRun:
    """Read a checkpoint of one optimizer file, as the Trainer writes it without DeepSpeed and FSDP."""
    path = folder / _OPTIMIZER
    if not path.is_file():
        raise ConfigError(str(folder), problem=f"there is neither a folder of DeepSpeed nor a file {_OPTIMIZER}",
                          remedy="checkpoints of FSDP, and those with save_only_model, are not read; --output imports "
                          "the weights alone")
    weights = check_hf_folder(folder)
    tensors = _parameters_in_order(weights)
    files = EngineFiles(folder, {}, (), (), {_OPTIMIZER: load_foreign_pickle(path, mmap=True)})
    found = FoundParameters(StoredParameters(folder))

    def weights_at(group: int, position: int, name: str) -> FileLocation:
        stored = weights.tensors[name]
        return FileLocation(stored.file, (stored.name,))

    add_torch_optimizer(files, found, FileLocation(_OPTIMIZER, ()), tensors, weights_at)
    batch = _global_batch_size(folder, arguments)
    precision = next((name for name in ("bf16", "fp16") if arguments.get(name)), weights.dtype)
    rounded = () if weights.dtype == "fp32" else (Omission(
        "master_weights", f"the run has trained weights in {weights.dtype}; they become fp32 master weights"),)
    clipping = arguments.get("max_grad_norm", "unknown") or 0.0  # None: no clipping
    run = ForeignRun(
        program=f"torch.optim, {weights.dtype} weights", folder=folder,
        files=(path, *(folder / name for name in weights.files)), config=config, shapes=found.stored.shapes,
        read=zero_files.ForeignReader(files, found).tensor, states=(), step=state["global_step"],
        global_batch_size=batch, consumed_samples=batch * state["global_step"] if batch else None,
        precision=precision, flags=effects.flags, omissions=(*rounded, *effects.omissions), notes=effects.notes,
        ds_config={"gradient_clipping": clipping} if isinstance(clipping, (int, float)) else None)
    return zero_files.with_optimizer(run, str(path), found, files.contents[_OPTIMIZER]["param_groups"])


def _parameters_in_order(weights: HFFolder) -> dict[str, torch.Tensor]:
    """Return the parameters of the transformers model in the order in which its optimizer has them, without memory."""
    values = {key: value for key, value in weights.config.hf_config.items() if key != "auto_map"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(values))
    found = dict(model.named_parameters())
    if weights.config.tie_word_embeddings:
        found.pop(HEAD, None)
    in_files = weights.tensors.keys() - weights.converted.keys()
    if found.keys() != in_files:
        name = sorted(found.keys() ^ in_files)[0]
        raise ConfigError(f"{weights.folder}: {name}", problem="transformers names this parameter differently in its "
                          "module and in its files, so that the optimizer's order is not known",
                          remedy="only checkpoints with DeepSpeed are read for this model")
    return {name: parameter.data for name, parameter in found.items()}


def _global_batch_size(folder: Path, arguments: Mapping[str, Any]) -> int | None:
    """Return the samples of a step; None: the arguments are not known."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not all(isinstance(arguments.get(key), int) for key in keys):
        return None
    # under auto_find_batch_size, or several GPUs of one process, it is not that of the arguments
    batch = read_json(folder / _STATE).get("train_batch_size")
    return int((batch if isinstance(batch, int) else arguments[keys[0]]) * arguments[keys[1]] * _ranks(folder))


def _ranks(folder: Path) -> int:
    return max(1, len(list(folder.glob("rng_state_*.pth"))))


def _seed(arguments: Mapping[str, Any]) -> int | None:
    return next((found for name in ("data_seed", "seed") if isinstance(found := arguments.get(name), int)), None)


def _last_rate(state: _TrainerState) -> float | None:
    """Return the learning rate of the last step, if the Trainer has logged this step."""
    rows = [row for row in state["log_history"] if "learning_rate" in row]
    if not rows or rows[-1].get("step") != state["global_step"]:
        return None
    return float(rows[-1]["learning_rate"])


def _notes(folder: Path, arguments: Mapping[str, Any]) -> list[str]:
    if arguments:
        return []
    problem = "is missing" if not (folder / TRAINING_ARGS).is_file() else \
        "cannot be read without running it, or holds no TrainingArguments"
    return [f"{TRAINING_ARGS} {problem}: the schedule is known by its position and its rates alone"]
