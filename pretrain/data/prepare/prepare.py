"""Tokenize inputs into token files. The main process reads and writes in order; workers tokenize.

The output does not depend on the number of workers, and not on whether the preparation was stopped and resumed: the
batches are the same, and results are written in order.
"""

import copy
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.active_extensions import document_steps
from pretrain.cli import StopRequest, bad_path, say
from pretrain.data.prepare.complete import DataFacts, PreparedData, check_not_empty, complete_output
from pretrain.data.prepare.document_step import DocumentStep, InputFile
from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.input_record import (
    changed_input,
    check_unchanged,
    describe_sources,
    pin_dataset,
    read_examined,
    record_inputs,
    save_examined,
)
from pretrain.data.prepare.partial_output import (
    DOCUMENTS,
    PartialOutput,
    file_of_step,
    is_of_other_version,
    partial_path,
    read_state,
)
from pretrain.data.prepare.shards import (
    Shard,
    check_count,
    complete_shard,
    facts_of_shards,
    write_record,
)
from pretrain.data.prepare.text_quality import sampled_fractions
from pretrain.data.prepare.tokenize_batch import TokenizeBatch, TokenizeSettings
from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.data.text_inputs.chunk import CHUNK_BYTES, Position, ReadSettings
from pretrain.data.text_inputs.find import Inputs, find_inputs
from pretrain.data.text_inputs.formats import STDIN
from pretrain.data.text_inputs.hub_dataset import DatasetName
from pretrain.data.text_inputs.parts import Part, part_of
from pretrain.data.text_inputs.reader import FIRST_PLACE, Place, delete_copies, read_batches
from pretrain.data.token_files.hashes import hash_file
from pretrain.data.token_files.index_file import dtype_for_vocab
from pretrain.data.token_files.writer import ENDINGS, SHARD_ENDINGS, existing_file, rename_files
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, shorten
from pretrain.paths import check_folder, writing
from pretrain.progress import ProgressBar


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that determines the output, apart from the inputs and the tokenizer."""

    read: ReadSettings = field(default_factory=ReadSettings)
    append_eod: bool = True
    prepend_bos: bool = False
    deduplicate: bool = False
    steps: Sequence[DocumentStep] = field(default_factory=lambda: document_steps({}))
    """steps of extensions, in their order (default: those without a flag)"""


def prepare(inputs: Sequence[str] | DatasetName, *, tokenizer: str, out: str, settings: PrepareSettings | None = None,
            workers: int | None = None, overwrite: bool = False, shard: Shard | None = None,
            command: Sequence[str] = (), seconds_between_states: float | None = None) -> PreparedData:
    """Tokenize `inputs` into out.bin, out.idx, out.meta.json, out.sha256.json and out.summary.json.

    Continues an earlier preparation that was stopped. workers: number of processes (default: one per CPU core).
    shard: tokenize only this part, into out.shard-I-of-N.*; command: the words that make it, stored for the merge.
    Raises ConfigError. After an error, and after StopRequest, out.partial/ remains if it is worth resuming.
    """
    settings = settings or PrepareSettings()
    if shard is not None:
        if not isinstance(inputs, DatasetName) and STDIN in inputs:
            raise ConfigError("--shard", problem="standard input cannot be divided", remedy="give files")
        check_count(out, shard)
    if isinstance(inputs, DatasetName):
        inputs = pin_dataset(inputs, out, shard, overwrite=overwrite)
    others = None if shard is None else facts_of_shards(out, shard, overwrite=overwrite)
    of_shards = None if others is None else Inputs((), (), others.commits)
    out = out if shard is None else shard.prefix(out)
    earlier = read_examined(partial_path(out)) if read_state(out) is not None else None
    found = find_inputs(inputs, settings.read, earlier or of_shards)
    if problem := bad_path(f"{out}.summary.json"):
        raise ConfigError("--out", problem=problem)
    check_folder(Path(out).absolute().parent, "--out")
    loaded = load_tokenizer(tokenizer)
    job = _Job(found, loaded, out, settings, shard, command)
    if shard is not None and not overwrite and (meta := complete_shard(out, shard, job.facts)):
        say(f"{out} is complete already, with these inputs and settings")
        return meta
    state = _resumable_state(out, job.facts.record, overwrite=overwrite)
    if is_of_other_version(out):
        say(f"{partial_path(out)} is of another version of this program: begins again, and replaces it")
    if state is None and earlier is not None and all(file.can_resume for file in found.files):
        # A new beginning reads the commits of the other shards, else those that the revisions name now.
        found = find_inputs(inputs, settings.read, of_shards)
        job = _Job(found, loaded, out, settings, shard, command)
    if state is not None and state.get("finished"):
        output = PartialOutput(out, state)
    else:
        output = job.run(state, workers=workers, seconds_between_states=seconds_between_states)
        state = read_state(out)
    assert state is not None
    rename_files(output.data_files, out, ENDINGS if shard is None else SHARD_ENDINGS)
    output.delete()
    return PreparedData.of(state["meta"])


def _resumable_state(out: str, record: dict[str, Any], *, overwrite: bool) -> dict[str, Any] | None:
    """Return the state of an earlier preparation of the same data; None if there is none to resume.

    Raises ConfigError if existing files would be lost.
    """
    state = read_state(out)
    skipped = state is not None and not record["skip_errors"] and state["skipped"] > 0
    different = [] if state is None else [name for name in {**record, **state["record"]}
                                          if name != "skip_errors" and state["record"].get(name) != record.get(name)]
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

    def __init__(self, inputs: Inputs, tokenizer: Tokenizer, out: str, settings: PrepareSettings, shard: Shard | None,
                 command: Sequence[str]) -> None:
        self._inputs, self._out, self._settings = inputs, out, settings
        self._shard, self._command = shard, command
        self._steps = copy.deepcopy(tuple(settings.steps))  # a step has a state
        for step in self._steps:
            step.start(tokenizer)
        self._tokenize = TokenizeSettings(tokenizer.name, *_special_tokens(tokenizer, settings),
                                          dtype_for_vocab(tokenizer.vocab_size).name, settings.read)
        read = settings.read
        record: dict[str, Any] = {
            "inputs": record_inputs(inputs.files), "--tokenizer": tokenizer.fingerprint, "--format": read.format,
            "--jsonl_key": read.jsonl_key, "--document_separator": read.document_separator,
            "--append_eod": settings.append_eod, "--prepend_bos": settings.prepend_bos,
            "--deduplicate": settings.deduplicate, "skip_errors": read.skip_errors}
        if inputs.dataset is not None:
            record |= inputs.dataset.found.record()
        for step in self._steps:
            record |= step.settings
        self.facts = DataFacts(
            vocab_size=tokenizer.ids.vocab_size, tokenizer=tokenizer.name, tokenizer_sha256=tokenizer.fingerprint,
            bos_token=self._tokenize.bos_token, eod_token=self._tokenize.eod_token, unknown_token=tokenizer.ids.unk,
            dtype=self._tokenize.dtype, inputs=inputs.describe(), record=record,
            sources=describe_sources(inputs, record["inputs"]),
            deduplicate=settings.deduplicate or any(step.exact_duplicates == "remove" for step in self._steps),
            states={step.name: step.state for step in self._steps},
            columns={step.name: list(step.column) for step in self._steps if step.column is not None},
            commits=dict(inputs.commits))
        self._part = Part(inputs.files, 0) if shard is None else part_of(inputs.files, read, shard.index, shard.count)
        self._tokenize = replace(self._tokenize, steps=copy.deepcopy(self._steps), first_input=self._part.first_file,
                                 sampled_fractions=sampled_fractions(inputs.files))

    def run(self, state: dict[str, Any] | None, *, workers: int | None,
            seconds_between_states: float | None) -> PartialOutput:
        """Write everything into the partial output. Raises ConfigError."""
        with writing(f"--out {self._out}", "remove the reason, and give the same command again"):
            of_steps = [file_of_step(step.name) for step in self._steps if step.has_file]
            output = PartialOutput(self._out, state, seconds_between_states=seconds_between_states,
                                   more_files=of_steps if self._shard is None else [DOCUMENTS])
            try:
                save_examined(output.path, self._inputs)
                self._write(output, state, workers)
            except BaseException as error:
                self._close(output, error)
                raise
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
        writer = DocumentWriter(output, self.facts, self._steps,
                                [InputFile.of(found) for found in self._inputs.files],
                                is_shard=self._shard is not None, state=state)
        place, done_bytes, lines = FIRST_PLACE, 0, 0
        if state is not None:
            place, done_bytes = Place(state["input"], Position(*state["position"])), state["done_bytes"]
            lines = state.get("lines", 0)
        total = self._part.num_bytes
        batches = read_batches(self._part.files, self._settings.read, place, continues=writer.is_inside_document,
                               copies=output.path)
        results = map_in_order(functools.partial(TokenizeBatch, self._tokenize), batches,
                               self._num_workers(workers, total - done_bytes))

        def save() -> None:
            output.save({**self._state(writer), "input": place.input, "position": place.position,
                         "done_bytes": done_bytes, "lines": lines, "finished": False})
            delete_copies(output.path, place)

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
                lines = batch.chunks[-1].end.line - 1
                rate = (writer.num_tokens - first_tokens) / max(time.monotonic() - started, 1e-3)  # tokens per second
                progress.advance(batch.file_bytes, f"{rate / 1e6:.2f} M tokens/s, {writer.num_documents:,} documents")
                if self._can_resume and output.is_due():
                    save()
        self._finish(output, writer, lines)

    @property
    def _can_resume(self) -> bool:
        return all(file.can_resume for file in self._inputs.files)

    def _num_workers(self, workers: int | None, num_bytes: int) -> int:
        """Return the number of processes. Starting a worker takes longer than tokenizing a small input."""
        most = workers or len(os.sched_getaffinity(0))
        # After a resume, the bytes left are an estimate: of compressed files, it may be below 0.
        return min(most, 1 + max(num_bytes, 0) // CHUNK_BYTES) if self._can_resume else most

    def _state(self, writer: DocumentWriter) -> dict[str, Any]:
        return {"record": self.facts.record, "skipped": writer.statistics.skipped, **writer.state()}

    def _finish(self, output: PartialOutput, writer: DocumentWriter, lines: int) -> None:
        """Complete all files in the partial output. lines: line ends that were read in the last file."""
        if self._shard is None:
            check_not_empty(writer, shorten(" ".join(file.name for file in self._inputs.files)))
        check_unchanged(self._inputs.files, self.facts.record["inputs"])
        meta = complete_output(output, writer, self.facts, self._steps)
        if self._shard is not None:
            write_record(output.data_files["shard.json"], self._shard, self.facts, self._part, last_lines=lines,
                         statistics={**writer.statistics.to_json(), "token_counts": []}, command=list(self._command),
                         documents_sha256=hash_file(output.files[DOCUMENTS].descriptor, after_chunk=lambda: None))
        writer.close()
        output.save({**self._state(writer), "meta": meta, "finished": True})


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
