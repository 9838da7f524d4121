"""Self-contained HTML page about the documents of a data set: lengths, token frequencies and sampled documents."""

import html
import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pretrain.analysis.inspect.documents import KINDS, DocumentReport, report_lines
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError

_SHOWN_TOKENS = 600  # of a sampled document
_SAMPLED = 12  # documents, besides the examples of each kind
_FREQUENT = 40  # tokens in the table
_STYLE = """body { font: 15px/1.45 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: .7em; overflow-x: auto; white-space: pre-wrap; }
table { border-collapse: collapse; } td, th { padding: .1em .8em .1em 0; text-align: right; }
td:nth-child(2) { text-align: left; font-family: monospace; } svg { max-width: 100%; height: auto; }"""


def write_page(target: Path, data: IndexedDataset, report: DocumentReport,
               decode: Callable[[Sequence[int]], str] | None) -> None:
    """Write the page. `decode` is the tokenizer's; without it, tokens are shown as numbers. Raises ConfigError."""
    try:
        plots = _plots(report)
    except ImportError:
        raise ConfigError("--html", problem="matplotlib is not installed", remedy="pip install -e '.[plot]'") from None
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
    import matplotlib
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
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "data"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().partition("?>")[2].partition(">")[2]  # without XML declaration and document type


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
