"""Find damaged, duplicate and degenerate documents in token files; statistics of the rest, also as an HTML page."""

import hashlib
import html
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.analysis.svg import svg_element
from pretrain.data.source_facts import is_degenerate
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError

KINDS = {
    "damaged": "tokens that the vocabulary does not have",
    "no end": "no end-of-document token at the end, unlike most others",
    "inner end": "an end-of-document token before the end",
    "empty": "no token besides the end-of-document token",
    "one token": "one token besides the end-of-document token",
    "degenerate": "hardly anything but repetitions",
    "duplicate": "the same tokens as an earlier document",
}
_SHOWN = 5  # documents that are named of each kind
_CHUNK_TOKENS = 2**22  # read at once
_LARGEST_VOCAB = 2**24  # larger tokens, as in int64 files with damage, would need a huge table of counts
_FEWEST_TOKENS = 64  # shorter documents are not called degenerate
_SHOWN_TOKENS = 600  # shown tokens of a sampled document
_SAMPLED = 12  # documents, besides the examples of each kind
_FREQUENT = 40  # tokens in the table
_STYLE = """body { font: 15px/1.45 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: .7em; overflow-x: auto; white-space: pre-wrap; }
table { border-collapse: collapse; } td, th { padding: .1em .8em .1em 0; text-align: right; }
td:nth-child(2) { text-align: left; font-family: monospace; } svg { max-width: 100%; height: auto; }"""


@dataclass
class DocumentReport:
    """Result of `inspect_documents`."""

    num_documents: int
    inspected: int
    token_bytes: int  # bytes of a token in the .bin
    tokens: int = 0  # tokens of the inspected documents
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    examples: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})  # document numbers
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(40, np.int64))
    """number of documents of 0, 1, 2 to 3, 4 to 7, ... tokens"""
    token_counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """number of occurrences of each token"""
    longest: tuple[int, int] = (0, 0)  # tokens, document

    def add(self, kind: str, document: int) -> None:
        self.counts[kind] += 1
        if len(self.examples[kind]) < _SHOWN:
            self.examples[kind].append(document)


def inspect_documents(data: IndexedDataset, *, vocab_size: int | None, eod_token: int | None, most: int,
                      advance: Callable[[int, str], None]) -> DocumentReport:
    """Inspect the documents; of more than `most`, evenly spread runs of consecutive ones.

    Memory: about 100 bytes per inspected document for the hashes, 25 bytes per token of the longest one, and 100 MB.

    Args:
        vocab_size: None: not known, only tokens that no vocabulary has count as damaged.
        eod_token: end-of-document token; None: not known.
        advance: is called with the number of bytes that were read, and "".
    """
    report = DocumentReport(data.num_documents, min(most, data.num_documents), data.dtype.itemsize)
    seen: set[bytes] = set()
    without_end: list[int] = []
    for first, offsets in _chunks(data, most):
        tokens = data.tokens(int(offsets[0]), int(offsets[-1]))
        _count(report, tokens)
        for number, (start, stop) in enumerate(zip(offsets[:-1] - offsets[0], offsets[1:] - offsets[0], strict=True)):
            document = tokens[start:stop]
            _inspect(report, document, first + number, vocab_size, eod_token, without_end)
            _compare(report, _text_of(document, eod_token).astype(data.dtype).tobytes(), first + number, seen)
        advance(len(tokens) * data.dtype.itemsize, "")
    if len(without_end) < report.inspected / 2:  # otherwise the data was prepared without this token
        report.counts["no end"], report.examples["no end"] = len(without_end), without_end[:_SHOWN]
    return report


def _chunks(data: IndexedDataset, most: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield (first document, token offsets) of runs of documents with at most about _CHUNK_TOKENS tokens each."""
    total = data.num_documents
    runs = 1 if total <= most else min(most, 64)
    for run in range(runs):
        first, last = total * run // runs, total * (run + 1) // runs
        last = min(last, first + -(-min(most, total) // runs))
        while first < last:
            offsets = data.document_offsets(first, min(last, first + 2**16))
            fits = int(np.searchsorted(offsets, offsets[0] + _CHUNK_TOKENS, side="right")) - 1
            offsets = offsets[:max(fits, 1) + 1]
            yield first, offsets
            first += len(offsets) - 1


def _count(report: DocumentReport, tokens: npt.NDArray[np.int64]) -> None:
    report.tokens += len(tokens)
    counts = np.bincount(tokens[(tokens >= 0) & (tokens < _LARGEST_VOCAB)])
    if len(counts) > len(report.token_counts):
        report.token_counts = np.pad(report.token_counts, (0, len(counts) - len(report.token_counts)))
    report.token_counts[:len(counts)] += counts


def _inspect(report: DocumentReport, tokens: npt.NDArray[np.int64], document: int, vocab_size: int | None,
             eod_token: int | None, without_end: list[int]) -> None:
    """Count the length of a document and its defects that the tokens alone show."""
    report.lengths[len(tokens).bit_length()] += 1
    report.longest = max(report.longest, (len(tokens), document))
    text = _text_of(tokens, eod_token)
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= (vocab_size or _LARGEST_VOCAB)):
        report.add("damaged", document)
    if eod_token is not None:
        if len(text) == len(tokens):
            without_end.append(document)
        if (text == eod_token).any():
            report.add("inner end", document)
    if len(text) < 2:
        report.add("one token" if len(text) else "empty", document)


def _text_of(tokens: npt.NDArray[np.int64], eod_token: int | None) -> npt.NDArray[np.int64]:
    """Return the tokens without the end-of-document token at their end."""
    return tokens[:-1] if len(tokens) and tokens[-1] == eod_token else tokens


def _compare(report: DocumentReport, content: bytes, document: int, seen: set[bytes]) -> None:
    """Count a document that repeats itself, or an earlier document. `content`: bytes of its tokens."""
    if len(content) < 2 * report.token_bytes:  # counted as empty or one token
        return
    digest = hashlib.blake2b(content, digest_size=16).digest()
    if digest in seen:
        report.add("duplicate", document)
    seen.add(digest)
    if len(content) >= _FEWEST_TOKENS * report.token_bytes and is_degenerate(content):
        report.add("degenerate", document)


def report_lines(report: DocumentReport) -> list[str]:
    """Return the lines that the tool prints."""
    part = "" if report.inspected == report.num_documents else f" ({report.inspected:,} of them inspected)"
    longest, document = report.longest
    lines = [f"{report.num_documents:,} documents{part}, {report.tokens:,} tokens; "
             f"mean {report.tokens / max(report.inspected, 1):,.0f}, longest {longest:,} (document {document})"]
    for kind, meaning in KINDS.items():
        if report.counts[kind]:
            shown = ", ".join(map(str, report.examples[kind]))
            more = ", ..." if report.counts[kind] > len(report.examples[kind]) else ""
            lines.append(f"{report.counts[kind]:>10,} {kind}: {meaning} (documents {shown}{more})")
    if not any(report.counts.values()):
        lines.append("no damaged, duplicate or degenerate document")
    return lines


def write_page(target: Path, data: IndexedDataset, report: DocumentReport,
               decode: Callable[[Sequence[int]], str] | None) -> None:
    """Write the page. `decode` is the tokenizer's; without it, tokens are shown as numbers. Raises ConfigError."""
    try:
        plots = _plots(report)
    except ImportError:
        raise ConfigError("--html", problem="matplotlib is not installed",
                          remedy="pip install 'ds-pretrain[plot]'") from None
    name = html.escape(str(data.prefix))
    lines = html.escape("\n".join(report_lines(report)))
    content = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style></head><body>
<h1>{name}</h1>
<pre>{lines}</pre>
<h2>Lengths and token frequencies</h2>
{plots}
<h2>Most frequent tokens</h2>
{_frequent_tokens(report, decode)}
<h2>Documents</h2>
{_documents(data, report, decode)}
</body></html>
"""
    try:
        target.write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--html {target}", problem=f"the file cannot be written: {error.strerror}") from None


def _plots(report: DocumentReport) -> str:
    """Return an SVG element: documents by length, and frequency of the tokens by rank. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    used = np.flatnonzero(report.lengths)
    sizes = np.arange(used[0], used[-1] + 1) if len(used) else np.arange(1)
    left.bar(range(len(sizes)), report.lengths[sizes], color="#4878a8")
    left.set_xticks(range(len(sizes)), [f"{2**(size - 1):,}" if size else "0" for size in sizes.tolist()],
                    rotation=60, fontsize=8)
    left.set(xlabel="tokens, at least", ylabel="documents")
    frequencies = np.sort(report.token_counts[report.token_counts > 0])[::-1]
    if len(frequencies):
        right.loglog(np.arange(1, len(frequencies) + 1), frequencies, color="#a85848")
    right.set(xlabel="rank of the token", ylabel="occurrences")
    return svg_element(figure, "data")


def _frequent_tokens(report: DocumentReport, decode: Callable[[Sequence[int]], str] | None) -> str:
    order = np.argsort(-report.token_counts, kind="stable")[:_FREQUENT].tolist()
    rows = [f"<tr><td>{token}</td><td>{html.escape(repr(decode([token])) if decode else '')}</td>"
            f"<td>{report.token_counts[token]:,}</td><td>{report.token_counts[token] / report.tokens:.2%}</td></tr>"
            for token in order if report.token_counts[token]]
    return "<table><tr><th>token</th><th>text</th><th>occurrences</th><th>share</th></tr>" + "".join(rows) + "</table>"


def _documents(data: IndexedDataset, report: DocumentReport, decode: Callable[[Sequence[int]], str] | None) -> str:
    """Return the beginnings of the examples of each kind, and of randomly chosen documents."""
    chosen = [(kind, document) for kind in KINDS for document in report.examples[kind]]
    sampled = random.Random(0).sample(range(data.num_documents), min(_SAMPLED, data.num_documents))
    chosen += [("sampled", document) for document in sorted(sampled)]
    parts = []
    for kind, document in chosen:
        start, stop = data.document_offsets(document, document + 1).tolist()
        tokens = data.tokens(start, min(stop, start + _SHOWN_TOKENS)).tolist()
        text = decode(tokens) if decode and kind != "damaged" else " ".join(map(str, tokens))
        more = " ..." if stop - start > _SHOWN_TOKENS else ""
        head = f"{kind}: document {document}, {stop - start:,} tokens"
        parts.append(f"<h3>{head}</h3><pre>{html.escape(text)}{more}</pre>")
    return "\n".join(parts)
