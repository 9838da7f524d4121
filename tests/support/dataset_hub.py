"""A local HTTP server that serves datasets like the Hugging Face Hub: revisions, ranges, gated and private ones."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secret"
"""the token that may read gated and private datasets"""


@dataclass
class Repository:
    """A dataset: a folder for each commit, and the names of commits."""

    commits: dict[str, Path]
    refs: dict[str, str]
    access: str = "public"
    """"public", "gated" (files need the token) or "private" (everything needs it)"""


@dataclass
class Request:
    """A request that the server has answered."""

    method: str
    path: str
    """of the URL; of a file of a dataset: its path in the dataset"""
    status: int
    num_bytes: int
    """of the answer's body"""


@dataclass
class DatasetHub:
    """The running server."""

    url: str
    repositories: dict[str, Repository]
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[str], str] | None = None
    """path of a file -> "" (answer), "drop" (close the connection in the middle of the answer), or a status such as
    "503"; called for each request of the content of a file"""

    def bytes_of_files(self) -> dict[str, int]:
        """Return how many bytes of each file were sent."""
        sizes: dict[str, int] = {}
        for request in self.requests:
            if request.method == "GET" and not request.path.startswith("/"):
                sizes[request.path] = sizes.get(request.path, 0) + request.num_bytes
        return sizes


@contextmanager
def dataset_hub(repositories: dict[str, Repository]) -> Iterator[DatasetHub]:
    """Serve datasets, by name ORG/NAME."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = DatasetHub(f"http://127.0.0.1:{server.server_address[1]}", repositories)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub: DatasetHub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        form = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs)/?(.*))?", path):
            name, what, rest = match[1], match[2] or "revision", match[3] or "main"
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(.+)", path):
            name, what, rest = match[1], "resolve", match[2]
        else:
            return self._error(404, "EntryNotFound", "there is no such page")
        repository = self.hub.repositories.get(name)
        is_trusted = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not is_trusted):
            return self._error(401, "RepoNotFound", "Repository not found")
        if what == "refs":
            return self._json({"branches": [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit}
                                            for ref, commit in repository.refs.items()], "tags": [], "converts": []})
        revision, _, inside = rest.partition("/")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if repository.access == "gated" and not is_trusted and what == "resolve":
            return self._error(403, "GatedRepo", "Access to this dataset is restricted")
        folder = repository.commits[commit]
        if what == "revision":
            return self._json({"id": name, "sha": commit, "private": False, "gated": False, "tags": [],
                               "siblings": [{"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
                                            for entry in _entries(folder, "", recursive=True)
                                            if entry["type"] == "file"]})
        if what == "tree":
            return self._tree(folder, inside)
        if what == "paths-info":
            wanted = parse_qs(form).get("paths", [])
            return self._json([_entry(folder, path) for path in wanted if (folder / path).exists()])
        return self._file(folder, inside, commit)

    def _tree(self, folder: Path, inside: str) -> None:
        if not (folder / inside).is_dir():
            return self._error(404, "EntryNotFound", f"{inside} does not exist")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        return self._json(_entries(folder, inside, recursive=recursive))

    def _file(self, folder: Path, inside: str, commit: str) -> None:
        file = folder / inside
        if not file.is_file():
            return self._error(404, "EntryNotFound", f"{inside} does not exist")
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(content)),
                   "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            size, start = len(content), int(match[1])
            if start >= size:
                return self._error(416, "", "range not satisfiable")
            stop = min(int(match[2] or size) + 1, size)
            content, status = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        fault = self.hub.fault(inside) if self.hub.fault and self.command == "GET" else ""
        if fault.isdigit():
            return self._error(int(fault), "", "a fault")
        self._send(status, content, headers, path=inside, cut=fault == "drop")

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message,
                                                                     "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, path: str = "", cut: bool = False) -> None:
        body = b"" if self.command == "HEAD" else content
        self.hub.requests.append(Request(self.command, path or unquote(self.path), status, len(body)))
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut

    def log_message(self, *_: object) -> None: ...


def _entries(folder: Path, inside: str, *, recursive: bool) -> list[dict[str, Any]]:
    found = sorted((folder / inside).rglob("*") if recursive else (folder / inside).iterdir())
    return [_entry(folder, str(path.relative_to(folder))) for path in found]


def _entry(folder: Path, path: str) -> dict[str, Any]:
    file = folder / path
    if file.is_dir():
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    return {"type": "file", "path": path, "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            "size": file.stat().st_size}
