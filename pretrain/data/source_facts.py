"""Facts about a token file, read from a sample before training: ends and lengths of documents, entropy, token order."""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import listed
from pretrain.stored_json import read_json

_CHUNKS, _CHUNK_TOKENS = 64, 1024  # tokens that are sampled: their statistics take 0.1 s. Four documents a chunk
_FEWEST_CHUNKS = 4
_WINDOW = 32  # tokens that are shuffled together: fewer than most documents have, so that their topic remains
_SHUFFLES = 4
_FEWEST_TOKENS = 2048  # a smaller sample shows nothing about the order of tokens
_LEAST_ORDER = 0.002  # nats; bases of DNA have 0.01, words and bytes of English and Python 0.3 to 0.8
_DEVIATIONS = 5
_CONSTANT = 0.1  # nats of unigram entropy; the four bases of DNA have 1.39
_FREQUENT = 64  # most frequent tokens of two sources that are compared
# A lower fraction of them is in both. Halves of Shakespeare share 0.8 to 0.9 with one tokenizer, and at most 0.7 with
# two; but with one tokenizer, English and Python share 0.3, and Shakespeare and Markdown 0.5.
_LEAST_SHARED = 0.7
_MOST_NAMED = 4  # sources in a note
_REPETITIVE = 0.1  # size of the tokens after compression / before; source code and prose have 0.4 to 0.8
_MANY_DUPLICATES = 0.3  # of the documents; crawls of the web have 0.03 to 0.14 (arXiv 2107.06499, table 2)


@dataclass(frozen=True)
class SourceFacts:
    """Statistics of a sample of a token file."""

    ends: Mapping[int, int]
    """last token of a sampled document -> number of these documents"""
    longest_document: int  # tokens, of the sampled documents
    tokens: npt.NDArray[np.int64]  # sampled, [chunks, tokens of a chunk]
    unigram_entropy: float  # nats, of the whole file if its .meta.json has it

    @property
    def documents(self) -> int:
        """Number of sampled documents with at least one token."""
        return sum(self.ends.values())

    def separates(self, eod_token: int) -> bool:
        """Return whether a sampled document ends with this token, or a sampled token is this one."""
        return self.ends.get(eod_token, 0) > 0 or bool((self.tokens == eod_token).any())

    def ends_text(self) -> str:
        """Describe the last tokens of the sampled documents."""
        token, count = max(self.ends.items(), key=lambda item: item[1], default=(0, 0))
        if count > self.documents / 2:
            return f"{count} of {self.documents} sampled documents end with token {token}"
        return f"{self.documents} sampled documents end with {len(self.ends)} different tokens"


def source_facts(indexed: IndexedDataset, *, num_sources: int = 1) -> SourceFacts:
    """Read a sample of the documents and tokens, evenly spread over the file, and a smaller one of many files."""
    chunks = max(_CHUNKS // num_sources, _FEWEST_CHUNKS)
    numbers = np.linspace(0, indexed.num_documents - 1, min(4 * chunks, indexed.num_documents), dtype=np.int64)
    bounds = [indexed.document_offsets(int(number), int(number) + 1) for number in numbers]
    lasts = np.array([stop - 1 for start, stop in bounds if stop > start], np.int64)
    ends = Counter(indexed.tokens_at(lasts, 1)[:, 0].tolist())
    tokens = sampled_tokens(indexed, chunks)
    entropy = indexed.meta.get("entropy_nats")
    return SourceFacts(ends, max((int(stop - start) for start, stop in bounds), default=0), tokens,
                       _entropy(tokens) if entropy is None else float(entropy))


def sampled_tokens(indexed: IndexedDataset, chunks: int = _FEWEST_CHUNKS) -> npt.NDArray[np.int64]:
    """Return tokens that are evenly spread over a file with at least one: [chunks, tokens of a chunk]."""
    length = min(_CHUNK_TOKENS, max(indexed.num_tokens // chunks, 1))
    starts = np.linspace(0, indexed.num_tokens - length, chunks, dtype=np.int64)
    return indexed.tokens_at(starts, length).astype(np.int64)


def end_notes(where: str, facts: SourceFacts, eod_token: int | None) -> list[str]:
    """Note documents that do not end with the end-of-document token. None: it is not known."""
    if eod_token is None or facts.ends.get(eod_token, 0) == facts.documents:
        return []
    if eod_token not in facts.ends:
        return [f"{where}: the end-of-document token is {eod_token}, but {facts.ends_text()}"]
    return [f"{where}: {facts.documents - facts.ends[eod_token]} of {facts.documents} sampled documents do not end "
            f"with the end-of-document token, {eod_token}"]


def learnable_notes(indexed: IndexedDataset, where: str, facts: SourceFacts) -> list[str]:
    """Note data from which there is little to learn: constant, in random order, or with many duplicates."""
    duplicates = _duplicates(indexed.small_files)
    notes = [f"{where}: {duplicates:.0%} of its documents are exact duplicates of others (its .summary.json): "
             "`ds-pretrain prepare --deduplicate` leaves them out"] if duplicates > _MANY_DUPLICATES else []
    if facts.unigram_entropy < _CONSTANT:
        return [*notes, f"{where}: nearly all of its tokens are the same one (unigram entropy "
                f"{facts.unigram_entropy:.4f} nats): there is nothing to learn"]
    if facts.tokens.size >= _FEWEST_TOKENS and not _has_order(facts.tokens):
        notes.append(f"{where}: its tokens are in random order (in a sample of {facts.tokens.size:,}, the next token "
                     "does not depend on the one before it): the loss cannot fall below the unigram entropy, "
                     f"{facts.unigram_entropy:.2f} nats")
    return notes


def tokenizer_notes(sources: Sequence[tuple[str, IndexedDataset, npt.NDArray[np.int64]]]) -> list[str]:
    """Note sources that may have another tokenizer than the first one, if no .meta.json names it.

    Frequencies of tokens cannot tell another tokenizer from another language. They can show that neither is likely.

    Args:
        sources: name in messages, data, and a sample of its tokens.
    """
    known = [row for row in sources if row[2].size >= _FEWEST_TOKENS]
    named = [row for row in known if row[1].meta.get("tokenizer_sha256")]
    if len(known) < 2 or len(named) == len(known):
        return []
    first, _, tokens = (named or known)[0]
    shares = [(where, own, _shared_frequent_tokens(tokens, own)) for where, indexed, own in known
              if where != first and not indexed.meta.get("tokenizer_sha256")]
    different = [f"{where} ({share:.0%}; largest token {own.max()})" for where, own, share in shares
                 if share < _LEAST_SHARED]
    if not different:
        return []
    return [f"whether these sources have the tokenizer of {first} is unknown, because no .meta.json names theirs, and "
            f"they share few of its frequent tokens: {listed(different, _MOST_NAMED)}. It may be another tokenizer, "
            "for which the same token is another text, or only another language or kind of text, such as code (texts "
            f"of one kind share 80%; the largest token in a sample of the first is {tokens.max()})"]


def _shared_frequent_tokens(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Return which fraction of the most frequent tokens of two samples is in both, by their frequencies."""
    tokens, numbers = np.unique(np.concatenate([first.ravel(), second.ravel()]), return_inverse=True)
    parts = numbers.ravel()[:first.size], numbers.ravel()[first.size:]
    counts = [np.bincount(part, minlength=len(tokens)) / part.size for part in parts]
    frequent = np.union1d(*(np.argsort(each)[-_FREQUENT:] for each in counts))
    shared, total = np.minimum(*counts)[frequent].sum(), (counts[0] + counts[1])[frequent].sum()
    return float(2 * shared / total)


def _has_order(tokens: npt.NDArray[np.int64]) -> bool:
    """Return whether the next token depends on the one before it.

    Compares the entropy of pairs of neighbours with that after the tokens are shuffled within short windows. Both are
    underestimated alike by a small sample, so that their difference needs no correction.
    """
    windows = tokens[:, :tokens.shape[1] // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    if not windows.size:
        windows = tokens
    random = np.random.default_rng(0)
    shuffled = np.array([_pair_entropy(random.permuted(windows, axis=1)) for _ in range(_SHUFFLES)])
    gain = float(shuffled.mean()) - _pair_entropy(windows)
    return gain > _LEAST_ORDER + _DEVIATIONS * float(shuffled.std(ddof=1))


def _pair_entropy(windows: npt.NDArray[np.int64]) -> float:
    return _entropy(windows[:, :-1] * (int(windows.max()) + 1) + windows[:, 1:])


def _entropy(values: npt.NDArray[np.int64]) -> float:
    """Return the entropy of the frequencies of the values, in nats."""
    values = values.ravel()
    few = values.max(initial=0) < 4 * values.size  # np.unique sorts, which takes 20 times as long as np.bincount
    counts = np.bincount(values) if few else np.unique(values, return_counts=True)[1]
    fractions = counts[counts > 0] / values.size
    return float(-(fractions * np.log(fractions)).sum())


def _duplicates(prefix: Path) -> float:
    """Return the fraction of duplicates among the documents of a preparation; 0 if it is not known."""
    try:
        summary: dict[str, Any] = read_json(Path(f"{prefix}.summary.json"))
        return 0.0 if summary["duplicates_removed"] else summary["duplicate_documents"] / summary["documents"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return 0.0  # of another program, or not counted


def is_degenerate(content: bytes) -> bool:
    """Return whether the bytes of a document's tokens are hardly anything but repetitions."""
    return len(zlib.compress(content, 1)) < _REPETITIVE * len(content)
