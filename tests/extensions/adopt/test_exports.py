"""Files of `export --format` come back by `import` without a difference, and are exported again."""

import re
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.commands.export import main as export_main
from pretrain.extensions.adopt.main import main as import_main
from tests.dry_gpu.conftest import DryGpu, dry_gpu
from tests.extensions.universal.test_export_formats import Command, command
from tests.support.checkpoints import STEPS, real_run

__all__ = ["command", "dry_gpu"]  # fixtures


@pytest.fixture
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run("pipeline2", corpus, tmp_path_factory)


def test_a_universal_export_is_imported_without_a_difference(run: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "universal" / f"global_step{STEPS}"
    command(export_main, run, "--format", "universal", "--output", out)
    text = command(import_main, out, "--save", tmp_path / "back")
    assert "DeepSpeed's universal format, names of transformers" in text
    assert re.search(r"learning rate +[\d.e-]+ in the next step", text)
    back = tmp_path / "back/checkpoints/global_step3"
    assert diff(run / "checkpoints/global_step3", back) == []
    before, after = read_manifest(run / "checkpoints/global_step3"), read_manifest(back)
    for key in ("step", "consumed_samples", "global_batch_size", "seq_length", "seed", "precision"):
        assert getattr(before, key) == getattr(after, key), key
    assert after.optimizer["type"] == "AdamW"
    # an adopted checkpoint is exported, too
    command(export_main, tmp_path / "back", "--format", "universal", "--output", tmp_path / "again")
    for path in out.glob("zero/*/*.pt"):
        first = torch.load(path)
        again = torch.load(tmp_path / "again" / path.relative_to(out))
        assert first == again if path.stem == "step" else torch.equal(first["param"], again["param"]), path


def test_an_export_for_the_trainer_is_imported_without_a_difference(run: Path, tmp_path: Path,
                                                                    command: Command) -> None:
    out = tmp_path / f"checkpoint-{STEPS}"
    command(export_main, run, "--format", "trainer", "--output", out)
    command(import_main, out, "--save", tmp_path / "back")
    assert diff(run / "checkpoints/global_step3", tmp_path / "back/checkpoints/global_step3") == []


@pytest.mark.slow
def test_an_export_is_imported_where_deepspeed_finds_a_gpu(run: Path, tmp_path: Path, dry_gpu: DryGpu) -> None:
    for words in (["export", run, "--output", tmp_path / "universal", "--format", "universal"],
                  ["import", tmp_path / "universal", "--save", tmp_path / "adopted"]):
        done = dry_gpu(["python", "-m", "pretrain", *map(str, words)])
        assert done.returncode == 0, done.stdout[-3000:]
