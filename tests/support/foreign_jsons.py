"""DeepSpeed JSONs of public repositories and documentation, with the expected outcome of each.

`tests/golden/foreign_jsons.jsonl` has one JSON object per line, without comments. Its keys:
"from": repository and path; "json": the document; "flags": the flags that "auto" values and missing keys need;
"ranks": 1 by default; and either "notes": the subject of each note, or "rejected": [key, remedy].
Blocks that do not affect the outcome may be shortened.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[1] / "golden" / "foreign_jsons.jsonl"


@dataclass(frozen=True)
class ForeignJson:
    """One document and its expected outcome."""

    source: str
    config: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    notes: tuple[str, ...] | None = None  # None: rejected
    rejected: tuple[str, ...] = ()  # the key and the remedy


def read_foreign_jsons() -> list[ForeignJson]:
    """Read all documents, in the order of the file."""
    rows = [json.loads(line) for line in _PATH.read_text(encoding="utf-8").splitlines()]
    return [ForeignJson(row["from"], row["json"], row.get("flags", {}), row.get("ranks", 1),
                        tuple(row["notes"]) if "notes" in row else None, tuple(row.get("rejected", ())))
            for row in rows]
