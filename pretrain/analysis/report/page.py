"""The HTML page: template, style, scripts and data in one file that needs no network."""

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pretrain.analysis.report.configuration import differences
from pretrain.analysis.report.page_data import points_per_run, run_data, run_names
from pretrain.analysis.report.run_table import RunTable
from pretrain.errors import ConfigError

_SCRIPTS = ("format.js", "scale.js", "panels.js", "chart.js", "tables.js", "watch.js", "report.js")


def page_data(tables: Sequence[RunTable], *, watch: bool) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    limit, names = points_per_run(len(tables)), run_names([table.run for table in tables])
    runs = [{"name": name, "path": str(table.run), **run_data(table, limit)}
            for name, table in zip(names, tables, strict=True)]
    return {"runs": runs, "differences": difference_rows(tables), "time": time.time(), "watch": watch}


def difference_rows(tables: Sequence[RunTable]) -> list[list[str | None]]:
    """Return [section, key, value of each run] of the settings that differ between the newest starts."""
    records = [table.starts[-1] if table.starts else {} for table in tables]
    return [[row.section, row.key, *row.values] for row in differences(records)]


def page_html(data: dict[str, Any]) -> str:
    """Return the page. Its content security policy permits no script or style but those of this package."""
    style = _read("report.css")
    script = '"use strict";\n' + "\n".join(map(_read, _SCRIPTS))
    connect = "connect-src 'self'; " if data["watch"] else ""
    policy = (f"default-src 'none'; script-src {_source_hash(script)}; style-src {_source_hash(style)}; img-src data:; "
              f"{connect}base-uri 'none'; form-action 'none'")
    names = ", ".join(run["name"] for run in data["runs"])
    return Template(_read("report.html")).substitute(
        policy=policy, title=html.escape(f"{names} - training report"), style=style, script=script,
        data=json_for_html(data))


def _read(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def json_for_html(data: Any) -> str:
    """Return JSON that is valid inside a <script> element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(text: str, target: Path) -> None:
    """Write the page. An older one is replaced at once, so that a browser never reads a part of it."""
    temporary = target.with_name(f".tmp-{os.getpid()}-report.html")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(str(target), problem=f"the file cannot be written ({error.strerror})") from None
