"""Speed of the loader, of a start and of a jump to another step, next to plain implementations."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.bench.sections.data.figures import DataBench, DataFigure, least_cpu_seconds
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.megatron import MegatronSamples
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.index_file import HEADER, MAGIC
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter

_SEQ_LENGTH, _MICRO_BATCH, _ACCUMULATION = 2048, 8, 8
_WEIGHTS = (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05)
_SOURCE_TOKENS = 4_000_000
_STEPS = 64
_SPARSE_DOCUMENT, _SPARSE_DOCUMENTS = 2048, 10_000_000


def loading(bench: DataBench) -> list[DataFigure]:
    """Measure samples per second of a blend of 8 sources, a jump to a distant step, and a start on 20 G tokens."""
    prefixes = _write_sources(bench.folder, int(_SOURCE_TOKENS * bench.scale))
    steps = max(int(_STEPS * bench.scale), 2)
    return [_throughput(bench, prefixes, steps), _jump(bench, prefixes, steps), _start(bench)]


def _write_sources(folder: Path, num_tokens: int) -> list[Path]:
    random, prefixes = np.random.default_rng(0), [folder / f"source{number}" for number in range(len(_WEIGHTS))]
    for prefix in prefixes:
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(8):
                writer.add_document(random.integers(0, 50_000, num_tokens // 8, dtype=np.uint16))
            writer.finalize()
    return prefixes


def _blend(prefixes: list[Path]) -> BlendedSamples:
    return BlendedSamples([ShuffledWindows(IndexedDataset(prefix), seq_length=_SEQ_LENGTH, seed=1)
                           for prefix in prefixes], _WEIGHTS)


def _loader(prefixes: list[Path]) -> Any:
    from pretrain.data.loader import Loader  # imports torch

    return Loader(_blend(prefixes), micro_batch_size=_MICRO_BATCH, gradient_accumulation_steps=_ACCUMULATION)


def _throughput(bench: DataBench, prefixes: list[Path], steps: int) -> DataFigure:
    loader, number = _loader(prefixes), steps * _MICRO_BATCH * _ACCUMULATION
    plain = _plain_reader(prefixes, number)

    def ours() -> None:
        for step in range(steps):
            loader.step(step * loader.global_batch_size)

    seconds = least_cpu_seconds([ours, plain], bench.repetitions)
    loader.close()
    return DataFigure("loader, blend of 8 sources", number / seconds[0], number / seconds[1], "samples/s",
                      "np.memmap, sample by sample", note=f"Loader: samples of {_SEQ_LENGTH} tokens from the page "
                      f"cache, {_MICRO_BATCH} a micro-batch, {_ACCUMULATION} micro-batches a step. The baseline reads "
                      "tables of starts that were made before.")


def _plain_reader(prefixes: list[Path], number: int) -> Callable[[], None]:
    """Return a reader that maps the files, and collates tensors of single samples, as torch's DataLoader does."""
    import torch

    files = [np.memmap(f"{prefix}.bin", np.uint16, "r") for prefix in prefixes]
    random = np.random.default_rng(0)
    sources = random.choice(len(files), number, p=_WEIGHTS)
    starts = random.integers(0, min(map(len, files)) - _SEQ_LENGTH - 1, number)

    def sample(index: int) -> tuple[Any, Any, Any]:
        start = starts[index]
        text = torch.from_numpy(files[sources[index]][start:start + _SEQ_LENGTH + 1].astype(np.int64))
        return text[:-1].contiguous(), text[1:].contiguous(), torch.ones(_SEQ_LENGTH)

    def read() -> None:
        held: list[Any] = []  # two steps, as in training: the one in use and the next one
        for first in range(0, number, _MICRO_BATCH):
            rows = [sample(index) for index in range(first, first + _MICRO_BATCH)]
            held = [*held[1 - 2 * _ACCUMULATION:], [torch.stack(column) for column in zip(*rows, strict=True)]]

    return read


def _jump(bench: DataBench, prefixes: list[Path], steps: int) -> DataFigure:
    loader = _loader(prefixes)
    targets = iter(range(10**9, 2 * 10**9, 7_654_321))

    def skip() -> None:
        for step in range(steps):
            loader.step(step * loader.global_batch_size)

    seconds = least_cpu_seconds([lambda: loader.step(next(targets)), skip], bench.repetitions)
    loader.close()
    return DataFigure("jump to sample 10^9", seconds[0] * 1e3, seconds[1] * 1e3, "ms",
                      f"reading and discarding {steps * loader.global_batch_size:,}", higher_is_better=False,
                      note="Jump: until the first micro-batch of the step, and its prefetched successor.")


def _start(bench: DataBench) -> DataFigure:
    prefix = _write_sparse(bench.folder / "sparse", int(_SPARSE_DOCUMENTS * bench.scale))
    number = IndexedDataset(prefix).num_tokens // _SEQ_LENGTH - 1

    def ours() -> None:
        ShuffledWindows(IndexedDataset(prefix), seq_length=_SEQ_LENGTH, seed=1).samples([number // 2])

    def index() -> None:
        MegatronSamples(IndexedDataset(prefix), order="megatron", seq_length=_SEQ_LENGTH, seed=1,
                        num_samples=number).samples([number // 2])

    seconds = least_cpu_seconds([ours, index], bench.repetitions)
    return DataFigure(f"start on {number / 1e6:.0f} M samples", seconds[0] * 1e3, seconds[1] * 1e3, "ms",
                      "--sample_order megatron", higher_is_better=False,
                      note="Start: open a sparse file and read its middle sample. The baseline builds the index of "
                           "Megatron-LM with NumPy.")


def _write_sparse(prefix: Path, number: int) -> Path:
    """Write `number` documents of 2,048 tokens. The .bin is sparse: it needs no space."""
    ends = np.arange(number + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, number, number + 1)
                                      + np.full(number, _SPARSE_DOCUMENT, "<i4").tobytes()
                                      + (ends[:-1] * _SPARSE_DOCUMENT * 2).tobytes() + ends.tobytes())
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", number * _SPARSE_DOCUMENT * 2)
    return prefix
