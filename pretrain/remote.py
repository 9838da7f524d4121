"""URLs: their names without credentials, the packages that they need, and requests that are repeated.

Extensions read what is at a URL (`token_files` and `text_inputs` of extension.py). Credentials come from each
protocol's own environment: AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ~/.netrc ...
"""

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

from pretrain.cli import is_url as is_url
from pretrain.cli import path_text, say, text
from pretrain.errors import ConfigError, printable, shorten

_CREDENTIALS = re.compile(r"(https?://)[^/\s]*@|(//)[^/\s:@]*:[^/\s]*@", re.IGNORECASE)
"""abfs://container@account has none"""
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*|(://[^\s?]*)\?\S*=\S*", re.IGNORECASE)
"""of stores, `?` may be part of a glob; a signature has a `=`"""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
"""protocol -> the extra of this package that installs its client"""
_FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
_SILENT_S = 5.0
"""seconds of failures after which a warning names the store"""
_CANNOT_BE_READ = ("NoCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidURL", "HFValidationError",
                   "HfUriError")
"""names of exceptions of the clients that another attempt would raise again"""
_PRECONDITION = ("PreconditionFailed", "pre-conditions", "and Etag")
"""words of errors of s3fs for a file with another ETag"""
_REMEDIES = {"NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public "
                                   "bucket, set FSSPEC_S3_ANON=true"}
_T = TypeVar("_T")


class StoreError(ConfigError):
    """A store does not answer. Another start may succeed."""


def path_or_url(word: str) -> str:
    """Argparse type: a path, a glob, - or a URL, returned as it was typed."""
    return text(word) if is_url(word) else path_text(word)


def without_credentials(message: str) -> str:
    """Return a text for messages and records: its URLs without user name, password, and the signature after `?`."""
    return _QUERY.sub(_kept, _CREDENTIALS.sub(_kept, message))


def _kept(match: "re.Match[str]") -> str:
    return str(match[1] or match[2])


def check_protocol(url: str, where: str) -> str:
    """Return the protocol of a URL. No server is contacted.

    Raises ConfigError, which begins with `where`, if the protocol is unknown or its package is not installed.
    """
    import fsspec

    protocol = url.partition("://")[0].lower()
    try:
        for name in protocol.split("::"):  # simplecache::s3://bucket is one URL
            fsspec.get_filesystem_class(name)
    except ImportError as error:
        extra = _EXTRAS.get(protocol.rpartition("::")[2])
        raise ConfigError(where, problem=f"{protocol}:// needs a package: {error}",
                          remedy=f"run `pip install 'ds-pretrain[{extra}]'`" if extra else "install it") from None
    except ValueError:
        raise ConfigError(where, found=f"the protocol {protocol}://", expected="a URL that fsspec knows such as "
                          "s3://bucket/name", word=protocol, known=fsspec.available_protocols()) from None
    return protocol


def changed_error(name: str) -> ConfigError:
    """Return the error for a file that is not the one that was read before."""
    return ConfigError(name, problem="it was changed while it was read: the store has another version now",
                       remedy="restore it, or begin again")


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
            error = reason_behind(error)
            reason = f"{type(error).__name__}: {text_of(error)}"
            if problem := lasting_problem(error):
                raise ConfigError(name, problem=problem, remedy=_REMEDIES.get(type(error).__name__, "")) from None
            if failed_s + wait_s > patience_s:
                raise StoreError(name, problem=f"no answer for {failed_s:.0f} s: {reason}", remedy="check the network "
                                 "and the store, and give the same command again") from None
            if failed_s >= _SILENT_S and failed_s - warned_s >= LONGEST_WAIT_S / 2:
                warned_s = failed_s
                if report is None:
                    say(waiting_line(name, failed_s, reason))
                else:
                    report(failed_s, reason)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def text_of(error: BaseException) -> str:
    return shorten(printable(without_credentials(str(error))), 300)


def reason_behind(error: Exception) -> Exception:
    """Return the error behind a FileNotFoundError, which fsspec's HTTP client raises for any failure."""
    cause = error.__cause__
    is_of_http = type(cause).__module__.partition(".")[0] in ("aiohttp", "asyncio") or \
        isinstance(cause, (TimeoutError, ConnectionError))
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_of_http else error


def lasting_problem(error: BaseException) -> str:
    """Return why a request can never succeed; "" if it may."""
    status = _http_status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        reason = text_of(error)
        return reason if " " in reason and status is None else "there is no such file"
    if status in (412, 416) or any(word in str(each) for each in (error, error.__cause__) for word in _PRECONDITION):
        return str(changed_error("").args[0]).removeprefix(": ")
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"the store refuses access: {text_of(error)}"
    if isinstance(error, (ImportError, TypeError, NotImplementedError)) or type(error) is ValueError or \
            type(error).__name__ in _CANNOT_BE_READ or getattr(error, "errno", None) == errno.EINVAL:
        return f"it cannot be read: {type(error).__name__}: {text_of(error)}"
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return f"the server answers {status}: {text_of(error)}"
    return ""


def _http_status(error: BaseException) -> int | None:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
