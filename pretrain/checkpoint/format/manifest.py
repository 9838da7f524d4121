"""`manifest.json`: what a checkpoint folder holds, in words that need neither torch nor the shards to read.

A folder counts as a checkpoint if its manifest is intact and every file that it names has its size.
`verify.damage` compares the contents too.
"""

import contextlib
import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.format.files import FileRecord
from pretrain.config.layout import Layout
from pretrain.errors import ConfigError

if TYPE_CHECKING:  # the plan needs numpy and transformers, which a process that writes or verifies does without
    from pretrain.config.validate import Plan

MANIFEST = "manifest.json"
LATEST = "latest"
_TAG = re.compile(r"global_step(\d+)")
_SEAL = "sha256"
FLAGS = "the flags"


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
    offload_param: str
    optimizer: dict[str, Any]  # type and params
    global_batch_size: int
    seed: int
    seq_length: int
    model: dict[str, Any]  # the transformers config.json
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    versions: dict[str, str]
    eval_loss: float | None = None  # validation loss at this step; None: not evaluated here, or not finite
    loss_scale: dict[str, float] | None = None  # fp16's; None: other precision
    scheduler: str = ""  # type of the JSON's scheduler, or FLAGS
    save_id: str = ""  # tells two saves of one step apart
    files: dict[str, FileRecord] = field(default_factory=dict)  # by path within the folder, "/" between its parts

    @property
    def layout(self) -> Layout:
        """Layout of the run that saved, without the values that the manifest does not record (micro-batch, buffers)."""
        return Layout(world_size=self.world_size, zero_stage=self.zero_stage, pipeline_stages=self.pipeline_stages,
                      precision=self.precision, grad_accum_dtype=self.grad_accum_dtype,
                      optimizer=str(self.optimizer["type"]).lower(), offload_optimizer=self.offload_optimizer,
                      offload_param=self.offload_param, seq_length=self.seq_length)

    def to_json(self) -> str:
        """The text of manifest.json; it ends with a hash of the rest, so that a changed bit is seen."""
        return _sealed(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`. Raises ValueError for every text that `to_json` would not have written."""
        values = json.loads(text)
        if not isinstance(values, dict) or _SEAL not in values:
            raise ValueError("not a manifest")
        if _sealed({key: value for key, value in values.items() if key != _SEAL}) != text:
            raise ValueError("its own hash does not match")
        try:
            values["files"] = {name: FileRecord(**record) for name, record in values["files"].items()}
            manifest = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{error} in it") from None
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"a file outside the folder: {name}")
        return manifest


def _sealed(values: dict[str, Any]) -> str:
    seal = hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
    return json.dumps({**values, _SEAL: seal}, indent=1)


def manifest_of(plan: "Plan", *, step: int, consumed_samples: int, versions: dict[str, str],
                eval_loss: float | None = None, loss_scale: dict[str, float] | None = None,
                save_id: str = "") -> Manifest:
    """The manifest of a checkpoint that `plan` writes after `step` steps, without its files."""
    layout = plan.layout
    return Manifest(
        step=step, consumed_samples=consumed_samples, world_size=layout.world_size,
        data_parallel_size=layout.data_parallel_size, pipeline_stages=layout.pipeline_stages,
        zero_stage=layout.zero_stage, precision=layout.precision, grad_accum_dtype=layout.grad_accum_dtype,
        offload_optimizer=layout.offload_optimizer, offload_param=layout.offload_param,
        optimizer=plan.ds_config["optimizer"], global_batch_size=layout.global_batch_size, seed=plan.args.seed,
        seq_length=layout.seq_length, model=plan.model.hf_config,
        data_fingerprint=plan.datasets["train"].fingerprint, tokenizer_fingerprint=tokenizer_fingerprint(plan),
        versions=versions, eval_loss=eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None,
        loss_scale=loss_scale, scheduler=scheduler_source(plan), save_id=save_id)


def tokenizer_fingerprint(plan: "Plan") -> str | None:
    """Fingerprint of the run's tokenizer; None for a run without --tokenizer."""
    return plan.tokenizer.fingerprint if plan.tokenizer else None


def scheduler_source(plan: "Plan") -> str:
    """Where the learning rate comes from: the type of the JSON's scheduler, or FLAGS."""
    return str(plan.ds_config.get("scheduler", {}).get("type", "")) if plan.schedule is None else FLAGS


def files_in(folder: Path) -> list[str]:
    """The names of everything in the folder and below, in order; the manifest and folders themselves aside."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                  if path != folder / MANIFEST and (path.is_symlink() or not path.is_dir()))


def read_manifest(folder: Path) -> Manifest:
    """Raises ConfigError where the folder is no whole checkpoint: it names the file, what is there and what should be.

    Sizes are compared, contents are not.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.from_json(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else f"a damaged one ({error})"
        raise ConfigError(str(path), found=found, expected="a checkpoint's manifest",
                          remedy="the folder is not a whole checkpoint") from None
    if step_of(folder) not in (-1, manifest.step):
        raise ConfigError(str(path), found=f"the manifest of step {manifest.step}",
                          expected=f"that of step {step_of(folder)}", remedy="the folder was renamed")
    for name, record in manifest.files.items():
        file = folder / name
        found_bytes = _size(file)
        if found_bytes != record.bytes:
            raise ConfigError(str(file), found="no such file" if found_bytes is None else f"{found_bytes} bytes",
                              expected=f"{record.bytes} bytes", remedy="the checkpoint is damaged")
    return manifest


def _size(file: Path) -> int | None:
    """Bytes; None: no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def step_of(folder: Path) -> int:
    """The step in a folder's name, -1 where it is not a checkpoint's name."""
    match = _TAG.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Every folder with a checkpoint's name, the newest first; whole or not."""
    folders = (path for path in checkpoints.glob("global_step*") if step_of(path) >= 0)
    return sorted(folders, key=step_of, reverse=True)


def manifest_or_error(folder: Path) -> Manifest | ConfigError:
    """Its manifest, or what is wrong with it, as `read_manifest` says."""
    try:
        return read_manifest(folder)
    except ConfigError as error:
        return error


def manifests_or_errors(checkpoints: Path) -> Iterator[tuple[Path, Manifest | ConfigError]]:
    """Every folder with a checkpoint's name, the newest first, with what `manifest_or_error` says."""
    for folder in checkpoint_folders(checkpoints):
        yield folder, manifest_or_error(folder)


def complete_checkpoints(checkpoints: Path) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """(folder and manifest of each whole checkpoint, the newest first; what is wrong with the others)."""
    whole: list[tuple[Path, Manifest]] = []
    complaints: list[str] = []
    for folder, found in manifests_or_errors(checkpoints):
        if isinstance(found, ConfigError):
            complaints.append(str(found))
        else:
            whole.append((folder, found))
    return whole, complaints


def newest_complete(checkpoints: Path) -> tuple[Path, Manifest, list[str]] | None:
    """(folder, manifest, what was wrong with newer ones) of the newest whole checkpoint; None if there is none.

    `latest` is for other readers: a run that was killed may have left it behind the folders. Raises ConfigError where
    there are checkpoints and all are damaged.
    """
    complaints: list[str] = []
    for folder, found in manifests_or_errors(checkpoints):
        if not isinstance(found, ConfigError):
            return folder, found, complaints
        complaints.append(str(found))
    if complaints:
        raise ConfigError(str(checkpoints), found=f"no whole checkpoint ({complaints[0]})",
                          expected="at least one whole checkpoint", remedy="restore one, or choose another --save")
    return None


def newest_step(checkpoints: Path) -> int:
    """Step of the newest whole checkpoint; 0 where there is none, or all are damaged, which the run itself says."""
    with contextlib.suppress(ConfigError):
        found = newest_complete(checkpoints)
        return found[1].step if found else 0
    return 0
