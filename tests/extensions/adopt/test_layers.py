"""The layers of the extension: each module imports only those below it."""

from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from tests.support.launch import ROOT

CONTRACT = """
[importlinter]
root_package = pretrain

[importlinter:contract:1]
name = command > writing | finding > dcp > megatron > deepspeed > what all kinds of sources share
type = layers
containers = pretrain.extensions.adopt
exhaustive = true
layers =
    main
    adopt | sources
    dcp
    megatron
    deepspeed
    mapping | run_files
    optimizers
    foreign_run
    extension
"""


def test_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "layers.ini").write_text(CONTRACT)
    assert lint_imports(config_filename=str(tmp_path / "layers.ini"), no_cache=True) == 0, capsys.readouterr().out
