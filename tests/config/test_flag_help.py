"""--help of pretrain/train.py: groups, defaults, 80 columns."""

import re

import pytest

from pretrain.config.flags.arguments import FLAGS
from pretrain.config.flags.parse import parse_arguments


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_a_group_with_its_default(page: str) -> None:
    sections = dict(re.findall(r"^(\S.*):\n\n?((?:  .*\n|\n)*)", page, re.MULTILINE))
    assert list(sections) == ["help", *dict.fromkeys(flag.group.title for flag in FLAGS.values())]
    entries = re.findall(r"^  --(\w+)((?:.*\n)(?:   .*\n)*)", page, re.MULTILINE)
    names = [name for name, _ in entries if name not in ("help", "config")]
    assert [*names, "local_rank"] == list(FLAGS), "DeepSpeed's launcher sets local_rank"
    for name, text in entries[1:]:
        assert re.search(r"\((default: .+|required|.+: required)\)$", " ".join(text.split())), (name, text)


def test_help_fits_80_columns(page: str) -> None:
    assert max(map(len, page.splitlines())) <= 80
