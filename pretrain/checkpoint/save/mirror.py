"""Copy committed checkpoints to a mirror: an fsspec URL (s3://bucket/run, ftp://host/run ...) or a plain path.

The mirror has the same folders as the run: URL/global_stepN/FILE. The manifest is copied last. A
folder of the mirror without a manifest is not a complete checkpoint.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import HashedFile
from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import read_manifest, step_of
from pretrain.checkpoint.save.commit import check_space, publish, temporary_folder, write_latest, write_manifest
from pretrain.errors import ConfigError, SaveError
from pretrain.progress import ProgressBar
from pretrain.remote import without_credentials

_PROBE = ".ds-pretrain-probe"  # name of a test file
_PART = ".part-"  # prefix of the files that mark a rank's files as copied
_READ_BYTES = 2**24  # size of a chunk
_MAX_TRANSFERS = 4  # files that are copied at the same time, if the fsspec client supports this


class _Mirror:
    """The fsspec file system of a URL, and the path of the mirror on it."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError if the protocol is unknown, its package is not installed, or the server does not answer."""
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        self.url = without_credentials(url)  # its name in messages
        with self.one_line_errors():
            self.fs, root = fsspec.url_to_fs(url)
        self._root = str(root).rstrip("/")
        # fsspec's clients of object stores are AsyncFileSystems. They have no folders, and makedirs would create a
        # bucket if its name is misspelt. The other clients (local, ftp, sftp ...) have folders and one connection.
        self._is_object_store = isinstance(self.fs, AsyncFileSystem)
        self._num_transfers = _MAX_TRANSFERS if self._is_object_store else 1

    @contextlib.contextmanager
    def one_line_errors(self, *parts: str) -> Iterator[None]:
        """Convert any exception to a ConfigError of one line. Each fsspec client has its own exception classes."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            remedy = "install the missing package" if isinstance(error, ImportError) else \
                "name a reachable path or fsspec URL"
            raise ConfigError("/".join([self.url, *parts]), remedy=remedy,
                              problem=f"the mirror cannot be used: {type(error).__name__} ({error})") from error

    def path(self, *parts: str) -> str:
        """Return a path below the mirror's root."""
        return "/".join([self._root, *parts])

    def make_folder(self, path: str) -> None:
        """Create a folder, except in an object store, which has no folders."""
        if not self._is_object_store:
            self.fs.makedirs(path, exist_ok=True)

    def names(self) -> list[str]:
        """List the names of files and folders directly in the mirror's root."""
        self.fs.invalidate_cache()
        try:
            return [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def sizes(self, tag: str) -> dict[str, int]:
        """Return the size in bytes of every file below a folder of the mirror."""
        self.fs.invalidate_cache()
        prefix = self.path(tag) + "/"
        try:
            found = self.fs.find(self.path(tag), detail=True)
        except FileNotFoundError:
            return {}
        return {str(path).partition(prefix)[2]: int(info["size"]) for path, info in found.items()}

    def manifest(self, tag: str) -> Manifest | None:
        """Read the manifest of a folder; None if it is missing or damaged."""
        try:
            manifest = Manifest.from_json(self.fs.cat_file(self.path(tag, MANIFEST)).decode())
        except (FileNotFoundError, ValueError):
            return None
        return manifest if manifest.step == step_of(Path(tag)) else None

    def read(self, *parts: str) -> Iterator[bytes]:
        """Yield a file's content in chunks. Raises ConfigError."""
        with self.one_line_errors(*parts), self.fs.open(self.path(*parts), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                yield chunk

    def for_each(self, names: Iterable[str], transfer: Callable[[str], None]) -> None:
        """Call `transfer` for each name, in parallel if the client supports this. An error cancels the other calls."""
        with ThreadPoolExecutor(self._num_transfers, thread_name_prefix="mirror") as pool:
            list(pool.map(transfer, names))


def check_mirror(url: str) -> None:
    """Write a small file to the mirror and remove it. Raises ConfigError if that fails."""
    mirror = _Mirror(url)
    with mirror.one_line_errors():
        mirror.make_folder(mirror.path())
        mirror.fs.pipe_file(mirror.path(_PROBE), b"probe")
        mirror.fs.rm_file(mirror.path(_PROBE))


def upload(folder: Path, url: str, names: Iterable[str], *, rank: int, save_id: str) -> None:
    """Copy one rank's files of a committed checkpoint, then write its part file to the mirror. Raises ConfigError."""
    mirror, tag = _Mirror(url), folder.name

    def put(name: str) -> None:
        target = mirror.path(tag, name)
        mirror.make_folder(target.rpartition("/")[0])
        mirror.fs.put_file(str(folder / name), target)

    with mirror.one_line_errors(tag):
        if rank == 0 and mirror.fs.exists(mirror.path(tag, MANIFEST)):  # from an earlier save of this step
            mirror.fs.rm_file(mirror.path(tag, MANIFEST))
        mirror.make_folder(mirror.path(tag))
        mirror.for_each(names, put)
        mirror.fs.pipe_file(mirror.path(tag, _part(rank, save_id)), b"here")


def finish_upload(folder: Path, url: str, *, timeout_s: float = 0, poll_s: float = 1) -> None:
    """Wait for every rank's `upload`, then copy the manifest, which makes the copy a complete checkpoint. Rank 0 only.

    Raises ConfigError if a rank's upload is not finished within `timeout_s`, or if a copied file has a wrong size.
    """
    mirror, tag, manifest = _Mirror(url), folder.name, read_manifest(folder)
    parts = {_part(rank, manifest.save_id): rank for rank in range(manifest.world_size)}
    deadline = time.monotonic() + timeout_s
    with mirror.one_line_errors(tag):
        while absent := parts.keys() - mirror.sizes(tag).keys():
            if time.monotonic() >= deadline:
                rank = min(parts[name] for name in absent)
                raise ConfigError(f"{mirror.url}/{tag}", problem=f"rank {rank} has not copied its files within "
                                  f"{timeout_s:g} s")
            time.sleep(poll_s)
        copied = mirror.sizes(tag)
        for name, num_bytes in manifest.sizes.items():
            if copied.get(name) != num_bytes:
                raise ConfigError(f"{mirror.url}/{tag}/{name}", problem="the copy is missing or does not have "
                                  f"{num_bytes} bytes")
        mirror.fs.pipe_file(mirror.path(tag, MANIFEST), manifest.to_json().encode())
        for name in copied:
            if name.startswith(_PART):
                mirror.fs.rm_file(mirror.path(tag, name))


def withdraw(url: str, save_ids: dict[str, str]) -> None:
    """Remove the manifests of abandoned checkpoints, so that no start fetches their copies. Raises ConfigError.

    Args:
        save_ids: folder name -> save_id. A copy of another save of the same step remains.
    """
    mirror = _Mirror(url)
    for tag, save_id in save_ids.items():
        with mirror.one_line_errors(tag):
            found = mirror.manifest(tag)
            if found is not None and found.save_id == save_id:
                mirror.fs.rm_file(mirror.path(tag, MANIFEST))


def _part(rank: int, save_id: str) -> str:
    """Return the name of the part file that marks a rank's files as copied."""
    return f"{_PART}{rank:05d}-{save_id}"


def mirrored_checkpoints(url: str, abandoned: Collection[str] = ()) -> list[str]:
    """List the names of the mirror's global_stepN folders that have a manifest, newest first. Raises ConfigError.

    Args:
        abandoned: save_ids of checkpoints that are left out.
    """
    mirror = _Mirror(url)
    with mirror.one_line_errors():
        tags = [name for name in mirror.names() if step_of(Path(name)) >= 0
                and mirror.fs.exists(mirror.path(name, MANIFEST))]
        if abandoned:
            manifests = {tag: mirror.manifest(tag) for tag in tags}
            tags = [tag for tag, found in manifests.items() if found is None or found.save_id not in abandoned]
    return sorted(tags, key=lambda tag: step_of(Path(tag)), reverse=True)


def fetch(url: str, checkpoints: Path, tag: str) -> Path:
    """Copy a checkpoint from the mirror into `checkpoints`, verify its hashes, and return its folder. Rank 0 only.

    Raises ConfigError if the checkpoint is incomplete, damaged or not finite, and SaveError if it cannot be written to
    the disk. In both cases the incomplete copy is removed.
    """
    mirror = _Mirror(url)
    with mirror.one_line_errors(tag):
        manifest = mirror.manifest(tag)
    if manifest is None:
        raise ConfigError(f"{mirror.url}/{tag}", problem="the manifest is missing or damaged",
                          remedy="use another checkpoint")
    if not manifest.is_good:
        raise ConfigError(f"{mirror.url}/{tag}", problem=NOT_FINITE, remedy="use another checkpoint")
    check_space(checkpoints, needed_bytes=manifest.num_bytes)
    temporary, final = temporary_folder(checkpoints, manifest.step), checkpoints / tag
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
    temporary.mkdir(parents=True)
    try:
        with ProgressBar("fetching", manifest.num_bytes) as progress:
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
    """Copy one file from the mirror. Raises ConfigError if its size or hash differs from the manifest's."""
    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(temporary / name) as file:
        for chunk in mirror.read(tag, name):
            file.write(chunk)
            progress.advance(len(chunk), name)
    found, expected = file.close(), manifest.files[name]
    if found != expected:
        raise ConfigError(f"{mirror.url}/{tag}/{name}", found=f"{found.bytes} bytes, SHA-256 {found.sha256[:16]}...",
                          expected=f"{expected.bytes} bytes, SHA-256 {expected.sha256[:16]}...",
                          remedy="use another checkpoint, because the mirror's copy is damaged")
