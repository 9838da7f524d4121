"""A web server of files that drops connections, is busy, is slow, or ignores ranges; and the same before a real server.

It logs the bytes that it sent, so that tests can check what a resumed program read again.
"""

import hashlib
import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PIECE = 1 << 14


@dataclass(frozen=True)
class Sent:
    """An answer with content: the range that was asked for, and how many of its bytes were sent."""

    path: str
    start: int
    num_bytes: int


@dataclass
class Server:
    """What a running server does, and what it did. The fields may change while it runs."""

    url: str
    drop_rate: float = 0.0
    """fraction of the answers with content that end in the middle"""
    busy_rate: float = 0.0
    """fraction of the requests that are answered with 503"""
    latency_s: float = 0.0
    stalls: int = 0
    """number of next answers that stop in the middle, while the connection stays open"""
    has_ranges: bool = True
    has_etags: bool = True
    allows_head: bool = True
    password: str = ""
    """value of the query `?key=`, or the password of HTTP basic authentication, without which the answer is 403"""
    sent: list[Sent] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    num_dropped: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def sent_of(self, name: str) -> list[Sent]:
        """Return the answers with bytes of a file."""
        return [sent for sent in self.sent if sent.path.endswith(name) and sent.num_bytes]


@contextmanager
def range_server(folder: Path) -> Iterator[Server]:
    """Serve the files of a folder."""
    yield from serve(lambda server: _handler(server, folder))


@contextmanager
def counting_proxy(upstream: str) -> Iterator[Server]:
    """Pass requests on to the server at `upstream`, and count what it sends."""
    yield from serve(lambda server: _proxy_handler(server, upstream))


def serve(make_handler: "Callable[[Server], type[RangeHandler]]") -> Iterator[Server]:
    """Serve in a thread until the iterator ends."""
    settings = Server("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(settings))
    server.daemon_threads = True
    settings.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield settings
    finally:
        server.shutdown()
        server.server_close()


def etag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class RangeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    settings: Server

    def send_content(self, status: int, headers: dict[str, str], content: bytes, start: int = 0) -> None:
        """Send an answer, or the beginning of it and then close the connection."""
        settings = self.settings
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content)
        if content and settings.chance.random() < settings.drop_rate:
            end = settings.chance.randrange(len(content))
            settings.num_dropped += 1
            self.close_connection = True
        if settings.stalls > 0 and end > 3:
            settings.stalls -= 1
            end = end // 2 - 1
        try:
            for at in range(0, end, _PIECE):
                self.wfile.write(content[at : min(at + _PIECE, end)])
            if end < len(content) and not self.close_connection:
                self.rfile.read(1)  # until the client gives up
                self.close_connection = True
        except OSError:  # the program was killed
            self.close_connection = True
        settings.sent.append(Sent(unquote(urlsplit(self.path).path), start, end))

    def is_busy(self) -> bool:
        self.settings.requests.append(f"{self.command} {self.path}")
        time.sleep(self.settings.latency_s)
        if self.settings.chance.random() < self.settings.busy_rate:
            self.send_content(503, {"Retry-After": "0"}, b"")
            return True
        return False

    def range_of(self, size: int) -> tuple[int, int] | None:
        """Return the range [start, stop) that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        return (int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)) if found else None

    def log_message(self, *_: object) -> None: ...


def _handler(server: Server, folder: Path) -> type[RangeHandler]:
    class Handler(RangeHandler):
        settings = server

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.is_busy():
                return
            url = urlsplit(self.path)
            file = folder / unquote(url.path).lstrip("/")
            if (server.password and server.password not in (url.query, self.headers.get("Authorization"))) or \
                    (self.command == "HEAD" and not server.allows_head):
                return self.send_content(403, {}, b"refused")
            if not file.is_file():
                return self.send_content(404, {}, b"not found")
            content = file.read_bytes()
            tag = {"ETag": etag_of(content)} if server.has_etags else {}
            tag["Last-Modified"] = self.date_time_string(int(file.stat().st_mtime))
            if (wanted := self.headers.get("If-Match")) and wanted != tag.get("ETag"):
                return self.send_content(412, tag, b"")
            part = self.range_of(len(content)) if server.has_ranges else None
            if part is None:
                return self.send_content(200, tag, content)
            headers = {**tag, "Content-Range": f"bytes {part[0]}-{part[1] - 1}/{len(content)}"}
            return self.send_content(206, headers, content[part[0] : part[1]], part[0])

    return Handler


def _proxy_handler(server: Server, upstream: str) -> type[RangeHandler]:
    class Handler(RangeHandler):
        settings = server

        def pass_on(self) -> None:
            if self.is_busy():
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(urlsplit(upstream).netloc)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            headers = {key: value for key, value in answer.getheaders()
                       if key.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date")}
            if self.command == "HEAD":
                return self.send_head(answer.status, headers, answer.getheader("Content-Length", "0"))
            start = (self.range_of(1 << 62) or (0, 0))[0]
            self.send_content(answer.status, headers, content, start)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        def send_head(self, status: int, headers: dict[str, str], size: str) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": size}.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler
