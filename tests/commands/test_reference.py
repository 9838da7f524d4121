"""`ds-pretrain reference`: each table has a row for everything that the code defines."""

import argparse
import dataclasses
import re
from collections.abc import Iterator

import pytest

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.commands import COMMANDS
from pretrain.commands.reference import TOPICS, main
from pretrain.config.ds_json.schema import TREE, Key, Tree
from pretrain.config.flags.arguments import FLAGS
from pretrain.errors import EXIT_CODES
from pretrain.monitor.rows import EVENTS, OPTIONAL_KEYS, TRAINING_ROW


def paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, key in tree.items():
        yield from [prefix + name] if isinstance(key, Key) else paths(key, f"{prefix}{name}.")


DEFINED = {
    "flags": {f"--{name}" for name, flag in FLAGS.items() if flag.help != argparse.SUPPRESS},
    "json": set(paths(TREE)),
    "metrics": {*TRAINING_ROW, *OPTIONAL_KEYS},
    "events": set(EVENTS),
    "exit-codes": {str(code) for code in EXIT_CODES},
    "manifest": {field.name for field in dataclasses.fields(Manifest)},
    "commands": {"--world_size", "--overfit_steps", "--hostfile", "--keep_checkpoints", "TOPIC"},
}


@pytest.mark.parametrize("topic", TOPICS)
def test_every_definition_has_a_complete_row(topic: str, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ds-pretrain reference", topic])
    main()
    printed = capsys.readouterr().out
    lines = [re.sub(r"`[^`]*`", lambda code: code[0].replace("|", "/"), line) for line in printed.splitlines()]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    named = {word.strip("` ") for row in rows for word in row[0].split(",")}
    assert DEFINED.get(topic, set()) - named == set()
    assert len(named) > 3
    assert {len(row) for row in rows} <= {2, 3}
    if topic == "commands":
        assert re.findall(r"^## ds-pretrain (.*)$", printed, re.MULTILINE) == list(COMMANDS)
    if topic in ("flags", "commands", "events", "metrics"):
        assert [row[0] for row in rows if not row[-1].strip()] == [], "a flag without a meaning"
