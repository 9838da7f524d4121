"""Merge the shards of a preparation into the files that one machine would have written.

The documents of all shards go through the DocumentWriter of a preparation, in order. So duplicates of other shards are
counted and left out, and the statistics are computed, by the same code.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.active_extensions import document_steps
from pretrain.data.prepare.complete import DataFacts, PreparedData, check_not_empty, complete_output
from pretrain.data.prepare.document_step import DocumentStep, InputFile, row_type
from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.partial_output import DOCUMENTS, PartialOutput, file_of_step, partial_path, read_state
from pretrain.data.prepare.shards import (
    ShardFiles,
    ShardRecord,
    shard_of,
)
from pretrain.data.prepare.summary import Statistics
from pretrain.data.prepare.tokenize_batch import TokenizedBatch
from pretrain.data.token_files.hashes import BLOCK_BYTES
from pretrain.data.token_files.index_file import HEADER, LENGTH_DTYPE
from pretrain.data.token_files.inspect_files import Advance
from pretrain.data.token_files.writer import existing_file, rename_files
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.merge_split.open_shards import not_complete
from pretrain.paths import check_folder, check_space, writing

_MOST_DOCUMENTS = 1 << 14  # in a batch
_MOST_TOKENS = 1 << 20  # in a batch; a longer document is divided
_OF_PARTS = row_type({}).names or ()  # columns of the rows that each part of a long document has


def steps_of_shards(shards: Sequence[ShardFiles]) -> list[DocumentStep]:
    """Return the steps of extensions with the settings with which the shards were made. Raises ConfigError."""
    facts = shards[0].record.facts
    return document_steps({name.removeprefix("--"): value for name, value in facts.record.items()})


def merge_shards(out: str, shards: Sequence[ShardFiles], *, steps: Sequence[DocumentStep] | None = None,
                 overwrite: bool, advance: Advance) -> PreparedData:
    """Write the files of the data set that the shards are parts of. Raises ConfigError.

    steps: those of the preparation, in their order (default: `steps_of_shards`).
    """
    facts = shards[0].record.facts
    steps = steps_of_shards(shards) if steps is None else steps
    if missing := sorted(facts.states.keys() - {step.name for step in steps}):
        raise ConfigError(shards[0].prefix, problem=f"it was made with the extension {missing[0]}, which is not here",
                          remedy="install it, or name it by --extension")
    steps = [copy.deepcopy(step) for step in steps if step.name in facts.states]
    for step in steps:
        step.state = facts.states[step.name]
    skips = any(shard.record.facts.record["skip_errors"] for shard in shards)
    facts = replace(facts, record={**facts.record, "skip_errors": skips})
    if read_state(out) is not None and not overwrite:
        raise ConfigError(str(partial_path(out)), problem="a preparation of the same name was stopped here",
                          remedy="give another OUT, or --overwrite to drop it")
    if (existing := existing_file(out)) and not overwrite:
        raise ConfigError(out, problem=f"{existing} exists", remedy="give --overwrite to replace it, or another OUT")
    check_folder(Path(out).absolute().parent, out)
    check_space(Path(out), out, sum(shard.hashes.bin_bytes + 6 * shard.hashes.idx_bytes for shard in shards))
    with writing(out):
        output = PartialOutput(out, None, more_files=[file_of_step(step.name) for step in steps if step.has_file])
        try:
            meta = _write(output, facts, steps, shards, advance)
            rename_files(output.data_files, out)
        finally:
            output.delete()
    return PreparedData.of(meta)


def _write(output: PartialOutput, facts: DataFacts, steps: Sequence[DocumentStep], shards: Sequence[ShardFiles],
           advance: Advance) -> dict[str, Any]:
    writer = DocumentWriter(output, facts, steps, _input_files(shards))
    lines: Counter[int] = Counter()  # line ends of each file in the shards so far
    for shard in shards:
        lines_before = lines[shard.record.first_file] if shard.record.first_byte else 0
        _add_counts(writer.statistics, shard.record, lines_before, facts)
        lines[shard.record.last_file] += shard.record.last_lines
        for batch in replay(shard, np.dtype(facts.dtype).newbyteorder("<")):
            batch.origins["line"][batch.origins["input"] == shard.record.first_file] += lines_before
            writer.add(batch, lambda: None)  # `output` has no saved state
            advance(batch.tokens.nbytes, f"{writer.num_documents:,} documents")
    check_not_empty(writer, shards[0].prefix)
    meta = complete_output(output, writer, facts, steps)
    writer.close()
    return meta


def _input_files(shards: Sequence[ShardFiles]) -> list[InputFile]:
    """Return the inputs of all shards, by their numbers."""
    files: dict[int, InputFile] = {}
    for shard in shards:
        files |= dict(enumerate(shard.record.files, shard.record.first_file))
    return [files[number] for number in range(len(files))]


def _add_counts(statistics: Statistics, record: ShardRecord, lines_before: int, facts: DataFacts) -> None:
    """Add the counts of documents that are not in a shard's files, and of its longest document.

    `DocumentWriter.add` adds the others. It finds no longer document, so that the place of the longest one is right.
    """
    counts = Statistics.from_json(record.statistics)
    relative, name = f"{record.first_name} (from byte {record.first_byte}):", record.first_name

    def in_file(place: str) -> str:
        if not record.first_byte or not place.startswith(relative):
            return place
        return f"{name}:{int(place.removeprefix(relative)) + lines_before}"

    statistics.empty += counts.empty
    statistics.divided += counts.divided
    if facts.deduplicate:
        statistics.add_duplicates({source: found.duplicates for source, found in counts.sources.items()})
    for source, found in counts.sources.items():
        statistics.sources[source].add_quality(found.quality)
    statistics.add_longest(counts.longest_tokens, in_file(counts.longest_place))
    for place, reason in counts.skipped_samples:
        statistics.skip(in_file(place), reason)
    statistics.skipped += counts.skipped - len(counts.skipped_samples)


def replay(shard: ShardFiles, dtype: npt.DTypeLike) -> Iterator[TokenizedBatch]:
    """Yield the documents of a shard as batches for `DocumentWriter.add`. Raises ConfigError if the .bin is damaged."""
    with _Tokens(shard, np.dtype(dtype)) as tokens:
        for lengths, rows in _documents(shard):
            first = 0
            while first < len(lengths):
                size = int(np.searchsorted(np.cumsum(lengths[first:]), _MOST_TOKENS, "right"))
                if size == 0:
                    yield from _long_document(tokens, int(lengths[first]), rows[first])
                else:
                    ends = np.cumsum(lengths[first : first + size])
                    some = rows[first : first + size]
                    yield _batch(tokens.read(int(ends[-1])), ends, some)
                first += max(size, 1)
        tokens.check_end()


def _documents(shard: ShardFiles) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]]:
    """Yield the lengths and the rows of consecutive documents."""
    with Path(f"{shard.prefix}.idx").open("rb") as index, Path(f"{shard.prefix}.{DOCUMENTS}").open("rb") as rows:
        index.seek(HEADER.size)
        for start in range(0, shard.num_documents, _MOST_DOCUMENTS):
            count = min(_MOST_DOCUMENTS, shard.num_documents - start)
            row = row_type(shard.record.facts.columns)
            lengths = np.frombuffer(index.read(count * LENGTH_DTYPE.itemsize), LENGTH_DTYPE)
            yield lengths.astype(np.int64), np.frombuffer(rows.read(count * row.itemsize), row)


def _long_document(tokens: "_Tokens", length: int, row: np.void) -> Iterator[TokenizedBatch]:
    """Yield a document in batches that it begins, continues and ends in."""
    left, rows, none = length, np.array([row]), np.zeros(0, np.int64)
    place = "a long document"  # not used: the statistics know the longest document
    while left > 0:
        size = min(left, _MOST_TOKENS)
        left -= size
        batch = _batch(tokens.read(size), none if left else np.array([size]), rows)
        batch.tail_place = place
        yield batch
        rows["text_bytes"], place = 0, ""
        rows = rows[list(_OF_PARTS)]  # the numbers of the steps are those of the document


def _batch(tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> TokenizedBatch:
    """Return a batch of documents."""
    values = {name: rows[name] for name in rows.dtype.names or () if name not in _OF_PARTS}
    return TokenizedBatch(tokens, ends, rows["text_bytes"].copy(), rows["digests"][: len(ends)],
                          rows["origins"].copy(), values)


class _Tokens:
    """The .bin of a shard, read once from its beginning to its end, and compared with its hashes."""

    def __init__(self, shard: ShardFiles, dtype: "np.dtype[Any]") -> None:
        self._shard, self._dtype = shard, dtype
        self._file = Path(f"{shard.prefix}.bin").open("rb")  # noqa: SIM115 (closed by __exit__)
        self._digest, self._position = hashlib.sha256(), 0

    def read(self, count: int) -> npt.NDArray[Any]:
        """Return the next `count` tokens."""
        content = self._file.read(count * self._dtype.itemsize)
        view = memoryview(content)
        while view:
            part = view[: BLOCK_BYTES - self._position % BLOCK_BYTES]
            self._digest.update(part)
            self._position, view = self._position + len(part), view[len(part):]
            if self._position % BLOCK_BYTES == 0:
                self._check_block()
        return np.frombuffer(content, self._dtype)

    def _check_block(self) -> None:
        number = (self._position - 1) // BLOCK_BYTES
        if self._digest.hexdigest() != self._shard.hashes.blocks[number]:
            shard, (out, _) = self._shard.record.shard, shard_of(self._shard.prefix) or ("", None)
            raise not_complete({shard: f"{self._file.name} is damaged in block {number} of 16 MiB"}, out,
                                {shard: self._shard.record})
        self._digest = hashlib.sha256()

    def check_end(self) -> None:
        """Compare the last block, after all tokens were read."""
        if self._position % BLOCK_BYTES:
            self._check_block()
        assert self._position == self._shard.hashes.bin_bytes, f"{shorten(self._shard.prefix)}: tokens are left"

    def __enter__(self) -> "_Tokens":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
