"""A local HTTP server that answers like the Hugging Face Hub, and a hand-made cache folder of the Hub."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.range_server import RangeHandler, Server, etag_of, serve

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
def hub(repositories: dict[str, Path]) -> Iterator[Server]:
    """Serve the files of the folders as repositories."""
    yield from serve(Server(), _Handler, repositories=repositories)


class _Handler(RangeHandler):
    repositories: dict[str, Path]

    def do_GET(self) -> None:
        if self.fails():
            return None
        path = self.path.partition("?")[0].strip("/")
        parts = path.removeprefix("api/models/").split("/")
        folder = self.repositories.get("/".join(parts[:2]))
        if folder is None:
            return self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if path.startswith("api/models/") and "tree" in parts:
            return self.send_json([{"type": "file", "path": file.name, "size": file.stat().st_size,
                                    "oid": etag_of(file.read_bytes()).strip('"')} for file in sorted(folder.iterdir())])
        if path.startswith("api/models/"):
            return self.send_json({"id": "/".join(parts[:2]), "sha": REVISION, "siblings": []})
        return self.send_file(folder / parts[-1], {"X-Repo-Commit": REVISION})

    do_HEAD = do_GET
