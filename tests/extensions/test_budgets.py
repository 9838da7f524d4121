"""The most lines of Python that each extension may have: a larger limit is a decision, and stands in its commit.

Lines are counted without blank ones, comments and docstrings. A new extension needs an entry. With the lines of the
core (tests/test_size.py), these are all lines of the package.
"""

from tests.extensions.test_deletable import NAMES
from tests.support.launch import ROOT
from tests.support.source_size import lines_of

MOST_LINES = {
    "adopt": 3710,
    "average": 210,
    "completion": 70,
    "cpu_kernels": 1100,
    "data_watch": 260,
    "fill_in_middle": 220,
    "fp8": 160,
    "generate": 620,
    "health": 1560,
    "hints": 320,
    "host_time": 350,
    "hub_datasets": 360,
    "inspect": 390,
    "ladder": 2180,
    "megatron_order": 310,
    "memory_watch": 280,
    "merge_split": 460,
    "near_duplicates": 340,
    "new": 640,
    "notify": 490,
    "object_stores": 920,
    "overlap": 550,
    "planner": 2630,
    "profile": 520,
    "quickstart": 100,
    "recipes": 850,
    "replay": 2590,
    "report": 650,
    "run_notes": 320,
    "sanity": 1020,
    "slow_ranks": 980,
    "supervise": 580,
    "sweep": 420,
    "tasks": 650,
    "tiktoken": 240,
    "translate": 2520,
    "universal": 260,
    "wrapped": 1930,
}


def test_no_extension_is_larger_than_its_budget() -> None:
    assert set(NAMES) <= MOST_LINES.keys()
    lines = {name: sum(lines_of(path.read_text(encoding="utf-8"))
                       for path in (ROOT / "pretrain/extensions" / name).rglob("*.py")) for name in NAMES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}
