"""Convert a checkpoint to DeepSpeed's universal format. Only one tensor is in memory at a time."""

from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pretrain.checkpoint.convert.new_folder import fill_new_folder
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.checkpoint.format.manifest import Manifest, read_manifest
from pretrain.checkpoint.load.reader import SCHEDULED_SETTINGS, CheckpointReader
from pretrain.distributed.deepspeed_version import TESTED
from pretrain.errors import ConfigError
from pretrain.progress import ProgressBar

_UNIVERSAL_VERSION = 0.4  # version of the format that DeepSpeed 0.19.8 writes


def convert(folder: Path, out: Path) -> None:
    """Write a universal checkpoint into the new folder `out`.

    Unpatched DeepSpeed 0.19.8 loads it at ZeRO stages 1 to 3 and into pipelines. This needs
    `"checkpoint": {"load_universal": true}` in the JSON and the call load_checkpoint(out.parent, tag=out.name).
    """
    manifest = read_manifest(folder)
    if manifest.weights_only:
        raise ConfigError(str(folder), problem="this checkpoint has only weights, and the universal format needs the "
                          "optimizer's states", remedy="name a checkpoint that a run wrote")
    if manifest.initialization.get("mup_base_width") is not None:
        raise ConfigError(str(folder), problem="it was trained with --mup_base_width, and DeepSpeed's universal format "
                          "has one learning rate for all parameters",
                          remedy="resume with ds-pretrain, which loads checkpoints of any layout")

    def write(temporary: Path) -> None:
        reader = CheckpointReader(folder)
        step = _universal_step(reader)
        total = sum(prod(shape) for shape in reader.shapes.values()) * 4 * len(reader.states)
        with ProgressBar("converting", total) as progress:
            for name, shape in reader.shapes.items():
                (temporary / "zero" / name).mkdir(parents=True)
                for state in reader.states:
                    torch.save({"param": reader.tensor(name, state)}, temporary / "zero" / name / f"{state}.pt")
                    progress.advance(4 * prod(shape), name)
                if step is not None:
                    torch.save(step, temporary / "zero" / name / "step.pt")
        torch.save(_universal_optimizer(reader, step, manifest), temporary / "zero" / "optimizer_state.pt")
        model = {key: value for key, value in reader.engine_state().items() if key not in ("optimizer", "param_shapes")}
        model |= {"module": None, "mp_world_size": 1,
                  "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION}}
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            torch.save(model, temporary / file)  # ZeRO stage 3 reads the second file, other stages the first

    fill_new_folder(folder, out, "convert", write)
    write_atomically(out.parent / "latest_universal", out.name)  # for load_checkpoint without a tag


def _universal_step(reader: CheckpointReader) -> int | torch.Tensor | None:
    """Return the optimizer's step count in the type that its class uses: a tensor for torch's own optimizers."""
    if "step" not in reader.scalars:
        return None
    step = reader.scalars["step"]
    return torch.tensor(step) if hasattr(torch.optim, reader.optimizer) else int(step)


def _universal_optimizer(reader: CheckpointReader, step: int | torch.Tensor | None,
                         manifest: Manifest) -> dict[str, Any]:
    """Return the content of `zero/optimizer_state.pt`. It has the keys for ZeRO stages 1 and 2 and those for stage 3.

    A parameter group has only the settings that schedules change, and the loading run keeps its other settings. At ZeRO
    stage 3 DeepSpeed 0.19.8 copies all values of the first group, weight decay included, to every group. In a pipeline
    the first group of a stage can correspond to a later group here.
    """
    group = {key: tuple(value) if isinstance(value, list) else value
             for key, value in reader.group(next(iter(reader.shapes))).items() if key in SCHEDULED_SETTINGS}
    groups = [group, dict(group)]  # one for matrices and one for vectors; DeepSpeed ignores a surplus group
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
