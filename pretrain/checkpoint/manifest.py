"""`manifest.json`: what a checkpoint folder holds, in words that need neither torch nor the shards to read.

A folder counts as a checkpoint if it has a manifest and every file that the manifest names has its size.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pretrain.check import Plan
from pretrain.errors import ConfigError

MANIFEST = "manifest.json"
LATEST = "latest"
_TAG = re.compile(r"global_step(\d+)")


@dataclass(frozen=True)
class Manifest:
    """Cursor, layout and contents of one checkpoint."""

    step: int  # optimizer steps done, those that fp16 skipped included
    consumed_samples: int
    world_size: int
    data_parallel_size: int
    pipeline_stages: int
    zero_stage: int
    precision: str
    grad_accum_dtype: str | None
    offload_optimizer: str
    optimizer: dict[str, Any]  # type and params
    global_batch_size: int
    seed: int
    seq_length: int
    model: dict[str, Any]  # the transformers config.json
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    versions: dict[str, str]
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes


def manifest_of(plan: Plan, *, step: int, consumed_samples: int, versions: dict[str, str]) -> Manifest:
    """The manifest of a checkpoint that `plan` writes after `step` steps, without its files."""
    return Manifest(
        step=step, consumed_samples=consumed_samples, world_size=plan.world_size,
        data_parallel_size=plan.data_parallel_size, pipeline_stages=plan.pipeline_stages, zero_stage=plan.zero_stage,
        precision=plan.precision, grad_accum_dtype=plan.grad_accum_dtype, offload_optimizer=plan.offload_optimizer,
        optimizer=plan.ds_config["optimizer"], global_batch_size=plan.global_batch_size, seed=plan.args.seed,
        seq_length=plan.args.seq_length, model=plan.model.hf_config,
        data_fingerprint=plan.datasets["train"].fingerprint,
        tokenizer_fingerprint=plan.tokenizer.fingerprint if plan.tokenizer else None, versions=versions)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, with the sizes of the files that lie in `folder` now, and flush it to the disk."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size
             for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**asdict(manifest), "files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises ConfigError where the folder is no whole checkpoint: it names the file, what is there and what should be.

    Sizes are compared, contents are not.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**{f.name: values[f.name] for f in fields(Manifest)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(path), found=f"{type(error).__name__} ({error})", expected="a checkpoint's manifest",
                          remedy="the folder is not a whole checkpoint") from None
    for name, size in manifest.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ConfigError(str(file), found="no such file" if found is None else f"{found} bytes",
                              expected=f"{size} bytes", remedy="the checkpoint is damaged")
    return manifest


def step_of(folder: Path) -> int:
    """The step in a folder's name, -1 where it is not a checkpoint's name."""
    match = _TAG.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def newest_whole(checkpoints: Path) -> tuple[Path, Manifest, list[str]] | None:
    """(folder, manifest, what was wrong with newer ones) of the newest whole checkpoint; None if there is none.

    `latest` is for other readers: a run that was killed may have left it behind the folders.
    """
    complaints: list[str] = []
    folders = sorted((p for p in checkpoints.glob("global_step*") if step_of(p) >= 0), key=step_of, reverse=True)
    for folder in folders:
        try:
            return folder, read_manifest(folder), complaints
        except ConfigError as error:
            complaints.append(str(error))
    if complaints:
        raise ConfigError(str(checkpoints), found=f"no whole checkpoint ({complaints[0]})",
                          expected="at least one whole checkpoint", remedy="restore one, or choose another --save")
    return None
