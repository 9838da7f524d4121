"""Search training data for the n-grams of evaluation sets, in several processes, document by document."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.inspect_files import Advance
from pretrain.extensions.overlap.ngrams import Ngrams, Numbers, load_ngrams

_JOB_TOKENS = 1 << 22
_READ_DOCUMENTS = 1 << 16  # whose bounds are read at once


@dataclass(frozen=True)
class Overlap:
    """N-grams of the evaluation sets that the training data has."""

    most_documents: int
    """n-grams in more training documents are not counted as matches: licenses, menus of web pages and the like"""
    documents_with: Numbers
    """number of training documents that have each n-gram [number of n-grams]"""
    ids: Numbers
    """n-grams that count as matches, sorted, one entry for each training document that has them"""
    documents: Numbers
    """training document of each of these entries"""

    @property
    def matched(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """True for each n-gram that is a match [number of n-grams]."""
        return (self.documents_with > 0) & (self.documents_with <= self.most_documents)

    def contaminated_documents(self) -> Numbers:
        """Return the numbers of the training documents with at least one match, in ascending order."""
        return np.unique(self.documents)

    def documents_of(self, ids: Numbers) -> Numbers:
        """Return the training documents with these n-grams: one for each of the n-grams that it has."""
        lows, highs = np.searchsorted(self.ids, ids, "left"), np.searchsorted(self.ids, ids, "right")
        return np.concatenate([self.documents[:0], *(self.documents[low:high] for low, high in
                                                     zip(lows.tolist(), highs.tolist(), strict=True))])


class _Job(NamedTuple):
    """N-grams that begin at the tokens [start, stop) of consecutive documents."""

    document: int
    bounds: Numbers
    """of these documents, in tokens"""
    start: int
    stop: int


def search(train: IndexedDataset, ngrams: Ngrams, *, most_documents: int, workers: int, advance: Advance) -> Overlap:
    """Search the training data. The memory depends on the n-grams, not on the training data. Raises ConfigError.

    advance: is called with the number of bytes that were searched, and "".
    """
    counts, last_document = np.zeros(ngrams.number, np.int64), np.full(ngrams.number, -1, np.int64)
    ids, documents = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    width = train.dtype.itemsize
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-overlap-") as folder:
        ngrams.save(Path(folder))
        make = functools.partial(_make_find, train.address, folder)
        for job, (found, where) in map_in_order(make, _jobs(train), min(workers, 1 + train.num_tokens // _JOB_TOKENS)):
            is_new = last_document[found] != where  # a long document is searched in several jobs
            found, where = found[is_new], where[is_new]
            is_kept = counts[found] < most_documents  # otherwise it is frequent already
            ids.append(found[is_kept])
            documents.append(where[is_kept])
            counts += np.bincount(found, minlength=ngrams.number)
            last_document[found] = where
            advance((job.stop - job.start) * width, "")
    all_ids, all_documents = np.concatenate(ids), np.concatenate(documents)
    is_match = counts[all_ids] <= most_documents
    all_ids, all_documents = all_ids[is_match], all_documents[is_match]
    order = np.lexsort((all_documents, all_ids))
    return Overlap(most_documents, counts, all_ids[order], all_documents[order])


def _jobs(train: IndexedDataset) -> Iterator[_Job]:
    """Divide the data into jobs of about _JOB_TOKENS tokens: several documents, or a part of a long one."""
    for first, last in ranges(0, train.num_documents, _READ_DOCUMENTS):
        bounds = train.document_offsets(first, last)
        low = 0
        while low < last - first:
            high = max(low + 1, int(np.searchsorted(bounds, bounds[low] + _JOB_TOKENS, "right")) - 1)
            high = min(high, last - first)
            for start, stop in ranges(int(bounds[low]), int(bounds[high]), _JOB_TOKENS):
                yield _Job(first + low, bounds[low : high + 1], start, stop)
            low = high


def _make_find(prefix: str, folder: str) -> Callable[[_Job], tuple[Numbers, Numbers]]:
    """Open the data and the index in a worker process, and return the function that does a job."""
    return functools.partial(_find, IndexedDataset(prefix), load_ngrams(Path(folder)))


def _find(train: IndexedDataset, ngrams: Ngrams, job: _Job) -> tuple[Numbers, Numbers]:
    """Return the ids of the n-grams, and the training document of each: each pair once, by document."""
    stop = min(job.stop + ngrams.n - 1, int(job.bounds[-1]))
    positions, ids = ngrams.find(train.raw_tokens(job.start, stop))
    positions += job.start
    place = np.searchsorted(job.bounds, positions, "right") - 1
    is_inside = (positions + ngrams.n <= job.bounds[place + 1]) & (positions < job.stop)
    place, ids = place[is_inside], ids[is_inside]
    pairs = np.unique(place * ngrams.number + ids)
    return pairs % ngrams.number, pairs // ngrams.number + job.document
