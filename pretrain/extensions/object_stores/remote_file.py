"""Read ranges of bytes of files in object stores and on web servers, with the file systems of fsspec."""

import errno
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pretrain import remote
from pretrain.cli import say
from pretrain.errors import ConfigError
from pretrain.remote import (
    changed_error,
    check_protocol,
    lasting_problem,
    reason_behind,
    text_of,
    waiting_line,
    with_retries,
    without_credentials,
)

_ANSWER_S = 60.0
_PIECE_BYTES = 1 << 16
_WHOLE_BYTES = 16 << 20
"""size up to which a file is read at once from a server that ignores ranges"""
_CONNECTIONS = 64
_S3, _HTTP = {"s3"}, {"http"}
"""protocols of clients to which a range of one version, named by its ETag, can be asked for"""
_VERSION_KEYS = ("ETag", "etag", "blob_id", "generation", "Content-MD5", "LastModified", "Last-Modified", "mtime",
                 "modified", "last_modified", "created")
"""keys of fsspec's facts about a file; the first one that is there identifies the version of the file"""
_T = TypeVar("_T")


def open_file_system(url: str, where: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path on it. Raises ConfigError as `check_protocol`."""
    import fsspec

    protocol = check_protocol(url, where)
    try:
        system, path = fsspec.url_to_fs(url, **_settings(protocol))
    except ValueError as error:
        raise ConfigError(where, problem=f"the URL cannot be used: {text_of(error)}") from None
    except OSError as error:  # clients of some protocols, such as ftp://, connect here
        raise ConfigError(where, problem=f"the server cannot be reached: {text_of(error)}") from None
    return system, str(path)


def _settings(protocol: str) -> dict[str, Any]:
    """Return settings of the client: of S3, more than botocore's 10 connections, besides what the user has set."""
    import fsspec.config

    if protocol in ("http", "https"):  # without trust_env, aiohttp reads neither ~/.netrc nor the variables of proxies
        return {"client_kwargs": {"trust_env": True}}
    if protocol not in ("s3", "s3a"):
        return {}
    given = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS, **given}}


class RemoteFile:
    """A file at a URL. Threads may read it at the same time.

    It has one version: the one that was found when it was opened, or `version`, if a caller recorded one. If the store
    answers with another version, a ConfigError says so. A failed request is repeated after 0.5, 1, 2 ... 30 seconds.

    Attributes:
        patience_s: seconds of failures after which ConfigError is raised; inf: never, and warnings continue.
        report: called with each warning, and whether the store still does not answer.
        last_wait: seconds of the last wait that is over and was reported, and the last answer in it.
        pins_version: whether each request asks for this version and no other.
    """

    def __init__(self, url: str, *, version: str = "", size: int | None = None, patience_s: float = 120.0) -> None:
        """size: of this version, if a listing of the store named both; then no request is made here.

        Raises ConfigError if there is no such file, and if it cannot be read.
        """
        self.name = without_credentials(url)
        self.patience_s = patience_s
        self.report: Callable[[str, bool], None] = lambda line, waits: say(line)
        self.last_wait: tuple[float, str] = 0.0, ""
        self._warned_at, self._answer = 0.0, ""
        self._system, self._path = open_file_system(url, self.name)
        self._is_http, self._is_s3 = (bool(names & names_of(self._system)) for names in (_HTTP, _S3))
        self._content: bytes | None = None  # the content of a small file on a server without ranges
        self.size, self.version = size or 0, version
        if size is None or not version:
            facts = self._facts()
            self.size, self.version = int(facts["size"]), version_of(facts)
        self.pins_version = self.version.startswith('"') and (self._is_http or self._is_s3)
        if (version and version != self.version) or (size is not None and size != self.size):
            raise self._changed()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes [start, start + num_bytes), fewer at the end of the file. Raises ConfigError."""
        stop = min(start + num_bytes, self.size)
        if self._content is not None:
            return self._content[start:stop]
        parts: list[bytes] = []
        while start < stop:
            parts.append(self._retry(functools.partial(self._request, start, stop)))
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_version(self) -> None:
        """Raise ConfigError if the file is another one now than when it was opened."""
        facts = self._facts()
        if version_of(facts) != self.version or facts["size"] != self.size:
            raise self._changed()

    def _retry(self, request: Callable[[], _T]) -> _T:
        return with_retries(request, self.name, self.patience_s, report=self._warn)

    def _warn(self, seconds: float, answer: str) -> None:
        """Report that a request waits, or has been answered; of requests that wait at the same time, report one."""
        now = time.monotonic()
        if (now - self._warned_at < remote.LONGEST_WAIT_S / 2 - 1) if answer else not self._warned_at:
            return
        self._warned_at = now if answer else 0.0
        self._answer = answer or self._answer
        if not answer:
            self.last_wait = seconds, self._answer
        self.report(waiting_line(self.name, seconds, answer), bool(answer))

    def _facts(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            if self._is_http:
                return dict(self._sync(self._facts_of_http))
            self._system.invalidate_cache()
            return dict(self._system.info(self._path))

        facts = self._retry(ask)
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise ConfigError(self.name, problem="the store names no size for it: it is no file, or the server sends "
                              "it without Content-Length", remedy="download it, and give the path")
        return facts

    def _request(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop); fewer, but at least one, if the connection ended before all came."""
        data = bytearray()
        try:
            self._fetch(start, stop, data)
        except Exception as error:
            if not data or lasting_problem(reason_behind(error)):
                raise
        if not data:
            raise OSError(errno.EIO, f"0 of {stop - start} bytes came")
        return bytes(data[: stop - start])

    def _fetch(self, start: int, stop: int, data: bytearray) -> None:
        """Append a range of this version to `data`. The protocol is asked for the version, if it can be."""
        from fsspec.asyn import AsyncFileSystem

        system = self._system
        if self._is_http:
            self._sync(self._fetch_from_http, start, stop, data)
        elif self._is_s3 and self.pins_version:
            data += self._s3_file.cache.fetcher(start, stop)
        elif isinstance(system, AsyncFileSystem):
            data += self._sync(system._cat_file, self._path, start=start, end=stop)
        elif "hf" in names_of(system):  # its default cache would read ahead, and ask for the size
            data += system.cat_file(self._path, start=start, end=stop, cache_type="none", size=self.size)
        else:
            data += system.cat_file(self._path, start=start, end=stop)

    def _sync(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function in the loop of the client."""
        from fsspec.asyn import sync

        return sync(self._system.loop, request, *args, timeout=_ANSWER_S, **kwargs)

    @functools.cached_property
    def _s3_file(self) -> Any:
        """The open file of s3fs, whose requests name the ETag that it had when it was opened (If-Match)."""
        self._system.retries = 1  # s3fs would repeat requests silently
        file = self._system.open(self._path, "rb", cache_type="none", fill_cache=False)
        if file.details.get("ETag") != self.version:
            raise self._changed()
        return file

    async def _facts_of_http(self) -> dict[str, Any]:
        """Return the facts of a web server's file. fsspec's `info` would begin to fetch it if HEAD fails."""
        size = None
        for method, part in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):  # a signature may be valid for GET only
            async with await self._ask_http(method, part) as answer:
                if method == "HEAD" and answer.status in (400, 401, 403, 404, 405, 501):
                    continue
                total = answer.headers.get("Content-Range", "").rpartition("/")[2]
                if answer.status != 416:  # 416: no byte of an empty file
                    answer.raise_for_status()
                if answer.status in (206, 416) and total.isdigit():
                    size = int(total)
                elif answer.headers.get("Content-Encoding", "identity") == "identity":
                    size = answer.content_length
                if size is not None:
                    return {"size": size, "type": "file", "ETag": answer.headers.get("ETag"),
                            "Last-Modified": answer.headers.get("Last-Modified")}
        return {"size": None}

    async def _ask_http(self, method: str, headers: dict[str, str]) -> Any:
        system = self._system
        session = await system.set_session()
        # Without "identity", a server may send a range of the compressed file.
        headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity", **headers}
        return session.request(method, system.encode_url(self._path), allow_redirects=True,
                               **{**system.kwargs, "headers": headers})

    async def _fetch_from_http(self, start: int, stop: int, data: bytearray) -> None:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if self.pins_version:  # a weak ETag, W/"...", never matches
            headers["If-Match"] = self.version
        async with await self._ask_http("GET", headers) as answer:
            answer.raise_for_status()
            version = answer.headers.get("ETag" if '"' in self.version else "Last-Modified", "")
            if self.version and version not in ("", self.version):
                raise self._changed()
            is_whole = answer.status == 200 and stop - start < self.size
            if is_whole and self.size > _WHOLE_BYTES:
                raise ConfigError(self.name, problem="the server sends the complete file instead of the range of bytes "
                                  "that is asked for", remedy="download it with curl -O, and give the path")
            content = bytearray() if is_whole else data
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                content += piece
            if is_whole:
                if len(content) != self.size:
                    raise OSError(errno.EIO, f"{len(content)} of {self.size} bytes came")
                self._content = bytes(content)
                data += content[start:stop]

    def _changed(self) -> ConfigError:
        return changed_error(self.name)


def names_of(system: Any) -> set[str]:
    """Return the protocols of a file system of fsspec."""
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def version_of(facts: dict[str, Any]) -> str:
    """Return what identifies a version of a file, from fsspec's facts about it: its ETag, else its time; or ""."""
    return next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), "")


