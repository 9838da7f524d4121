"""Write a checkpoint in DeepSpeed's universal format, under this program's names of parameters or transformers'.

`export_trainer` writes a folder checkpoint-N from which transformers.Trainer with DeepSpeed resumes.
Only the tensors of one parameter are in memory at a time.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pretrain.checkpoint.convert.export_hf import conversion_text, write_config, write_hf
from pretrain.checkpoint.convert.new_folder import check_free_space, fill_new_folder
from pretrain.checkpoint.convert.plan_export import ExportPlan
from pretrain.checkpoint.format.hashed_files import FileRecord, write_atomically
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.find_checkpoint import run_folder_of
from pretrain.checkpoint.load.reader import SCHEDULED_SETTINGS, CheckpointReader
from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.requirements import TESTED
from pretrain.errors import ConfigError
from pretrain.extensions.universal.extension import check_has_states
from pretrain.model.config import ModelConfig
from pretrain.model.hf_weights import module_tensors, rules_by_module_tensors
from pretrain.monitor.read_run_folder import newest_start
from pretrain.progress import ProgressBar

# key of the weight decay of each parameter, for an import of the checkpoint
DECAYS = "ds_pretrain_weight_decay"
LATEST = "latest_universal"  # the file in which load_checkpoint looks for the folder's name, if it gets no tag
_UNIVERSAL_VERSION = 0.4  # version of the format that DeepSpeed 0.19.8 writes
# The parameter groups of another program are unknown. DeepSpeed 0.19.8 loads only as many as the file has
# (runtime/base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir), and ignores the others in it.
_MANY_GROUPS = 100
# keys of an engine's model-states file that a universal checkpoint needs
_ENGINE_KEYS = ("dp_world_size", "ds_config", "ds_version", "global_samples", "global_steps", "skipped_steps")
_ToFiles = Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]
_ONLY_AT_THE_END = 10**9  # an interval of 0 here; the Trainer divides by it


def convert(folder: Path, out: Path) -> None:
    """Write a universal checkpoint, under this program's names of parameters, into the new folder `out`.

    Unpatched DeepSpeed 0.19.8 loads it at ZeRO stages 1 to 3 and into pipelines. This needs
    `"checkpoint": {"load_universal": true}` in the JSON and the call load_checkpoint(out.parent, tag=out.name).
    """
    manifest = read_manifest(folder)
    check_has_states(folder, manifest)

    def write(temporary: Path) -> None:
        write_universal(folder, manifest, temporary, None)
        (temporary / "config.json").write_text(json.dumps(manifest.model, indent=2) + "\n", encoding="utf-8")

    fill_new_folder(folder, out, "convert", write)
    write_atomically(out.parent / LATEST, out.name)


def export_universal(plan: ExportPlan) -> None:
    """Write a universal checkpoint, under transformers' names of parameters, into the new folder `plan.out`.

    Plain DeepSpeed loads it into an engine of the transformers model, at ZeRO stages 1 to 3; see `convert`.
    """
    def write(temporary: Path) -> None:
        write_universal(plan.folder, plan.manifest, temporary, plan.config)
        write_config(plan, temporary, plan.tokenizer.ids if plan.tokenizer else None)

    if not plan.out.exists():
        check_free_space(plan.out, universal_bytes(plan.config))
    fill_new_folder(plan.folder, plan.out, "universal, names of transformers", write)
    write_atomically(plan.out.parent / LATEST, plan.out.name)


def universal_bytes(config: ModelConfig) -> int:
    """Return the size of the master weights and of two optimizer states, in fp32."""
    return 3 * 4 * config.num_parameters()


def write_universal(folder: Path, manifest: Manifest, out: Path, config: ModelConfig | None) -> None:
    """Write a checkpoint's states into the existing folder `out`.

    Args:
        folder: of the checkpoint.
        config: None: the names of the parameters remain. A model: they become the names of its module in transformers.
    """
    reader = CheckpointReader(folder)
    if config is not None:
        _check_buffers(reader, config)
    step = int(reader.scalars["step"]) if "step" in reader.scalars else None
    total = sum(prod(shape) for shape in reader.shapes.values()) * 4 * len(reader.states)
    decays: dict[str, float] = {}
    with ProgressBar("converting", total) as progress:
        for names, to_files in _groups(reader, config):
            for state in reader.states:
                for name, tensor in to_files([reader.tensor(ours, state) for ours in names]).items():
                    (out / "zero" / name).mkdir(parents=True, exist_ok=True)
                    torch.save({"param": tensor}, out / "zero" / name / f"{state}.pt")
                    progress.advance(tensor.nbytes, name)
                    decays[name] = reader.group(names[0]).get("weight_decay", 0.0)
                    if step is not None:  # torch's optimizers need a tensor; DeepSpeed's take one, too
                        torch.save(torch.tensor(float(step)), out / "zero" / name / "step.pt")
    num_groups = 2 if config is None else _MANY_GROUPS  # ours: one for matrices and one for vectors
    torch.save(_universal_optimizer(reader, step, manifest, num_groups), out / "zero" / "optimizer_state.pt")
    engine = reader.engine_state()
    model = {key: value for key, value in engine.items() if key not in ("optimizer", "param_shapes")}
    if config is not None:
        model = {key: engine[key] for key in _ENGINE_KEYS if key in engine}
        model["lr_scheduler"] = any_scheduler(engine["global_steps"] - engine["skipped_steps"])
    model.setdefault("dp_world_size", 1)  # missing in adopted checkpoints
    model |= {"module": None, "mp_world_size": 1, "step": manifest.step, "consumed_samples": manifest.consumed_samples,
              "seq_length": manifest.seq_length, "seed": manifest.seed, DECAYS: decays,
              "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION}}
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model, out / file)  # ZeRO stage 3 reads the second file, other stages the first


def _check_buffers(reader: CheckpointReader, config: ModelConfig) -> None:
    """Raise ConfigError if a buffer of the model has changed: DeepSpeed loads none from a universal checkpoint."""
    saved, initial = reader.buffers(), config.implementation.initial_buffers(config)
    for ours, theirs, _ in config.named_buffers():
        if not torch.equal(saved[ours].float(), initial[theirs].float()):
            raise ConfigError(f"{reader.folder}: {theirs}", problem="this buffer of the model has other values than at "
                              "the start, and DeepSpeed loads no buffers from a universal checkpoint",
                              remedy="--format transformers exports the weights with it")


def any_scheduler(steps: int) -> dict[str, Any]:
    """Return a state that DeepSpeed's schedules and torch's LambdaLR load, after `steps` steps of the schedule.

    The loading run keeps its own rates. DeepSpeed's schedules count from -1, and ignore torch's keys; torch keeps an
    unknown key as an attribute.
    """
    return {"last_batch_iteration": steps - 1, "last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}


def _groups(reader: CheckpointReader, config: ModelConfig | None) -> Iterator[tuple[list[str], _ToFiles]]:
    """Yield names of our parameters, and the function that returns the tensors of the files for theirs."""
    if config is None:
        for name in reader.shapes:
            yield [name], partial(_unchanged, name)
        return
    rules_of = rules_by_module_tensors(config)
    reader.check_shapes({rule.ours: rule.shape for rules in rules_of for rule in rules})
    for rules in rules_of:
        yield [rule.ours for rule in rules], partial(module_tensors, rules, config=config)


def _unchanged(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[0]}


def _universal_optimizer(reader: CheckpointReader, step: int | None, manifest: Manifest,
                         num_groups: int) -> dict[str, Any]:
    """Return the content of `zero/optimizer_state.pt`. It has the keys for ZeRO stages 1 and 2 and those for stage 3.

    The step count of stage 3 is no tensor: DeepSpeed 0.19.8 (zero/stage3.py,
    load_hp_checkpoint_state_from_checkpoint_dir_stage3) gives the same one to all sub-groups, and each of them would
    add 1 to it in a step. torch's optimizers reject the number, where a tensor would give a wrong bias correction.

    A parameter group has only the settings that schedules change, and the loading run keeps its other settings. At ZeRO
    stage 3 DeepSpeed 0.19.8 copies all values of the first group, weight decay included, to every group. In a pipeline
    the first group of a stage can correspond to a later group here.
    """
    group = {key: tuple(value) if isinstance(value, list) else value
             for key, value in reader.group(next(iter(reader.shapes))).items() if key in SCHEDULED_SETTINGS}
    groups = [dict(group) for _ in range(num_groups)]  # DeepSpeed ignores surplus groups
    saved = {"ds_version": manifest.versions.get("deepspeed", TESTED[-1]), "param_groups": groups,
             "optimizer_state_dict": {"state": {0: {} if step is None else {"step": step}}, "param_groups": groups}}
    scaler = _loss_scaler(manifest.loss_scale or {}, reader.engine_state()["ds_config"].get("fp16", {}))
    return saved if scaler is None else {**saved, "loss_scaler": scaler, "dynamic_loss_scale": True}


def _loss_scaler(saved: dict[str, float], fp16: dict[str, Any]) -> DynamicLossScaler | None:
    """Return a loss scaler like the one in ZeRO's fp16 checkpoints; None for a fixed scale or another precision."""
    if fp16.get("loss_scale", 0) or "cur_iter" not in saved:
        return None
    scaler = DynamicLossScaler(
        init_scale=saved["cur_scale"], scale_window=fp16.get("loss_scale_window", 1000),
        min_scale=fp16.get("min_loss_scale", 1), delayed_shift=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False))
    for key in saved.keys() - {"cur_scale"}:
        setattr(scaler, key, int(saved[key]))
    return scaler


def export_trainer(plan: ExportPlan) -> list[str]:
    """Write the files of `export_hf`, a universal checkpoint and the Trainer's state into the new folder `plan.out`.

    The Trainer (5.23, integrations/deepspeed.py, `deepspeed_load_checkpoint`) loads the newest checkpoint of DeepSpeed
    in the folder. With `"checkpoint": {"load_universal": true}` this is the one that `latest_universal` names.

    Return notes for the user. Raises ConfigError.
    """
    notes, intervals = list(plan.notes), _intervals(plan.folder)
    shown = ", ".join(f"{name} {value}" for name, value in intervals.items())
    notes.append(f"trainer_state.json has {shown}: a Trainer "
                 "that resumes uses them, and not those of its TrainingArguments; change them in this file")

    def write(temporary: Path) -> dict[str, FileRecord]:
        records = write_hf(plan, temporary, notes)
        name = f"global_step{plan.manifest.step}"
        (temporary / name).mkdir()
        write_universal(plan.folder, plan.manifest, temporary / name, plan.config)
        (temporary / LATEST).write_text(name)
        _write_state(plan, temporary, intervals)
        return records

    if not plan.out.exists():
        check_free_space(plan.out, plan.num_bytes + universal_bytes(plan.config))
    fill_new_folder(plan.folder, plan.out, f"trainer {conversion_text(plan)}", write)
    return notes


def _intervals(checkpoint: Path) -> dict[str, int]:
    """Return the steps between two lines of the log, evaluations and checkpoints, as the run of a checkpoint has them.

    TrainerState has 500 if its file has no number, and the Trainer (5.23) prefers the file to TrainingArguments.
    """
    flags: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        run = run_folder_of(checkpoint)
        flags = {} if run is None else newest_start(run)["flags"]
    found = {}
    for theirs, ours in (("logging_steps", "log_interval"), ("eval_steps", "eval_interval"),
                         ("save_steps", "save_interval")):
        value = flags.get(ours, getattr(RunArguments, ours))
        found[theirs] = value if isinstance(value, int) and value > 0 else _ONLY_AT_THE_END
    return found


def _write_state(plan: ExportPlan, folder: Path, intervals: dict[str, int]) -> None:
    """Write trainer_state.json, and scheduler.pt, which the Trainer reads if the JSON has no optimizer."""
    from transformers import TrainerControl, TrainerState  # takes seconds

    manifest, engine = plan.manifest, CheckpointReader(plan.folder).engine_state()
    micro_batch_size = engine["ds_config"].get("train_micro_batch_size_per_gpu")
    state = TrainerState(
        global_step=manifest.step, max_steps=manifest.step, num_train_epochs=1, **intervals,
        num_input_tokens_seen=manifest.consumed_samples * manifest.seq_length,
        train_batch_size=micro_batch_size if isinstance(micro_batch_size, int) else 1, total_flos=0,
        # without its entry, the first save after the resume ends with a KeyError (transformers 5.23, _save_checkpoint)
        stateful_callbacks=[TrainerControl()])
    state.save_to_json(str(folder / "trainer_state.json"))
    torch.save(any_scheduler(engine["global_steps"] - engine["skipped_steps"]), folder / "scheduler.pt")
