"""Data of a run: its datasets, tokenizer and end-of-document token, checked against the model's vocabulary."""

from dataclasses import dataclass
from typing import Any

from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.files.meta import read_meta
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.open_datasets import open_datasets
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError

SCANNED_TOKENS = 16 * 2**20  # at each end of a data file without a .meta.json; a full scan would take minutes
_CHUNK_TOKENS = 2**20


@dataclass(frozen=True)
class RunData:
    """Datasets by name ("train", "valid", "test"), the tokenizer, and the end-of-document token if it is known."""

    datasets: dict[str, SampleDataset]
    tokenizer: Tokenizer | None = None
    eod_token: int | None = None


def open_run_data(train_data: str, *, valid_data: str | None, test_data: str | None, split: str, seq_length: int,
                  seed: int, tokenizer: str | None, vocab_size: int, eod_mask_loss: bool) -> RunData:
    """Open the data files and the tokenizer of a run.

    Raises:
        ConfigError: for missing or damaged files, for tokens that the model's vocabulary does not have, and for data
            that was prepared with another tokenizer.
    """
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if loaded is not None and loaded.vocab_size > vocab_size:
        raise _vocabulary_error(f"--tokenizer {tokenizer}", f"{loaded.vocab_size} tokens", loaded.vocab_size,
                                vocab_size)
    datasets = open_datasets(train_data, valid_data=valid_data, test_data=test_data, split=split,
                             seq_length=seq_length, seed=seed)
    if "train" not in datasets:
        raise ConfigError(f"--train_data {train_data}", found="no training tokens",
                          expected=f"at least {seq_length + 1} for one sample", remedy="change --split")
    eod_token = loaded.eod_token if loaded else None
    for name, prefix in (("train", train_data), ("valid", valid_data), ("test", test_data)):
        if not prefix:
            continue
        token = check_prepared_data(datasets[name].sources[0], f"--{name}_data {prefix}", vocab_size=vocab_size,
                                    tokenizer=loaded)
        if loaded is None and token is not None:
            eod_token = token
    if eod_mask_loss and eod_token is None:
        raise ConfigError("--eod_mask_loss", problem="the end-of-document token is unknown: there is no --tokenizer, "
                          "and the data's .meta.json does not name the token",
                          remedy="give --tokenizer, or leave --eod_mask_loss out")
    return RunData(datasets, loaded, eod_token)


def check_prepared_data(indexed: IndexedDataset, where: str, *, vocab_size: int, tokenizer: Tokenizer | None,
                        can_change_model: bool = True) -> int | None:
    """Return the end-of-document token that the data's .meta.json names; None if it names none.

    Raises ConfigError if the data has tokens beyond the vocabulary, or was prepared with another tokenizer.
    `can_change_model`: whether another vocab_size is a remedy.
    """
    prefix = str(indexed.prefix)
    meta = _meta_of(indexed)
    largest = meta.get("max_token")
    if not isinstance(largest, int):
        largest = _largest_token(indexed)
    if largest >= vocab_size:
        raise _vocabulary_error(where, f"token {largest}", largest + 1, vocab_size, can_change_model)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, meta, f"--tokenizer {tokenizer.path}", prefix)
    token = meta.get("eod_token")
    return token if isinstance(token, int) else None


def _vocabulary_error(where: str, found: str, needed: int, vocab_size: int,
                      can_change_model: bool = True) -> ConfigError:
    remedy = f"--model_overrides vocab_size={needed}, or another --model" if can_change_model else \
        "use data that was prepared with this model's tokenizer"
    return ConfigError(where, found=found, expected=f"at most the model's vocab_size, {vocab_size}", remedy=remedy)


def _meta_of(indexed: IndexedDataset) -> dict[str, Any]:
    """Read PREFIX.meta.json. Return {} if there is none, or if it describes earlier data with this name."""
    meta = read_meta(indexed.prefix) or {}
    return meta if meta.get("num_tokens", indexed.num_tokens) == indexed.num_tokens else {}


def _largest_token(indexed: IndexedDataset) -> int:
    """Return the largest of the first and last 16 Mi tokens of a data file. Raises ConfigError for a negative token."""
    total = indexed.num_tokens
    starts = set(range(0, min(SCANNED_TOKENS, total), _CHUNK_TOKENS))
    starts |= set(range(max(total - SCANNED_TOKENS, 0), total, _CHUNK_TOKENS))
    chunks = (indexed.tokens(start, min(start + _CHUNK_TOKENS, total)) for start in sorted(starts))
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]
    smallest = min(low for low, _ in ranges)
    if smallest < 0:
        raise ConfigError(f"{indexed.prefix}.bin", found=f"token {smallest}", expected="no token below 0",
                          remedy="write it again with tools/prepare_data.py")
    return max(high for _, high in ranges)


def _check_tokenizer(tokenizer: Tokenizer, meta: dict[str, Any], where: str, prefix: str) -> None:
    """Raise ConfigError if the data was prepared with another tokenizer."""
    prepared_with = meta.get("tokenizer_sha256")
    if prepared_with is not None and prepared_with != tokenizer.fingerprint:
        raise ConfigError(where, found=f"sha256 {tokenizer.fingerprint[:12]}...",
                          expected=f"sha256 {prepared_with[:12]}..., with which {prefix} was prepared",
                          remedy=f"use {meta.get('tokenizer', 'the same tokenizer')}, or prepare the data again")
