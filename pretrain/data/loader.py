"""Batches: a step's micro-batches for one data-parallel rank, read one step ahead.

Shapes: B micro-batch size, T sequence length.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pretrain.data.dataset import SampleDataset

MicroBatch = tuple[Tensor, tuple[Tensor, Tensor]]
"""(tokens_BT int64, (labels_BT int64, weights_BT float32))"""


@dataclass(frozen=True)
class _Step:
    """What the reading thread makes: weights are still the mask, 1 where a label counts."""

    micro_batches: list[MicroBatch]
    unmasked_tokens: float


class Loader:
    """Micro-batches by consumed_samples: no state, so any jump (resume, evaluation) is right.

    A step's global batch is samples [consumed, consumed + mbs * gas * dp); micro-batch m of rank r holds the mbs
    samples from consumed + (m * dp + r) * mbs on. Weights hold the normalisation: the mean over micro-batches and
    data-parallel ranks of sum(weights * loss_per_token) is the mean over the unmasked tokens of the global batch.
    With `eod_token`, the prediction that follows that token has no weight; their count is then summed over the
    data-parallel ranks in `step`, in the calling thread.
    """

    def __init__(self, dataset: SampleDataset, *, micro_batch_size: int, gradient_accumulation_steps: int,
                 data_parallel_rank: int = 0, data_parallel_size: int = 1, eod_token: int | None = None,
                 sum_over_data_parallel: Callable[[float], float] = float, pin_memory: bool = False) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self.dataset = dataset
        self.micro_batch_size, self.gradient_accumulation_steps = micro_batch_size, gradient_accumulation_steps
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * data_parallel_size
        self._eod_token, self._sum, self._pin_memory = eod_token, sum_over_data_parallel, pin_memory
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[_Step]] | None = None

    def step(self, consumed_samples: int) -> list[MicroBatch]:
        """The micro-batches of the step that starts at sample `consumed_samples`. Errors of reading surface here."""
        if self._ahead is not None and self._ahead[0] == consumed_samples:
            future = self._ahead[1]
        else:
            future = self._reader.submit(self._read, consumed_samples)
        self._ahead = None
        read = future.result()
        following = consumed_samples + self.global_batch_size
        self._ahead = following, self._reader.submit(self._read, following)
        return self._weigh(read)

    def close(self) -> None:
        """Stop the reading thread; `step` may not be called again."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, consumed_samples: int) -> _Step:
        micro_batches, unmasked_tokens = [], 0.0
        for number in range(self.gradient_accumulation_steps):
            offset = (number * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
            first = consumed_samples + offset
            rows = [self.dataset.sample(index) for index in range(first, first + self.micro_batch_size)]
            samples = torch.from_numpy(np.stack(rows))
            tokens_BT, labels_BT = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
            if self._eod_token is None:
                weights_BT = torch.full(tokens_BT.shape, 1.0 / tokens_BT.numel())
            else:
                weights_BT = (tokens_BT != self._eod_token).float()
                unmasked_tokens += float(weights_BT.sum())
            if self._pin_memory:
                tokens_BT, labels_BT, weights_BT = (x.pin_memory() for x in (tokens_BT, labels_BT, weights_BT))
            micro_batches.append((tokens_BT, (labels_BT, weights_BT)))
        return _Step(micro_batches, unmasked_tokens)

    def _weigh(self, read: _Step) -> list[MicroBatch]:
        if self._eod_token is not None:
            total = self._sum(read.unmasked_tokens)
            # A global batch without any unmasked token has loss 0, not NaN.
            scale = self.gradient_accumulation_steps * self.data_parallel_size / max(total, 1.0)
            for _, (_, weights_BT) in read.micro_batches:
                weights_BT.mul_(scale)
        return read.micro_batches


def evaluation_batches(loader: Loader, eval_steps: int) -> Iterator[list[MicroBatch]]:
    """The first `eval_steps` global batches of the loader's dataset, the same at every evaluation."""
    for number in range(eval_steps):
        yield loader.step(number * loader.global_batch_size)
