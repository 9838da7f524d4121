"""A local HTTP server that answers like the Hugging Face Hub, and a hand-made cache folder of the Hub."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "a1" * 20


def write_cache(cache: Path, name: str, source: Path) -> Path:
    """Put the files of `source` into the cache folder of repository `name`, as links to blobs. Return this folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    for part in (snapshot, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    for path in sorted(source.iterdir()):
        blob = folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return folder


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of the folders as repositories. Yields the URL, and the growing list of requests."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            requests.append(f"{self.command} {path}")
            parts = path.removeprefix("api/models/").split("/")
            folder = repositories.get("/".join(parts[:2]))
            if folder is None:
                return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body)
            if path.startswith("api/models/") and "tree" in parts:
                rows = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                        for file in sorted(folder.iterdir())]
                return self._send(200, json.dumps(rows).encode(), {}, body)
            if path.startswith("api/models/"):
                info = {"id": "/".join(parts[:2]), "sha": REVISION, "siblings": []}
                return self._send(200, json.dumps(info).encode(), {}, body)
            file = folder / parts[-1]
            return self._send(200, file.read_bytes(), {"X-Repo-Commit": REVISION, "ETag": f'"{_etag(file)}"'}, body)

        def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(code)
            for key, value in {"Content-Type": "application/json", "Content-Length": str(len(content)),
                               **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
