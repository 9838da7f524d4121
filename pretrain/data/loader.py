"""The micro-batches of a step for one data-parallel rank, read one step ahead, or several from an object store.

Shapes: B micro-batch size, T sequence length.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pretrain.daemon_threads import DaemonThreads
from pretrain.data.samples.dataset import PADDING, SampleDataset
from pretrain.data.samples.own import OwnSamples
from pretrain.data.samples.read_order import DEFAULT_ORDER, ReadOrder

MicroBatch = tuple[Tensor | tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(tokens_BT int64, (labels_BT int64, weights_BT float32)); with document attention the first element is
(tokens_BT, positions_BT), both int64"""

_TOKENS_AHEAD, _FEWEST_STEPS_AHEAD, _MOST_STEPS_AHEAD = 2**22, 2, 16  # of data in an object store; 28 bytes a token


@dataclass(frozen=True)
class _Step:
    """A step as the reading thread returns it. If labels can be masked, the weights are not normalized yet."""

    micro_batches: list[MicroBatch]
    weights: Tensor
    """of all micro-batches"""
    total_weight: float
    """sum of these weights: without weights of the user's dataset, the number of labels that count, an int"""


class Loader:
    """Micro-batches as a pure function of consumed_samples, so that resume and evaluation can start at any sample.

    With mbs = micro_batch_size, gas = gradient_accumulation_steps and dp = data_parallel_size, the global batch of a
    step is samples [consumed, consumed + mbs * gas * dp). Micro-batch m of rank r has the mbs samples that start at
    consumed + (m * dp + r) * mbs.

    The weights contain the normalization of the loss. The loss of a micro-batch is sum(weights * loss_per_token). The
    mean of these losses over micro-batches and data-parallel ranks is the mean over the unmasked tokens of the global
    batch.

    With `eod_token`, the prediction that follows this token is masked. Labels that are PADDING are always masked. In
    these cases `step` sums the number of unmasked tokens over the data-parallel ranks, in the calling thread, and the
    weights are on the device of this sum, which is not read. The model gets an end-of-document token, or 0, in place of
    PADDING.

    With `batch_size_at`, the step at `consumed` has `batch_size_at(consumed)` samples instead of global_batch_size, and
    gas changes with it.

    With `seq_length_at`, each sample of the step at `consumed` is divided into sequences of `seq_length_at(consumed)`
    tokens, which must divide seq_length.

    With `document_end`, the token that ends a document, the model also gets the positions of the tokens inside their
    documents. A dataset with positions of its own (`OwnSamples`) needs no such token.

    With `order`, samples are left out or reordered: a data position then is no index of the dataset (`ReadOrder`).

    If the dataset has weights of its own, the loss is the mean that is weighted by them: the sum of weight * loss over
    the labels of the global batch, divided by the sum of their weights.

    Data on local disks is read one step ahead, in one thread. Data in an object store is read several steps ahead, in
    as many threads: up to 16 steps, and fewer if these have more than 4 million tokens.
    """

    def __init__(self, dataset: SampleDataset, *, micro_batch_size: int, gradient_accumulation_steps: int,
                 data_parallel_rank: int = 0, data_parallel_size: int = 1, eod_token: int | None = None,
                 sum_over_data_parallel: Callable[[float], Tensor] = torch.tensor,
                 batch_size_at: Callable[[int], int] | None = None,
                 seq_length_at: Callable[[int], int] | None = None, document_end: int | None = None,
                 pin_memory: bool = False, order: ReadOrder = DEFAULT_ORDER) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * data_parallel_size
        self._eod_token, self._sum_over_data_parallel, self._pin_memory = eod_token, sum_over_data_parallel, pin_memory
        self._batch_size_at = batch_size_at or (lambda consumed_samples: self.global_batch_size)
        self._seq_length_at = seq_length_at
        self._document_end = document_end
        self._order = order
        self._is_masked = eod_token is not None or dataset.has_padding
        known = [token for token in (eod_token, document_end) if token is not None]
        self._padding_token = known[0] if known else 0
        # each thread has a current device of its own, at first device 0, on which pinning would create a CUDA context
        device = torch.cuda.current_device() if pin_memory else None
        self._steps_ahead = 1
        self._reader: ThreadPoolExecutor | DaemonThreads
        if any(source.is_remote for source in dataset.sources):
            tokens = micro_batch_size * gradient_accumulation_steps * dataset.seq_length
            self._steps_ahead = min(max(_TOKENS_AHEAD // tokens, _FEWEST_STEPS_AHEAD), _MOST_STEPS_AHEAD)
            self._reader = DaemonThreads(self._steps_ahead, name="loader", initializer=partial(_set_device, device))
        else:
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader",
                                              initializer=_set_device, initargs=(device,))
        self._prefetched: deque[tuple[int, Future[_Step]]] = deque()

    def step(self, consumed_samples: int) -> list[MicroBatch]:
        """Return the micro-batches of the step at `consumed_samples`. Raises errors of the reading thread."""
        if self._prefetched and self._prefetched[0][0] == consumed_samples:
            future = self._prefetched.popleft()[1]
        else:
            while self._steps_ahead > 1 and self._prefetched:
                self._prefetched.pop()[1].cancel()
            self._prefetched.clear()
            future = self._reader.submit(self._read, consumed_samples)
        if self._steps_ahead > 1:  # also while this step is waited for
            self._read_ahead(consumed_samples)
        read = future.result()
        self._read_ahead(consumed_samples)
        if self._is_masked:
            return self._normalized(read)
        return read.micro_batches

    def _read_ahead(self, consumed_samples: int) -> None:
        """Begin to read the steps after the one at `consumed_samples`."""
        last = self._prefetched[-1][0] if self._prefetched else consumed_samples
        while len(self._prefetched) < self._steps_ahead:
            last += self._batch_size_at(last)
            self._prefetched.append((last, self._reader.submit(self._read, last)))

    def close(self) -> None:
        """Stop the reading threads. Do not call `step` afterwards."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _normalized(self, read: _Step) -> list[MicroBatch]:
        """Return the micro-batches with normalized weights, without waiting for the sum over the ranks."""
        steps = len(read.micro_batches)
        total_weight = self._sum_over_data_parallel(read.total_weight)
        scale = self._scale(total_weight, steps).float()
        weights = read.weights.to(total_weight.device, non_blocking=True).mul_(scale).chunk(steps)
        return [(inputs, (labels_BT, weights_BT))
                for (inputs, (labels_BT, _)), weights_BT in zip(read.micro_batches, weights, strict=True)]

    def _read(self, consumed_samples: int) -> _Step:
        """Read all samples of a step at once. The micro-batches are contiguous slices of one buffer per tensor."""
        steps = self._batch_size_at(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)
        length = self.dataset.seq_length if self._seq_length_at is None else self._seq_length_at(consumed_samples)
        samples, own_weights, own_positions = self._columns(self._own_samples(consumed_samples, steps))
        tokens, labels = (torch.from_numpy(part.astype(np.int64)).view(-1, length)
                          for part in (samples[:, :-1], samples[:, 1:]))
        if self._is_masked:
            weights = self._mask(tokens, labels)
            if own_weights is not None:
                weights *= torch.from_numpy(own_weights[:, 1:].copy()).view(-1, length)
        else:
            all_tokens = torch.tensor(tokens.numel() * self.data_parallel_size)
            weights = self._scale(all_tokens, steps).float().repeat(tokens.shape)
        columns = [tokens, labels, weights]
        if own_positions is not None:
            columns.append(torch.from_numpy(own_positions[:, :-1].copy()).view(-1, length))
        elif self._document_end is not None:
            columns.append(torch.from_numpy(document_positions(tokens.numpy(), self._document_end)))
        if self._pin_memory:
            columns = [column.pin_memory() for column in columns]
        parts = zip(*(column.chunk(steps) for column in columns), strict=True)
        micro_batches: list[MicroBatch] = [
            ((tokens_BT, *positions) if positions else tokens_BT, (labels_BT, weights_BT))
            for tokens_BT, labels_BT, weights_BT, *positions in parts]
        total_weight = int(weights.count_nonzero()) if own_weights is None else float(weights.double().sum())
        return _Step(micro_batches, columns[2], total_weight)

    def _columns(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.float32] | None,
                                                                npt.NDArray[np.int64] | None]:
        """Return the tokens of samples, and the weights and positions of a dataset of the user, [n, seq_length + 1]."""
        if isinstance(self.dataset, OwnSamples):
            return self.dataset.columns(indices)
        return self.dataset.samples(indices), None, None

    def _mask(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return 1 for labels that count, and 0 for others. Replaces PADDING in place."""
        weights = (labels != PADDING).float()
        if self._eod_token is not None:
            weights[tokens == self._eod_token] = 0
        for column in (tokens, labels):
            column.masked_fill_(column == PADDING, self._padding_token)
        return weights

    def _own_samples(self, consumed_samples: int, steps: int) -> npt.NDArray[np.int64]:
        """Return the indices of this rank's samples in `steps` micro-batches, one micro-batch after the other."""
        own = np.arange(steps) * self.data_parallel_size + self.data_parallel_rank
        positions = consumed_samples + own[:, None] * self.micro_batch_size + np.arange(self.micro_batch_size)
        return self._order.ids(positions.reshape(-1))

    def _scale(self, total_weight: Tensor, steps: int) -> Tensor:
        """Return the factor of the weights, whose sum is `total_weight` for `steps` micro-batches on all ranks.

        The loss is normalized only here. The engine then takes the mean over micro-batches and data-parallel ranks.
        """
        # A global batch without unmasked tokens has loss 0 instead of NaN.
        total = total_weight.double()
        return steps * self.data_parallel_size / torch.where(total > 0, total, torch.ones_like(total))


def _set_device(device: int | None) -> None:
    """Make the CUDA device of this index current in the calling thread."""
    if device is not None:
        torch.cuda.set_device(device)


def tokens_of(batch: MicroBatch) -> Tensor:
    """Return the tokens [B, T] of a micro-batch."""
    inputs = batch[0]
    return inputs if torch.is_tensor(inputs) else inputs[0]


def wrong_labels(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return where a label is not the next token of its row, and where labels count, both [B, T - 1] of bools.

    The first is false where labels do not count, because they may be padding.
    """
    labels_BT, weights_BT = batch[1]
    counts = weights_BT[:, :-1] > 0
    return (labels_BT[:, :-1] != tokens_of(batch)[:, 1:]) & counts, counts


def evaluation_batches(loader: Loader, eval_steps: int) -> Iterator[list[MicroBatch]]:
    """Yield the first `eval_steps` global batches of the dataset, the same ones at every evaluation."""
    for number in range(eval_steps):
        yield loader.step(number * loader.global_batch_size)


def document_positions(tokens_BT: npt.NDArray[np.int64], eod_token: int) -> npt.NDArray[np.int64]:
    """Return the position of each token inside its document, [B, T].

    Positions begin at 0 with each sample, and again after each eod_token. The eod_token is the last token of its
    document. A document that began in an earlier sample begins here at 0 too.
    """
    starts_BT = np.empty(tokens_BT.shape, bool)
    starts_BT[:, :1] = True
    np.equal(tokens_BT[:, :-1], eod_token, out=starts_BT[:, 1:])
    starts = np.flatnonzero(starts_BT)
    lengths = np.diff(starts, append=tokens_BT.size)
    return (np.arange(tokens_BT.size) - np.repeat(starts, lengths)).reshape(tokens_BT.shape)
