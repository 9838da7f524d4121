"""The model that a tool evaluates: its files, tokenizer, data type and partition. Imports no torch.

It is a checkpoint of any layout, or a transformers folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import parse_head, read_manifest
from pretrain.checkpoint.format.verify import damaged_checkpoint, reject_damaged
from pretrain.checkpoint.load.find_checkpoint import (
    find_checkpoint,
    find_transformers_folder,
    run_folder_of,
    tokenizer_of,
)
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder, verify_recorded_hashes
from pretrain.config.layout import DTYPE_BYTES
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_file, load_tokenizer
from pretrain.distributed.device import Device
from pretrain.distributed.world import World
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.monitor.read_run_folder import newest_start

_MAX_FRACTION = 0.8  # the part of a device's memory for complete weights; activations and logits need the rest
# all loading by transformers: no network, and no code of a folder, for which it would otherwise ask on a terminal
LOCAL_FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint, or a transformers folder."""

    folder: Path
    config: ModelConfig | None  # None: a transformers folder, which transformers loads itself
    manifest: Manifest | None = field(default=None, repr=False)  # the checkpoint's
    hf_folder: HFFolder | None = field(default=None, repr=False)  # the checked files of a transformers folder
    precision: str  # "fp32" ..., of the run that wrote the checkpoint, or of the transformers folder's weights
    notes: tuple[str, ...] = ()  # shown to the user

    @property
    def published(self) -> bool:
        """True if another program trained the model: its texts then begin with special tokens."""
        return self.manifest is None or self.manifest.weights_only

    @property
    def trained_length(self) -> int | None:
        """--seq_length of the run that trained the model."""
        return None if self.manifest is None or self.manifest.weights_only else self.manifest.seq_length

    def require_tokenizer_of_run(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless the tokenizer has the recorded fingerprint, if there is one."""
        expected = self.manifest.tokenizer_fingerprint if self.manifest is not None else None
        if expected is not None and tokenizer.fingerprint != expected:
            raise ConfigError(f"--tokenizer {tokenizer.path}", found=f"sha256 {tokenizer.fingerprint[:12]}...",
                              expected=f"sha256 {expected[:12]}..., with which {self.folder} was trained",
                              remedy="name the tokenizer of the run: with another one, the results have no meaning")

    def verify(self, *, ranks: int = 1) -> None:
        """Compare the files with their recorded hashes: results of damaged weights have no meaning.

        Collective if there are several ranks. Raises ConfigError, on every rank, if a file is damaged.
        """
        found = self.hf_folder
        if ranks == 1:
            if found is not None:
                verify_recorded_hashes(found)
            elif self.manifest is not None:
                reject_damaged(self.folder, self.manifest)
            return
        from pretrain.checkpoint.load.agree_on_checkpoint import find_damage_together
        from pretrain.distributed.collectives import from_rank_0

        if found is not None:
            from_rank_0(lambda: verify_recorded_hashes(found))
        elif self.manifest is not None and (damage := find_damage_together(self.folder, self.manifest)):
            raise damaged_checkpoint(self.folder, damage)


def checkpoint_values(path: Path, step: int | None, *, complete: bool = True) -> dict[str, Any]:
    """Return the checkpoint at `path` as arguments of a source. `complete`: see `evaluation_source`."""
    folder, manifest, notes = find_checkpoint(path, step, read_manifest if complete else parse_head)
    return {**_values_of(folder, manifest), "notes": notes}


def _values_of(folder: Path, manifest: Manifest) -> dict[str, Any]:
    config = model_config_from(manifest.model, str(folder / MANIFEST))
    return {"folder": folder, "manifest": manifest, "precision": manifest.precision, "config": config}


@dataclass(frozen=True, kw_only=True)
class EvaluationSource(ModelSource):
    """The model to evaluate."""

    path: Path  # as the user named it
    config: ModelConfig

    @cached_property
    def run(self) -> dict[str, Any] | None:
        """The newest record in run.json of the run that this model belongs to; None if there is none."""
        run = run_folder_of(self.path) if self.hf_folder is None else None
        return newest_start(run) if run is not None else None

    def of_rank_0(self) -> "EvaluationSource":
        """Return the source with the checkpoint that rank 0 has found; collective."""
        from pretrain.distributed.collectives import from_rank_0

        if self.manifest is None:
            return self
        manifest = self.manifest
        folder, text = from_rank_0(lambda: (self.folder, manifest.to_json()))
        return replace(self, **_values_of(folder, Manifest.from_json(text)))


def evaluation_source(path: Path, step: int | None, *, complete: bool = True) -> EvaluationSource:
    """Find the checkpoint at `path`, or check the transformers folder there. Raises ConfigError.

    Args:
        complete: also read names and sizes of a checkpoint's files, which grow with the number of ranks. Rank 0 does
            it; the others then take its checkpoint (`of_rank_0`).
    """
    folder = find_transformers_folder(path, step)
    if folder is not None:
        found = check_hf_folder(folder)
        return EvaluationSource(path=path, folder=folder, config=found.config, precision=found.dtype, hf_folder=found)
    return EvaluationSource(path=path, **checkpoint_values(path, step, complete=complete))


def find_tokenizer(source: EvaluationSource, flag: str | None) -> Tokenizer | ConfigError:
    """Load the tokenizer of --tokenizer, of the run or of the transformers folder.

    Returns the error if no tokenizer is known. Raises ConfigError if it does not fit the model.
    """
    try:
        path = flag or (tokenizer_of(source.path) if source.hf_folder is None else _tokenizer_in(source.folder))
    except ConfigError as error:
        return error
    loaded = load_tokenizer(path)
    require_fit(loaded, {}, source.config.vocab_size)
    source.require_tokenizer_of_run(loaded)
    return loaded


def _tokenizer_in(folder: Path) -> str:
    if find_tokenizer_file(folder) is None:
        raise ConfigError("--tokenizer", problem=f"the flag is missing, and {folder} has no tokenizer.json or "
                          "tokenizer.model", remedy="name the tokenizer of the model")
    return str(folder)


def require_fit(tokenizer: Tokenizer, hf_config: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Return notes on differing special tokens. Raises ConfigError if the model lacks tokens of the tokenizer."""
    return check_tokenizer_fits(tokenizer.ids, hf_config, vocab_size=vocab_size, where=f"--tokenizer {tokenizer.path}",
                                remedy="use the tokenizer that belongs to the weights")


def evaluation_dtype(source: EvaluationSource, device: Device, flag: str | None) -> str:
    """Return --dtype, by default the precision in which the model was trained, or fp32 if the device lacks it."""
    dtype = flag or source.precision
    supported = dtype == "fp32" or (device.bf16 if dtype == "bf16" else device.fp16)
    if flag is not None and not supported:
        raise ConfigError(f"--dtype {flag}", problem=f"this {device.kind} device does not support it",
                          remedy="use fp32" + " or bf16" * device.bf16)
    return dtype if supported else "fp32"


def choose_partition(source: EvaluationSource, dtype: str, device: Device, world: World, flag: bool | None) -> bool:
    """Return whether ZeRO-3 partitions the weights: as the flag says, or if they do not fit on a device.

    On CPUs, the ranks of a host share its memory.
    """
    if flag and world.size == 1:
        raise ConfigError("--partition_weights", problem="there is only one rank, which holds all weights",
                          remedy="start several ranks, for example with deepspeed --num_accelerators 2")
    if flag is not None or world.size == 1 or not device.memory_bytes:
        return bool(flag)
    copies = world.local_size if device.kind == "cpu" else 1
    return source.config.num_parameters() * DTYPE_BYTES[dtype] * copies > _MAX_FRACTION * device.memory_bytes
