"""An HTTP server of a folder, with ranges and ETags, which can be slow, refuse requests and drop connections."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Faults:
    """What the server does wrong. It may be changed while the server runs."""

    latency_s: float = 0.0
    status: int = 0
    """code with which each request is answered; 0: the right answer"""
    dropped: int = 0
    """number of next answers that end after half of their bytes"""
    version: str = "ETag"
    """header that tells versions of a file apart: ETag, Last-Modified, or none of them"""
    requests: list[str] = field(default_factory=list)
    """those with a range: path and range"""


@contextmanager
def range_server(folder: Path) -> Iterator[tuple[str, Faults]]:
    """Start a server of the files in `folder`. Yields its URL, and its faults, at first none."""
    faults, lock = Faults(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            if body and "Range" in self.headers:
                faults.requests.append(f"{self.path} {self.headers['Range']}")
            time.sleep(faults.latency_s)
            path = folder / self.path.lstrip("/")
            if faults.status or not path.is_file():
                return self._send(faults.status or 404, b"", {})
            content = path.read_bytes()
            etag = f'"{hashlib.md5(content).hexdigest()}"'
            versions = {"ETag": etag, "Last-Modified": self.date_time_string(path.stat().st_mtime)}
            headers = {"Accept-Ranges": "bytes"} | {name: value for name, value in versions.items()
                                                    if name == faults.version}
            if self.headers.get("If-Match", etag) != etag:
                return self._send(412, b"", headers)
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if not body:
                return self._send(200, content, headers, body=False)
            if found is None:
                return self._send(200, content, headers)
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._send(206, content[first:last + 1], headers)

        def _send(self, code: int, content: bytes, headers: dict[str, str], *, body: bool = True) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with lock:
                drops = body and faults.dropped > 0 and bool(content)
                faults.dropped -= drops
            if body:
                self.wfile.write(content[:len(content) // 2] if drops else content)
            self.close_connection = drops or self.close_connection

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        server.server_close()
