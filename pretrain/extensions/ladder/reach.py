"""How far a prediction lies beyond the points of the law, and the limits of what is predicted.

The limits are from backtests on four published families (README.md, Backtests). Up to 10 times beyond the fitted
points, the errors were at most 4%, and 92% of the losses lay in the 90% intervals; further, errors of 6.5% were seen.
Nothing was tested beyond 58 times.
"""

from dataclasses import dataclass

from pretrain.errors import format_number
from pretrain.extensions.ladder.ladder_file import Range

WARN_FACTOR = 10.0
LARGEST_FACTOR = 50.0


@dataclass(frozen=True)
class Reach:
    """Factors by which a model and its tokens lie outside of the range of the points; 1 within it."""

    parameters: float
    tokens: float

    @staticmethod
    def of(fitted: Range, parameters: float, tokens: float) -> "Reach":
        return Reach(_factor(fitted.parameters, parameters), _factor(fitted.tokens, tokens))

    @property
    def factor(self) -> float:
        return max(self.parameters, self.tokens)

    def problem(self) -> str:
        """Return why the prediction is rejected; "" if it is not."""
        return f"{self}: {LARGEST_FACTOR:g} times is the limit" if self.factor > LARGEST_FACTOR else ""

    def warning(self) -> str:
        """Return a warning about the prediction; "" up to WARN_FACTOR."""
        if self.factor <= WARN_FACTOR:
            return ""
        return f"{self}: further than {WARN_FACTOR:g} times, backtests had errors of up to 6.5%"

    def __str__(self) -> str:
        return (f"the prediction is {format_number(self.parameters)} times beyond the fitted points in parameters, and "
                f"{format_number(self.tokens)} times in tokens")


def _factor(limits: list[float], value: float) -> float:
    low, high = limits
    return max(1.0, value / high, low / value)
