"""Plots as SVG with text as text. The same figure and name give the same bytes. Needs matplotlib."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError


def check_plot_target(target: Path) -> None:
    """Raise ConfigError if the plot cannot be drawn: matplotlib is missing, or the name does not end with .svg."""
    if target.suffix.lower() != ".svg":
        raise ConfigError("--plot", found=str(target), expected="a file name that ends with .svg")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot", problem="matplotlib is not installed", remedy="pip install 'ds-pretrain[plot]'")


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
