"""The band of an expected curve, and whether noisy losses have left it for longer than their noise explains.

The interval of the prediction holds the loss of a run with the probability LEVEL, so one healthy run in ten leaves it.
A run counts as off the curve beyond a wider band, which holds 99% of the healthy runs, and as on the curve again when
it is back in the interval. Between the two, nothing changes.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pretrain.extensions.ladder.expected_curve import LEVEL
from pretrain.monitor.noise import NORMAL_MAD, error_of_mean

ABOVE, BELOW = "above", "below"
FEWEST_ROWS = 16  # logged steps; a departure of fewer than 12 of them is a spike
_ALARM_LEVEL = 0.99  # probability that a healthy run remains in the wider band
_ERRORS = 5.0  # standard errors, as for the hints
_CLIP = 5.0  # standard deviations; a value farther from the median counts as one at this distance
_WIDER = NormalDist().inv_cdf((1 + _ALARM_LEVEL) / 2) / NormalDist().inv_cdf((1 + LEVEL) / 2)
_MOST_PARTS = 16  # of the rows, from which the noise is estimated


@dataclass(frozen=True)
class Band:
    """The expected loss at each of some rows, and the interval of its prediction."""

    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray
    tolerance: float = 0.0  # nats, on both sides: how well it is known which training loss belongs to the expected one

    def excess(self, losses: np.ndarray, side: str, *, wider: float = 1.0) -> np.ndarray:
        """Return how far losses lie outside of the band on this side; `wider` multiplies its half-width."""
        if side == ABOVE:
            return losses - self.loss - wider * (self.high - self.loss) - self.tolerance
        return self.loss - wider * (self.loss - self.low) - losses - self.tolerance


def is_outside(losses: np.ndarray, band: Band, side: str) -> bool:
    """Return whether most of some losses are outside of the wider band on this side."""
    return _mostly(band.excess(losses, side, wider=_WIDER) > 0)


def _mostly(holds: np.ndarray) -> bool:
    return 2 * np.count_nonzero(holds) > len(holds)


def departure(losses: np.ndarray, band: Band, side: str, *, fewest: int = FEWEST_ROWS) -> int:
    """Return how many of the last rows show that the losses are outside of the wider band on this side; 0: none do.

    Windows of `fewest` rows, of 2 times as many and so on are tested. In both halves of the window most losses must
    be outside, so that spikes are not enough, and the mean of all by several standard errors.

    Args:
        losses: finite losses of consecutive rows, within the curve.
        band: of the same rows.
        fewest: a multiple of FEWEST_ROWS.
    """
    excess = band.excess(losses, side, wider=_WIDER)
    rows = fewest
    while rows <= len(excess):
        if _mostly(excess[-rows:-rows // 2] > 0) and _mostly(excess[-rows // 2:] > 0) and _is_beyond(excess, rows):
            return rows
        rows *= 2
    return 0


def _is_beyond(excess: np.ndarray, rows: int) -> bool:
    """Return whether the mean of the last `rows` rows is above 0 by more than its noise.

    The noise of a mean of this many rows is estimated from the fluctuations within the last parts of this length,
    around a line. A few parts say less about slow fluctuations, and the limit is higher then.
    """
    parts = min(len(excess) // rows, _MOST_PARTS)
    values = excess[-parts * rows:].reshape(parts, rows)
    middle = np.median(values, axis=1, keepdims=True)
    spread = _CLIP * np.median(np.abs(values - middle), axis=1, keepdims=True) / NORMAL_MAD
    means = np.clip(values, middle - spread, middle + spread).reshape(parts, FEWEST_ROWS, -1).mean(axis=2)
    return bool(means[-1].mean() > _ERRORS * (1 + 0.5 / parts) * error_of_mean(means))


def has_returned(losses: np.ndarray, band: Band, side: str, *, rows: int) -> bool:
    """Return whether the losses of the last `rows` rows are in the interval again, or beyond it on the other side."""
    if len(losses) < rows:
        return False
    is_back = band.excess(losses, side)[-rows:] < 0
    return _mostly(is_back[:rows // 2]) and _mostly(is_back[rows // 2:])
