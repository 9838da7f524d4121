"""`ds-pretrain ladder --points` and `--mixtures`: the commands from files to results, and rejected input."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("scipy")

from pretrain.errors import ConfigError
from pretrain.extensions.ladder.main import main
from tests.support.launch import ROOT

PYTHIA = ROOT / "tests/extensions/ladder/published/pythia.csv"
BLEND = {"train_data": [0.5, "data/a", 0.5, "data/b"], "valid_data": ["a=data/a", "b=data/b"], "train_steps": 10}


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command in `tmp_path` and returns its output. It raises ConfigError."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ds-pretrain ladder", *words])
        assert main() == 0
        return capsys.readouterr().out

    return run


def write_target(folder: Path, **changes: object) -> str:
    values = {name: value for name, value in {**BLEND, **changes}.items() if value is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return "run.yaml"


def test_points(tmp_path: Path, ladder: Callable[..., str]) -> None:
    shown = ladder("--points", str(PYTHIA))
    assert "12B" in shown
    assert "inside     4 of 4" in shown
    few = tmp_path / "few.csv"
    few.write_text("run,parameters,tokens,loss\na,1e6,1e7,4\nb,2e6,1e7,3.9\nc,4e6,1e7,3.8\n")
    with pytest.raises(ConfigError, match=r"^--points few\.csv: .* have 2 different numbers of parameters"):
        ladder("--points", "few.csv")
    with pytest.raises(ConfigError, match=r"^--target: it has no effect with --points"):
        ladder("--points", "few.csv", "--target", "run.yaml")


@pytest.mark.parametrize(("changes", "words", "problem"), [
    ({"train_data": "data/a"}, ["5"], "train_data has 1 prefixes; --mixtures needs at least two"),
    ({"valid_data": None}, ["5"], "valid_data has fewer than two sets"),
    ({"train_steps": None}, ["5"], "train_steps is missing"),
    ({"blend_schedule": "1e6:1,0"}, ["5"], "blend_schedule: the runs of --mixtures keep their weights"),
    ({}, ["3"], "^--mixtures: found 3; expected at least 4 runs for 2 domains"),
    ({}, ["5", "--budget", "2h"], "^--budget: it has no effect with --mixtures"),
])
def test_rejected_blends(tmp_path: Path, ladder: Callable[..., str], changes: dict[str, object], words: list[str],
                         problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ladder("--target", write_target(tmp_path, **changes), "--mixtures", *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_mixtures(tmp_path: Path, ladder: Callable[..., str]) -> None:
    """Five short runs on two kinds of text; the command can be given again, and rejects other settings."""
    texts = {"words": "the loss of a small model falls ", "digits": "0 1 2 3 5 8 13 21 34 55 89 144 "}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text * 2000)
        subprocess.run([sys.executable, "-m", "pretrain", "prepare", f"{name}.txt", "--tokenizer", "bytes", "--out",
                        f"data/{name}"], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    target = write_target(
        tmp_path, train_data=[0.4, "data/words", 0.6, "data/digits"], train_steps=6, tokenizer="bytes", model="tiny",
        valid_data=["words=data/words", "digits=data/digits"], deepspeed_config="zero0_fp32", seq_length=64,
        model_overrides="vocab_size=258", micro_batch_size=4, learning_rate=0.003, lr_warmup_steps=2, eval_steps=2)
    for _ in range(2):
        shown = ladder("--target", target, "--mixtures", "4", "--out", "out")
        assert "predicted before it was trained: words 0.4, digits 0.6" in shown
        assert "train_data: [" in shown
    found = json.loads((tmp_path / "out/mixtures.json").read_text())
    assert len(found["runs"]) == 4
    assert set(found["grade"]["measured"]) == {"words", "digits"}
    target = write_target(tmp_path, train_steps=8)
    with pytest.raises(ConfigError, match="its runs have other settings"):
        ladder("--target", target, "--mixtures", "4", "--out", "out")
