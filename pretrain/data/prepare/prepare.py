"""Tokenize text files into a `.bin/.idx` pair. The main process reads and writes in order; workers tokenize.

The output does not depend on the number of workers: the batches are the same, and results are written in order.
"""

import concurrent.futures
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
from pretrain.data.files.index_format import dtype_for_vocab
from pretrain.data.files.writer import IndexedWriter
from pretrain.data.inputs.chunk import CHUNK_BYTES, Chunk, ReadSettings
from pretrain.data.inputs.chunks import read_chunks
from pretrain.data.inputs.documents import Skipped, documents
from pretrain.data.inputs.find import Input, find_inputs
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.paths import check_folder
from pretrain.terminal.progress import ProgressBar

_CHECK_WORKERS_S = 5.0  # time without a result, after which the workers are checked


@dataclass(frozen=True)
class PreparedData:
    """Content of PREFIX.meta.json."""

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
    """entropy per token of the token frequencies: the loss of a model that predicts these frequencies"""


@dataclass(frozen=True)
class _WorkerSettings:
    """Settings that each worker needs."""

    tokenizer: str
    reading: ReadSettings
    eod_token: int | None
    dtype: str


@dataclass(frozen=True)
class _TokenizedBatch:
    tokens: npt.NDArray[Any]
    ends: list[int]
    """positions in `tokens` at which documents end"""
    error: str
    """message of a ConfigError; empty without an error"""


def prepare(inputs: Sequence[str], *, tokenizer: str, out: str, jsonl_key: str = "text", workers: int | None = None,
            append_eod: bool = True) -> PreparedData:
    """Tokenize `inputs` into out.bin, out.idx and out.meta.json. After an error no file is written.

    workers: number of processes (default: one per CPU core). Raises ConfigError.
    """
    if workers is not None and workers < 1:
        raise ConfigError("--workers", found=workers, expected="at least 1")
    reading = ReadSettings(jsonl_key=jsonl_key)
    found = find_inputs(inputs, reading)
    total_bytes = found.num_bytes
    if problem := bad_path(f"{out}.meta.json.tmp-1234567"):
        raise ConfigError("--out", problem=problem)
    check_folder(Path(out).absolute().parent, "--out")
    loaded = load_tokenizer(tokenizer)
    if append_eod and loaded.eod_token is None:
        raise ConfigError(f"--tokenizer {tokenizer}",
                          problem="it has no end-of-document token such as <|endoftext|> or </s>",
                          remedy="choose another tokenizer, or give --no-append_eod")
    eod_token = loaded.eod_token if append_eod else None
    settings = _WorkerSettings(str(loaded.path), reading, eod_token, dtype_for_vocab(loaded.vocab_size).name)
    counts = np.zeros(loaded.vocab_size, np.int64)
    try:
        with IndexedWriter(out, settings.dtype) as writer, ProgressBar("tokenizing", total_bytes) as progress:
            # Starting a worker takes longer than tokenizing one chunk.
            most_workers = min(workers or len(os.sched_getaffinity(0)), 1 + total_bytes // CHUNK_BYTES)
            for batch, result in _map_in_order(_batches(found.files, reading, CHUNK_BYTES), settings, most_workers):
                if result.error:
                    raise ConfigError.from_line(result.error)
                writer.add_documents(result.tokens, result.ends)
                counts += np.bincount(result.tokens, minlength=len(counts))
                progress.advance(sum(chunk.file_bytes for chunk in batch), f"{writer.num_documents:,} documents")
            if writer.num_documents == 0:
                raise ConfigError(" ".join(inputs), problem="there is no document that is not empty")
            summary = PreparedData(
                vocab_size=loaded.vocab_size, tokenizer=str(loaded.path.resolve()),
                tokenizer_sha256=loaded.fingerprint, eod_token=eod_token, num_tokens=writer.num_tokens,
                num_documents=writer.num_documents, max_token=int(np.flatnonzero(counts)[-1]),
                entropy_nats=entropy_nats(counts))
            writer.finalize(vars(summary))
    except OSError as error:
        raise ConfigError(f"--out {out}", problem=f"the files cannot be written: {error}") from None
    return summary


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy in nats of the frequencies `counts` [n]."""
    frequencies = counts[counts > 0] / counts.sum()
    return -math.fsum((frequencies * np.log(frequencies)).tolist())


def _batches(inputs: Iterable[Input], reading: ReadSettings, batch_bytes: int) -> Iterator[list[Chunk]]:
    """Yield lists of chunks in the order of the inputs; small files are combined up to `batch_bytes`."""
    batch: list[Chunk] = []
    size = 0
    for found in inputs:
        for chunk in read_chunks(found, reading, chunk_bytes=batch_bytes):
            batch.append(chunk)
            size += chunk.num_bytes
            if size >= batch_bytes // 2:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _map_in_order(batches: Iterator[list[Chunk]], settings: _WorkerSettings,
                  workers: int) -> Iterator[tuple[list[Chunk], _TokenizedBatch]]:
    """Yield each batch and its result, in order. At most a few batches per worker are read ahead."""
    if workers == 1:
        yield from ((batch, _tokenize(batch, settings)) for batch in batches)
        return
    # Not fork: a child would inherit locks of the parent's threads (progress bar, torch).
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    pending: deque[tuple[list[Chunk], Future[_TokenizedBatch]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_tokenize, batch, settings)))
            if len(pending) > 3 * workers:
                done, future = pending.popleft()
                yield done, _result(pool, future)
        while pending:
            done, future = pending.popleft()
            yield done, _result(pool, future)
    except BrokenProcessPool:
        raise ConfigError("--workers", problem=f"one of {workers} worker processes was killed",
                          remedy="if memory is short, give fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(pool: ProcessPoolExecutor, future: "Future[_TokenizedBatch]") -> _TokenizedBatch:
    """Return the result of a future. Raises BrokenProcessPool if a worker was killed.

    If a worker is killed while it writes a result, the executor waits forever for the rest of it (Python 3.10 to 3.13,
    concurrent/futures/process.py, `wait_result_broken_or_wakeup`): the pipe remains open, because this process and the
    other workers can write to it. In this case the other workers are killed and the pipes are closed here.
    """
    while True:
        try:
            return future.result(timeout=_CHECK_WORKERS_S)
        except concurrent.futures.TimeoutError:  # a class of its own in Python 3.10
            workers = list((pool._processes or {}).values())
            if not all(worker.is_alive() for worker in workers):
                for worker in workers:
                    worker.kill()
                pool._result_queue._writer.close()  # type: ignore[attr-defined]
                pool._call_queue._reader.close()  # type: ignore[attr-defined]


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent ends for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _tokenize(batch: list[Chunk], settings: _WorkerSettings) -> _TokenizedBatch:
    """Tokenize a batch; runs in a worker process if there are several workers."""
    tokenizer = _load_once(settings.tokenizer)
    parts: list[npt.NDArray[Any]] = [np.zeros(0, settings.dtype)]
    ends: list[int] = []
    size = 0
    try:
        for chunk in batch:
            for document in documents(chunk, settings.reading):
                assert not isinstance(document, Skipped)
                text, is_end = document.text, document.ends_document
                if not text and not (is_end and chunk.kind == "part"):
                    continue
                tokens = tokenizer.encode(text)
                if is_end and settings.eod_token is not None:
                    tokens.append(settings.eod_token)
                parts.append(np.asarray(tokens, settings.dtype))
                size += len(tokens)
                if is_end:
                    ends.append(size)
    except ConfigError as error:
        return _TokenizedBatch(parts[0], [], str(error))
    return _TokenizedBatch(np.concatenate(parts), ends, "")
