"""The model that generates text: its files, tokenizer, data type and devices. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.analysis.model_source import ModelSource, checkpoint_values, require_fit
from pretrain.checkpoint.load.find_checkpoint import find_transformers_folder, tokenizer_of
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder, weight_files
from pretrain.data.tokenizers.special_tokens import read_object
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.distributed.device import Device, multiplies_bf16
from pretrain.errors import ConfigError, require_package
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.config_keys import NotTrainedHereError, check_limits, read_config_json
from pretrain.stored_json import read_text

_NO_LIMIT = 2**31 - 1  # positions of a transformers model whose config.json names no limit
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
USABLE_MEMORY = 0.9  # fraction of the free memory for weights and cache; activations need the rest
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GenerationSource(ModelSource):
    """A model that generates text, and its tokenizer."""

    config: ModelConfig | None = None
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
    found, loaded = checkpoint_values(path, step), load_tokenizer(tokenizer or tokenizer_of(path))
    source = GenerationSource(max_positions=found["config"].max_positions, tokenizer=loaded, **found,
                              leading=_leading_tokens(loaded) if found["manifest"].weights_only else ())
    source.require_tokenizer_of_run(loaded)
    require_fit(loaded, {}, found["config"].vocab_size)
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
        notes=tuple(require_fit(loaded, values, vocab_size)))


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
