"""Which columns of noisy times are above the others: ranks of a pipeline stage, or stages. Pure functions of arrays.

A column is found by one of two tests. `significant` finds small differences, of at least 15%: it needs blocks from
before, which show the spread of the times. `obvious` finds ranks that are at least twice as slow, also from the first
step on: it compares them with the spread among the others, because their own past may be slow.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.monitor.noise import error_of_mean

WINDOW = 16  # newest blocks
LONGEST = 256  # newest blocks that are kept
_FEWEST_ROWS, _OBVIOUS_S = 8, 60.0  # blocks of an obvious difference: those of this time, at least 8, at most WINDOW
_MOST_OF, _NEARLY_ALL = 0.75, 0.875  # fractions of the newest blocks that must show a difference: a blip does not
_SPREADS, _OBVIOUS_SPREADS = 3.0, 5.0  # that a difference must exceed
_ERRORS = 5.0  # standard errors that the mean of two columns' difference must exceed
_SMALLEST_RATIO, _OBVIOUS_RATIO = math.log(1.15), math.log(2)
# A stage that takes this times as long as its share of the FLOPs was slow from the start. Embeddings, the loss and
# small matrices make healthy stages differ by less.
_MOST_BY_DESIGN = math.log(2.2)
_MARGIN = 1.25  # factor of the smaller one of two estimates of a spread
_STD_OF_MEDIAN = 1.4826  # standard deviation of a normal distribution / its median deviation


@dataclass(frozen=True)
class Excess:
    """Logarithms of own times, relative to the reference: 0 is as fast as the others."""

    ranks: np.ndarray  # [blocks, ranks]
    stages: np.ndarray  # [blocks, pipeline stages]; 0 if there is one


def lower_median(values: np.ndarray) -> np.ndarray:
    """Return the median of the last axis; of an even number of values, the lower one in the middle."""
    middle = (values.shape[-1] - 1) // 2
    result: np.ndarray = np.partition(values, middle, axis=-1)[..., middle]
    return result


def excesses(own: np.ndarray, stage_ranks: Sequence[np.ndarray], work: Sequence[float] = (),
             slow: Collection[int] = ()) -> Excess:
    """Return the excess of each rank and stage.

    Args:
        own: [blocks, ranks].
        stage_ranks: the ranks of each stage.
        work: what each stage computes, in any unit; (): unknown.
        slow: stages that are known to be slow.
    """
    logs = np.log(np.maximum(own, 1e-6))
    by_rank, by_stage = np.zeros_like(logs), np.zeros((len(logs), len(stage_ranks)))
    for stage, ranks in enumerate(stage_ranks):
        by_stage[:, stage] = lower_median(logs[:, ranks])
        if len(ranks) > 1:
            by_rank[:, ranks] = _relative(logs[:, ranks])
    if len(stage_ranks) == 1:
        return Excess(by_rank, np.zeros_like(by_stage))
    by_stage = _relative(by_stage - _by_design(by_stage, work, slow))
    for stage, ranks in enumerate(stage_ranks):
        if len(ranks) == 1:
            by_rank[:, ranks[0]] = by_stage[:, stage]
    return Excess(by_rank, by_stage)


def _by_design(by_stage: np.ndarray, work: Sequence[float], slow: Collection[int]) -> np.ndarray:
    """Return by how much the stages differ by design: what the earliest blocks show; before them, by their work."""
    is_known = len(by_stage) >= 2 * WINDOW
    earliest = by_stage[:-WINDOW][:LONGEST // 4] if is_known else by_stage  # the newest blocks may be slow
    past: np.ndarray = np.median(earliest, axis=0)
    if not work:
        return past
    predicted: np.ndarray = np.log(np.maximum(work, 0.25 * max(work)))  # stages of look-ups and norms take time, too
    if not is_known:
        return predicted
    beyond_work = _relative((past - predicted)[None])[0]
    limits = np.full(len(past), _MOST_BY_DESIGN)
    limits[list(slow)] = 0.5 * _MOST_BY_DESIGN  # its past becomes slow, too
    return past - np.where(beyond_work > limits, beyond_work, 0.0)


def _relative(logs: np.ndarray) -> np.ndarray:
    """Return the difference of each column from the lower median of the others, by row."""
    ordered, middle = np.sort(logs, axis=1), (logs.shape[1] - 2) // 2
    return logs - np.where(logs <= ordered[:, [middle]], ordered[:, [middle + 1]], ordered[:, [middle]])


def significant(excess: np.ndarray, imbalance: float = 0.0) -> list[tuple[int, float]]:
    """Return the columns whose newest blocks are significantly above 0, each with their median.

    Args:
        excess: [blocks, columns].
        imbalance: logarithm of the ratio that is no sign of a slow rank.
    """
    fewest = (2 if excess.shape[1] > 2 else 3) * WINDOW  # if there are two columns, only time shows the spread
    if len(excess) < fewest or not excess.any():
        return []
    newest, earlier = excess[-WINDOW:], excess[:-WINDOW]
    spread = _spread_in_time(earlier)
    spread = np.maximum(spread, np.median(spread)) * (1 + WINDOW / len(earlier))  # few blocks show less than many
    return _above(newest, np.maximum(_SPREADS * spread, _SMALLEST_RATIO) + imbalance, _MOST_OF)


def obvious(excess: np.ndarray, seconds: float, imbalance: float = 0.0) -> list[tuple[int, float]]:
    """Return the columns whose newest blocks are far above 0, each with their median.

    Args:
        excess: [blocks, columns], of different blocks.
        seconds: usual time of a block.
        imbalance: logarithm of the ratio that is no sign of a slow rank.
    """
    columns = excess.shape[1]
    rows = min(max(math.ceil(_OBVIOUS_S / seconds), _FEWEST_ROWS), WINDOW) if columns > 2 else WINDOW
    if len(excess) < rows or columns < 2 or not excess.any():
        return []
    newest = excess[-rows:]
    if columns > 2:
        return _above(newest, np.maximum(_OBVIOUS_SPREADS * _spread_of_others(excess), _OBVIOUS_RATIO) + imbalance,
                      _NEARLY_ALL)
    # no third column shows the spread: the mean of the newest blocks must be far above its own error
    return [(column, level) for column, level in _above(newest, np.full(2, _OBVIOUS_RATIO + imbalance), _NEARLY_ALL)
            if newest[:, column].mean() - imbalance > _ERRORS * error_of_mean(newest[None, :, column])]


def _above(newest: np.ndarray, limits: np.ndarray, fraction: float) -> list[tuple[int, float]]:
    found = np.flatnonzero((newest > limits).mean(axis=0) >= fraction)
    return [(int(column), float(np.median(newest[:, column]))) for column in found]


def _spread_in_time(excess: np.ndarray) -> np.ndarray:
    """Return the spread of each column over time, but not a lasting change of its level: by [columns].

    Such a change is in the deviations from the median, but not in the differences of consecutive blocks. These are
    smaller than the deviations if noise lasts: by how much, the other columns show; of two columns, a factor 2, as with
    a correlation of 0.75.
    """
    deviation = _STD_OF_MEDIAN * np.median(np.abs(excess - np.median(excess, axis=0)), axis=0)
    changes = np.diff(excess, axis=0)
    changes = _STD_OF_MEDIAN / math.sqrt(2) * np.median(np.abs(changes), axis=0)
    lasting = 2.0 if excess.shape[1] == 2 else min(max(float(np.median(deviation / np.maximum(changes, 1e-9))), 1.0), 3)
    return np.where(changes > 0, np.minimum(deviation, _MARGIN * lasting * changes), deviation)


def _spread_of_others(excess: np.ndarray) -> np.ndarray:
    """Return the spread among the other columns of each column: by [columns]."""
    deviations = np.median(np.abs(excess), axis=0)
    found = [np.median(np.delete(deviations, column)) for column in range(len(deviations))] \
        if len(deviations) <= LONGEST else [np.median(deviations)] * len(deviations)
    return _STD_OF_MEDIAN * np.array(found)
