"""Results of replays (RUN/replays/*/verdict.json), and the flight records that were kept, for those who read a run."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.analysis.run_table import as_float
from pretrain.errors import escape_controls, shorten
from pretrain.stored_json import read_object

_MOST = 50  # results and records; the newest
_MAX_LINES = 20  # lines of observations
_LONGEST = 300  # characters of a text
_PLACES = (("step", "step"), ("ranks", "rank"), ("hosts", "host"), ("layer", "layer"), ("operator", "operator"),
           ("stage", "stage of the step"))
_KEPT = re.compile(r"step_(\d{1,16})_(\w{1,40})")


class Replays:
    """The results and the kept records of a run, which are read each time: there are few."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def update(self) -> None:
        pass

    def state(self) -> str:
        folders = (self._run / "replays", *(self._run / "replays").glob("*"), self._run / "flight" / "kept")
        return str(sum(_modified(folder) for folder in folders) % 10**12)

    def data(self) -> dict[str, Any] | None:
        replays, kept = replays_data(self._run), kept_records(self._run)
        return {"replays": replays, "kept_records": kept} if replays or kept else None


def results(run: Path) -> Iterator[tuple[int, str]]:
    """Yield the steps that were replayed, and the results, the newest first."""
    for replay in replays_data(run):
        if replay["step"] is not None:
            yield replay["step"], f"replay of step {replay['step']}: {replay['what']} ({replay['certainty']})"


def replays_data(run: Path) -> list[dict[str, Any]]:
    """Return the results of the replays of a run, the newest first. Damaged files are left out."""
    paths = sorted((run / "replays").glob("*/verdict.json"), key=_modified, reverse=True)
    found = []
    for path in paths[:_MOST]:
        with contextlib.suppress(OSError, ValueError):
            found.append(_result(path.parent.name, read_object(path)))
    return found


def _result(folder: str, record: dict[str, Any]) -> dict[str, Any]:
    inner = record.get("verdict")
    result: dict[str, Any] = inner if isinstance(inner, dict) else record
    step = as_float(record.get("step"))  # that was replayed; the result names the one where the replay differs
    samples = record.get("samples")
    if not isinstance(samples, dict):
        samples = {}
    places = {label: text for key, label in _PLACES if (text := _text(result.get(key)))}
    return {"folder": _text(folder), "step": int(step) if step >= 0 else None,
            "what": _text(result.get("text")) or _text(result.get("kind")) or "no result",
            "certainty": _text(result.get("certainty")) or "unsure", "places": list(places.items()),
            "reason": "; ".join(_lines(result.get("reasons"))),
            "evidence": [*_lines(result.get("evidence")), *_lines(record.get("notes"))],
            "samples": _lines(samples.get("lines")),
            "remedy": _text(result.get("remedy")), "command": _text(samples.get("command"), 2000)}


def _lines(values: object) -> list[str]:
    return [_text(line) for line in values[:_MAX_LINES] if line] if isinstance(values, list) else []


def kept_records(run: Path) -> list[dict[str, Any]]:
    """Return the flight records that were kept (RUN/flight/kept/step_S_REASON), by step, the newest first."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for path in (run / "flight" / "kept").iterdir():
            if match := _KEPT.fullmatch(path.name):
                files = sum(1 for _ in path.rglob("rank_*.jsonl"))
                found.append({"step": int(match[1]), "reason": match[2], "folder": f"flight/kept/{path.name}",
                              "files": files})
    return sorted(found, key=lambda record: int(record["step"]), reverse=True)[:_MOST]


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _text(value: object, longest: int = _LONGEST) -> str:
    """Return a value of a result as text; "" for None, and a list as its items."""
    if isinstance(value, list):
        value = ", ".join(map(str, value[:_MAX_LINES]))
    return "" if value is None else escape_controls(shorten(str(value), longest))
