"""A TCPStore that listens on no more addresses than needed, and the values that this package puts into stores.

Every program that reaches a store's port can read and write all keys. Values are therefore JSON, which is checked
against a type, and not pickles, which could run code. Each value is signed with DS_PRETRAIN_SECRET, if that is set.
"""

import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pretrain.distributed.process import port_is_free
from pretrain.errors import printable, shorten
from pretrain.stored_json import build, parse_json

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SECRET_VARIABLE = "DS_PRETRAIN_SECRET"
_MOST_BYTES = 2**24  # size of one value; the values of 10,000 ranks take 2 MB
_SIGNATURE_BYTES = 32
_BACKLOG = 2048  # connections that wait, as in torch's own socket
_POLL_S = 0.2
_served: set[tuple[str, int]] = set()  # addresses and ports of the servers of this process


def secret_variable() -> dict[str, str]:
    """Return the variable with the secret of a start: this process's, or a new one."""
    return {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)}


class ForeignValueError(ConnectionError):
    """A value of a store that no rank of this start can have written."""


def wait_for_port(address: str, port: int, timeout_s: float) -> bool:
    """Return whether a program listens at `address`:`port` within `timeout_s`.

    A TCPStore that connects earlier prints a stack trace for each failed attempt.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=max(min(2.0, timeout_s), 0.1)).close()
            return True
        time.sleep(_POLL_S)
    return False


def start_store(address: str, port: int, *, on_one_host: bool, timeout_s: float,
                world_size: int | None = None) -> "TCPStore":
    """Start the server of a TCPStore on this host. A process group of this process at the same port shares the server.

    The server listens on `address` only. It listens on all addresses, as torch's own does, if the other hosts may know
    this one by another address: if `address` is a name, or not an address of this host (behind a translating router).
    Raises OSError or RuntimeError.
    """
    from torch import __version__ as torch_version
    from torch.distributed import TCPStore

    is_shared = (address, port) in _served and not port_is_free(port)
    listener = listen(address, port) if not is_shared and (on_one_host or is_numeric(address)) else None
    _served.add((address, port))
    own: dict[str, Any] = {}
    if listener is not None:  # the server with libuv of torch 2.6 takes no socket
        own = {"master_listen_fd": listener.detach(), "use_libuv": torch_version >= "2.7"}
    return TCPStore(address, port, world_size, True, timedelta(seconds=timeout_s), wait_for_workers=False,
                    multi_tenant=True, **own)


def is_numeric(address: str) -> bool:
    """Return whether an address is a number, such as 10.0.0.1, and not a name."""
    try:
        return bool(ipaddress.ip_address(address))
    except ValueError:
        return False


def listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address, or None if this host does not have the address."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(target, family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None


def encode_value(key: str, value: Any) -> bytes:
    """Return the bytes for `key` of a store: a signature, then `value` as JSON."""
    text = json.dumps(value, default=dataclasses.asdict).encode()
    return _signature(key, text) + text


def decode_value(key: str, content: bytes, kind: Any) -> Any:
    """Return the value of `key`. Raises ForeignValueError if it is not signed, too large, or not of the type `kind`."""
    signature, text = content[:_SIGNATURE_BYTES], content[_SIGNATURE_BYTES:]
    if len(content) > _MOST_BYTES:
        problem = f"it has {len(content):,} bytes"
    elif not hmac.compare_digest(signature, _signature(key, text)):
        problem = f"it is not signed with this rank's {SECRET_VARIABLE}"
    else:
        try:
            return build(kind, parse_json(text))
        except ValueError as error:
            problem = f"it is not of the expected form ({shorten(printable(str(error)))})"
    raise ForeignValueError(f"{key}: another program has written this value: {problem}. Check that all ranks belong to "
                            f"the same start and have the same {SECRET_VARIABLE}, and who can connect to this port")


def _signature(key: str, text: bytes) -> bytes:
    """Return the signature of a value, which is valid for this key only. Without a secret it proves nothing."""
    return hmac.digest(os.environ.get(SECRET_VARIABLE, "").encode(), key.encode() + b"\0" + text, "sha256")
