"""Server of a page that is updated while its runs train. It listens on 127.0.0.1 only."""

import re
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pretrain.analysis.report.page import difference_rows, json_for_html, page_data, page_html
from pretrain.analysis.report.page_data import new_data, points_per_run, run_data
from pretrain.analysis.report.run_table import RunTable
from pretrain.errors import ConfigError

ADDRESS = "127.0.0.1"
# A page of another site may let its own name resolve to 127.0.0.1 (DNS rebinding); its requests carry this name.
# The port is not compared: it differs at the near end of an ssh tunnel.
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class ReportServer(ThreadingHTTPServer):
    """Serves the page at / and the changes since a known state at /update."""

    daemon_threads = True

    def __init__(self, tables: Sequence[RunTable], port: int) -> None:
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

    def update(self, known: Sequence["Known | None"]) -> dict[str, Any]:
        """Return what is new in each run, or all data of a run whose known state cannot be extended."""
        with self.lock:
            for table in self.tables:
                table.update()
            states = [*known, *[None] * len(self.tables)]
            runs = [self._change(table, state) for table, state in zip(self.tables, states, strict=False)]
            answer: dict[str, Any] = {"runs": runs, "time": time.time()}
            if any("all" in change for change in runs):
                answer["differences"] = difference_rows(self.tables)
            return answer

    def _change(self, table: RunTable, known: "Known | None") -> dict[str, Any]:
        limit = points_per_run(len(self.tables))
        if known is not None and known[0] == table.generation and table.num_lines - known[1] <= limit:
            _, _, lines, events = known
            if (lines, events) == (table.num_lines, len(table.events)):
                return {}
            new = new_data(table, lines, events)
            if new is not None:
                return {"new": new}
        return {"all": run_data(table, limit)}


Known = tuple[int, int, int, int]  # generation, lines when all data was sent, lines now, events now


def _parse_known(text: str) -> list[Known | None]:
    """Parse the states of all runs; None for one that is not valid."""
    words = [re.fullmatch(r"(\d{1,12})\.(\d{1,12})\.(\d{1,12})\.(\d{1,12})", word) for word in text.split(",")]
    return [(int(word[1]), int(word[2]), int(word[3]), int(word[4])) if word else None for word in words]


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
            known = _parse_known(parse_qs(url.query).get("known", [""])[0])
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
