"""Read the inputs in batches for the workers, from any position on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pretrain.data.inputs.chunk import BEGINNING, CHUNK_BYTES, Chunk, Position, ReadSettings
from pretrain.data.inputs.chunks import read_chunks
from pretrain.data.inputs.find import Input


@dataclass(frozen=True)
class Place:
    """A position in the list of inputs."""

    input: int
    position: Position


FIRST_PLACE = Place(0, BEGINNING)


@dataclass(frozen=True)
class Batch:
    """Consecutive chunks of the inputs."""

    chunks: list[Chunk]
    continues: bool
    """whether the first chunk begins inside a document"""
    end: Place
    """place at which the next batch begins"""

    @property
    def file_bytes(self) -> int:
        return sum(chunk.file_bytes for chunk in self.chunks)


def read_batches(inputs: Sequence[Input], settings: ReadSettings, start: Place, *, continues: bool) -> Iterator[Batch]:
    """Yield batches of about CHUNK_BYTES, in order. Small inputs are combined. Raises ConfigError.

    continues: whether `start` is inside a document.
    """
    chunks: list[Chunk] = []
    size = 0
    for chunk, end in _chunks(inputs, settings, start):
        chunks.append(chunk)
        size += chunk.num_bytes
        if size >= CHUNK_BYTES // 2 or len(chunks) >= CHUNK_BYTES // 64:  # empty inputs have no bytes
            yield Batch(chunks, continues, end)
            continues = not chunk.ends_document
            chunks, size = [], 0
    if chunks:
        yield Batch(chunks, continues, end)


def _chunks(inputs: Sequence[Input], settings: ReadSettings, start: Place) -> Iterator[tuple[Chunk, Place]]:
    """Yield each chunk, and the place of the next one: after the last chunk of an input, that is the next input."""
    for index in range(start.input, len(inputs)):
        position = start.position if index == start.input else BEGINNING
        previous: Chunk | None = None
        for chunk in read_chunks(inputs[index], settings, start=position, chunk_bytes=CHUNK_BYTES):
            if previous is not None:
                yield previous, Place(index, previous.end)
            previous = chunk
        if previous is not None:
            yield previous, Place(index + 1, BEGINNING)
