"""Find the model that generates: a run, one of its checkpoints, or a transformers folder. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.convert.inspect import reject_damaged
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder, weight_files
from pretrain.checkpoint.load.hf_hashes import verify_recorded_hashes
from pretrain.checkpoint.load.select import (
    find_transformers_folder,
    select_checkpoint,
    tokenizer_of,
)
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits, read_object
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.config_keys import read_config_json

_NO_LIMIT = 2**31 - 1  # positions of a transformers model whose config.json names no limit
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class GenerationSource:
    """A model that generates text, and its tokenizer."""

    folder: Path  # the checkpoint, or the transformers folder
    config: ModelConfig | None  # None: a transformers folder
    precision: str  # of the run, or of a transformers folder's weights: "fp32", "bf16" or "fp16"
    max_positions: int
    tokenizer: Tokenizer
    leading: tuple[int, ...]  # special tokens before each prompt; () for a model that this program trained
    end_tokens: tuple[int, ...] = ()  # that end a text, in addition to the tokenizer's end-of-document token
    notes: tuple[str, ...] = ()
    hf_folder: HFFolder | None = None  # its checked files; None: a checkpoint, or a folder that only transformers reads

    def verify(self) -> None:
        """Compare the files with their recorded hashes. Raises ConfigError for a damaged one."""
        if self.config is not None:
            reject_damaged(self.folder, read_manifest(self.folder))
        elif self.hf_folder is not None:
            verify_recorded_hashes(self.hf_folder)


def find_source(path: Path, *, step: int | None = None, tokenizer: str | None = None) -> GenerationSource:
    """Return the model at `path`. Raises ConfigError.

    Args:
        path: a run folder, a checkpoint, or a folder with a config.json and weights of transformers.
        step: step of the checkpoint; None: the newest good one.
        tokenizer: --tokenizer; None: the run's, or the one in the transformers folder.
    """
    transformers_folder = find_transformers_folder(path, step)
    if transformers_folder is not None:
        return _transformers_source(transformers_folder, tokenizer)
    folder, manifest, notes = select_checkpoint(path, step)
    config = model_config_from(manifest.model, f"{folder / 'manifest.json'}: model")
    loaded = load_tokenizer(tokenizer or tokenizer_of(path))
    if manifest.tokenizer_fingerprint not in (None, loaded.fingerprint):
        raise ConfigError(f"--tokenizer {loaded.path}", problem=f"{folder} was trained with another tokenizer",
                          remedy="use the tokenizer that prepared the data")
    _require_fit(loaded, {}, config.vocab_size)
    return GenerationSource(folder, config, manifest.precision, config.max_positions, loaded,
                            leading=_leading_tokens(loaded) if manifest.weights_only else (),
                            notes=notes)


def _transformers_source(folder: Path, tokenizer: str | None) -> GenerationSource:
    values = read_config_json(folder / "config.json")
    if not weight_files(folder):
        raise ConfigError(str(folder), problem="the folder has a config.json, but no weights",
                          remedy="name a run folder, a global_stepN folder, or a transformers folder with weights")
    hf_folder = _check_headers(folder, values)
    loaded = load_tokenizer(tokenizer or folder)
    dtype = values.get("dtype", values.get("torch_dtype"))
    positions = next((values[key] for key in _POSITION_KEYS if isinstance(values.get(key), int)), _NO_LIMIT)
    vocab_size = values["vocab_size"] if isinstance(values.get("vocab_size"), int) else loaded.vocab_size
    return GenerationSource(folder, None, _DTYPES.get(str(dtype), "fp32"), positions, loaded, _leading_tokens(loaded),
                            _end_tokens(folder), tuple(_require_fit(loaded, values, vocab_size)), hf_folder)


def _check_headers(folder: Path, values: dict[str, Any]) -> HFFolder | None:
    """Raise ConfigError if safetensors files are damaged or do not fit the model.

    Return None for models that only transformers implements and for other formats. They are checked when transformers
    loads them.
    """
    if not any(folder.glob("*.safetensors")):
        return None
    try:
        config = model_config_from(values, str(folder / "config.json"))
    except ConfigError:
        return None
    return check_hf_folder(folder, config)


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
    path = tokenizer.path.with_name("tokenizer.json") if tokenizer.path.suffix == ".model" else tokenizer.path
    if not path.is_file():
        adds_bos = read_object(path.with_name("tokenizer_config.json")).get("add_bos_token") is True
        return (tokenizer.ids.bos,) if adds_bos and tokenizer.ids.bos is not None else ()
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(path.read_text(encoding="utf-8"))
    except Exception:  # the file is damaged; the library raises plain Exception
        return ()
    plain, complete = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [start for start in range(len(complete)) if complete[start:start + len(plain)] == plain]
    return tuple(complete[:starts[0]]) if starts else ()


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end tokens in generation_config.json of a transformers folder; () if it names none."""
    tokens = read_object(folder / "generation_config.json").get("eos_token_id")
    return tuple(token for token in (tokens if isinstance(tokens, list) else [tokens]) if isinstance(token, int))
