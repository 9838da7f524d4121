"""The files of a data set in an object store. The small ones are copied to the local disk once per host: .idx ..."""

import contextlib
import hashlib
import json
import os
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.daemon_threads import DaemonThreads
from pretrain.data.token_files.token_file import Url
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.object_stores.page_cache import open_cache, turn
from pretrain.extensions.object_stores.remote_file import RemoteFile
from pretrain.extensions.object_stores.token_file import RemoteTokenFile
from pretrain.paths import replace_file
from pretrain.remote import without_credentials
from pretrain.stored_json import read_object

if TYPE_CHECKING:
    from pretrain.extensions.object_stores.extension import ObjectStores

_OPTIONAL = (".meta.json", ".sha256.json", ".summary.json")
_RECORD = "files.json"
_OPEN = "give the prefix of a .bin/.idx pair, without .bin; upload both files"
_CHUNK_BYTES = 2**23
_AT_ONCE = 8  # requests
_LARGEST_HASHED = 2**26  # bytes; of a larger copy, size and modification time are compared at each start


class StoredTokens:
    """The files of a data set, as pretrain/data/token_files/token_file.py describes them."""

    def __init__(self, url: str, settings: "ObjectStores") -> None:
        self._url, self._settings = url, settings

    @property
    def note(self) -> str:
        cache = open_cache(self._settings)
        return f"data in object stores: pages are kept in {cache.folder}, at most {cache.num_bytes / 1e9:.1f} GB " \
               "(--data_cache, --data_cache_gb)"

    def read_small_file(self, suffix: str) -> bytes | None:
        file = _open(f"{self._url}{suffix}")
        return None if file is None else file.read(0, file.size)

    def copy_small_files(self) -> tuple[Path, str]:
        return fetch_small_files(self._url, open_cache(self._settings).folder)

    def open_tokens(self) -> RemoteTokenFile:
        return RemoteTokenFile(f"{self._url}.bin", open_cache(self._settings))


@dataclass(frozen=True)
class _Copy:
    """Record of a copy."""

    version: str  # in the store
    size: int
    mtime_ns: int
    sha256: str


def fetch_small_files(url: str, cache: Path) -> tuple[Path, str]:
    """Copy the small files of the data set `url` into a folder of `cache`, those that are not there as they are now.

    Return the prefix of the copies, and the SHA-256 of the .idx, which was computed while it was copied. One process of
    a host copies, and the others wait for it. Raises ConfigError.
    """
    shown = without_credentials(url)
    folder = cache / f"{Url(url).name[:100]}-{hashlib.sha256(shown.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with turn(folder):
            copies = _fetch(url, folder)
    except OSError as error:
        raise ConfigError("--data_cache", problem=f"{shorten(str(folder))} cannot be written to "
                          f"({error.strerror or error})", remedy="name a folder on a local disk") from None
    return folder / Url(url).name, copies[".idx"].sha256


def _fetch(url: str, folder: Path) -> dict[str, _Copy]:
    """Bring the copies up to date, and return what is recorded about them, by suffix. Raises ConfigError, OSError."""
    threads = DaemonThreads(_AT_ONCE, name="store")
    try:
        copies, known = _copies(url, folder, threads), _read_record(folder)
    finally:
        threads.shutdown()
    if copies != known:
        replace_file(folder / _RECORD, lambda path: path.write_text(
            json.dumps({suffix: vars(copy) for suffix, copy in copies.items()}), encoding="utf-8"))
    return copies


def _copies(url: str, folder: Path, threads: DaemonThreads) -> dict[str, _Copy]:
    futures = {suffix: threads.submit(_open, f"{url}{suffix}") for suffix in (".idx", *_OPTIONAL)}
    files, known = {suffix: future.result() for suffix, future in futures.items()}, _read_record(folder)
    if files[".idx"] is None:
        raise ConfigError(without_credentials(f"{url}.idx"), problem="there is no such file", remedy=_OPEN)
    copies: dict[str, _Copy] = {}
    for suffix, file in files.items():
        path = folder / f"{Url(url).name}{suffix}"
        if file is None:
            path.unlink(missing_ok=True)
        elif not file.version or not _is_current(known.get(suffix), file, path):
            copies[suffix] = _copy(file, path, threads)
        else:
            copies[suffix] = known[suffix]
    return copies


def _open(url: str) -> RemoteFile | None:
    """Open a file of a store; None if there is none."""
    try:
        return RemoteFile(url)
    except ConfigError as error:
        if "there is no such file" in str(error):
            return None
        raise


def _is_current(copy: _Copy | None, file: RemoteFile, path: Path) -> bool:
    """Return whether the copy at `path` is this file."""
    if copy is None or (copy.version, copy.size) != (file.version, file.size):
        return False
    with contextlib.suppress(OSError):
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (copy.size, copy.mtime_ns):
            return copy.size > _LARGEST_HASHED or hashlib.sha256(path.read_bytes()).hexdigest() == copy.sha256
    return False


def _copy(file: RemoteFile, path: Path, threads: DaemonThreads) -> _Copy:
    """Copy a file from the store. Raises ConfigError and OSError."""
    digest = hashlib.sha256()

    def write(temporary: Path) -> None:
        starts = iter(range(0, file.size, _CHUNK_BYTES))
        parts = deque(threads.submit(file.read, start, _CHUNK_BYTES) for start in islice(starts, _AT_ONCE))
        with temporary.open("xb") as target:
            while parts:
                data = parts.popleft().result()
                parts.extend(threads.submit(file.read, start, _CHUNK_BYTES) for start in islice(starts, 1))
                digest.update(data)
                target.write(data)
            target.flush()
            os.fsync(target.fileno())

    replace_file(path, write)
    file.check_version()
    status = path.stat()
    return _Copy(file.version, status.st_size, status.st_mtime_ns, digest.hexdigest())


def _read_record(folder: Path) -> dict[str, _Copy]:
    """Return what is recorded about the copies in a folder; {} if nothing can be read."""
    try:
        return {suffix: _Copy(**values) for suffix, values in read_object(folder / _RECORD).items()}
    except (OSError, ValueError, TypeError):
        return {}
