"""The table of events against the code that writes events.jsonl."""

import ast
from collections.abc import Iterator

from pretrain.active_extensions import extensions
from pretrain.monitor.rows import EVENTS
from tests.support.launch import ROOT

# not written: replies of the background writer, and what the report finds
INTERNAL = {"ready", "after_save", "crash"}


def written_events() -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the keys of each call of RunFolder.event, and of each dict that becomes a row."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "pretrain").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    constants = {target.id: node.value.value for node in nodes
                 if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                 for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
            kind = node.args[0] if node.args else None
            if isinstance(kind, ast.Constant) or (isinstance(kind, ast.Name) and kind.id in constants):
                name = kind.value if isinstance(kind, ast.Constant) else constants[kind.id]
                yield name, {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        elif isinstance(node, ast.Dict):
            values = {key.value: value for key, value in zip(node.keys, node.values, strict=True)
                      if isinstance(key, ast.Constant)}
            if isinstance(values.get("event"), ast.Constant) and values["event"].value not in INTERNAL:
                yield values["event"].value, set(values) - {"event"}


def test_every_event_and_each_of_its_keys_is_defined() -> None:
    found = list(written_events())
    # extensions may write theirs in other ways
    assert {name for name, _ in found} | {name for each in extensions() for name in each.events} == set(EVENTS)
    for name, keys in found:
        assert keys - {"time", "step", "reason"} <= set(EVENTS[name][0].split()), name
