"""Order in which the checkpoints of a run are tried in a rollback."""

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.save.retention import Rollback
from pretrain.resilience.guard import BadSteps
from pretrain.resilience.rollback import _candidates
from tests.checkpoint.test_commit import save


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints of the steps 1 to 6. The one of step 2 is not finite."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in range(1, 7):
        path = save(folder, step, num_bytes=100)
        manifest = replace(read_manifest(path), save_id=f"id{step}", finite=step != 2)
        (path / MANIFEST).write_text(manifest.to_json())
    return folder


def order(checkpoints: Path, *past: Rollback, weights_changed: bool = True) -> list[int]:
    bad = BadSteps("", first_step=5, last_step=6, consumed_samples=0, weights_changed=weights_changed)
    return [Manifest.from_json(text).step for _, text in _candidates(checkpoints, list(past), bad)]


def rollback(to_step: int, last_step: int, save_id: str = "") -> Rollback:
    return Rollback(time=0.0, reason="", bad_step=last_step, last_step=last_step, to_step=to_step,
                    save_id=save_id or f"id{to_step}", first_sample=0, consumed_samples=0, abandoned={})


def test_the_newest_good_one_from_before_the_bad_steps_comes_first(checkpoints: Path) -> None:
    assert order(checkpoints) == [4, 3, 1]


def test_checkpoints_between_skipped_updates_come_last(checkpoints: Path) -> None:
    assert order(checkpoints, weights_changed=False) == [4, 3, 1, 6, 5]


def test_a_checkpoint_that_did_not_help_comes_last(checkpoints: Path) -> None:
    assert order(checkpoints, rollback(4, 5)) == [3, 1, 4]
    assert order(checkpoints, rollback(4, 5), rollback(3, 6)) == [1, 4, 3]
    assert order(checkpoints, rollback(4, 4)) == [4, 3, 1], "the run got beyond the earlier bad step"
    assert order(checkpoints, rollback(4, 5, "another save")) == [4, 3, 1]
