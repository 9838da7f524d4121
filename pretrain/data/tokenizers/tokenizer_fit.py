"""Check that a tokenizer fits a model: the size of the vocabulary, and the special tokens."""

from collections.abc import Mapping
from typing import Any

from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.errors import ConfigError


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
