"""Results of `ds-pretrain replay` (RUN/replays/*/verdict.json), and the flight records that were kept, for the page."""

import contextlib
import re
from pathlib import Path
from typing import Any

from pretrain.analysis.report.run_table import as_float
from pretrain.errors import escape_controls, shorten
from pretrain.stored_json import read_object

_MOST = 50  # results and records; the newest
_MAX_LINES = 20  # of the evidence
_LONGEST = 300  # characters of a text
_KINDS = {
    "reproducible": "the step is reproducible: the data or the recipe is the cause",
    "data_changed": "the step read other tokens than before",
    "settings_changed": "the step had other settings, such as the learning rate",
    "random_state": "the step had another random state",
    "memory_weights": "weights changed in memory between two steps",
    "memory_states": "optimizer states changed in memory between two steps",
    "forward": "the forward pass computed something else",
    "backward": "the backward pass computed something else",
    "reduction": "the reduction of the gradients gave something else",
    "update": "the update computed something else",
    "nondeterministic": "replays differ from one another on the same hardware",
}
_PLACES = (("step", "step"), ("rank", "rank"), ("ranks", "rank"), ("host", "host"), ("hosts", "host"),
           ("layer", "layer"), ("stage", "stage of the step"))
_KEPT = re.compile(r"step_(\d{1,16})_(\w{1,40})")


def replays_data(run: Path) -> list[dict[str, Any]]:
    """Return the results of the replays of a run, the newest first. Damaged files are left out."""
    paths = sorted((run / "replays").glob("*/verdict.json"), key=_modified, reverse=True)
    found = []
    for path in paths[:_MOST]:
        with contextlib.suppress(OSError, ValueError):
            found.append(_verdict(path.parent.name, read_object(path)))
    return found


def _verdict(folder: str, verdict: dict[str, Any]) -> dict[str, Any]:
    kind, step = _text(verdict.get("kind")), as_float(verdict.get("step"))
    lines = verdict.get("evidence")
    places = {label: text for key, label in _PLACES if (text := _text(verdict.get(key)))}
    return {"folder": _text(folder), "step": int(step) if step >= 0 else None,
            "what": _KINDS.get(kind, kind or "no result"), "certainty": _text(verdict.get("certainty")) or "unsure",
            "reason": _text(verdict.get("reason")), "places": list(places.items()),
            "evidence": [_text(line) for line in (lines if isinstance(lines, list) else [lines])[:_MAX_LINES] if line],
            "remedy": _text(verdict.get("remedy"))}


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


def state_of_folders(run: Path) -> str:
    """Return a text that changes when a replay has ended, or a record was kept."""
    folders = (run / "replays", *(run / "replays").glob("*"), run / "flight" / "kept")
    return str(sum(_modified(folder) for folder in folders) % 10**12)


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _text(value: object) -> str:
    """Return a value of a verdict as text; "" for None, and a list as its items."""
    if isinstance(value, list):
        value = ", ".join(map(str, value[:_MAX_LINES]))
    return "" if value is None else escape_controls(shorten(str(value), _LONGEST))
