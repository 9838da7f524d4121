"""Checkpoints for other programs, and compared: one process, no process group, a parameter at a time in memory."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pretrain.checkpoint.convert.commands import SOURCE
from pretrain.checkpoint.format.files import fsync, write_atomically
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from pretrain.checkpoint.load.reader import FP32, SCHEDULED, CheckpointReader
from pretrain.config.validate import DEEPSPEED_VERSION
from pretrain.console.progress import Progress
from pretrain.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9
_UNIVERSAL_VERSION = 0.4
_CHUNK = 2**24  # elements
_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Difference:
    """One weight or optimizer state in which two checkpoints differ."""

    name: str
    state: str  # "fp32", "exp_avg" ...
    max_abs: float | None  # largest absolute difference; None: it cannot be computed
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.state}: {self.reason or f'differs by up to {self.max_abs:.3g}'}"


def diff(a: Path, b: Path) -> list[Difference]:
    """Every weight and optimizer state in which the checkpoints in folders `a` and `b`, of any layout, differ."""
    one, other = CheckpointReader(a), CheckpointReader(b)
    found = [Difference("optimizer", key, abs(one.scalars.get(key, 0) - other.scalars.get(key, 0)))
             for key in sorted(one.scalars.keys() | other.scalars.keys())
             if one.scalars.get(key) != other.scalars.get(key)]
    common = [name for name in one.states if name in other.states]
    found += [Difference("optimizer", state, None, f"only in {(one if state in one.states else other).folder}")
              for state in sorted(set(one.states) ^ set(other.states))]
    total = sum(prod(shape) for shape in one.shapes.values()) * 4 * len(common)
    with Progress("comparing", total) as progress:
        for name in sorted(one.shapes.keys() | other.shapes.keys()):
            shapes = [reader.shapes.get(name) for reader in (one, other)]
            if shapes[0] != shapes[1]:
                where = ", ".join(f"{shape or 'not there'} in {reader.folder}"
                                  for shape, reader in zip(shapes, (one, other), strict=True))
                found.append(Difference(name, "", None, where))
                continue
            for state in common:
                difference = _max_abs(one, other, name, state)
                if difference > 0:
                    found.append(Difference(name, state, difference))
                progress.advance(4 * prod(one.shapes[name]), name)
    return found


def _max_abs(one: CheckpointReader, other: CheckpointReader, name: str, state: str) -> float:
    """0 where the bits are the same, NaN included."""
    largest = 0.0
    for start, length in _chunks(prod(one.shapes[name])):
        x, y = (reader.read(name, state, start, length) for reader in (one, other))
        if not torch.equal(x.view(torch.int32), y.view(torch.int32)):
            difference = (x - y).abs().nan_to_num(nan=float("inf")).max().item()
            largest = max(largest, difference, torch.finfo(torch.float32).tiny)  # 0 and -0 differ too
    return largest


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    """(start, length) of stretches that together are `numel` elements."""
    for start in range(0, numel, _CHUNK):
        yield start, min(_CHUNK, numel - start)


def consolidate(folder: Path, out: Path, *, dtype: str) -> None:
    """The whole weights, by this project's names, as safetensors files in the new folder `out`, with config.json.

    Args:
        dtype: "fp32": the master weights, exactly; "bf16": those, rounded.
    """
    manifest = read_manifest(folder)

    def write(temporary: Path) -> None:
        reader = CheckpointReader(folder)
        shards = _shards(reader.shapes, DTYPES[dtype].itemsize)
        names = ["model.safetensors"] if len(shards) == 1 else [
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        total = sum(prod(shape) for shape in reader.shapes.values()) * DTYPES[dtype].itemsize
        with Progress("writing weights", total) as progress:
            for file, shard in zip(names, shards, strict=True):
                _write_safetensors(reader, temporary / file, shard, DTYPES[dtype], progress)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (temporary / "config.json").write_text(json.dumps(manifest.model, indent=1))

    _publish(folder, out, f"consolidate {dtype}", write)


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    """The names of each file: in order, up to SHARD_BYTES, or one larger parameter."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        num_bytes = prod(shape) * itemsize
        if shards[-1] and used + num_bytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    return shards


def _write_safetensors(reader: CheckpointReader, path: Path, names: list[str], dtype: torch.dtype,
                       progress: Progress) -> None:
    """The format is a length (u64), a JSON header and the tensors' bytes: written in pieces it needs no memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + prod(reader.shapes[name]) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": reader.shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for start, length in _chunks(prod(reader.shapes[name])):
                values = reader.read(name, FP32, start, length).to(dtype)
                file.write(values.view(torch.uint8).numpy().data)
                progress.advance(length * dtype.itemsize, name)


def convert(folder: Path, out: Path) -> None:
    """DeepSpeed's universal checkpoint in the new folder `out`, which plain DeepSpeed 0.19.8 loads into ZeRO-1, 2 and 3
    and pipelines: `"checkpoint": {"load_universal": true}`, load_checkpoint(out's parent, tag=out's name).
    """
    manifest = read_manifest(folder)

    def write(temporary: Path) -> None:
        reader = CheckpointReader(folder)
        step = _universal_step(reader)
        total = sum(prod(shape) for shape in reader.shapes.values()) * 4 * len(reader.states)
        with Progress("converting", total) as progress:
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
            torch.save(model, temporary / file)  # the second one for stage 3

    _publish(folder, out, "convert", write)
    write_atomically(out.parent / "latest_universal", out.name)  # where DeepSpeed looks when it is given no tag


def _universal_step(reader: CheckpointReader) -> int | torch.Tensor | None:
    """The optimizer's step count as the class that saved keeps it: torch's own are tensors."""
    if "step" not in reader.scalars:
        return None
    step = reader.scalars["step"]
    return torch.tensor(step) if hasattr(torch.optim, reader.optimizer) else int(step)


def _universal_optimizer(reader: CheckpointReader, step: int | torch.Tensor | None,
                         manifest: Manifest) -> dict[str, Any]:
    """`zero/optimizer_state.pt`, with what stages 1 and 2 look for and what stage 3 does.

    A parameter group has no more than what schedules change: DeepSpeed gives stage 3's groups all the first one's
    values, weight decay too, and on a pipeline stage the first group need not be the first here.
    """
    group = {key: tuple(value) if isinstance(value, list) else value
             for key, value in reader.group(next(iter(reader.shapes))).items() if key in SCHEDULED}
    groups = [group, dict(group)]  # matrices and vectors; DeepSpeed passes over those that it has no group for
    saved = {"ds_version": manifest.versions.get("deepspeed", DEEPSPEED_VERSION), "param_groups": groups,
             "optimizer_state_dict": {"state": {0: {} if step is None else {"step": step}}, "param_groups": groups}}
    scaler = _loss_scaler(manifest.loss_scale or {}, reader.engine_state()["ds_config"].get("fp16", {}))
    return saved if scaler is None else {**saved, "loss_scaler": scaler, "dynamic_loss_scale": True}


def _loss_scaler(saved: dict[str, float], fp16: dict[str, Any]) -> DynamicLossScaler | None:
    """What ZeRO keeps in fp16; None: the scale is fixed, or the precision another."""
    if fp16.get("loss_scale", 0) or "cur_iter" not in saved:
        return None
    scaler = DynamicLossScaler(
        init_scale=saved["cur_scale"], scale_window=fp16.get("loss_scale_window", 1000),
        min_scale=fp16.get("min_loss_scale", 1), delayed_shift=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False))
    for key in saved.keys() - {"cur_scale"}:
        setattr(scaler, key, int(saved[key]))
    return scaler


def _publish(folder: Path, out: Path, what: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, which then becomes `out`. Nothing is done where `out` is the same already.

    Raises ConfigError where `out` is something else.
    """
    source = {"what": what, "manifest_sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()}
    if out.exists():
        if _is_whole(out, source):
            return
        raise ConfigError(str(out), found="a folder with something else in it" if out.is_dir() else "a file",
                          expected="a new folder", remedy="remove it, or name another")
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed conversion left
        temporary.mkdir(parents=True)
        write(temporary)
        sizes = {str(path.relative_to(temporary)): path.stat().st_size
                 for path in sorted(temporary.rglob("*")) if path.is_file()}
        for path in temporary.rglob("*"):
            fsync(path)
        write_atomically(temporary / SOURCE, json.dumps({**source, "files": sizes}, indent=1))
        temporary.rename(out)
        fsync(out.parent)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(temporary):
            raise ConfigError(str(error.filename), problem=f"it cannot be read: {error.strerror}") from error
        raise ConfigError(str(out), problem=f"it cannot be written: {error.strerror or error}",
                          remedy="name a new folder on a disk with enough free space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_whole(out: Path, source: dict[str, str]) -> bool:
    try:
        found = json.loads((out / SOURCE).read_text(encoding="utf-8"))
        sizes = found.pop("files")
        return found == source and all((out / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False
