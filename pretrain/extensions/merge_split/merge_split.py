"""Merge data sets into one, and split one into several, with little memory for any number and length of documents."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.copy_documents import (
    CHUNK_DOCUMENTS,
    MERGED_FROM,
    OF_TOKENIZER,
    CopyWriter,
    check_output,
    copy_chosen,
    meta_of,
    provenance,
)
from pretrain.data.data_spec import absolute_words, split_documents
from pretrain.data.source_facts import sampled_tokens, tokenizer_notes
from pretrain.data.token_files.index_file import CODES, ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset, check_same_tokenizer, open_checked
from pretrain.data.token_files.inspect_files import Advance
from pretrain.data.token_files.token_file import allow_open_files
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.paths import writing

REST = "rest"
_MOST_RANDOM = 10**9 - 1  # documents that numpy's multivariate_hypergeometric can choose from
_MOST_OUTPUTS = 100
_MOST_LISTED = 1000  # inputs in the .meta.json of merged data


def merge(output: str, prefixes: Sequence[str], *, overwrite: bool,
          advance: Advance) -> tuple[IndexedWriter, list[str]]:
    """Write the documents of all data sets to `output`. Return its writer, which has the counts, and notes.

    The dtype is the widest one. Raises ConfigError for damaged data, data of different tokenizers, and existing output.
    """
    allow_open_files(2 * len(prefixes))
    sources = [open_checked(prefix) for prefix in prefixes]
    dtype = np.result_type(*(source.dtype for source in sources))
    assert dtype in CODES, f"{dtype} has no code in the .idx format"
    check_output([output], sources, output, overwrite=overwrite,
                 num_bytes=dtype.itemsize * sum(source.num_tokens for source in sources))
    meta, notes = merged_meta(sources)
    with writing(output), CopyWriter(output, dtype) as writer:
        for source in sources:
            writer.copy_range(source, 0, source.num_documents, advance)
        writer.finalize({**meta, **merged_provenance(sources)})
    return writer, [*(note for source in sources for note in source.notes), *notes]


def merged_meta(sources: Sequence[IndexedDataset]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts about the tokenizer that all sources share, and notes about those that they may not.

    Raises ConfigError if two sources were prepared with different tokenizers.
    """
    check_same_tokenizer([(str(source.prefix), source) for source in sources])
    metas = [meta_of(source) for source in sources]
    found = [key for key in OF_TOKENIZER if any(key in meta for meta in metas)]
    shared = {key: metas[0].get(key) for key in found
              if all(meta and meta.get(key) == metas[0].get(key) for meta in metas)}
    if "tokenizer_sha256" in shared:
        shared = {**shared, "tokenizer": metas[0].get("tokenizer", "")}  # the same tokenizer may have several paths
    missing = [key for key in found if key not in shared]
    notes = [f"{', '.join(missing)}: left out of the .meta.json: not the same for every input"] if missing else []
    if not all("tokenizer_sha256" in meta for meta in metas):
        notes += tokenizer_notes([(str(source.prefix), source, sampled_tokens(source)) for source in sources
                                  if source.num_tokens])
    return shared, notes


def merged_provenance(datasets: Sequence[IndexedDataset]) -> dict[str, Any]:
    """Return the facts that all data sets share, and under "merged_from" the others of each data set."""
    each = [provenance(data) for data in datasets]
    shared = {key: value for key, value in each[0].items() if all(found.get(key) == value for found in each)}
    others = [{key: value for key, value in found.items() if key not in shared} for found in each]
    if not any(others):
        return shared
    lists = [found["sources"]["list"] for found in others
             if isinstance(found.get("sources"), dict) and isinstance(found["sources"].get("list"), list)]
    if sum(map(len, lists)) > _MOST_LISTED:
        for found in others:
            if isinstance(found.get("sources"), dict):
                found["sources"] = {key: value for key, value in found["sources"].items() if key != "list"}
    return {**shared, MERGED_FROM: [{"data": absolute_words(str(data.prefix)), "documents": data.num_documents, **found}
                                    for data, found in zip(datasets, others, strict=True)]}


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
    with writing("--out"):
        return _copy(data, outputs, sizes, seed, advance)


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
        writers = [stack.enter_context(CopyWriter(output, data.dtype)) for output in outputs]
        if seed is None:
            bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
            for (first, last), writer in zip(bounds, writers, strict=True):
                writer.copy_range(data, first, last, advance)
        else:
            for first, choice in choose(data.num_documents, sizes, seed):
                copy_chosen(data, first, choice, writers, advance)
        for writer in writers:
            writer.finalize({**meta_of(data), **provenance(data)})
    return list(writers)


def choose(num_documents: int, sizes: list[int], seed: int) -> Iterator[tuple[int, npt.NDArray[np.int8]]]:
    """Yield, for consecutive documents, the first one and the output of each; -1: of none.

    Each output gets exactly its number of documents, and each choice is equally likely. Memory does not grow with the
    number of documents: the numbers in each chunk follow the multivariate hypergeometric distribution.
    """
    generator = np.random.default_rng(seed)
    left = np.array([*sizes, num_documents - sum(sizes)], np.int64)
    numbers = np.array([*range(len(sizes)), -1], np.int8)
    for first, last in ranges(0, num_documents, CHUNK_DOCUMENTS):
        drawn = generator.multivariate_hypergeometric(left, last - first, method="marginals")
        left -= drawn
        yield first, generator.permutation(np.repeat(numbers, drawn))
