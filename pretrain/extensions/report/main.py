"""Curves of runs as a page, live or as a file; a comparison of runs; the script that repeats one."""

import argparse
import base64
import hashlib
import html
import json
import re
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pretrain.active_extensions import extensions
from pretrain.cli import Parser, path, whole_number
from pretrain.errors import ConfigError
from pretrain.extensions.report.compare import compare_runs, comparison_lines
from pretrain.extensions.report.page_data import ShownRun, page_data, state_of
from pretrain.extensions.report.repeat_command import command_of
from pretrain.monitor.read_run_folder import newest_start
from pretrain.paths import check_file, replace_file

_LIBRARY = "vendor/uPlot"
_SCRIPTS = ("format.js", "series.js", "chart.js", "incidents.js")
ADDRESS = "127.0.0.1"
# A page of another site may let its own name resolve to 127.0.0.1 (DNS rebinding); its requests carry this name.
# The port is not compared: it differs at the near end of an ssh tunnel.
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_MAX_RUNS = 32  # a page with more curves cannot be read


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
        except ConfigError as error:  # the file system of a run folder may be gone
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


def main() -> int:
    parser = Parser(description="Draw runs as one HTML page without network access, watch them, or compare them.")
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="run folder (--save of the run)")
    parser.add_argument("--output", type=path, metavar="FILE.html", help="default: report.html in the first run folder")
    parser.add_argument("--watch", action="store_true",
                        help="serve the page on 127.0.0.1, and update it while the runs train, until Ctrl-C")
    parser.add_argument("--port", type=whole_number(1, 65535), help="of --watch; default: a free port")
    parser.add_argument("--compare", action="store_true",
                        help="print the settings that differ, and where the losses diverge")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--command", action="store_true",
                        help="print a script that repeats the newest start of one run")
    args = parser.parse_args()
    _check_flags(args)
    if args.compare:
        comparison = compare_runs(args.runs)
        print(json.dumps(comparison.as_json(), indent=1) if args.json else "\n".join(comparison_lines(comparison)))
    elif args.command:
        print(_command(args.runs[0]), end="")
    elif args.watch:
        _watch(args.runs, args.port or 0)
    else:
        _write(args.runs, args.output or args.runs[0] / "report.html")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would have no effect."""
    modes = [name for name in ("watch", "compare", "command") if getattr(args, name)]
    if len(modes) > 1:
        raise ConfigError(f"--{modes[1]}", problem=f"it cannot be combined with --{modes[0]}",
                          remedy="give one of them")
    for name, mode in (("port", "watch"), ("json", "compare")):
        if getattr(args, name) and not getattr(args, mode):
            raise ConfigError(f"--{name}", problem=f"it has no effect without --{mode}", remedy=f"add --{mode}")
    if args.output is not None:
        if modes:
            raise ConfigError("--output", problem=f"it has no effect with --{modes[0]}, which writes no page")
        if args.output.suffix.lower() not in (".html", ".htm"):
            raise ConfigError("--output", found=str(args.output), expected="a file name that ends with .html")
    if args.compare and len(args.runs) < 2:
        raise ConfigError("--compare", problem="it needs at least two run folders")
    if args.command and len(args.runs) > 1:
        raise ConfigError("--command", problem="it takes one run folder", remedy="call the program once for each run")
    if len(args.runs) > _MAX_RUNS:
        raise ConfigError("command line", found=f"{len(args.runs)} run folders", expected=f"at most {_MAX_RUNS}")


def _command(run: Path) -> str:
    record = newest_start(run)
    try:
        return command_of(record, run)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(str(run / "run.json"), problem=f"the newest record lacks what a repetition needs "
                          f"({type(error).__name__}: {error})") from None


def _write(runs: list[Path], target: Path) -> None:
    begin = time.perf_counter()
    tables = [ShownRun(run) for run in runs]
    check_file(target, "--output")
    text = page_html(page_data(tables, watch=False))
    write_page(text, target)
    rows = sum(table.training.num_rows for table in tables)
    print(f"wrote {target} ({len(text) / 1e6:.1f} MB, {rows:,} rows, {time.perf_counter() - begin:.1f} s)")


def _watch(runs: list[Path], port: int) -> None:
    with ReportServer([ShownRun(run) for run in runs], port) as server:
        print(f"{server.url} shows the newest rows; Ctrl-C ends this program", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
