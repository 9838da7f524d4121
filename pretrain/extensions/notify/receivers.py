"""Who hears of a run (--notify and its companions), and where its metrics are served. URLs of receivers hold secrets:
they are read from environment variables, and only by the process that sends.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.cli import OWNED, chosen
from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.world import world_from_environment
from pretrain.errors import ConfigError, require_package
from pretrain.extensions.notify.extension import KINDS, Notify

LOOPBACK = "127.0.0.1"


def check_receivers(args: RunArguments) -> None:
    """Raise ConfigError for receivers and addresses that cannot be used, and for flags without an effect.

    URLs are read only where they are used: by the launcher, or without one by rank 0.
    """
    flags = args.of(Notify)
    for name, other, used in (("notify_on", "--notify or --notify_command", flags.has_receivers),
                              ("notify_silence", "--notify or --notify_command", flags.has_receivers),
                              ("metrics_address", "--metrics_port", flags.metrics_port)):
        if getattr(flags, name) is not None and not used:
            raise ConfigError(f"--{name}", problem=f"it has no effect without {other}", remedy=f"give {other}, too")
    kinds_to_send(flags)
    if os.environ.get(OWNED) or world_from_environment(os.environ).rank != 0:
        return
    read_urls(flags, os.environ)
    if flags.metrics_port is not None:
        require_package("prometheus_client", "--metrics_port", "metrics",
                        "the package prometheus-client is not installed")
        _socket_address(flags)


def kinds_to_send(flags: Notify) -> Sequence[str]:
    """Return the kinds of messages that --notify_on selects. Raises ConfigError for an unknown kind."""
    return chosen("--notify_on", flags.notify_on or [], KINDS) or KINDS


def read_urls(flags: Notify, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return name of the variable -> the URLs that it holds. Raises ConfigError, which never has a part of a URL."""
    found: dict[str, list[str]] = {}
    for name in flags.variables:
        if not name.isidentifier():
            raise ConfigError("--notify", problem="it takes the name of an environment variable, not a URL, which "
                              "other users could read in the list of processes",
                              remedy="run `export NOTIFY_URL='...'` with the URL, and give --notify NOTIFY_URL")
        found[name] = environ.get(name, "").split()
        if not found[name]:
            raise ConfigError("--notify", problem=f"the environment variable {name} is empty or not set",
                              remedy=f"run `export {name}='...'` with a URL such as slack://... before this command")
    if found:
        require_package("apprise", "--notify", "notify")
        import apprise

        silence_apprise()
        for name, urls in found.items():
            if not all(apprise.Apprise.instantiate(url, suppress_exceptions=True) for url in urls):
                raise ConfigError("--notify", problem=f"the variable {name} holds no URL that apprise knows",
                                  remedy="it begins with the name of a service, such as slack://, mailto:// or "
                                  "json://; `apprise --details` lists them")
    return found


def silence_apprise() -> None:
    """Print nothing that apprise logs: its lines may hold the URL."""
    logger = logging.getLogger("apprise")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def check_port(flags: Notify) -> None:
    """Raise ConfigError if no server can listen on --metrics_port."""
    if flags.metrics_port is None:
        return
    family, place = _socket_address(flags)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen()
        except OSError as error:
            raise ConfigError("--metrics_port", problem=f"port {flags.metrics_port} of {place[0]} cannot be used: "
                              f"{error.strerror}", remedy="choose another port, or an address of this host as "
                              "--metrics_address") from None


def _socket_address(flags: Notify) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    address = flags.metrics_address or LOOPBACK
    try:
        family, _, _, _, place = socket.getaddrinfo(address, flags.metrics_port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise ConfigError("--metrics_address", problem=f"{address!r} is no address: {reason}",
                          remedy="give an address of this host, or 0.0.0.0 or :: for all of them") from None
    return family, place
