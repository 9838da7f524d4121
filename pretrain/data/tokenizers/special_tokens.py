"""Find the special tokens of a tokenizer in the JSON files next to it, and compare them with a model's."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import stored_json
from pretrain.errors import ConfigError, reason_of

CONFIG_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
EOD_PIECE = "<|endoftext|>"
EOD_NAMES = (EOD_PIECE, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>", "[SEP]")


@dataclass(frozen=True)
class TokenIds:
    """Size of a tokenizer's vocabulary, and the ids of its special tokens; None for those that it does not have."""

    vocab_size: int
    """largest token + 1"""
    bos: int | None = None
    eos: int | None = None
    """token at the end of a document"""
    pad: int | None = None
    unk: int | None = None
    notes: tuple[str, ...] = ()
    """what differs in an exported tokenizer, one line each"""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of arrays of tokens."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def config_keys(self) -> dict[str, int | None]:
        """Return the keys of a config.json for these tokens; None for those that the tokenizer does not have."""
        return dict(zip(CONFIG_KEYS, (self.bos, self.eos, self.pad), strict=True))


_SURROGATES = re.compile("[\ud800-\udfff]")


def find_special_tokens(folder: Path, token_of: Callable[[str], int | None], vocab_size: int) -> TokenIds:
    """Return the special tokens that tokenizer_config.json and special_tokens_map.json of `folder` name.

    If they name no end-of-document token, it is found by its usual names, then in generation_config.json and
    config.json. These two come last, because they often have the default of the model's family. `token_of` returns the
    token of a name, or None.
    """
    config = read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # with this key, transformers 5 ignores special_tokens_map.json
        config |= read_object(folder / "special_tokens_map.json")
    names = {kind: _text(config.get(f"{kind}_token")) for kind in ("bos", "eos", "pad", "unk")}
    ids = {kind: None if name is None else token_of(name) for kind, name in names.items()}
    if ids["eos"] is None:
        ids["eos"] = next((token for token in map(token_of, EOD_NAMES) if token is not None), None)
    if ids["eos"] is None:
        ids["eos"] = _eos_of_model(folder, vocab_size)
    return TokenIds(vocab_size, ids["bos"], ids["eos"], ids["pad"], ids["unk"])


def _text(value: Any) -> str | None:
    """Return the text of a token that is written as a string, or as an object with the key "content".

    None for other values, also for text with lone surrogates, which no tokenizer has.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and not _SURROGATES.search(text) else None


def _eos_of_model(folder: Path, vocab_size: int) -> int | None:
    for file in ("generation_config.json", "config.json"):
        token = read_object(folder / file).get("eos_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if type(token) is int and 0 <= token < vocab_size:
            return token
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Return {} if there is no such file. Raises ConfigError for any other content."""
    try:
        return stored_json.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=f"it is not a JSON object: {reason_of(error)}") from None


def check_tokenizer_fits(ids: TokenIds, hf_config: Mapping[str, Any], *, vocab_size: int, where: str,
                         remedy: str) -> list[str]:
    """Return a note for each special token that the model's config.json and the tokenizer name differently.

    `where` names the tokenizer. Raises ConfigError with `remedy` if the tokenizer has tokens beyond the model's
    vocabulary of `vocab_size` tokens.
    """
    if ids.vocab_size > vocab_size:
        raise ConfigError(where, problem=f"its largest token is {ids.vocab_size - 1}, and the model has only "
                          f"{vocab_size} tokens", remedy=remedy)
    notes = []
    keys = ids.config_keys()
    for key in ("bos_token_id", "eos_token_id"):
        ours, theirs = keys[key], hf_config.get(key)
        if theirs is not None and ours is not None and ours not in (theirs if isinstance(theirs, list) else [theirs]):
            notes.append(f"the config.json's {key} is {theirs}, and the tokenizer's is {ours}: the tokenizer's is used")
    return notes
