"""A web server of files that drops connections, fails, is slow, or ignores ranges; and the same before a real server.

It logs the bytes that it sent, so that tests can check what a resumed program read again.
"""

import hashlib
import http.client
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
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

    url: str = ""
    drop_rate: float = 0.0
    """fraction of the answers with content that end in the middle"""
    busy_rate: float = 0.0
    """fraction of the requests that are answered with 503"""
    status: int = 0
    """code with which each request is answered; 0: the right answer"""
    latency_s: float = 0.0
    drops: int = 0
    """number of next answers that end after half of their bytes"""
    stalls: int = 0
    """number of next answers that stop in the middle, while the connection stays open"""
    has_ranges: bool = True
    versions: tuple[str, ...] = ("ETag", "Last-Modified")
    """headers that tell versions of a file apart"""
    allows_head: bool = True
    password: str = ""
    """value of the query `?key=`, or the password of HTTP basic authentication, without which the answer is 403"""
    sent: list[Sent] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    num_dropped: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def sent_of(self, name: str = "") -> list[Sent]:
        """Return the answers with bytes of a file; of all files if it is left out."""
        return [sent for sent in self.sent if sent.path.endswith(name) and sent.num_bytes]


_Server = TypeVar("_Server", bound=Server)


@contextmanager
def range_server(folder: Path) -> Iterator[Server]:
    """Serve the files of a folder."""
    yield from serve(Server(), _FolderHandler, folder=folder)


@contextmanager
def counting_proxy(upstream: str) -> Iterator[Server]:
    """Pass requests on to the server at `upstream`, and count what it sends."""
    yield from serve(Server(), _ProxyHandler, upstream=upstream)


def serve(settings: _Server, handler: "type[RangeHandler]", **fields: Any) -> Iterator[_Server]:
    """Serve in a thread until the iterator ends. fields: attributes of the handler."""
    own_handler = type("Handler", (handler,), {"settings": settings, **fields})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own_handler)
    server.daemon_threads = True
    settings.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield settings
    finally:
        server.shutdown()
        server.server_close()


def etag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class RangeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
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
            self.close_connection = True
        elif content and settings.drops > 0:
            settings.drops -= 1
            end //= 2
            self.close_connection = True
        settings.num_dropped += end < len(content)
        if settings.stalls > 0 and end > 3:
            settings.stalls -= 1
            end = end // 2 - 1
        if status < 300:
            settings.sent.append(Sent(unquote(urlsplit(self.path).path), start, end))
        try:
            for at in range(0, end, _PIECE):
                self.wfile.write(content[at : min(at + _PIECE, end)])
            if end < len(content) and not self.close_connection:
                self.rfile.read(1)  # until the client gives up
                self.close_connection = True
        except OSError:  # the program was killed
            self.close_connection = True

    def send_file(self, file: Path, headers: dict[str, str]) -> None:
        """Send a file, or the range of it that is asked for."""
        settings, content = self.settings, file.read_bytes()
        versions = {"ETag": etag_of(content), "Last-Modified": self.date_time_string(int(file.stat().st_mtime))}
        headers = {"Accept-Ranges": "bytes", **headers} | {
            name: version for name, version in versions.items() if name in settings.versions}
        if (wanted := self.headers.get("If-Match")) and wanted != headers.get("ETag"):
            return self.send_content(412, headers, b"")
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if settings.has_ranges else None
        if found is None:
            return self.send_content(200, headers, content)
        size, start = len(content), int(found[1])
        if start >= size:
            return self.send_content(416, {**headers, "Content-Range": f"bytes */{size}"}, b"")
        content = content[start : int(found[2]) + 1 if found[2] else size]
        headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
        return self.send_content(206, headers, content, start)

    def send_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_content(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def fails(self) -> bool:
        """Log the request, and answer it if it is one that fails. Return whether it is."""
        settings = self.settings
        settings.requests.append(f"{self.command} {self.path}")
        time.sleep(settings.latency_s)
        status = 503 if settings.chance.random() < settings.busy_rate else settings.status
        if status:
            self.send_content(status, {"Retry-After": "0"}, b"")
        return status != 0

    def log_message(self, *_: object) -> None: ...


class _FolderHandler(RangeHandler):
    folder: Path

    def do_GET(self) -> None:
        settings = self.settings
        if self.fails():
            return
        url = urlsplit(self.path)
        file = self.folder / unquote(url.path).lstrip("/")
        if (settings.password and settings.password not in (url.query, self.headers.get("Authorization"))) or \
                (self.command == "HEAD" and not settings.allows_head):
            return self.send_content(403, {}, b"refused")
        if not file.is_file():
            return self.send_content(404, {}, b"not found")
        return self.send_file(file, {})

    do_HEAD = do_GET


class _ProxyHandler(RangeHandler):
    upstream: str

    def pass_on(self) -> None:
        if self.fails():
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        headers = {key: value for key, value in answer.getheaders()
                   if key.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date")}
        if self.command == "HEAD":
            return self.send_head(answer.status, headers, answer.getheader("Content-Length", "0"))
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return self.send_content(answer.status, headers, content, int(found[1]) if found else 0)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def send_head(self, status: int, headers: dict[str, str], size: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": size}.items():
            self.send_header(key, value)
        self.end_headers()
