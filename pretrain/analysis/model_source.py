"""The model that a tool evaluates, or that generates text: its files, tokenizer, data type and devices. No torch.

It is a checkpoint of any layout, or a transformers folder.
"""

from collections.abc import Mapping, Sequence
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
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder, verify_recorded_hashes, weight_files
from pretrain.config.layout import DTYPE_BYTES
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits, read_object
from pretrain.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_file, load_tokenizer
from pretrain.distributed.device import Device, multiplies_bf16
from pretrain.distributed.world import World
from pretrain.errors import ConfigError, require_package
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.config_keys import NotTrainedHereError, check_limits, read_config_json
from pretrain.monitor.read_run_folder import newest_start
from pretrain.stored_json import read_text

_NO_LIMIT = 2**31 - 1  # positions of a transformers model whose config.json names no limit
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MAX_FRACTION = 0.8  # the part of a device's memory for complete weights; activations and logits need the rest
USABLE_MEMORY = 0.9  # fraction of the free memory for weights and cache; activations need the rest
_GIB = 2**30
# all loading by transformers: no network, and no code of a folder, for which it would otherwise ask on a terminal
LOCAL_FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint, or a transformers folder."""

    folder: Path
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


def _checkpoint(path: Path, step: int | None, *, complete: bool = True) -> dict[str, Any]:
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
    return EvaluationSource(path=path, **_checkpoint(path, step, complete=complete))


def find_tokenizer(source: EvaluationSource, flag: str | None) -> Tokenizer | ConfigError:
    """Load the tokenizer of --tokenizer, of the run or of the transformers folder.

    Returns the error if no tokenizer is known. Raises ConfigError if it does not fit the model.
    """
    try:
        path = flag or (tokenizer_of(source.path) if source.hf_folder is None else _tokenizer_in(source.folder))
    except ConfigError as error:
        return error
    loaded = load_tokenizer(path)
    _require_fit(loaded, {}, source.config.vocab_size)
    source.require_tokenizer_of_run(loaded)
    return loaded


def _tokenizer_in(folder: Path) -> str:
    if find_tokenizer_file(folder) is None:
        raise ConfigError("--tokenizer", problem=f"the flag is missing, and {folder} has no tokenizer.json or "
                          "tokenizer.model", remedy="name the tokenizer of the model")
    return str(folder)


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


@dataclass(frozen=True, kw_only=True)
class GenerationSource(ModelSource):
    """A model that generates text, and its tokenizer."""

    config: ModelConfig | None = None  # None: a transformers folder, which transformers loads itself
    max_positions: int
    tokenizer: Tokenizer
    leading: tuple[int, ...]  # special tokens before each prompt; () for a model that this program trained
    end_tokens: tuple[int, ...] = ()  # that end a text, in addition to the tokenizer's end-of-document token


def generation_source(path: Path, *, step: int | None = None, tokenizer: str | None = None) -> GenerationSource:
    """Return the model at `path`. Raises ConfigError.

    Args:
        path: a run folder, a checkpoint, or a folder with a config.json and weights of transformers.
        step: step of the checkpoint; None: the newest good one.
        tokenizer: --tokenizer; None: the run's, or the one in the transformers folder.
    """
    transformers_folder = find_transformers_folder(path, step)
    if transformers_folder is not None:
        return _transformers_source(transformers_folder, tokenizer)
    found, loaded = _checkpoint(path, step), load_tokenizer(tokenizer or tokenizer_of(path))
    source = GenerationSource(max_positions=found["config"].max_positions, tokenizer=loaded, **found,
                              leading=_leading_tokens(loaded) if found["manifest"].weights_only else ())
    source.require_tokenizer_of_run(loaded)
    _require_fit(loaded, {}, found["config"].vocab_size)
    return source


def _transformers_source(folder: Path, tokenizer: str | None) -> GenerationSource:
    values = read_config_json(folder / "config.json")
    if not weight_files(folder):
        raise ConfigError(str(folder), problem="the folder has a config.json, but no weights",
                          remedy="name a run folder, a global_stepN folder, or a transformers folder with weights")
    if (folder / "adapter_config.json").is_file():  # transformers would load the base model that it names
        raise ConfigError(str(folder), problem="an adapter_config.json of PEFT is not read",
                          remedy="merge the adapter into the weights, or remove the file")
    hf_folder = _check_model(folder, values)
    loaded = load_tokenizer(tokenizer or folder)
    dtype = values.get("dtype", values.get("torch_dtype"))
    positions = next((values[key] for key in _POSITION_KEYS if isinstance(values.get(key), int)), _NO_LIMIT)
    vocab_size = values["vocab_size"] if isinstance(values.get("vocab_size"), int) else loaded.vocab_size
    return GenerationSource(
        folder=folder, hf_folder=hf_folder, precision=_DTYPES.get(str(dtype), "fp32"), max_positions=positions,
        tokenizer=loaded, leading=_leading_tokens(loaded), end_tokens=_end_tokens(folder),
        notes=tuple(_require_fit(loaded, values, vocab_size)))


def _check_model(folder: Path, values: dict[str, Any]) -> HFFolder | None:
    """Raise ConfigError for a wrong config.json, and if safetensors files are damaged or do not fit the model.

    Return None for models that only transformers implements and for other formats. They are checked when transformers
    loads them, but for absurd sizes.
    """
    where = str(folder / "config.json")
    check_limits(values, where)
    try:
        config = model_config_from(values, where)
    except NotTrainedHereError:
        return None
    return check_hf_folder(folder, config) if any(folder.glob("*.safetensors")) else None


def _require_fit(tokenizer: Tokenizer, hf_config: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Return notes on differing special tokens. Raises ConfigError if the model lacks tokens of the tokenizer."""
    return check_tokenizer_fits(tokenizer.ids, hf_config, vocab_size=vocab_size, where=f"--tokenizer {tokenizer.path}",
                                remedy="use the tokenizer that belongs to the weights")


def _leading_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that transformers adds before a text, such as <s>: published models expect them.

    A tokenizer.json names them, so it is read even if the tokenizer is the tokenizer.model next to it. Without a
    tokenizer.json, tokenizer_config.json says whether there is one.
    """
    if tokenizer.is_bytes:
        return ()
    if tokenizer.exported_files is not None:  # of an extension's format
        return (tokenizer.ids.bos,) if tokenizer.begins_with_bos and tokenizer.ids.bos is not None else ()
    path = tokenizer.path.with_name("tokenizer.json") if tokenizer.path.suffix == ".model" else tokenizer.path
    if not path.is_file():
        adds_bos = read_object(path.with_name("tokenizer_config.json")).get("add_bos_token") is True
        return (tokenizer.ids.bos,) if adds_bos and tokenizer.ids.bos is not None else ()
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(read_text(path))
    except Exception:  # the file is damaged; the library raises plain Exception
        return ()
    plain, complete = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [start for start in range(len(complete)) if complete[start:start + len(plain)] == plain]
    return tuple(complete[:starts[0]]) if starts else ()


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end tokens in generation_config.json of a transformers folder; () if it names none."""
    tokens = read_object(folder / "generation_config.json").get("eos_token_id")
    return tuple(token for token in (tokens if isinstance(tokens, list) else [tokens]) if isinstance(token, int))


def generation_dtype(requested: str, precision: str, device: Device) -> str:
    """Return "fp32", "bf16" or "fp16": what --dtype requests, or for "auto" the precision of the run.

    If the device computes slowly in this precision, "auto" becomes fp32.
    """
    if requested != "auto":
        return requested
    fast = {"bf16": multiplies_bf16()} if device.kind == "cpu" else {"bf16": device.bf16, "fp16": device.fp16}
    return precision if fast.get(precision) else "fp32"


def check_devices(requested: int | None, device: Device) -> None:
    """Raise ConfigError if --devices requests several devices, and layers cannot be spread over them."""
    if requested is not None and requested > 1:
        if device.kind == "cpu":
            raise ConfigError("--devices", found=requested, expected="1: layers are spread over GPUs only, and this "
                              "machine has none that torch can use")
        require_accelerate()


def require_accelerate() -> None:
    """Raise ConfigError if the package accelerate is missing. Imports no torch."""
    require_package("accelerate", "--devices", "generate",
                    "several devices need the Python package accelerate, which is not installed")


def choose_num_devices(needed: int, free: Sequence[int], requested: int | None, what: str) -> int:
    """Return the number of devices for a model that needs `needed` bytes.

    Args:
        free: bytes of free memory of each device.
        requested: --devices; None: as few devices as possible.
        what: the model and its precision, for the message.

    Raises:
        ConfigError: there are fewer devices than requested, or the model does not fit.
    """
    if requested is not None and requested > len(free):
        raise ConfigError("--devices", found=requested, expected=f"at most {len(free)}, the devices of this machine")
    enough = next((count for count in range(1, len(free) + 1) if sum(free[:count]) * USABLE_MEMORY >= needed), None)
    count = requested or enough or len(free)
    if enough is None or enough > count:
        has = f"{sum(free[:count]) / _GIB:.1f} GiB"
        devices = "the device has" if count == 1 else f"{count} devices have"
        remedy = f"use --devices {enough}" if enough else \
            "use a 16-bit --dtype, a smaller --batch_size, or a machine with more memory"
        raise ConfigError(what, problem=f"the model and its key-value cache take {needed / _GIB:.1f} GiB, and "
                          f"{devices} {has} of free memory", remedy=remedy)
    return count
