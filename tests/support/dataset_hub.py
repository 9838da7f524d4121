"""A local HTTP server that serves datasets like the Hugging Face Hub: revisions, ranges, gated and private ones."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.range_server import RangeHandler, Server, serve

TOKEN = "hf_secret"
"""the token that may read gated and private datasets"""


@dataclass
class Repository:
    """A dataset: a folder for each commit, and the names of commits, which may change while the server runs."""

    commits: dict[str, Path]
    refs: dict[str, str]
    access: str = "public"
    """"public", "gated" (files need the token) or "private" (everything needs it)"""


@dataclass
class DatasetHub(Server):
    """The running server."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    fault: Callable[[str], str] | None = None
    """path of a file -> "" (answer), "drop" (close the connection in the middle of the answer), or a status such as
    "503"; called for each request of the content of a file"""

    def bytes_of_files(self) -> dict[str, int]:
        """Return how many bytes of each file were sent."""
        sizes: dict[str, int] = {}
        for sent in self.sent:
            if file := sent.path.partition("/resolve/")[2].partition("/")[2]:  # after the commit
                sizes[file] = sizes.get(file, 0) + sent.num_bytes
        return sizes


@contextmanager
def dataset_hub(repositories: dict[str, Repository]) -> Iterator[DatasetHub]:
    """Serve datasets, by name ORG/NAME."""
    yield from serve(DatasetHub(repositories=repositories), _Handler)


class _Handler(RangeHandler):
    settings: DatasetHub

    def do_GET(self) -> None:
        form = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.fails():
            return None
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs)/?(.*))?", path):
            name, what, rest = match[1], match[2] or "revision", match[3] or "main"
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(.+)", path):
            name, what, rest = match[1], "resolve", match[2]
        else:
            return self._error(404, "EntryNotFound", "there is no such page")
        repository = self.settings.repositories.get(name)
        is_trusted = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not is_trusted):
            return self._error(401, "RepoNotFound", "Repository not found")
        if what == "refs":
            return self.send_json({"branches": [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit}
                                            for ref, commit in repository.refs.items()], "tags": [], "converts": []})
        revision, inside = map(unquote, rest.partition("/")[::2])  # refs%2Fconvert%2Fparquet is one revision
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if repository.access == "gated" and not is_trusted and what == "resolve":
            return self._error(403, "GatedRepo", "Access to this dataset is restricted")
        folder = repository.commits[commit]
        if what == "revision":
            return self.send_json({"id": name, "sha": commit, "private": False, "gated": False, "tags": [],
                               "siblings": [{"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
                                            for entry in _entries(folder, "", recursive=True)
                                            if entry["type"] == "file"]})
        if what == "tree":
            return self._tree(folder, inside)
        if what == "paths-info":
            wanted = parse_qs(form).get("paths", [])
            return self.send_json([_entry(folder, path) for path in wanted if (folder / path).exists()])
        return self._file(folder, inside, commit)

    do_HEAD = do_POST = do_GET

    def _tree(self, folder: Path, inside: str) -> None:
        if not (folder / inside).is_dir():
            return self._error(404, "EntryNotFound", f"{inside} does not exist")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        return self.send_json(_entries(folder, inside, recursive=recursive))

    def _file(self, folder: Path, inside: str, commit: str) -> None:
        if not (folder / inside).is_file():
            return self._error(404, "EntryNotFound", f"{inside} does not exist")
        fault = self.settings.fault(inside) if self.settings.fault and self.command == "GET" else ""
        if fault.isdigit():
            return self._error(int(fault), "", "a fault")
        self.settings.drops += fault == "drop"
        return self.send_file(folder / inside, {"X-Repo-Commit": commit, "Content-Type": "application/octet-stream"})

    def _error(self, status: int, code: str, message: str) -> None:
        self.send_json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})


def _entries(folder: Path, inside: str, *, recursive: bool) -> list[dict[str, Any]]:
    found = sorted((folder / inside).rglob("*") if recursive else (folder / inside).iterdir())
    return [_entry(folder, str(path.relative_to(folder))) for path in found]


def _entry(folder: Path, path: str) -> dict[str, Any]:
    file = folder / path
    if file.is_dir():
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    return {"type": "file", "path": path, "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            "size": file.stat().st_size}
