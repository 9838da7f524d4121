"""The HTML page: template, style, scripts and data in one file that needs no network; and the server of --watch."""

import base64
import hashlib
import html
import json
import re
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pretrain.active_extensions import extensions
from pretrain.errors import ConfigError
from pretrain.extensions.report.page_data import ShownRun, page_data, state_of
from pretrain.paths import replace_file

_LIBRARY = "vendor/uPlot"
_SCRIPTS = ("format.js", "series.js", "chart.js", "incidents.js")
ADDRESS = "127.0.0.1"
# A page of another site may let its own name resolve to 127.0.0.1 (DNS rebinding); its requests carry this name.
# The port is not compared: it differs at the near end of an ssh tunnel.
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)


def page_html(data: dict[str, Any]) -> str:
    """Return the page. Its content security policy permits no script or style except this package's."""
    style = "".join([_read(f"{_LIBRARY}.min.css"), _read("report.css"), *_of_sections(".css")])
    library = f"/*\n{_read(f'{_LIBRARY}.LICENSE')}*/\n{_read(f'{_LIBRARY}.iife.min.js')}"
    script = "\n".join(['"use strict";', library, *map(_read, _SCRIPTS), *_of_sections(".js"), _read("report.js")])
    connect = "connect-src 'self'; " if data["watch"] else ""
    policy = (f"default-src 'none'; script-src {_source_hash(script)}; style-src {_source_hash(style)}; img-src data:; "
              f"{connect}base-uri 'none'; form-action 'none'")
    names = ", ".join(run["name"] for run in data["runs"])
    return Template(_read("report.html")).substitute(
        policy=policy, title=html.escape(f"{names} - training report"), style=style, script=script,
        data=json_for_html(data))


def _read(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _of_sections(suffix: str) -> list[str]:
    """Return the scripts or the styles of the sections that extensions bring."""
    return [each.read_file(name) for each in extensions() for name in each.section_files if name.endswith(suffix)]


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def json_for_html(data: Any) -> str:
    """Return JSON that is valid inside a <script> element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(text: str, target: Path) -> None:
    """Write the page. An older one is replaced at once, so that a browser never reads a part of it."""
    try:
        replace_file(target, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(target), problem=f"the file cannot be written ({error.strerror})") from None


class ReportServer(ThreadingHTTPServer):
    """Serves the page at /, and at /update its data, if their state is not the known one."""

    daemon_threads = True

    def __init__(self, tables: Sequence[ShownRun], port: int) -> None:
        """Listen on `port`, or on a free port if this is 0. Raises ConfigError if the port is in use."""
        self.tables, self.lock = list(tables), threading.Lock()  # one request at a time reads the tables
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError("--port", problem=f"port {port} cannot be used ({error.strerror})",
                              remedy="leave the flag out: a free port is then chosen") from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def page(self) -> str:
        with self.lock:
            for table in self.tables:
                table.update()
            return page_html(page_data(self.tables, watch=True))

    def update(self, known: str) -> dict[str, Any]:
        """Return the data of the page, or nothing if its state is the known one."""
        with self.lock:
            for table in self.tables:
                table.update()
            return {} if state_of(self.tables) == known else page_data(self.tables, watch=True)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 60

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not _OWN_HOST.fullmatch(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "This server answers to 127.0.0.1 and localhost only.\n")
        elif url.path == "/":
            self._answer_with("text/html", self.server.page)
        elif url.path == "/update":
            known = parse_qs(url.query).get("known", [""])[0]
            self._answer_with("application/json", lambda: json_for_html(self.server.update(known)))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "There is only / and /update.\n")

    def _answer_with(self, kind: str, make_text: Any) -> None:
        try:
            text = make_text()
        except ConfigError as error:  # for example a run folder on a file system that is gone
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        else:
            self._answer(HTTPStatus.OK, kind, text)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                            ("Cross-Origin-Resource-Policy", "same-origin"), ("X-Frame-Options", "DENY")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the page asks every two seconds."""
