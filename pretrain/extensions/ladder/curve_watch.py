"""The training loss of a running process compared with its expected curve: changes are reported once.

The interval of the prediction holds the loss of a run with the probability LEVEL, so one healthy run in ten leaves it.
A run counts as off the curve beyond a wider band, which holds 99% of the healthy runs, and as on the curve again when
it is back in the interval. Between the two, nothing changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from pretrain.extensions.ladder.expected_curve import LEVEL, OFF_CURVE, ON_CURVE, Target
from pretrain.monitor.curve import Expected, Rows, millions_of_tokens
from pretrain.monitor.noise import NORMAL_MAD, change_point, error_of_mean
from pretrain.monitor.read_run_folder import is_number, newest_path, read_events, read_metrics

ABOVE, BELOW = "above", "below"
FEWEST_ROWS = 16  # logged steps; a departure of fewer than 12 of them is a spike
_ALARM_LEVEL = 0.99  # probability that a healthy run remains in the wider band
_ERRORS = 5.0  # standard errors, as for the hints
_CLIP = 5.0  # standard deviations; a value farther from the median counts as one at this distance
_WIDER = NormalDist().inv_cdf((1 + _ALARM_LEVEL) / 2) / NormalDist().inv_cdf((1 + LEVEL) / 2)
_MOST_PARTS = 16  # most parts of the rows, from which the noise is estimated
_KEYS = ("step", "tokens", "loss", "expected", "low", "high")
_LONGEST = 4096  # newest rows that are looked at
_JUMP = 4.0  # standard errors
_SUDDEN = 0.75  # fraction of the departure; in a slow one, the rows next to its beginning differ by less than half
_MOST_EVALUATIONS = 8  # newest ones, whose difference from the training loss is used
# fraction of the expected loss: without evaluations, the training texts may be easier or harder by this much than
# those for validation. In runs on Python's library, files of other packages had a loss 2% to 5% higher (2026-11-25).
_OTHER_TEXTS = 0.05


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


@dataclass(frozen=True)
class Change:
    """The loss has left the band, or is in it again."""

    event: str  # OFF_CURVE or ON_CURVE
    side: str  # ABOVE or BELOW; of ON_CURVE, where it was
    step: int
    tokens: float
    rows: int  # logged steps that show the change
    since: int  # first of the steps that are outside; of ON_CURVE, inside
    loss: float  # training loss, median of the newest 8 rows, plus the difference of the validation loss
    expected: Expected
    jump: float | None = None  # change of the loss at `since`, if it was sudden

    def record(self) -> dict[str, Any]:
        """Return the keys of the event besides its name, reason and causes."""
        return {"step": self.step, "side": self.side, "loss": self.loss, "expected": self.expected.loss,
                "low": self.expected.low, "high": self.expected.high, "consumed_tokens": int(self.tokens),
                "rows": self.rows, "since": self.since}

    def __str__(self) -> str:
        what = f"{self.side} the expected" if self.event == OFF_CURVE else "again within the expected"
        return (f"the loss is {self.loss:.4g} after {millions_of_tokens(self.tokens)}, {what} {self.expected}, since "
                f"about step {self.since}")


class CurveWatch:
    """Looks at each row of training, and reports when the loss leaves the band of the curve, and when it is back.

    A ladder predicts the validation loss. The training loss is compared with it less the difference between the two in
    the newest evaluations. As long as there are few, a departure must be larger.

    A change that was reported for steps that are trained again, after a resume or a rollback, is not reported again.
    After each return to the band, a departure must last twice as long, so that a loss near its edge gives few reports.

    Args:
        run: the run folder, whose earlier rows and changes count if the run is resumed.
        first_step: number of steps that were done before.
        first_tokens: of the data, before the first token that the run is trained with.
        seq_length: shorter sequences are not compared.
    """

    def __init__(self, run: Path, target: Target, *, first_step: int, first_tokens: int, seq_length: int) -> None:
        self._target, self._first_tokens, self._seq_length = target, first_tokens, seq_length
        self._rows = Rows(_KEYS)
        self._differences: list[tuple[int, float]] = []  # (step, validation loss - training loss) of evaluations
        self._changes: list[tuple[int, str, str, int]] = []  # (step, event, side, rows), up to the present step
        self._known: list[tuple[str, str]] = []  # (event, side) that were reported for later steps
        self._trained = 0  # newest step that was trained before
        self._reported = ""  # side of the last report; "" if it is ON_CURVE
        if first_step:
            for row in read_metrics(run):
                self._add(row)
                self._trained = max(self._trained, row["step"])
            found = [event for event in read_events(run)
                     if event["event"] in (OFF_CURVE, ON_CURVE) and event.get("side") in (ABOVE, BELOW)]
            self._changes = [(event["step"], event["event"], event["side"], _as_rows(event.get("rows")))
                             for event in newest_path(found)]
            self._reported = found[-1]["side"] if found and found[-1]["event"] == OFF_CURVE else ""
            self.return_to(first_step)

    def return_to(self, step: int) -> None:
        """Forget the rows of later steps, because the run has returned to `step`."""
        self._known += [(event, side) for at, event, side, _ in self._changes if at > step]
        self._changes = [change for change in self._changes if change[0] <= step]
        self._trained = max(self._trained, int(self._rows.columns(newest=1)["step"].max(initial=0)))
        self._rows.drop_after(step)
        self._differences = [each for each in self._differences if each[0] <= step]

    def observe(self, row: Mapping[str, Any]) -> Change | None:
        """Add a row of training or of an evaluation. Returns the change to report, if there is one."""
        if not self._add(row):
            return None
        step, change = int(row["step"]), self._find()
        if change is not None:
            self._changes.append((step, change.event, change.side, change.rows))
            if (change.event, change.side) in self._known:
                self._known.remove((change.event, change.side))
                change = None
        if change is None and self._known and step > self._trained:  # the same steps have had another result
            self._known = []
            if self._reported != self._side:
                event = OFF_CURVE if self._side else ON_CURVE
                change = self._describe(event, self._side or self._reported, FEWEST_ROWS)
        if change is not None:
            self._reported = change.side if change.event == OFF_CURVE else ""
        return change

    def _add(self, row: Mapping[str, Any]) -> bool:
        """Add a row. Returns whether it is one of training that can be compared."""
        if row.get("split") == "valid":
            self._add_evaluation(row)
        loss, position = row.get("loss"), row.get("consumed_tokens")
        if not is_number(loss) or not is_number(position) or row.get("seq_length") != self._seq_length:
            return False
        tokens = position - self._first_tokens
        expected = self._target.at(tokens) if tokens > 0 else None
        if expected is None:
            return False
        self._rows.append({"step": row["step"], "tokens": tokens, "loss": loss, "expected": expected.loss,
                           "low": expected.low, "high": expected.high})
        self._differences = [each for each in self._differences if each[0] < row["step"]]
        return True

    def _add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Add the difference between the validation loss and the training loss of the newest rows."""
        loss, rows = row.get("eval_loss"), self._rows.columns(newest=FEWEST_ROWS)
        if is_number(loss) and len(rows["step"]) == FEWEST_ROWS and rows["step"][-1] <= row["step"]:
            training = rows["expected"][-1] + np.median(rows["loss"] - rows["expected"])
            self._differences.append((int(row["step"]), loss - float(training)))

    @property
    def _side(self) -> str:
        """Side of the curve that the loss is on: ABOVE, BELOW, or "" on the curve."""
        return self._changes[-1][2] if self._changes and self._changes[-1][1] == OFF_CURVE else ""

    def _newest(self, count: int) -> tuple[dict[str, np.ndarray], Band]:
        """Return the newest rows since the last change, and their band."""
        rows = self._rows.columns(newest=count)
        if self._changes:
            later = rows["step"] > self._changes[-1][0]
            rows = {key: column[later] for key, column in rows.items()}
        return rows, self._band(rows)

    def _band(self, rows: Mapping[str, np.ndarray]) -> Band:
        """Return the band of training losses: that of validation losses, less the difference between the two."""
        expected = rows["expected"]
        newest = [difference for _, difference in self._differences[-_MOST_EVALUATIONS:]]
        shift = float(np.median(newest)) if newest else 0.0
        tolerance = _OTHER_TEXTS * float(expected[-1]) / math.sqrt(1 + len(newest)) if len(expected) else 0.0
        return Band(expected - shift, rows["low"] - shift, rows["high"] - shift, tolerance)

    def _find(self) -> Change | None:
        """Return what has changed with the newest row."""
        if self._side:
            needed = self._changes[-1][3]
            rows, band = self._newest(needed)
            is_back = has_returned(rows["loss"], band, self._side, rows=needed)
            return self._describe(ON_CURVE, self._side, needed) if is_back else None
        rows, band = self._newest(FEWEST_ROWS // 2)
        for side in (ABOVE, BELOW):
            if not is_outside(rows["loss"], band, side):
                continue
            rows, band = self._newest(_LONGEST)
            returns = sum(event == ON_CURVE for _, event, _, _ in self._changes)
            found = departure(rows["loss"], band, side, fewest=FEWEST_ROWS * 2 ** min(returns, 8))
            if found:
                return self._describe(OFF_CURVE, side, found)
        return None

    def _describe(self, event: str, side: str, count: int) -> Change:
        rows = self._rows.columns(newest=_LONGEST)
        band, expected = self._band(rows), Expected(*(float(rows[key][-1]) for key in ("expected", "low", "high")))
        difference = rows["loss"] - band.loss
        loss = float(np.median(rows["loss"][-FEWEST_ROWS // 2:]) + rows["expected"][-1] - band.loss[-1])
        excess = band.excess(rows["loss"], side)
        first = change_point(excess if event == OFF_CURVE else -excess, count)
        return Change(event, side, int(rows["step"][-1]), float(rows["tokens"][-1]), count, int(rows["step"][first]),
                      loss, expected, _jump(difference, first) if event == OFF_CURVE else None)


def _as_rows(value: object) -> int:
    """Return the number of rows of an event that was read from a file, as one that CurveWatch has written."""
    return value if isinstance(value, int) and FEWEST_ROWS <= value <= _LONGEST else FEWEST_ROWS


def _jump(difference: np.ndarray, first: int) -> float | None:
    """Return the change of the loss at row `first`; None if it was not sudden, or if there are few rows before it."""
    before, after = difference[max(first - FEWEST_ROWS, 0):first], difference[first:first + FEWEST_ROWS // 2]
    if len(before) < FEWEST_ROWS // 2 or len(after) < FEWEST_ROWS // 2:
        return None
    jump, whole = (float(np.median(part) - np.median(before)) for part in (after, difference[-FEWEST_ROWS // 2:]))
    noise = float(np.median(np.abs(before - np.median(before)))) / NORMAL_MAD
    error = 1.25 * noise * math.sqrt(1 / len(before) + 1 / len(after))  # error of a difference of medians
    return jump if abs(jump) > max(_JUMP * error, _SUDDEN * abs(whole)) else None
