"""Continue one prompt after another from a terminal, and print each text while it is generated."""

import select
import sys
from collections.abc import Callable

from pretrain.analysis.generate.decode import Completion, LoadedModel, Sampling, generate_batch
from pretrain.analysis.generate.prompts import EncodedPrompt, Prompt
from pretrain.cli import say
from pretrain.errors import ConfigError

_POLL_S = 0.1


def interact(loaded: LoadedModel, encode: Callable[[Prompt], EncodedPrompt], sampling: Sampling) -> None:
    """Read a prompt per line until end of file, and print what follows it.

    Ctrl-C ends the current text. While a prompt is read, it raises KeyboardInterrupt. A prompt that cannot be used is
    reported, and the next one is read.
    """
    index = 0
    while (line := _read_line()) is not None:
        try:
            text = Completion(encode(Prompt("prompt", line)), index)
        except ConfigError as error:
            say(str(error))
            continue
        try:
            generate_batch(loaded, [text], sampling, on_text=_print_piece)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)
        index += 1


def _read_line() -> str | None:
    """Return the next line from standard input; None at its end."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("> ", end="", flush=True)
        # input() would not notice a Ctrl-C that the kernel delivers to one of torch's threads
        while not select.select([sys.stdin], [], [], _POLL_S)[0]:
            pass
    line = sys.stdin.readline()
    if terminal and not line:
        print()  # after Ctrl-D, the shell's prompt begins on a new line
    return line.rstrip("\r\n") if line else None


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)
