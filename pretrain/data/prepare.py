"""Text files to a `.bin/.idx` pair: this process reads and writes in order, workers tokenise in between.

The output is the same for any number of workers: they get the same batches, and results are taken in order.
"""

import functools
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.cli import bad_path
from pretrain.console.progress import ProgressBar
from pretrain.data.indexed import IndexedWriter, dtype_for_vocab
from pretrain.data.text import CHUNK_BYTES, Chunk, check_inputs, read_chunks, read_texts
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.paths import check_folder


@dataclass(frozen=True)
class PreparedData:
    """What PREFIX.meta.json holds."""

    vocab_size: int
    tokenizer: str
    """path of the tokenizer's file"""
    tokenizer_sha256: str
    eod_token: int | None
    """the token that ends each document; None without --append_eod"""
    num_tokens: int
    num_documents: int
    max_token: int
    entropy_nats: float
    """per token, of the tokens' frequencies: the loss of a model that knows nothing else"""


@dataclass(frozen=True)
class _Job:
    """What a worker needs to know, apart from the text."""

    tokenizer: str
    jsonl_key: str
    eod_token: int | None
    dtype: str


@dataclass(frozen=True)
class _Tokenised:
    tokens: npt.NDArray[Any]
    ends: list[int]
    """positions in `tokens` at which documents end"""
    refusal: str
    """the ConfigError's line, which as an exception would not survive the way between processes"""


def prepare(inputs: Sequence[str], *, tokenizer: str, out: str, jsonl_key: str = "text", workers: int | None = None,
            append_eod: bool = True) -> PreparedData:
    """Tokenise `inputs` into out.bin, out.idx and out.meta.json; all of them, or none.

    workers: processes (default: one a CPU core). Raises ConfigError.
    """
    if workers is not None and workers < 1:
        raise ConfigError("--workers", found=str(workers), expected="1 or more")
    total_bytes = check_inputs(inputs)
    if problem := bad_path(f"{out}.meta.json.tmp-1234567"):
        raise ConfigError("--out", problem=problem)
    check_folder(Path(out).absolute().parent, "--out")
    loaded = load_tokenizer(tokenizer)
    if append_eod and loaded.eod_token is None:
        raise ConfigError(f"--tokenizer {tokenizer}", found="no end-of-document token",
                          expected="one such as <|endoftext|> or </s>", remedy="or give --no-append_eod")
    eod_token = loaded.eod_token if append_eod else None
    job = _Job(str(loaded.path), jsonl_key, eod_token, dtype_for_vocab(loaded.vocab_size).name)
    counts = np.zeros(loaded.vocab_size, np.int64)
    try:
        with IndexedWriter(out, job.dtype) as writer, ProgressBar("tokenising", total_bytes) as progress:
            # Starting a process takes longer than one chunk.
            most_workers = min(workers or len(os.sched_getaffinity(0)), 1 + total_bytes // CHUNK_BYTES)
            for batch, result in _map_in_order(_batches(inputs, CHUNK_BYTES), job, most_workers):
                if result.refusal:
                    raise _as_config_error(result.refusal)
                writer.add_documents(result.tokens, result.ends)
                counts += np.bincount(result.tokens, minlength=len(counts))
                progress.advance(sum(chunk.file_bytes for chunk in batch), f"{writer.num_documents:,} documents")
            if writer.num_documents == 0:
                raise ConfigError(" ".join(inputs), found="no text", expected="at least one document that is not empty")
            summary = PreparedData(
                vocab_size=loaded.vocab_size, tokenizer=str(loaded.path.resolve()),
                tokenizer_sha256=loaded.fingerprint, eod_token=eod_token, num_tokens=writer.num_tokens,
                num_documents=writer.num_documents, max_token=int(np.flatnonzero(counts)[-1]),
                entropy_nats=entropy_nats(counts))
            writer.finalize(vars(summary))
    except OSError as error:
        raise ConfigError(f"--out {out}", found=str(error), expected="a place with room that can be written") from None
    return summary


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the frequencies `counts` [n], in nats."""
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum((shares * np.log(shares)).tolist())


def _batches(inputs: Iterable[str], batch_bytes: int) -> Iterator[list[Chunk]]:
    """Chunks in the order of the inputs, small files together until `batch_bytes`."""
    batch: list[Chunk] = []
    size = 0
    for path in inputs:
        for chunk in read_chunks(path, chunk_bytes=batch_bytes):
            batch.append(chunk)
            size += len(chunk.data)
            if size >= batch_bytes // 2:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _map_in_order(batches: Iterator[list[Chunk]], job: _Job,
                  workers: int) -> Iterator[tuple[list[Chunk], _Tokenised]]:
    """Each batch with its result, in order; never more than a few batches a worker are read ahead."""
    if workers == 1:
        yield from ((batch, _tokenise(batch, job)) for batch in batches)
        return
    # Not fork: the parent may hold threads (a progress bar, torch) whose locks a child would inherit.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    pending: deque[tuple[list[Chunk], Future[_Tokenised]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_tokenise, batch, job)))
            if len(pending) > 3 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise ConfigError("--workers", found=f"one of {workers} worker processes was killed",
                          expected="all of them to live", remedy="memory may be short: give fewer") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C is for the parent to handle, and no worker outlives it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _tokenise(batch: list[Chunk], job: _Job) -> _Tokenised:
    """Runs in a worker."""
    tokenizer = _load_once(job.tokenizer)
    parts: list[npt.NDArray[Any]] = [np.zeros(0, job.dtype)]
    ends: list[int] = []
    size = 0
    try:
        for chunk in batch:
            for text, is_end in read_texts(chunk, jsonl_key=job.jsonl_key):
                if not text:
                    continue
                tokens = tokenizer.encode(text)
                if is_end and job.eod_token is not None:
                    tokens.append(job.eod_token)
                parts.append(np.asarray(tokens, job.dtype))
                size += len(tokens)
                if is_end:
                    ends.append(size)
    except ConfigError as error:
        return _Tokenised(parts[0], [], str(error))
    return _Tokenised(np.concatenate(parts), ends, "")


def _as_config_error(line: str) -> ConfigError:
    return ConfigError.__new__(ConfigError, line)  # the constructor would compose the line anew
