"""The interface of all datasets: samples of a fixed length, each a pure function of its index.

The samples depend on the data, the settings and the index only: not on ranks, batch sizes, workers or resumes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.data.files.indexed import IndexedDataset

Indices = Sequence[int] | npt.NDArray[np.int64]

PADDING = -1
"""in samples: no token. Padding ends a sample; the loader excludes it from the loss"""


class SampleDataset(Protocol):
    """Samples of seq_length + 1 tokens. The label of each token is the next one."""

    name: str
    """name of its losses: train, valid, test, or valid/NAME"""
    seq_length: int
    samples_per_epoch: int
    has_padding: bool
    """whether samples can end with PADDING"""

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        """The token files that the samples come from."""

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples [n, seq_length + 1]. Indices start at 0 and count over all epochs, without end.

        The dtype is that of the files, such as uint16, so that the loader converts the tokens once; int32 or int64 if
        there is PADDING.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens in these token files that samples are taken from."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of data and settings. These and the seed determine the samples."""

    def record(self) -> dict[str, Any]:
        """Return the `DataRecord` of checkpoint/format/manifest.py."""


def source_records(dataset: SampleDataset) -> list[tuple[IndexedDataset, dict[str, Any]]]:
    """Return each source with its facts in `record`."""
    record = dataset.record()
    return list(zip(dataset.sources, record.get("sources", [record]), strict=True))
