"""Exit codes, and the exceptions that end a program with one line."""

from collections.abc import Iterable
from typing import Any

_LONGEST_PLACE = 1000  # characters of a path and key
_LONGEST_VALUE = 300  # characters of a value that a message shows

FINISHED = 0
CRASHED = 1  # the last checkpoint was not written either; and whatever else is not named here
REFUSED = 2  # bad input: another start would end the same
STOPPED = 75  # saved on a signal or at a time limit, start me again (EX_TEMPFAIL of sysexits.h)
GUARD = 76  # stopped by the bad-step guard
HANG = 77
INTERRUPTED = 130  # by Ctrl-C, without a save: what a shell reports of a program that SIGINT ended

NEVER_AGAIN = {REFUSED: "the run was refused", GUARD: "the bad-step guard stopped it"}


class ConfigError(ValueError):
    """Bad input, reported in one line that names where it is, what is wrong and what to do.

    With two values, `ConfigError("--seed", found=-1, expected="at least 0")`: `--seed: found -1; expected at least 0.`
    Otherwise a sentence, `ConfigError("--save", problem="the folder is read-only")`: `--save: the folder is read-only.`
    `main()` functions turn it into that line on stderr and exit code 2.
    """

    def __init__(self, where: str, *, found: object = None, expected: str = "", problem: str = "",
                 remedy: str = "") -> None:
        what = problem or f"found {shorten(str(found))}; expected {expected}"
        line = shown(f"{shorten(where, _LONGEST_PLACE)}: {what}. {remedy}".rstrip(". "))
        super().__init__(line if line.endswith("?") else f"{line}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError.of_line, (str(self),)  # how it travels between ranks

    @classmethod
    def of_line(cls, line: str) -> "ConfigError":
        """What another rank found, from its line."""
        error = cls.__new__(cls)
        error.args = (line,)
        return error


class SaveError(Exception):
    """A checkpoint could not be written. The earlier ones are as they were."""


def shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    """`text`, or its beginning and its length where it is longer than a line can show."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def shown(text: str) -> str:
    """`text` on one line, with escapes for characters that a terminal would act on."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean "x"?`, or "" where no word in `known` is similar to `word`."""
    meant = closest(word, known)
    return f'did you mean "{meant}"?' if meant else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` misspells or abbreviates, or that has the same parts in another order; "": none.

    Short words may differ by one letter only: with two, most of them are similar ("fp8", "fp16"). A word with digits
    and one without are different names ("gptj", "gpt2").
    """
    names = list(known)
    most = min(3, 1 + len(word) // 8)
    similar = [name for name in names if abs(len(word) - len(name)) <= most
               and any(map(str.isdigit, word)) == any(map(str.isdigit, name))]
    ranked = [(_edit_distance(word.lower(), name.lower()), word[:1] != name[:1], name) for name in similar]
    distance, _, best = min(ranked, key=lambda row: row[:2], default=(most + 1, True, ""))
    if distance <= most:
        return best
    return next((name for name in names if _same_parts(word, name) or (len(word) >= 8 and name.startswith(word))), "")


def _edit_distance(word: str, name: str) -> int:
    """Letters to insert, delete, replace or swap with the next one."""
    before: list[int] = []
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(name, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (name[j - 2], other):
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _same_parts(word: str, name: str) -> bool:
    """Whether two names of several parts differ by their order, or by one part that is missing or too many."""
    mine, other = ({*text.lower().replace("-", "_").split("_")} for text in (word, name))
    return len(mine & other) >= 2 and len(mine ^ other) <= 1
