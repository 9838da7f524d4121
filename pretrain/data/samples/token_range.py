"""A range of the tokens of a `.bin/.idx` pair, from which samples are taken."""

from typing import Any

from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.samples.file_record import file_record
from pretrain.errors import ConfigError


class TokenRange:
    """The tokens [first_token, last_token) of a `.bin/.idx` pair, for samples of seq_length + 1 tokens.

    Raises ConfigError if the range is shorter than one sample.
    """

    def __init__(self, indexed: IndexedDataset, *, seq_length: int, seed: int, first_token: int,
                 last_token: int | None, name: str) -> None:
        self.indexed, self.seq_length, self.seed, self.name = indexed, seq_length, seed, name
        self.first_token = first_token
        self.last_token = indexed.num_tokens if last_token is None else last_token
        check_num_tokens(indexed, self.num_tokens, seq_length=seq_length, name=name)

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        return (self.indexed,)

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        return {**file_record(self.indexed), "first_token": self.first_token, "last_token": self.last_token}


def check_num_tokens(indexed: IndexedDataset, num_tokens: int, *, seq_length: int, name: str) -> None:
    """Raise ConfigError if the tokens of a dataset are fewer than those of one sample."""
    if num_tokens < seq_length + 1:
        raise ConfigError(f"{indexed.prefix} ({name})", found=f"{num_tokens} tokens",
                          expected=f"at least {seq_length + 1} for one sample of --seq_length {seq_length}",
                          remedy="give more data, a larger proportion in --split, or a smaller --seq_length")
