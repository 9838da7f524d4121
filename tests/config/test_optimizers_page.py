"""The JSON snippets of ds_configs/optimizers.md are accepted, and rejected where the page says so."""

import json
import re
from typing import Any

import pytest

from pretrain.config import run_rules
from pretrain.errors import ConfigError
from tests.config.test_foreign_jsons import resolve
from tests.support.launch import ROOT

_PAGE = (ROOT / "ds_configs" / "optimizers.md").read_text()
SNIPPETS: dict[str, dict[str, Any]] = {
    f"{config['optimizer']['type']}-{config['zero_optimization']['stage']}": config
    for config in map(json.loads, re.findall(r"^```json\n(\{.*?)^```", _PAGE, re.DOTALL | re.MULTILINE))}


@pytest.fixture(autouse=True)
def _has_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_rules, "find_spec", lambda name: name)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_are_accepted(name: str) -> None:
    assert len(SNIPPETS) == 5
    resolved = resolve(SNIPPETS[name], ranks=2, micro_batch_size=1, precision="bf16")
    assert resolved.layout.optimizer == name.partition("-")[0].lower()


@pytest.mark.parametrize(("kind", "zero", "message"), [
    ("Muon", {"stage": 0}, "ZeRO stage 1 to 3"), ("Muon", {"stage": 3}, "reduce_scatter"),
    ("AdamW8bit", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "which run on the CPU"),
    ("SGD", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "which run on the CPU"),
    ("Muon", {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, '"cpu" or "none" for Muon'),
    ("Adafactor", {"stage": 1}, "its updates depend on the layout"), ("Lamb", {"stage": 1}, "depend on the layout")])
def test_other_combinations_are_rejected(kind: str, zero: dict[str, Any], message: str) -> None:
    config = {"optimizer": {"type": kind, "params": {"lr": 0.1}}, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=message):
        resolve(config, ranks=2, micro_batch_size=1, precision="bf16")
