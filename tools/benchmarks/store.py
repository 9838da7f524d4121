"""--what store: how long training waits for data in an object store whose answers take 50 ms."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.active_extensions import reader_of
from pretrain.child import child_command
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from tools.benchmarks.processes import BenchContext, ReportProgress
from tools.benchmarks.report import BenchSection

DELAY_S = 0.05  # of each answer
_TOKENS = 200_000_000  # of uint16
_SEQ_LENGTH, _MICRO_BATCH, _ACCUMULATION = 2048, 4, 4  # one rank
_STEP_SECONDS = (2.0, 0.5, 0.1)
_SECONDS = 20.0  # of one measurement
_PAGE_BYTES = 2**16  # of the cache of the extension that reads the store
_SMALL_CACHE = 2**24  # bytes: 4% of the file, so that nearly each sample is requested from the store


@dataclass(frozen=True)
class StoreFigure:
    """Measurement with one cache and one length of the step. The field names are the keys of --json."""

    step_seconds: float  # of the computation
    tokens_per_second: float  # of one rank, with the waiting
    wait: float  # fraction of the step in which it waits for data
    longest_wait_ms: float
    requests_per_second: float
    cpu: float  # cores that this process used for reading


def store(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Run all measurements. One that fails is reported, and the others continue."""
    folder = context.folder / "store"
    folder.mkdir()
    figures, failures = dict[str, StoreFigure](), []
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        random = np.random.default_rng(0)
        for _ in range(100):
            writer.add_document(random.integers(0, 50_000, _TOKENS // 100, dtype=np.uint16))
        writer.finalize()
    with delayed_server(folder) as url:
        for name, num_bytes in (("larger than the cache", _SMALL_CACHE), ("fits into the cache", 8 * _TOKENS)):
            for step_s in _STEP_SECONDS:
                row = f"{name}, step of {step_s:g} s"
                report(row)
                try:
                    figures[row] = measure(url, folder / row.replace(" ", "_"), num_bytes, step_s=step_s)
                except Exception as error:
                    failures.append(f"{row}: {type(error).__name__}: {error}")
    rows = [[name, f"{each.tokens_per_second:,.0f}", f"{each.wait:.2%}", f"{each.longest_wait_ms:.1f} ms",
             f"{each.requests_per_second:.0f}", f"{each.cpu:.2f}"] for name, each in figures.items()]
    tokens = _SEQ_LENGTH * _MICRO_BATCH * _ACCUMULATION
    notes = [f"An HTTP server on this machine, which answers after {DELAY_S * 1e3:.0f} ms. One rank reads {tokens:,} "
             f"tokens a step, in samples of {_SEQ_LENGTH} at random places of a file of {2 * _TOKENS / 1e6:.0f} MB; "
             f"the step itself is a pause. The first step is not counted. The cache is empty at first; each row took "
             f"{_SECONDS:.0f} s.",
             f"A cache of {_SMALL_CACHE / 1e6:.0f} MB has {_SMALL_CACHE // _PAGE_BYTES} pages."]
    return BenchSection("store", "Data in an object store",
                        ["data", "tokens/s", "waiting for data", "longest", "requests/s", "cores"], rows, notes,
                        failures, {"figures": {name: asdict(each) for name, each in figures.items()}})


def measure(url: str, cache: Path, num_bytes: int, *, step_s: float, seconds: float = _SECONDS) -> StoreFigure:
    """Read steps for some seconds, with a cache of this size. Returns how long they waited."""
    from pretrain.data.loader import Loader  # imports torch

    extension, _ = reader_of("token_files", url, url)
    assert extension.settings is not None
    settings = extension.settings(data_cache=str(cache), data_cache_gb=num_bytes / 1e9)
    data = IndexedDataset(url, {extension.name: settings})
    requests = _count_requests(data.file)
    loader = Loader(ShuffledWindows(data, seq_length=_SEQ_LENGTH, seed=1), micro_batch_size=_MICRO_BATCH,
                    gradient_accumulation_steps=_ACCUMULATION)
    loader.step(0)
    requests.clear()
    waits, begin, cpu = list[float](), time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds or len(waits) < 2:
        time.sleep(step_s)
        start = time.perf_counter()
        loader.step((len(waits) + 1) * loader.global_batch_size)
        waits.append(time.perf_counter() - start)
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    loader.close()
    return StoreFigure(step_s, len(waits) * loader.global_batch_size * _SEQ_LENGTH / elapsed, sum(waits) / elapsed,
                       max(waits) * 1e3, len(requests) / elapsed, cpu / elapsed)


def _count_requests(file: Any) -> list[int]:
    """Let each request of the file append its size to a list, and return the list."""
    requests, read = list[int](), file.remote.read

    def counted(start: int, num_bytes: int) -> bytes:
        requests.append(num_bytes)
        return read(start, num_bytes)

    file.remote.read = counted
    return requests


@contextmanager
def delayed_server(folder: Path) -> Iterator[str]:
    """Start the server of a folder with the data set "corpus". Yields the URL of its prefix."""
    command = child_command("tools.benchmarks.delayed_server", str(folder), str(DELAY_S))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/corpus"
        finally:
            server.stdin.close()
