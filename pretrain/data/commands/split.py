"""Split a data set into several: consecutive documents, or documents chosen at random."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pretrain.data.commands.copy_documents import (
    CHUNK_DOCUMENTS,
    Advance,
    TokenCounts,
    chunks,
    copy_chosen,
    copy_range,
    open_checked,
)
from pretrain.data.commands.merge import complete_meta, meta_of
from pretrain.data.commands.output import check_output
from pretrain.data.datasets.split import split_documents
from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.files.writer import IndexedWriter
from pretrain.errors import ConfigError

REST = "rest"
_MOST_RANDOM = 10**9 - 1  # documents that numpy's multivariate_hypergeometric can choose from
_MOST_OUTPUTS = 100


def split(prefix: str, outputs: Sequence[str], *, proportions: str | None = None, documents: str | None = None,
          seed: int | None = None, overwrite: bool, advance: Advance) -> list[IndexedWriter]:
    """Divide the documents of a data set among the outputs. Return their writers, which have the counts.

    proportions: such as 969,30,1. documents: numbers of documents such as rest,1000. seed: choose the documents of each
    output at random, in the order of the input; None: consecutive documents, as --split of a run does.
    Raises ConfigError.
    """
    data = open_checked(prefix)
    where = "--proportions" if documents is None else "--documents"
    words = (documents if documents is not None else proportions or "").split(",")
    if len(words) != len(outputs) or len(outputs) > _MOST_OUTPUTS:
        raise ConfigError(where, problem=f"it has {len(words)} values for {len(outputs)} outputs of --out",
                          remedy="give one value for each output")
    sizes = _numbers(words, data) if documents is not None else _in_proportion(words, data)
    if 0 in sizes:
        raise ConfigError(where, problem=f"{outputs[sizes.index(0)]} would have none of the {data.num_documents} "
                          "documents", remedy="change the values, or leave this output out")
    if seed is not None and data.num_documents > _MOST_RANDOM:
        raise ConfigError("--seed", problem=f"it chooses from at most {_MOST_RANDOM} documents, and {prefix} has "
                          f"{data.num_documents}", remedy="leave it out")
    check_output(outputs, [data], "--out", overwrite=overwrite, num_bytes=data.num_tokens * data.dtype.itemsize)
    try:
        return _copy(data, outputs, sizes, seed, advance)
    except OSError as error:
        raise ConfigError("--out", problem=f"the files cannot be written: {error}") from None


def _in_proportion(words: Sequence[str], data: IndexedDataset) -> list[int]:
    """Return the number of documents of each output in these proportions."""
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 1e9 for value in values) or sum(values) < 1e-9:
        raise ConfigError("--proportions", found=repr(",".join(words)), expected="numbers such as 969,30,1")
    ranges = split_documents(data.num_documents, tuple(value / sum(values) for value in values))
    return [last - first for first, last in ranges]


def _numbers(words: Sequence[str], data: IndexedDataset) -> list[int]:
    """Return the numbers of documents. One of the words may be "rest"."""
    if not all(word == REST or (word.isdecimal() and len(word) < 19) for word in words) or words.count(REST) > 1:
        raise ConfigError("--documents", found=repr(",".join(words)),
                          expected="whole numbers such as 1000,1000; one of them may be the word rest")
    given = sum(int(word) for word in words if word != REST)
    if given > data.num_documents:
        raise ConfigError("--documents", found=f"{given} documents",
                          expected=f"at most {data.num_documents}, which {data.prefix} has")
    return [data.num_documents - given if word == REST else int(word) for word in words]


def _copy(data: IndexedDataset, outputs: Sequence[str], sizes: list[int], seed: int | None,
          advance: Advance) -> list[IndexedWriter]:
    with contextlib.ExitStack() as stack:
        writers = [(stack.enter_context(IndexedWriter(output, data.dtype)), TokenCounts()) for output in outputs]
        if seed is None:
            bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
            for (first, last), (writer, counts) in zip(bounds, writers, strict=True):
                copy_range(data, first, last, writer, counts, advance)
        else:
            for first, choice in choose(data.num_documents, sizes, seed):
                copy_chosen(data, first, choice, writers, advance)
        for writer, counts in writers:
            writer.finalize(complete_meta(meta_of(data), writer, counts))
    return [writer for writer, _ in writers]


def choose(num_documents: int, sizes: list[int], seed: int) -> Iterator[tuple[int, npt.NDArray[np.int8]]]:
    """Yield, for consecutive documents, the first one and the output of each; -1: of none.

    Each output gets exactly its number of documents, and each choice is equally likely. Memory does not grow with the
    number of documents: the numbers in each chunk follow the multivariate hypergeometric distribution.
    """
    generator = np.random.default_rng(seed)
    left = np.array([*sizes, num_documents - sum(sizes)], np.int64)
    numbers = np.array([*range(len(sizes)), -1], np.int8)
    for first, last in chunks(0, num_documents, CHUNK_DOCUMENTS):
        drawn = generator.multivariate_hypergeometric(left, last - first, method="marginals")
        left -= drawn
        yield first, generator.permutation(np.repeat(numbers, drawn))
