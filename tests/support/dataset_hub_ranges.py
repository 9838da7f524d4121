"""A local server that answers like the Hugging Face Hub does for a data set: revisions, lists of files, ranges."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.range_server import RangeHandler, Server, serve

NAME = "org/books"


@contextmanager
def dataset_hub(commits: dict[str, Path], branches: dict[str, str]) -> Iterator[Server]:
    """Serve the data set org/books: the folder of each commit, and branches, which may move while the server runs."""
    yield from serve(lambda server: _handler(server, commits, branches))


def _handler(server: Server, commits: dict[str, Path], branches: dict[str, str]) -> type[RangeHandler]:
    class Handler(RangeHandler):
        settings = server

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.is_busy():
                return
            path = urlsplit(self.path).path.strip("/")
            if server.password and self.headers.get("Authorization") != f"Bearer {server.password}":
                return self.fail(401, "RepoNotFound")
            about, _, rest = path.removeprefix("api/").removeprefix("datasets/").partition(NAME)
            if about or not path.startswith(("api/datasets/", "datasets/")):
                return self.fail(404, "RepoNotFound")
            action, _, rest = rest.strip("/").partition("/")
            revision, name = map(unquote, rest.partition("/")[::2])
            commit = branches.get(revision or "main", revision)
            if commit not in commits:
                return self.fail(404, "RevisionNotFound")
            if action == "resolve":
                return self.send_file(commits[commit] / name, commit)
            if action == "tree":
                return self.send_tree(commits[commit], name)
            return self.send_json({"id": NAME, "sha": commit, "siblings": []})

        def send_tree(self, folder: Path, name: str) -> None:
            top = folder / name
            if not top.is_dir():
                return self.fail(404, "EntryNotFound")
            found = sorted(top.rglob("*") if "recursive=true" in self.path.lower() else top.iterdir())
            self.send_json([{"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size,
                             "oid": _oid(path)} if path.is_file() else
                            {"type": "directory", "path": str(path.relative_to(folder)), "oid": "0" * 40}
                            for path in found])

        def send_file(self, file: Path, commit: str) -> None:
            if not file.is_file():
                return self.fail(404, "EntryNotFound")
            content = file.read_bytes()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(file)}"'}
            part = self.range_of(len(content))
            if part is None:
                return self.send_content(200, headers, content)
            headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{len(content)}"
            return self.send_content(206, headers, content[part[0] : part[1]], part[0])

        def send_json(self, value: object) -> None:
            self.send_content(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def fail(self, status: int, code: str) -> None:
            self.send_content(status, {"X-Error-Code": code}, b"{}")

    return Handler


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
