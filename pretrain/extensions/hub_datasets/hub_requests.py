"""Requests of the libraries `datasets` and `huggingface_hub`: which failures pass, and what to say about the others."""

import os
from collections.abc import Callable
from typing import TypeVar

from pretrain.errors import ConfigError, printable, shorten
from pretrain.remote import is_url, with_retries

_NETWORK = ("httpx", "httpcore", "requests", "urllib3", "aiohttp", "asyncio")  # huggingface_hub 2.4 uses httpx2
_T = TypeVar("_T")


def ask_hub(request: Callable[[], _T], where: str) -> _T:
    """Return what a request of the library returns. Repeats it while the network fails. Raises ConfigError."""
    def attempt() -> _T:
        try:
            return request()
        except ConfigError:
            raise
        except Exception as error:  # the library, Arrow, the HTTP client and the file system raise others
            if _may_pass(error):
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            raise hub_error(where, error) from None

    return with_retries(attempt, where)


def _may_pass(error: BaseException) -> bool:
    """Return whether the network or the server failed in a way that may pass."""
    if (status := _status(error)) is not None:
        return status in (408, 425, 429) or status >= 500
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.startswith(_NETWORK):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def hub_error(where: str, error: Exception) -> ConfigError:
    """Return the error for a request that can never succeed."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError) or _status(error) == 403 or " gated dataset" in str(error):
        return ConfigError(where, problem="the Hub refuses access (403): the dataset is gated, or the token may not "
                           "read it", remedy="accept its terms on its page, and set HF_TOKEN to your token")
    if not is_url(where) and (isinstance(error, errors.RepositoryNotFoundError) or _status(error) in (401, 404)):
        private = "HF_TOKEN may not read it" if os.environ.get("HF_TOKEN") else "it is private, which needs HF_TOKEN"
        return ConfigError(where, problem=f"the Hub has no such dataset, or {private}", remedy="check the name: "
                           "ORG/NAME")
    if "script" in str(error) and isinstance(error, RuntimeError):
        return ConfigError(where, problem=f"{str(error).split(', but ')[-1]}: the dataset is a Python script, and no "
                           "script is ever run", remedy="--dataset_revision refs/convert/parquet names the Hub's "
                           "Parquet files of many such datasets")
    if isinstance(error, (FileNotFoundError, ImportError)) or _status(error) is not None:
        reason = str(error).strip().partition("\n")[0]
    else:
        reason = f"{type(error).__name__}: {error}"
    return ConfigError(where, problem=f"it cannot be read: {shorten(printable(reason))}")


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or of its cause."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__ or cause.__context__
    return None
