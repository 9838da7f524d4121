"""Plots as SVG with text as text. The same figure and name give the same bytes. Needs matplotlib."""

import io
from pathlib import Path
from typing import Any


def save_svg(figure: Any, target: Path | io.StringIO, name: str) -> None:
    """Write a matplotlib Figure. The names of its parts depend on `name`, so that a page may have several figures."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", metadata={"Date": None})


def svg_element(figure: Any, name: str) -> str:
    """Return a Figure as an element of HTML, which has no XML declaration and document type."""
    text = io.StringIO()
    save_svg(figure, text, name)
    return "<svg" + text.getvalue().partition("<svg")[2]
