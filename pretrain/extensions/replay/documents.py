"""Name the documents of samples: their numbers, places in the token files and inputs, and what is odd. No torch."""

import json
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.run_data import RunData
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.own import OwnSamples
from pretrain.data.source_facts import is_degenerate
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import printable

_EXCERPT = 160  # characters
_DECODED_TOKENS = 2048
_EXAMINED_TOKENS = 2**16  # examined tokens of a document
_COMPARED_DOCUMENTS = 64  # documents of the source, evenly spread
_FEWEST_TOKENS = 16  # shorter documents have no statistics
_SEARCHED_BYTES = 2**31  # searched bytes of the input files
_PROBE = 48  # characters that are searched for
_ONE_TOKEN = 0.6  # fraction of a document
_NO_TEXT = 0.08  # fraction of its characters
_UNLIKE_Z = 8.0
_EVEN = 0.96  # random bytes have 0.97 to 0.98, text of a byte-level BPE with 256 tokens 0.90 to 0.94
_FEWEST_TOLD_APART = 250  # tokens


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a token file in a sample."""

    source: IndexedDataset
    start: int  # token of the .bin
    length: int


@dataclass(frozen=True)
class OddDocument:
    """A document in a sample that stands out, or that has a high loss."""

    sample: int
    document: int  # number in the token file, from 0
    prefix: str  # prefix of the token file
    first_token: int  # first token of the part in the sample, in the .bin
    tokens: int  # tokens of this part
    document_tokens: int
    loss: float  # mean, of this part
    excess: float  # nats above the usual loss, in all
    odd: list[str] = field(default_factory=list)
    excerpt: str = ""
    inputs: list[str] = field(default_factory=list)  # where its source comes from
    position: str = ""  # in an input; "": not found


def odd_documents(data: RunData, report: dict[str, Any]) -> list[OddDocument]:
    """Return the documents of the samples in samples.json that stand out, or else of those with the highest loss.

    The documents of the worst sample come first.
    """
    dataset = data.datasets["train"]
    found: list[OddDocument] = []
    for odd in report["odd"] or report["highest"]:
        documents = documents_of(dataset, odd["id"], np.array(odd["token_losses"]), report["usual_loss"])
        worst = max((abs(document.excess) for document in documents), default=0.0)
        found += [_described(document, data) for document in documents if abs(document.excess) >= worst / 2
                  and (document.sample, document.document) not in {(each.sample, each.document) for each in found}]
    return found


def documents_of(dataset: SampleDataset, sample: int, token_losses: npt.NDArray[np.float64],
                 usual_loss: float) -> list[OddDocument]:
    """Return the documents of a sample, those with the largest excess of loss first.

    `token_losses`: of each label. The label i is the token i + 1 of the sample.
    """
    documents, place = [], 0
    for piece in pieces_of(dataset, sample):
        for number, first, last in _documents_in(piece):
            begin = place + first - piece.start
            losses = token_losses[max(begin - 1, 0):begin - 1 + last - first]
            bounds = piece.source.document_offsets(number, number + 1)
            if len(losses):
                documents.append(OddDocument(
                    sample, number, str(piece.source.prefix), first, last - first, int(bounds[1] - bounds[0]),
                    round(float(losses.mean()), 4), round(float((losses - usual_loss).sum()), 2)))
        place += piece.length
    return sorted(documents, key=lambda document: -abs(document.excess))


def pieces_of(dataset: SampleDataset, sample: int) -> list[Piece]:
    """Return which tokens of which files a sample consists of. Items of --dataset_module have none."""
    if isinstance(dataset, OwnSamples):
        return []
    with _recorded_reads(dataset) as reads:
        dataset.samples([sample])
    return reads


@contextmanager
def _recorded_reads(dataset: SampleDataset) -> Iterator[list[Piece]]:
    """Record what this thread reads of the token files: every kind of dataset reads its samples by `pieces`."""
    reads: list[Piece] = []
    thread = threading.get_ident()

    def recorded(source: IndexedDataset) -> Callable[..., Any]:
        def pieces(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Any:
            if threading.get_ident() == thread:
                reads.extend(Piece(source, int(start), int(length))
                             for start, length in zip(starts, lengths, strict=True))
            return type(source).pieces(source, starts, lengths)

        return pieces

    for source in dataset.sources:
        source.pieces = recorded(source)  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        for source in dataset.sources:
            source.__dict__.pop("pieces", None)


def _documents_in(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield the documents of a piece: number, first token, and token after the last one, in the .bin."""
    first, number = piece.start, document_at(piece.source, piece.start)
    while first < piece.start + piece.length:
        end = piece.source.document_offset(number + 1)
        last = min(end, piece.start + piece.length)
        if last > first:
            yield number, first, last
        first, number = max(first, end), number + 1


def document_at(source: IndexedDataset, token: int) -> int:
    """Return the number of the document that has this token of the .bin, by bisection."""
    return max(bisect_right(range(source.num_documents), token, key=source.document_offset) - 1, 0)


def _described(found: OddDocument, data: RunData) -> OddDocument:
    source = next(each for each in data.datasets["train"].sources if str(each.prefix) == found.prefix)
    bounds = source.document_offsets(found.document, found.document + 1).tolist()
    tokens = source.tokens(bounds[0], min(bounds[1], bounds[0] + _EXAMINED_TOKENS))
    decode = data.tokenizer.decode if data.tokenizer else None
    content = tokens[tokens != data.eod_token] if data.eod_token is not None else tokens
    text = decode(content[:_DECODED_TOKENS].tolist()) if decode else " ".join(map(str, content[:40].tolist()))
    return OddDocument(**{**asdict(found), "odd": oddities(content, text if decode else None, source, found.document),
                          "excerpt": printable(text[:_EXCERPT]), "inputs": inputs_of(source),
                          "position": find_in_inputs(source, text) if decode else ""})


def oddities(tokens: npt.NDArray[np.int64], text: str | None, source: IndexedDataset, document: int) -> list[str]:
    """Return what is odd about a document, a line each, the plainest first."""
    lines: list[str] = []
    if len(tokens) < _FEWEST_TOKENS:
        return lines
    counts = np.bincount(tokens)
    top, share = int(counts.argmax()), float(counts.max() / len(tokens))
    if share >= _ONE_TOKEN:
        lines.append(f"one token repeated: token {top} is {share:.0%} of its {len(tokens):,} tokens")
    elif is_degenerate(tokens.astype(source.dtype).tobytes()):
        lines.append("hardly anything but repetitions")
    wrong = sum(1 for character in text or "" if character == "\ufffd" or not (character.isprintable()
                                                                               or character in "\n\r\t"))
    if text and wrong / len(text) >= _NO_TEXT:
        lines.append(f"bytes that are no text: {wrong / len(text):.0%} of its characters")
    unlike = unlike_source(tokens, source, document)
    if unlike is not None:
        lines.append(f"token statistics unlike the source's: {unlike[0]:.2f} nats a token by the source's frequencies, "
                     f"and {unlike[1]:.2f} usually" + ("" if share >= _ONE_TOKEN else f"; {_likely(counts)}"))
    return lines


def _likely(counts: npt.NDArray[np.int64]) -> str:
    """Return what usually has tokens of these numbers of occurrences, if the tokens are not those of the source."""
    if counts.sum() < _FEWEST_TOLD_APART:
        return "random bytes and text of another tokenizer look like this"
    return "random bytes look like this" if evenness(counts) >= _EVEN else "text of another tokenizer looks like this"


def evenness(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of these numbers of occurrences relative to its maximum: 1 if all tokens are as frequent."""
    fractions = counts[counts > 0] / counts.sum()
    return float(-(fractions * np.log(fractions)).sum() / np.log(max(len(fractions), 2)))


def unlike_source(tokens: npt.NDArray[np.int64], source: IndexedDataset, document: int) -> tuple[float, float] | None:
    """Return the unigram cross-entropy of a document and the usual one of the source; None if it is not unusual."""
    numbers = sorted({index * source.num_documents // _COMPARED_DOCUMENTS for index in range(_COMPARED_DOCUMENTS)}
                     - {document})
    others = []
    for number in numbers:
        first, last = source.document_offsets(number, number + 1).tolist()
        others.append(source.tokens(first, min(last, first + _EXAMINED_TOKENS)))
    if not others:
        return None
    counts = np.bincount(np.concatenate(others), minlength=max(map(_largest, [*others, tokens])) + 1)
    costs = -np.log((counts + 0.5) / (counts.sum() + 0.5 * len(counts)))
    usual = np.array([costs[other].mean() for other in others if len(other) >= _FEWEST_TOKENS])
    if len(usual) < 4:
        return None
    center = float(np.median(usual))
    spread = max(1.4826 * float(np.median(np.abs(usual - center))), 0.03 * center)
    own = float(costs[tokens].mean())
    return (own, center) if abs(own - center) > _UNLIKE_Z * spread else None


def _largest(tokens: npt.NDArray[np.int64]) -> int:
    return int(tokens.max()) if len(tokens) else 0


def inputs_of(source: IndexedDataset) -> list[str]:
    """Return the inputs from which the data was prepared, as its .meta.json says."""
    return [path for meta in _metas(source.meta) for path in _listed(meta)]


def _metas(meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield meta
    for merged in meta.get("merged_from") or []:
        yield from _metas(merged)


def _listed(meta: dict[str, Any]) -> Iterator[str]:
    sources = meta.get("sources")
    for entry in (sources.get("list") or [] if isinstance(sources, dict) else []):
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            yield entry["path"]


def find_in_inputs(source: IndexedDataset, text: str) -> str:
    """Return the place of a document in an input file, by the beginning of its text; "" if it is not found.

    Uncompressed files on this machine are searched, at most 2 GiB.
    """
    probe = max(text[:4 * _PROBE].split("\n"), key=len)[:_PROBE]
    if len(probe.strip()) < 8:
        return ""
    forms = {probe.encode(errors="replace"), *(json.dumps(probe, ensure_ascii=ascii)[1:-1].encode(errors="replace")
                                               for ascii in (True, False))}
    left = _SEARCHED_BYTES
    for path in inputs_of(source):
        size = os.path.getsize(path) if Path(path).is_file() else 0
        if not 0 < size <= left:
            continue
        left -= size
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            place = min((found for form in forms if (found := content.find(form)) >= 0), default=-1)
            if place >= 0:
                return f"{path}, line {1 + content[:place].count(bytes([10])):,}, byte {place:,}"
    return ""
