"""Copies of finished checkpoints elsewhere: any fsspec URL (s3://bucket/run, ftp://host/run ...) or a plain path.

The mirror has the folders of the run: URL/global_stepN/FILE. The manifest goes up last, and comes with its own hash:
without it, or with files of other sizes, a folder of the mirror is no checkpoint.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.checkpoint.format.files import HashedFile
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, step_of
from pretrain.checkpoint.save.commit import (
    SaveError,
    check_space,
    publish,
    temporary_folder,
    write_latest,
    write_manifest,
)
from pretrain.console.progress import ProgressBar
from pretrain.errors import ConfigError

_PROBE = ".ds-pretrain-probe"
_PART = ".part-"
_READ_BYTES = 2**24
_TRANSFERS = 4  # at a time, where the file system's client can do more than one


class _Mirror:
    """A URL's file system and the path of its root on it."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError where the protocol is unknown, or its package not installed, or nobody answers."""
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        self.url = re.sub(r"//[^/@]*@", "//", url)  # for people: without a password
        with self.reaching():
            self.fs, root = fsspec.url_to_fs(url)
        self._root = str(root).rstrip("/")
        # fsspec's clients of object stores are these. Folders are parts of names there, and makedirs would create a
        # bucket whose name was misspelt. The others (local, ftp, sftp ...) have folders, and one connection.
        self._is_object_store = isinstance(self.fs, AsyncFileSystem)
        self._transfers = _TRANSFERS if self._is_object_store else 1

    @contextlib.contextmanager
    def reaching(self, *parts: str) -> Iterator[None]:
        """Every client has exceptions of its own: all become a ConfigError of one line."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            remedy = "install the package" if isinstance(error, ImportError) else ""
            raise ConfigError("/".join([self.url, *parts]), found=f"{type(error).__name__} ({error})",
                              expected="a path, or an fsspec URL that can be reached", remedy=remedy) from error

    def path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    def make_folder(self, path: str) -> None:
        if not self._is_object_store:
            self.fs.makedirs(path, exist_ok=True)

    def names(self) -> list[str]:
        """Of what lies directly in the root."""
        self.fs.invalidate_cache()
        try:
            return [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def sizes(self, tag: str) -> dict[str, int]:
        """Bytes of every file below a folder of the root."""
        self.fs.invalidate_cache()
        prefix = self.path(tag) + "/"
        try:
            found = self.fs.find(self.path(tag), detail=True)
        except FileNotFoundError:
            return {}
        return {str(path).partition(prefix)[2]: int(info["size"]) for path, info in found.items()}

    def manifest(self, tag: str) -> Manifest | None:
        """None where there is none, or one that is damaged."""
        try:
            manifest = Manifest.from_json(self.fs.cat_file(self.path(tag, MANIFEST)).decode())
        except (FileNotFoundError, ValueError):
            return None
        return manifest if manifest.step == step_of(Path(tag)) else None

    def read(self, *parts: str) -> Iterator[bytes]:
        """A file's content, in pieces. Raises ConfigError."""
        with self.reaching(*parts), self.fs.open(self.path(*parts), "rb") as file:
            while piece := file.read(_READ_BYTES):
                yield piece

    def for_each(self, names: Iterable[str], transfer: Callable[[str], None]) -> None:
        """Several at a time where the client can; the first error ends it."""
        with ThreadPoolExecutor(self._transfers, thread_name_prefix="mirror") as pool:
            transfers = [pool.submit(transfer, name) for name in names]
            try:
                for one in transfers:
                    one.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def missing(self, tag: str, manifest: Manifest) -> list[str]:
        """Names of the manifest's files that are not there, or not with their sizes."""
        sizes = self.sizes(tag)
        return [name for name, record in manifest.files.items() if sizes.get(name) != record.bytes]


def check_mirror(url: str) -> None:
    """Write a small file there and remove it. Raises ConfigError where that fails."""
    mirror = _Mirror(url)
    with mirror.reaching():
        mirror.make_folder(mirror.path())
        mirror.fs.pipe_file(mirror.path(_PROBE), b"probe")
        mirror.fs.rm_file(mirror.path(_PROBE))


def upload(folder: Path, url: str, names: Iterable[str], *, rank: int, save_id: str) -> None:
    """Copy these files of a finished checkpoint, the rank's share, and say so there. Raises ConfigError."""
    mirror, tag = _Mirror(url), folder.name

    def put(name: str) -> None:
        target = mirror.path(tag, name)
        mirror.make_folder(target.rpartition("/")[0])
        mirror.fs.put_file(str(folder / name), target)

    with mirror.reaching(tag):
        if rank == 0 and mirror.fs.exists(mirror.path(tag, MANIFEST)):  # of an earlier checkpoint of this step
            mirror.fs.rm_file(mirror.path(tag, MANIFEST))
        mirror.make_folder(mirror.path(tag))
        mirror.for_each(names, put)
        mirror.fs.pipe_file(mirror.path(tag, _part(rank, save_id)), b"here")


def finish_upload(folder: Path, url: str, *, timeout_s: float = 0, poll_s: float = 1) -> None:
    """Wait for every rank's `upload`, then copy the manifest: now it is a checkpoint. After `upload`, as rank 0.

    Raises ConfigError where a rank has not said that it is done within `timeout_s`, or a file has not its size then.
    """
    mirror, tag, manifest = _Mirror(url), folder.name, read_manifest(folder)
    parts = {_part(rank, manifest.save_id): rank for rank in range(manifest.world_size)}
    deadline = time.monotonic() + timeout_s
    with mirror.reaching(tag):
        while absent := parts.keys() - mirror.sizes(tag).keys():
            if time.monotonic() >= deadline:
                raise ConfigError(f"{mirror.url}/{tag}", found=f"nothing of rank {min(map(parts.__getitem__, absent))}",
                                  expected=f"those of every rank within {timeout_s:g} s")
            time.sleep(poll_s)
        for name in mirror.missing(tag, manifest):
            raise ConfigError(f"{mirror.url}/{tag}/{name}", found="no whole file",
                              expected=f"{manifest.files[name].bytes} bytes")
        mirror.fs.pipe_file(mirror.path(tag, MANIFEST), manifest.to_json().encode())
        for name in mirror.sizes(tag):
            if name.startswith(_PART):
                mirror.fs.rm_file(mirror.path(tag, name))


def _part(rank: int, save_id: str) -> str:
    return f"{_PART}{rank:05d}-{save_id}"


def finished_in_mirror(url: str) -> list[str]:
    """Folder names of the checkpoints whose upload was finished, the newest first. Raises ConfigError."""
    mirror = _Mirror(url)
    with mirror.reaching():
        tags = [name for name in mirror.names() if step_of(Path(name)) >= 0
                and mirror.fs.exists(mirror.path(name, MANIFEST))]
    return sorted(tags, key=lambda tag: step_of(Path(tag)), reverse=True)


def fetch(url: str, checkpoints: Path, tag: str) -> Path:
    """Copy a checkpoint of the mirror here; its folder. Each file is hashed while it arrives. One process only.

    Raises ConfigError where it is no whole checkpoint, SaveError where it does not fit; nothing is left of it then.
    """
    mirror = _Mirror(url)
    with mirror.reaching(tag):
        manifest = mirror.manifest(tag)
    if manifest is None:
        raise ConfigError(f"{mirror.url}/{tag}", found="no manifest, or a damaged one", expected="a whole checkpoint")
    num_bytes = sum(record.bytes for record in manifest.files.values())
    check_space(checkpoints, needed_bytes=num_bytes)
    temporary, final = temporary_folder(checkpoints, manifest.step), checkpoints / tag
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed attempt left
    temporary.mkdir(parents=True)
    try:
        with ProgressBar("fetching", num_bytes) as progress:
            mirror.for_each(manifest.files, lambda name: _fetch_file(mirror, temporary, tag, name, manifest, progress))
        write_manifest(temporary, manifest)
        publish(temporary, final)
        write_latest(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise SaveError(f"{final}: {error}") from error
        raise
    return final


def _fetch_file(mirror: _Mirror, temporary: Path, tag: str, name: str, manifest: Manifest,
                progress: ProgressBar) -> None:
    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(temporary / name) as file:
        for piece in mirror.read(tag, name):
            file.write(piece)
            progress.advance(len(piece), name)
    found, expected = file.close(), manifest.files[name]
    if found != expected:
        raise ConfigError(f"{mirror.url}/{tag}/{name}", found=f"{found.bytes} bytes, SHA-256 {found.sha256[:16]}...",
                          expected=f"{expected.bytes} bytes, SHA-256 {expected.sha256[:16]}...",
                          remedy="the mirror's copy is damaged")
