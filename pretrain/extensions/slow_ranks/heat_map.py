"""The heat map of ranks by time, from rank_times.jsonl: own time of each rank relative to the median of the step.

A run may have 1,000 ranks and 10,000 rows. Rows are read once, and held in at most `COLUMNS` columns: when there are
more, neighbouring columns are merged. A row of the map is a place on a host, so that it remains the same machine when
ranks have other numbers after a start on fewer hosts.
"""

import base64
import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import escape_controls, shorten
from pretrain.monitor.read_run_folder import Tail, is_number

COLUMNS, ROWS = 400, 200  # largest map
LOWEST, HIGHEST = 0.5, 8.0  # ratios at the ends of the scale
PHASES = ("data", "forward", "backward", "optimizer", "other")  # own work; in `reduce_wait` a rank waits for others
_MAX_STARTS = 100  # the newest are kept
_LARGEST_WORLD = 100_000
_LONGEST_NAME = 60  # characters of a host name


@dataclass
class _Column:
    """Sums over the rows of some steps, by rank."""

    first: int
    last: int
    count: int
    ratios: np.ndarray  # [ranks], sum
    highest: np.ndarray  # [ranks], maximum
    excess_ms: np.ndarray  # [phases, ranks], sum of the time above the median

    def merge(self, other: "_Column") -> "_Column":
        return _Column(self.first, other.last, self.count + other.count, self.ratios + other.ratios,
                       np.maximum(self.highest, other.highest), self.excess_ms + other.excess_ms)


@dataclass
class _Start:
    """The rows of one start, whose ranks are on these hosts."""

    hosts: list[str]
    peers: list[np.ndarray]  # ranks that are compared with one another
    columns: list[_Column] = field(default_factory=list)


class HeatMap:
    """Reads RUN/rank_times.jsonl as it grows. Lines that do not have the expected values are left out."""

    def __init__(self, run: Path) -> None:
        self._tail = Tail(run / "rank_times.jsonl")
        self._begin_again()

    def _begin_again(self) -> None:
        self._tail = Tail(self._tail.path)
        self._starts: list[_Start] = []
        self._rows_per_column = 1

    def state(self) -> str:
        return str(self._tail.lines)

    def update(self) -> None:
        """Read what was appended since the last call. Raises OSError."""
        if self._tail.was_replaced():
            self._begin_again()
        for block in self._tail.blocks():
            for _, row in block:
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        hosts = row.get("hosts")
        if isinstance(hosts, list) and 0 < len(hosts) <= _LARGEST_WORLD:
            self._starts = [*self._starts[1 - _MAX_STARTS:],
                            _Start([escape_controls(shorten(str(host), _LONGEST_NAME)) for host in hosts],
                                   _peers(row.get("coordinates"), len(hosts)))]
            return
        if self._starts and (column := _column_of(row, self._starts[-1].peers)) is not None:
            self._append(column)

    def _append(self, column: _Column) -> None:
        columns = self._starts[-1].columns
        is_full = not columns or columns[-1].count >= self._rows_per_column or column.first < columns[-1].last
        columns.append(column if is_full else columns.pop().merge(column))
        if sum(len(start.columns) for start in self._starts) > COLUMNS:
            self._rows_per_column *= 2
            for start in self._starts:
                start.columns = _merged(start.columns)

    def data(self) -> dict[str, Any] | None:
        """Return the map for the page, as JSON values; None if no start has rows of several ranks."""
        starts = [start for start in self._starts if start.columns and len(start.hosts) > 1]
        if not starts:
            return None
        places = _places([start.hosts for start in starts])
        groups, layouts, columns, cells = _row_groups(places), [], [], []
        for start in starts:
            rank_at = _ranks_at(places, start.hosts)
            layout = rank_at.tolist()
            if layout not in layouts:
                layouts.append(layout)
            for number, column in enumerate(start.columns):
                columns.append([column.first, column.last, layouts.index(layout), int(number == 0)])
                cells.append(_cells(column, rank_at, groups))
        ratio, highest, member, phase = (np.stack(arrays, axis=1) for arrays in zip(*cells, strict=True))
        return {"columns": columns, "layouts": layouts, "phases": PHASES, "low": LOWEST, "high": HIGHEST,
                "rows": [[int(group[0]), int(group[-1]) + 1, places[group[0]][0]] for group in groups],
                "ratio": _encoded(_as_codes(ratio)), "highest": _encoded(_as_codes(highest)),
                "phase": _encoded(phase), "slowest": _slowest(ratio, highest, member, phase, columns, layouts, places),
                # if each row has one rank, it is always the first one
                "member": _encoded(member) if len(groups) < len(places) else None}


def _peers(coordinates: object, num_ranks: int) -> list[np.ndarray]:
    """Return the ranks of each pipeline stage; all ranks if a stage has only one, or the coordinates are not known."""
    stages = [each.get("pipeline") if isinstance(each, dict) else None
              for each in (coordinates if isinstance(coordinates, list) else [])]
    names = np.array([str(stage) for stage in stages])
    found = [np.flatnonzero(names == name) for name in np.unique(names)] if len(names) == num_ranks else []
    return found if found and min(map(len, found)) > 1 else [np.arange(num_ranks)]


def _column_of(row: dict[str, Any], peers: list[np.ndarray]) -> _Column | None:
    """Return the values of one row, or None if it has no valid ones for these ranks."""
    step, times = row.get("step"), row.get("ms")
    if not isinstance(times, dict) or not is_number(step):
        return None
    own = _numbers(times.get("own"))
    if own is None or len(own) != sum(map(len, peers)):
        return None
    medians = _lower_medians(own, peers)
    if not np.all(medians > 0):  # also for NaN
        return None
    ratios = np.nan_to_num(own / medians, nan=1.0)
    excess = np.zeros((len(PHASES), len(own)), dtype=np.float32)
    for number, name in enumerate(PHASES):
        values = _numbers(times.get(name))
        if values is not None and len(values) == len(own):
            excess[number] = np.nan_to_num(values - _lower_medians(values, peers))
    return _Column(int(step), int(step), 1, ratios, ratios, excess)


def _lower_medians(values: np.ndarray, peers: list[np.ndarray]) -> np.ndarray:
    """Return the median of the peers of each rank; of an even number the lower one, as the events on slow ranks do."""
    medians = np.full(len(values), np.nan)
    for ranks in peers:
        known = np.sort(values[ranks][np.isfinite(values[ranks])])
        if len(known):
            medians[ranks] = known[(len(known) - 1) // 2]
    return medians


def _numbers(values: object) -> np.ndarray | None:
    """Return a list of numbers as an array, with NaN for null; None for anything else."""
    if not isinstance(values, list) or not values:
        return None
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return np.where(np.isfinite(array), array, np.nan) if array.ndim == 1 else None


def _merged(columns: list[_Column]) -> list[_Column]:
    """Return the columns with each pair of neighbours merged, unless the second is an earlier step (a rollback)."""
    merged, rest = [], list(columns)
    while rest:
        first = rest.pop(0)
        merged.append(first.merge(rest.pop(0)) if rest and rest[0].first > first.last else first)
    return merged


def _places(hosts_of_starts: list[list[str]]) -> list[tuple[str, int]]:
    """Return (host, number on this host) of all rows of the map, by host in the order in which the hosts appear."""
    most: dict[str, int] = {}
    for hosts in hosts_of_starts:
        for host, count in Counter(hosts).items():
            most[host] = max(most.get(host, 0), count)
    return [(host, number) for host, count in most.items() for number in range(count)]


def _ranks_at(places: list[tuple[str, int]], hosts: list[str]) -> np.ndarray:
    """Return the rank of a start at each place; -1: none."""
    seen: dict[str, int] = {}
    rank_of = {}
    for rank, host in enumerate(hosts):
        rank_of[host, seen.get(host, 0)] = rank
        seen[host] = seen.get(host, 0) + 1
    return np.array([rank_of.get(place, -1) for place in places])


def _row_groups(places: list[tuple[str, int]]) -> list[np.ndarray]:
    """Return the places of each row of the map: neighbours, and of one host unless there are too many hosts."""
    every = np.arange(len(places))
    size = -(-len(places) // ROWS)  # rounded up
    names = [host for host, _ in places]
    changes = np.flatnonzero([before != after for before, after in itertools.pairwise(names)]) + 1
    if len(changes) + 1 > ROWS:
        return np.array_split(every, ROWS)
    # a host has a remainder: with larger groups, all hosts together have at most ROWS rows
    while sum(-(-len(part) // size) for part in np.split(every, changes)) > ROWS:
        size += 1
    return [group for part in np.split(every, changes) for group in np.array_split(part, -(-len(part) // size))]


def _cells(column: _Column, rank_at: np.ndarray,
           groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return [rows] of the map: mean and highest ratio of the slowest rank, its number in the row, its slowest phase.

    A row without a rank in this start is NaN.
    """
    mean = np.where(rank_at < 0, np.nan, (column.ratios / column.count)[rank_at])
    highest = np.where(rank_at < 0, 0.0, column.highest[rank_at])
    phase = np.argmax(column.excess_ms, axis=0)[rank_at]
    member = np.array([int(np.argmax(np.nan_to_num(mean[group], nan=-1.0))) for group in groups])
    worst = np.array([group[number] for group, number in zip(groups, member, strict=True)])
    peaks = np.array([np.max(highest[group]) for group in groups])
    return mean[worst], np.where(np.isnan(mean[worst]), np.nan, peaks), member, phase[worst]


def _slowest(ratio: np.ndarray, highest: np.ndarray, member: np.ndarray, phase: np.ndarray, columns: list[list[int]],
             layouts: list[list[int]], places: list[tuple[str, int]]) -> list[list[Any]]:
    """Return [rank, host, ratio, phase] of the slowest rows in the newest twentieth of the columns of the newest start.

    Only rows that are slower than the median by a fifth.
    """
    begin = max(number for number, column in enumerate(columns) if column[3])
    begin = max(begin, len(columns) - max(len(columns) // 20, 5))
    mean = np.nanmean(np.where(np.isnan(ratio[:, begin:]), 0.0, ratio[:, begin:]), axis=1)
    groups = _row_groups(places)
    found = []
    for row in np.argsort(-mean)[:5].tolist():
        place = groups[row][int(member[row, -1])]
        if mean[row] >= 1.2:
            found.append([layouts[columns[-1][2]][place], places[place][0], round(float(mean[row]), 2),
                          PHASES[int(phase[row, -1])]])
    return found


def _as_codes(ratios: np.ndarray) -> np.ndarray:
    """Return 1 to 255 for ratios from LOWEST to HIGHEST, on a logarithmic scale; 0 for NaN."""
    position = np.log2(np.clip(ratios, LOWEST, HIGHEST) / LOWEST) / np.log2(HIGHEST / LOWEST)
    return np.where(np.isnan(ratios), 0, np.nan_to_num(1 + np.round(254 * position)))


def _encoded(values: np.ndarray) -> str:
    return base64.b64encode(np.minimum(values, 255).astype(np.uint8).tobytes()).decode()
