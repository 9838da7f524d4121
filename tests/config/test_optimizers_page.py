"""The JSON snippets of ds_configs/recipe.md are accepted."""

import json
import re
from typing import Any

import pytest

from pretrain.config import run_rules
from tests.config.test_foreign_jsons import resolve
from tests.support.launch import ROOT

_PAGE = (ROOT / "ds_configs" / "recipe.md").read_text()
SNIPPETS: dict[str, dict[str, Any]] = {
    f"{config['optimizer']['type']}-{config['zero_optimization']['stage']}": config
    for config in map(json.loads, re.findall(r"^```json\n(\{.*?)^```", _PAGE, re.DOTALL | re.MULTILINE))}


@pytest.fixture(autouse=True)
def _has_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_rules, "find_spec", lambda name: name)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_are_accepted(name: str) -> None:
    assert len(SNIPPETS) == 2
    resolved = resolve(SNIPPETS[name], ranks=2, micro_batch_size=1, precision="bf16")
    assert resolved.layout.optimizer == name.partition("-")[0].lower()
