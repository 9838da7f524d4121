"""Check that a tokenizer fits a model."""

from collections.abc import Mapping
from typing import Any

from pretrain.data.special_tokens import TokenIds
from pretrain.errors import ConfigError


def check_tokenizer_fits(ids: TokenIds, hf_config: Mapping[str, Any], *, vocab_size: int, where: str) -> list[str]:
    """Return a note for each special token of the model's config.json that is another one in the tokenizer.

    `where` names the tokenizer, for example "--tokenizer data/tokenizer". Raises ConfigError if the tokenizer has
    tokens beyond the model's vocabulary of `vocab_size` tokens.
    """
    check_vocabulary(where, f"{ids.vocab_size} tokens", ids.vocab_size, vocab_size)
    notes = []
    for key, ours in (("bos_token_id", ids.bos), ("eos_token_id", ids.eos)):
        theirs = hf_config.get(key)
        known = theirs if isinstance(theirs, list) else [theirs]
        if theirs is not None and ours is not None and ours not in known:
            notes.append(f"{where}: its {key} is {ours}, and the model's config.json says {theirs}. "
                         "The tokenizer's token is used")
    return notes


def check_vocabulary(where: str, found: str, needed: int, vocab_size: int) -> None:
    """Raise ConfigError if `needed`, the largest token + 1, is larger than the model's vocabulary."""
    if needed > vocab_size:
        raise ConfigError(where, found=found, expected=f"at most the model's vocab_size, {vocab_size}",
                          remedy=f"--model_overrides vocab_size={needed}, or another --model")
