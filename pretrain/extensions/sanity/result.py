"""The result of one check, and the table of all results."""

from dataclasses import asdict, dataclass
from typing import Any

from pretrain.terminal import Screen, aligned


@dataclass(frozen=True)
class Result:
    """Result of one check: the measured value next to its bound."""

    check: str  # short name, such as "causal mask"
    passed: bool | None  # None: the check was not run, and `measured` says why
    measured: str
    bound: str
    remedy: str  # what to do if the check failed
    value: float | None = None  # the measured number, if it is a single one


def not_made(check: str, reason: str) -> Result:
    """Return the result of a check that could not be made."""
    return Result(check, None, reason, "", "")


def failed_checks(results: list[Result]) -> list[str]:
    """Return the names of the failed checks."""
    return [result.check for result in results if result.passed is False]


def table_lines(results: list[Result]) -> list[str]:
    """Return the table of the results, and below it what to do about each failed check."""
    words = {True: "pass", False: "FAIL", None: "-"}
    rows = [("check", "result", "measured", "expected")]
    rows += [(result.check, words[result.passed], result.measured, result.bound) for result in results]
    lines = aligned(rows, num_words=4)
    lines += [f"{result.check}: {result.remedy}" for result in results if result.passed is False]
    failed, made = len(failed_checks(results)), sum(result.passed is not None for result in results)
    return [*lines, f"{failed} of {made} checks failed" if failed else f"all {made} checks passed"]


def print_table(results: list[Result], *, active: bool = True) -> None:
    """Print the table if `active`. A terminal shows its lines wrapped between words."""
    screen = Screen(active=active)
    for line in table_lines(results):
        screen.line(line)


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    """Return the results as a list of JSON objects."""
    return [asdict(result) for result in results]
