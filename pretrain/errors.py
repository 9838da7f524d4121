"""Exit codes, and the exceptions that end a program with one line on stderr."""

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

_COMMANDS = ("apt-get", "deepspeed", "pip", "python", "rm", "sudo", "torchrun")
_LONGEST_WHERE = 1000  # characters of a path and key
_LONGEST_VALUE = 300  # characters of a value
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

FINISHED = 0
CRASHED = 1  # any failure that has no code of its own
REJECTED = 2
NOTHING_FITS = 3
STOPPED = 75  # EX_TEMPFAIL of sysexits.h
GUARD = 76
HANG = 77
INTERRUPTED = 130  # shells report the same code for a program that SIGINT killed
EXIT_CODES = {
    FINISHED: "finished",
    CRASHED: "out of memory, an object store that does not answer, a last checkpoint that could not be written, copies "
             "of a parameter that differ, a device that computes wrongly, a run folder that another start took over, "
             "or a crash; the log says which",
    REJECTED: "bad input: the run was rejected, and another start would end in the same way",
    NOTHING_FITS: "`ds-pretrain compare`: no layout fits these machines and runs",
    STOPPED: "the run has saved and stopped on request: a signal, `RUN/STOP` or a time limit; start it again",
    GUARD: "stopped by the guard against bad steps, or a last checkpoint with NaN; another start would not help",
    HANG: "a rank made no progress within its time-out; the supervisor and the SLURM script start the run again",
    INTERRUPTED: "Ctrl-C ended the program without a save; other signals: 128 + number, such as 143 for SIGTERM",
}

NO_RESTART = {REJECTED: "the run was rejected", GUARD: "the bad-step guard stopped it"}


class ConfigError(ValueError):
    """Bad input. The message is one line: where the error is, what is wrong, and what to do.

    If both parts are values, `ConfigError("--seed", found=-1, expected="at least 0")` becomes
    `--seed: found -1; expected at least 0.` Otherwise the problem is a sentence:
    `ConfigError("--save", problem="the folder is read-only")` becomes `--save: the folder is read-only.`
    If `word` resembles one of the `known` words, `Did you mean "..."?` replaces `remedy`.
    Every `main()` prints the line to stderr and exits with `exit_code`. `details` are printed before the line: the
    traceback of the user's own code (--dataset_module) if it failed.
    """

    details: str = ""
    exit_code: ClassVar[int] = REJECTED

    def __init__(self, where: str, *, found: object = None, expected: str = "", problem: str = "", remedy: str = "",
                 word: str = "", known: Iterable[str] = ()) -> None:
        what = problem or f"found {shorten(str(found))}; expected {expected}"
        advice = begin_sentence(did_you_mean(word, known) or remedy)
        line = printable(f"{shorten(where, _LONGEST_WHERE)}: {what}. {advice}".rstrip(". "))
        super().__init__(line if line.endswith("?") else f"{line}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError.from_line, (str(self),)  # for pickle: one rank sends the error to the others

    @classmethod
    def from_line(cls, line: str) -> "ConfigError":
        """Return an error with this complete line, for example one that another rank reported."""
        error = cls.__new__(cls)
        error.args = (line,)
        return error


@contextmanager
def file_errors(where: object, problem: str = "it cannot be read: {}", remedy: str = "",
                kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise ConfigError for an error of these kinds in the block, with the reason in place of the {} of `problem`.

    The error is its `__cause__`: a caller may try again after an OSError.
    """
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(str(where), problem=problem.replace("{}", reason_of(error)), remedy=remedy) from error


def reason_of(error: Exception) -> str:
    """Return why a file was not read or written, as part of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return getattr(error, "strerror", None) or str(error)


def require_package(module: str, where: str, extra: str, problem: str = "") -> None:
    """Raise ConfigError if a package of an extra of ds-pretrain is not installed. Does not import it."""
    if importlib.util.find_spec(module) is None:
        raise _missing_package(module, where, extra, problem)


def import_package(module: str, where: str, extra: str, problem: str = "") -> Any:
    """Return a package of an extra of ds-pretrain. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing_package(module, where, extra, problem) from None


def _missing_package(module: str, where: str, extra: str, problem: str) -> ConfigError:
    return ConfigError(where, problem=problem or f"the package {module} is not installed",
                       remedy=f"run `pip install 'ds-pretrain[{extra}]'`")


def begin_sentence(text: str) -> str:
    """Capitalize the first letter, unless `text` begins with a command, a flag, a key or a path."""
    first, _, _ = text.partition(" ")
    is_word = first.rstrip(",:").isalpha() and first not in _COMMANDS
    return text[:1].upper() + text[1:] if is_word else text


class GuardError(Exception):
    """The guard against bad steps has stopped the run. The message is one line with the reason and the remedy."""


class CorruptionError(Exception):
    """Copies of a parameter differ between ranks, or a rank computes wrongly. The message names the rank."""


class SaveError(Exception):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


def shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    """Return `text`, cut after `longest` characters with a note of its full length."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `no ranks`, `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def listed(items: Sequence[object], most: int = 8) -> str:
    """Return the first items as text: `a, b and 4 more`."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def named(noun: str, items: Sequence[object]) -> str:
    """Return the first items with their noun: `rank 3`, `ranks 0, 1`."""
    return f"{noun}{'s' if len(items) > 1 else ''} {listed(items)}"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with this many significant digits, and with all digits before the point: never as 1.7e+03."""
    return f"{value:,.0f}" if abs(value) >= 10**(digits - 1) else f"{value:.{digits}g}"


def tokens_text(number: float) -> str:
    """Format a number of tokens or parameters: 26 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.0f}"


def printable(text: str) -> str:
    """Return `text` on one line, with control characters escaped. For one value that was read from a file."""
    return one_line(" ".join(text.split()))


def one_line(text: str) -> str:
    """Return `text` with the characters escaped that are not printable, line breaks and tabs too; spaces remain."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_controls(text: str) -> str:
    r"""Return `text` with the characters escaped that act on a terminal; new lines and tabs remain.

    These are C0 and C1 controls (\x1b begins a terminal's commands), the controls that reverse the direction of text,
    other line separators, and halves of surrogate pairs, which cannot be encoded.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `Did you mean "x"?`, or "" if no word in `known` is similar to `word`."""
    name = closest(word, known)
    return f'Did you mean "{name}"?' if name else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` misspells, abbreviates or reorders; "" if there is none.

    Short words may differ by one letter only: most of them are within two letters of each other ("fp8", "fp16"). At
    least half of the letters must be right. A word with digits never matches one without ("gptj", "gpt2"). If several
    known words differ in their digits only ("node1", "node2"), digits are not corrected.
    """
    names = list(known)
    numbered = Counter(map(_without_digits, names))
    max_distance = min(3, 1 + len(word) // 8)
    similar = [name for name in names if abs(len(word) - len(name)) <= max_distance
               and any(map(str.isdigit, word)) == any(map(str.isdigit, name))
               and (numbered[_without_digits(name)] == 1 or _digits(word) == _digits(name))]
    ranked = [(_edit_distance(word.lower(), name.lower()), word[:1] != name[:1], name) for name in similar]
    distance, _, best = min(ranked, key=lambda row: row[:2], default=(max_distance + 1, True, ""))
    if distance <= max_distance and 2 * distance <= max(len(word), len(best)):
        return best
    return next((name for name in names if _same_parts(word, name) or (len(word) >= 8 and name.startswith(word))), "")


def _digits(word: str) -> str:
    return "".join(filter(str.isdigit, word))


def _without_digits(word: str) -> str:
    return "".join(letter for letter in word if not letter.isdigit())


def _edit_distance(word: str, name: str) -> int:
    """Count the letters to insert, delete, replace or swap with the next one.

    difflib's ratio counts matching letters: it suggests "fp16" for "bfp16", "comet" for "_comment", no "sp" for "tp".
    """
    previous_row: list[int] = []
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        row_before_previous, previous_row, row = previous_row, row, [i]
        for j, other in enumerate(name, 1):
            cost = min(previous_row[j] + 1, row[j - 1] + 1, previous_row[j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (name[j - 2], other):
                cost = min(cost, row_before_previous[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _same_parts(word: str, name: str) -> bool:
    """Return whether two names have the same parts in another order, or differ by one missing or added part."""
    first, second = ({*text.lower().replace("-", "_").split("_")} for text in (word, name))
    return len(first & second) >= 2 and len(first ^ second) <= 1
