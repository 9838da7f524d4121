"""Stop a preparation on SIGTERM, Ctrl-C or a closed terminal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest(BaseException):
    """Raised in the main thread by a signal. `name` is the name of the signal."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.remedy = "nothing has been written"
        super().__init__(self.name)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StopRequest at the first signal, and ignore further ones. Signals that are ignored (nohup) remain so."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    used = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]

    def stop(number: int, _: Any) -> None:
        for other in used:
            signal.signal(other, signal.SIG_IGN)
        raise StopRequest(number)

    for number in used:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in used:
            signal.signal(number, before[number])
