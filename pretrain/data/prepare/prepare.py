"""Tokenize inputs into token files. The main process reads and writes in order; workers tokenize.

The output does not depend on the number of workers, and not on whether the preparation was stopped and resumed: the
batches are the same, and results are written in order.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.cli import StopRequest, bad_path, say
from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.partial_output import PartialOutput, partial_path, read_state
from pretrain.data.prepare.summary import entropy_nats, make_summary
from pretrain.data.prepare.tokenize_batch import TokenizeSettings, make_tokenize
from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.data.text_inputs.chunk import CHUNK_BYTES, Position, ReadSettings
from pretrain.data.text_inputs.find import Input, Inputs, find_inputs
from pretrain.data.text_inputs.reader import FIRST_PLACE, Place, read_batches
from pretrain.data.token_files.index_file import dtype_for_vocab
from pretrain.data.token_files.writer import complete_files, existing_file, rename_files
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, shorten
from pretrain.paths import check_folder
from pretrain.progress import ProgressBar


@dataclass(frozen=True)
class PreparedData:
    """Content of PREFIX.meta.json."""

    vocab_size: int
    tokenizer: str
    """path of the tokenizer's file"""
    tokenizer_sha256: str
    bos_token: int | None
    """the token that begins each document; None without --prepend_bos"""
    eod_token: int | None
    """the token that ends each document; None without --append_eod"""
    num_tokens: int
    num_documents: int
    max_token: int
    entropy_nats: float
    """entropy per token of the token frequencies: the loss of a model that predicts these frequencies"""


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that determines the output, apart from the inputs and the tokenizer."""

    read: ReadSettings = field(default_factory=ReadSettings)
    append_eod: bool = True
    prepend_bos: bool = False
    deduplicate: bool = False


def prepare(inputs: Sequence[str], *, tokenizer: str, out: str, settings: PrepareSettings | None = None,
            workers: int | None = None, overwrite: bool = False,
            seconds_between_states: float | None = None) -> PreparedData:
    """Tokenize `inputs` into out.bin, out.idx, out.meta.json, out.sha256.json and out.summary.json.

    Continues an earlier preparation that was stopped. workers: number of processes (default: one per CPU core).
    Raises ConfigError. After an error, and after StopRequest, out.partial/ remains if it is worth resuming.
    """
    settings = settings or PrepareSettings()
    found = find_inputs(inputs, settings.read)
    if problem := bad_path(f"{out}.summary.json"):
        raise ConfigError("--out", problem=problem)
    check_folder(Path(out).absolute().parent, "--out")
    job = _Job(found, load_tokenizer(tokenizer), out, settings)
    state = _resumable_state(out, job.record, overwrite=overwrite)
    if state is not None and state.get("finished"):
        output = PartialOutput(out, state)
    else:
        output = job.run(state, workers=workers, seconds_between_states=seconds_between_states)
        state = read_state(out)
    assert state is not None
    rename_files(output.data_files, out)
    output.delete()
    return PreparedData(**state["meta"])


def _resumable_state(out: str, record: dict[str, Any], *, overwrite: bool) -> dict[str, Any] | None:
    """Return the state of an earlier preparation of the same data; None if there is none to resume.

    Raises ConfigError if existing files would be lost.
    """
    state = read_state(out)
    skipped = state is not None and not record["skip_errors"] and state["skipped"] > 0
    different = [] if state is None else [name for name, value in record.items()
                                          if name != "skip_errors" and state["record"].get(name) != value]
    if different or skipped:
        if not overwrite:
            if state is not None and "inputs" in different and "inputs" in state["record"]:
                different[different.index("inputs")] = changed_input(state["record"]["inputs"], record["inputs"])
            names = ", ".join([*different, *(["--on_error"] if skipped else [])])
            raise ConfigError(str(partial_path(out)), problem=f"an earlier preparation was stopped here, and the "
                              f"following was different: {names}",
                              remedy="give the same command to continue it, or --overwrite to start from the beginning")
        state = None
    if (state is None or not state["finished"]) and not overwrite and (existing := existing_file(out)):
        raise ConfigError(f"--out {out}", problem=f"{existing} exists", remedy="give --overwrite to replace it, or "
                          "another --out")
    return state


class _Job:
    """A preparation: inputs, tokenizer and settings that have been checked."""

    def __init__(self, inputs: Inputs, tokenizer: Tokenizer, out: str, settings: PrepareSettings) -> None:
        self._inputs, self._out, self._settings = inputs, out, settings
        self._ids: TokenIds = tokenizer.ids
        self._name, self._fingerprint = tokenizer.name, tokenizer.fingerprint
        self._tokenize = TokenizeSettings(tokenizer.name, *_special_tokens(tokenizer, settings),
                                          dtype_for_vocab(tokenizer.vocab_size).name, settings.read)
        read = settings.read
        self.record: dict[str, Any] = {
            "inputs": record_inputs(inputs.files), "--tokenizer": tokenizer.fingerprint, "--format": read.format,
            "--jsonl_key": read.jsonl_key, "--document_separator": read.document_separator,
            "--append_eod": settings.append_eod, "--prepend_bos": settings.prepend_bos,
            "--deduplicate": settings.deduplicate, "skip_errors": read.skip_errors}
        """settings and inputs that must be the same for a resume"""

    def run(self, state: dict[str, Any] | None, *, workers: int | None,
            seconds_between_states: float | None) -> PartialOutput:
        """Write everything into the partial output. Raises ConfigError."""
        try:
            output = PartialOutput(self._out, state, seconds_between_states=seconds_between_states)
            try:
                self._write(output, state, workers)
            except BaseException as error:
                self._close(output, error)
                raise
        except OSError as error:
            raise ConfigError(f"--out {self._out}", problem=f"the files cannot be written: {error.strerror or error}",
                              remedy="remove the reason, and give the same command again") from None
        return output

    def _close(self, output: PartialOutput, error: BaseException) -> None:
        """Close the partial output; delete it if there is nothing to resume."""
        if not output.has_progress:
            output.delete()
        else:
            output.close()
            if isinstance(error, StopRequest):
                error.remedy = f"the work so far is kept in {output.path}: the same command continues it"

    def _write(self, output: PartialOutput, state: dict[str, Any] | None, workers: int | None) -> None:
        writer = DocumentWriter(output, self._tokenize.dtype, vocab_size=self._ids.vocab_size,
                                special_tokens=self._tokenize.special_tokens,
                                deduplicate=self._settings.deduplicate, state=state)
        place, done_bytes = FIRST_PLACE, 0
        if state is not None:
            place, done_bytes = Place(state["input"], Position(*state["position"])), state["done_bytes"]
        total = self._inputs.num_bytes
        batches = read_batches(self._inputs.files, self._settings.read, place, continues=writer.is_inside_document)
        results = map_in_order(functools.partial(make_tokenize, self._tokenize), batches,
                               self._num_workers(workers, total - done_bytes))

        def save() -> None:
            output.save({**self._state(writer), "input": place.input, "position": place.position,
                         "done_bytes": done_bytes, "finished": False})

        if state is not None:
            say(f"continues the preparation in {output.path} after {writer.num_documents:,} documents")
        if self._inputs.is_mixed:
            say(self._inputs.describe())
        with ProgressBar("tokenizing", total, done_bytes=done_bytes) as progress:
            started, first_tokens = time.monotonic(), writer.num_tokens
            for batch, result in results:
                if isinstance(result, ConfigError):
                    kept = " The work so far is kept: with --on_error skip, the same command continues it."
                    raise ConfigError.from_line(str(result) + kept * output.has_progress)
                writer.add(result, save)
                place, done_bytes = batch.end, done_bytes + batch.file_bytes
                rate = (writer.num_tokens - first_tokens) / max(time.monotonic() - started, 1e-3)  # tokens per second
                progress.advance(batch.file_bytes, f"{rate / 1e6:.2f} M tokens/s, {writer.num_documents:,} documents")
                if self._can_resume and output.is_due():
                    save()
        self._finish(output, writer)

    @property
    def _can_resume(self) -> bool:
        return all(file.can_resume for file in self._inputs.files)

    def _num_workers(self, workers: int | None, num_bytes: int) -> int:
        """Return the number of processes. Starting a worker takes longer than tokenizing a small input."""
        most = workers or len(os.sched_getaffinity(0))
        # After a resume, the bytes left are an estimate: of compressed files, it may be below 0.
        return min(most, 1 + max(num_bytes, 0) // CHUNK_BYTES) if self._can_resume else most

    def _state(self, writer: DocumentWriter) -> dict[str, Any]:
        return {"record": self.record, "skipped": writer.statistics.skipped, **writer.state()}

    def _finish(self, output: PartialOutput, writer: DocumentWriter) -> None:
        """Complete all files in the partial output."""
        statistics = writer.statistics
        if statistics.documents == 0:
            raise ConfigError(shorten(" ".join(file.name for file in self._inputs.files)),
                              problem="there is no document that is not empty")
        if (inputs := record_inputs(self._inputs.files)) != self.record["inputs"]:
            raise ConfigError(changed_input(self.record["inputs"], inputs), problem="it was changed while it was read",
                              remedy="prepare the data again")
        meta = PreparedData(
            vocab_size=self._ids.vocab_size, tokenizer=self._name, tokenizer_sha256=self._fingerprint,
            bos_token=self._tokenize.bos_token, eod_token=self._tokenize.eod_token, num_tokens=statistics.tokens,
            num_documents=statistics.documents, max_token=int(np.flatnonzero(statistics.token_counts)[-1]),
            entropy_nats=entropy_nats(statistics.token_counts))
        summary = make_summary(
            statistics, unknown_token=self._ids.unk, duplicates_counted=writer.duplicates_are_counted,
            deduplicated=self._settings.deduplicate, entropy_nats=meta.entropy_nats,
            inputs=self._inputs.describe(), settings={**self.record, "tokenizer": meta.tokenizer})
        complete_files(output.data_files, self._tokenize.dtype, output.path / "lengths", blocks=writer.finish(),
                       meta=asdict(meta), summary=summary)
        writer.close()
        output.save({**self._state(writer), "meta": asdict(meta), "finished": True})


def _special_tokens(tokenizer: Tokenizer, settings: PrepareSettings) -> tuple[int | None, int | None]:
    """Return the tokens that begin and end each document. Raises ConfigError if the tokenizer does not have them."""
    if settings.append_eod and tokenizer.eod_token is None:
        raise ConfigError(f"--tokenizer {tokenizer.path}",
                          problem="it has no end-of-document token such as <|endoftext|> or </s>",
                          remedy="choose another tokenizer, or give --no-append_eod")
    if settings.prepend_bos and tokenizer.ids.bos is None:
        raise ConfigError(f"--tokenizer {tokenizer.path}",
                          problem="it has no token such as <s> that begins a document",
                          remedy="choose another tokenizer, or leave out --prepend_bos")
    return (tokenizer.ids.bos if settings.prepend_bos else None,
            tokenizer.eod_token if settings.append_eod else None)


_MOST_LISTED = 1000


def record_inputs(inputs: Sequence[Input]) -> dict[str, Any]:
    """Return {"files": number, "bytes": sum, "sha256": of the list, "list": [[path, bytes, mtime_ns], ...]}.

    The list is left out if it has over 1,000 files. Standard input has neither size nor time. Raises ConfigError.
    """
    digest, listed, total = hashlib.sha256(), [], 0
    for found in inputs:
        entry: list[Any] = [found.path, None, None]
        if found.can_resume:
            try:
                status = os.stat(found.path)
            except OSError as error:
                raise ConfigError(found.path, problem=f"it cannot be read: {error.strerror}") from None
            entry[1:] = status.st_size, status.st_mtime_ns
            total += status.st_size
        digest.update(json.dumps(entry).encode() + b"\n")
        if len(inputs) <= _MOST_LISTED:
            listed.append(entry)
    return {"files": len(inputs), "bytes": total, "sha256": digest.hexdigest(), "list": listed}


def changed_input(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the path of the first input that two records differ in; "inputs" if other files were listed, or none."""
    paths = [[entry[0] for entry in record["list"]] for record in (before, after)]
    if paths[0] != paths[1]:
        return "inputs"
    pairs = zip(before["list"], after["list"], strict=True)
    return next((str(old[0]) for old, new in pairs if list(old) != list(new)), "inputs")
