"""A DeepSpeed of an unknown version trains, without the shortcuts that it has no place for, and with one note.

A work-around that has no place rejects the run.
"""

from pathlib import Path

import pytest

from pretrain.distributed.requirements import TESTED
from tests.support.launch import ROOT, WORKERS, run_ranks
from tests.test_train import _flags, losses

ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
SHORTCUTS = ",".join([
    "deepspeed.runtime.compiler:compile", "deepspeed.comm.torch:build_shm_op", f"{ZERO}.average_tensor",
    f"{ZERO}._get_preflattened_grad_partition", f"{ZERO}.get_grad_norm_direct", f"{ZERO}._has_inf_or_nan",
    f"{ZERO}.reduce_ready_partitions_and_remove_grads", f"{ZERO}._use_compact_grad_partition_buffer"])
UNKNOWN = "0.20.1"


def train(folder: Path, corpus: str, version: str, hidden: str) -> tuple[int, str, list[tuple[int, float, float]]]:
    """Train two steps on one rank. Return the exit code, the output, and the losses."""
    folder.mkdir()
    flags = _flags(corpus, folder / "run", "--train_steps", "2", config=ROOT / "ds_configs" / "zero1_bf16.json")
    done, = run_ranks([str(WORKERS / "hidden_names.py"), version, hidden, *flags], 1, cwd=folder)
    return done.returncode, done.stdout, losses(folder / "run") if done.returncode == 0 else []


def test_an_unknown_version_trains_without_the_shortcuts(corpus: str, tmp_path: Path) -> None:
    code, output, found = train(tmp_path / "unknown", corpus, UNKNOWN, SHORTCUTS)
    assert code == 0, output
    notes = [line for line in output.splitlines() if UNKNOWN in line]
    assert len(notes) == 1
    assert "python -m tests.upstream.reproduce" in notes[0]
    code, output, expected = train(tmp_path / "known", corpus, TESTED[-1], "")
    assert code == 0, output
    assert "outside the tested versions" not in output
    assert found == [(step, pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-3))
                     for step, loss, norm in expected]


def test_an_unknown_version_without_a_place_for_a_workaround_is_rejected(corpus: str, tmp_path: Path) -> None:
    hidden = "deepspeed.ops.adam.fused_adam:FusedAdam._dummy_overflow_buf"  # of defect L
    code, output, _ = train(tmp_path / "rejected", corpus, UNKNOWN, hidden)
    assert code == 2, output
    assert "Traceback" not in output
    assert f"deepspeed {UNKNOWN}: a work-around for its defects cannot be applied" in output


def test_a_version_before_the_tested_ones_is_rejected(corpus: str, tmp_path: Path) -> None:
    code, output, _ = train(tmp_path / "earlier", corpus, "0.18.0", "")
    assert code == 2, output
    assert "deepspeed 0.18.0: versions before 0.18.9 can give wrong gradients here. pip install" in output
