"""--help of pretrain/train.py: groups, defaults, 80 columns."""

import dataclasses
import re

import pytest

from pretrain.config import auto as ds_auto
from pretrain.config.flags.arguments import GROUPS, RunArguments, parse_arguments

FILLED = {"micro_batch_size": ds_auto.DEFAULT_MICRO_BATCH_SIZE, "learning_rate": ds_auto.DEFAULT_LEARNING_RATE,
          "gradient_accumulation_steps": ds_auto.DEFAULT_GRADIENT_ACCUMULATION_STEPS,
          "weight_decay": ds_auto.DEFAULT_WEIGHT_DECAY, "adam_beta1": ds_auto.DEFAULT_BETAS[0],
          "adam_beta2": ds_auto.DEFAULT_BETAS[1], "adam_epsilon": ds_auto.DEFAULT_EPSILON,
          "gradient_clipping": ds_auto.DEFAULT_GRADIENT_CLIPPING, "precision": ds_auto.auto_precision("auto", "auto")}


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_a_group_with_its_default(page: str) -> None:
    sections = dict(re.findall(r"^(\S.*):\n\n?((?:  .*\n|\n)*)", page, re.MULTILINE))
    assert list(sections) == ["help", *(group.title for group in GROUPS)]
    entries = re.findall(r"^  --(\w+)((?:.*\n)(?:   .*\n)*)", page, re.MULTILINE)
    names = [field.name for field in dataclasses.fields(RunArguments)]
    assert [name for name, _ in entries if name not in ("help", "config")] == [name for name in names
                                                                              if name != "local_rank"]
    for name, text in entries[1:]:
        assert re.search(r"\((default: .+|required|.+: required)\)$", " ".join(text.split())), (name, text)


def test_shown_defaults_equal_the_applied_defaults(page: str) -> None:
    text = " ".join(page.split())
    for name, value in FILLED.items():
        shown = re.search(rf"--{name} \S+ .*?\(default: ([^)]+)\)", text)
        assert shown, name
        assert shown[1] == str(value) if isinstance(value, str) else float(shown[1]) == value, name


def test_help_fits_80_columns(page: str) -> None:
    assert max(map(len, page.splitlines())) <= 80
