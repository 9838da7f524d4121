"""Losses that an extension expects of a run, next to which the summary and the report show the measured ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.active_extensions import functions


@dataclass(frozen=True)
class Expected:
    """An expected loss in nats a token, and the interval of it."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.loss:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class Expectation:
    """The expected losses of a run."""

    at: Callable[[float], Expected | None]  # by the number of tokens that the run was trained with; None: not known
    remark: str = ""  # how the run does, for a line of text


def expectation_of(start: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Expectation | None:
    """Return what the first extension expects that knows this run.

    Args:
        start: newest record of run.json; its values are not checked.
        events: rows of events.jsonl.
    """
    return next((found for _, expect in functions("expectation") if (found := expect(start, events)) is not None), None)


def tokens_text(tokens: float) -> str:
    """Return a number of tokens with its unit, in millions if there are that many."""
    return f"{tokens / 1e6:,.4g} M tokens" if tokens >= 1e6 else f"{tokens:,.0f} tokens"
