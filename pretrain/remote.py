"""Files of object stores and web servers, read in ranges of bytes: s3://, gs://, https://, hf:// and others of fsspec.

Credentials come from each protocol's own environment: AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ~/.netrc ...
"""

import errno
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pretrain.cli import say
from pretrain.errors import ConfigError, printable, shorten

_URL = re.compile(r"[a-z][a-z0-9+.-]*(?:::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""protocol -> the extra of this package that installs its client"""
_FIRST_WAIT_S, _LONGEST_WAIT_S, _ANSWER_S = 0.5, 30.0, 60.0
_CONNECTIONS = 64
_SILENT_S = 5.0
"""seconds of failures after which a warning names the store"""
_VERSION_KEYS = ("ETag", "etag", "blob_id", "generation", "Content-MD5", "LastModified", "Last-Modified", "mtime",
                 "modified", "last_modified", "created")
"""keys of fsspec's facts about a file of which the first one tells versions of the file apart"""
_PINNING = ("S3FileSystem", "HTTPFileSystem")
"""fsspec's clients to which a range of one version, named by its ETag, can be asked for"""
_T = TypeVar("_T")


class StoreError(ConfigError):
    """A store does not answer. Another start may succeed."""


def is_url(word: str) -> bool:
    """Return whether a word of the command line is a URL and not a path."""
    return _URL.match(word) is not None


def without_credentials(text: str) -> str:
    """Return a text for messages and records: its URLs without user name, password, and the signature after `?`."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("//", text))


def open_file_system(url: str, where: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path on it. No server is contacted.

    Raises ConfigError, which begins with `where`, if the protocol is unknown or its package is not installed.
    """
    import fsspec

    protocol = url.partition("://")[0].lower()
    try:
        for name in protocol.split("::"):  # simplecache::s3://bucket is one URL
            fsspec.get_filesystem_class(name)
        system, path = fsspec.url_to_fs(url, **_settings(protocol))
    except ImportError as error:
        extra = _EXTRAS.get(protocol.rpartition("::")[2])
        raise ConfigError(where, problem=f"{protocol}:// needs a package: {error}",
                          remedy=f"run `pip install 'ds-pretrain[{extra}]'`" if extra else "install it") from None
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise ConfigError(where, problem=f"the URL cannot be used: {printable(str(error))}") from None
        raise ConfigError(where, found=f"the protocol {protocol}://", expected="a URL that fsspec knows such as "
                          "s3://bucket/name", word=protocol, known=fsspec.available_protocols()) from None
    return system, str(path)


def _settings(protocol: str) -> dict[str, Any]:
    """Return settings of the client: of S3, more than botocore's 10 connections, besides what the user has set."""
    import fsspec.config

    if protocol not in ("s3", "s3a"):
        return {}
    own = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS, **own}}


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

    def __init__(self, url: str, *, version: str = "", patience_s: float = 120.0) -> None:
        """Raises ConfigError if there is no such file, and if it cannot be read."""
        self.name = without_credentials(url)
        self.patience_s = patience_s
        self.report: Callable[[str, bool], None] = lambda line, waits: say(line)
        self.last_wait: tuple[float, str] = 0.0, ""
        self._warned_at, self._answer = 0.0, ""
        self._system, self._path = open_file_system(url, self.name)
        facts = self._facts()
        self.size = int(facts["size"])
        self.version = version_of(facts)
        self.pins_version = self.version.startswith('"') and type(self._system).__name__ in _PINNING
        if version and version != self.version:
            raise self._changed()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes [start, start + num_bytes), fewer at the end of the file. Raises ConfigError."""
        stop = min(start + num_bytes, self.size)
        if stop <= start:
            return b""
        return self._retry(lambda: self._request(start, stop))

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
        if (now - self._warned_at < _LONGEST_WAIT_S / 2 - 1) if answer else not self._warned_at:
            return
        self._warned_at = now if answer else 0.0
        self._answer = answer or self._answer
        if not answer:
            self.last_wait = seconds, self._answer
        self.report(waiting_line(self.name, seconds, answer), bool(answer))

    def _facts(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self._system.invalidate_cache()
            return dict(self._system.info(self._path))

        facts = self._retry(ask)
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise ConfigError(self.name, problem="the store names no size for it: it is no file, or the server sends "
                              "it without Content-Length", remedy="download it, and give the path")
        return facts

    def _request(self, start: int, stop: int) -> bytes:
        data: bytes = self._fetch(start, stop)
        if len(data) == self.size != stop - start:  # a server without ranges sends all
            data = data[start:stop]
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"{len(data)} of {stop - start} bytes came")
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        """Ask for a range of this version, where the protocol can ask for a version."""
        from fsspec.asyn import AsyncFileSystem, sync

        system, kind = self._system, type(self._system).__name__
        if not isinstance(system, AsyncFileSystem):
            return bytes(system.cat_file(self._path, start=start, end=stop))
        if kind == "S3FileSystem" and self.pins_version:
            return bytes(sync(system.loop, self._fetch_from_s3, start, stop, timeout=_ANSWER_S))
        own = {"headers": {"If-Match": self.version}} if self.pins_version else {}
        return bytes(sync(system.loop, system._cat_file, self._path, start=start, end=stop, timeout=_ANSWER_S, **own))

    async def _fetch_from_s3(self, start: int, stop: int) -> bytes:
        bucket, key, version_id = self._system.split_path(self._path)
        own = {"VersionId": version_id} if version_id else {}
        answer = await self._system._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}",
                                             IfMatch=self.version, **own)
        async with answer["Body"] as body:
            return bytes(await body.read())

    def _changed(self) -> ConfigError:
        return changed_error(self.name)


def changed_error(name: str) -> ConfigError:
    """Return the error for a file that is not the one that was read before."""
    return ConfigError(name, problem="it was changed while it was read: the store has another version now",
                       remedy="restore it, or begin again")


def version_of(facts: dict[str, Any]) -> str:
    """Return what tells the versions of a file apart, from fsspec's facts about it: its ETag, else its time; or ""."""
    return next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), "")


def waiting_line(name: str, seconds: float, answer: str) -> str:
    """Return a line about a store that does not answer, or that answers again if `answer` is ""."""
    if not answer:
        return f"{name}: the store answers again after {seconds:.0f} s"
    return f"{name}: waits for the store since {seconds:.0f} s; last answer: {answer}"


def with_retries(request: Callable[[], _T], name: str, patience_s: float = 120.0, *,
                 report: Callable[[float, str], None] | None = None) -> _T:
    """Return what `request` returns; repeat it while it fails in a way that may pass. Raises ConfigError.

    report: called instead of a warning, with the seconds of waiting and the last answer of the store; and with the
    answer "" once the request has succeeded after such a call.
    """
    started, wait_s, warned_s = time.monotonic(), _FIRST_WAIT_S, 0.0
    while True:
        try:
            answer = request()
            if warned_s and report is not None:
                report(time.monotonic() - started, "")
            return answer
        except ConfigError:
            raise
        except Exception as error:  # each client of fsspec has its own exception classes
            failed_s = time.monotonic() - started
            reason = shorten(printable(f"{type(error).__name__}: {error}"), 300)
            if problem := _lasting_problem(error):
                raise ConfigError(name, problem=problem) from None
            if failed_s + wait_s > patience_s:
                raise StoreError(name, problem=f"no answer for {failed_s:.0f} s: {reason}", remedy="check the network "
                                 "and the store, and give the same command again") from None
            if failed_s >= _SILENT_S and failed_s - warned_s >= _LONGEST_WAIT_S / 2:
                warned_s = failed_s
                if report is None:
                    say(waiting_line(name, failed_s, reason))
                else:
                    report(failed_s, reason)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _lasting_problem(error: BaseException) -> str:
    """Return why a request can never succeed; "" if it may."""
    if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith("aiohttp"):
        assert error.__cause__ is not None  # fsspec's HTTP client raises FileNotFoundError for any failure
        error = error.__cause__
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "there is no such file"
    if status == 412 or "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
        return str(changed_error("").args[0]).removeprefix(": ")
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"the store refuses access: {shorten(printable(str(error)), 200)}"
    if isinstance(error, (ImportError, TypeError, NotImplementedError)) or type(error).__name__ in (
            "NoCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidURL"):
        return f"it cannot be read: {shorten(printable(f'{type(error).__name__}: {error}'), 200)}"
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return f"the server answers {status}: {shorten(printable(str(error)), 200)}"
    return ""


def _http_status(error: BaseException) -> int | None:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
