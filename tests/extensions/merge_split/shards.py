"""Merge the shards of a preparation: see tests/data/prepare/helpers.py."""

from collections.abc import Sequence

from pretrain.data.prepare.document_step import DocumentStep
from pretrain.extensions.merge_split.merge_shards import merge_shards
from pretrain.extensions.merge_split.open_shards import named_shards, open_shards


def merge_shards_of(out: str, *, steps: Sequence[DocumentStep] | None, overwrite: bool) -> None:
    """Merge all shards of the preparation of this name."""
    shards = open_shards(named_shards(out, []) or [])
    merge_shards(out, shards, steps=steps, overwrite=overwrite, advance=lambda count, note: None)
