"""A checkpoint with NaN or infinity is never chosen, and does not push good ones out of the run folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.format.fragments import FileLocation, FlatTensor, Fragment
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_checkpoints import (
    LATEST_FILE,
    latest_problem,
    newest_good,
    newest_step,
    read_manifest,
)
from pretrain.checkpoint.save.commit import commit, temporary_folder, write_part
from pretrain.checkpoint.save.retention import prune
from pretrain.checkpoint.save.save_checkpoint import FiniteCheck
from pretrain.errors import ConfigError, SaveError
from tests.checkpoint.test_commit import RANKS, manifest, save, steps_of, write_files


def mark(folder: Path, finite: bool | None) -> Manifest:
    """Replace `finite` in a checkpoint's manifest."""
    changed = replace(read_manifest(folder), finite=finite)
    (folder / MANIFEST).write_text(changed.to_json())
    return changed


def saved(checkpoints: Path, *finite: bool | None) -> list[Path]:
    """Save the checkpoints of steps 1, 2, ... with these values of `finite`."""
    folders = [save(checkpoints, step, num_bytes=100) for step in range(1, len(finite) + 1)]
    for folder, value in zip(folders, finite, strict=True):
        mark(folder, value)
    return folders


def test_manifests_without_the_key_keep_their_text(tmp_path: Path) -> None:
    text = manifest(1).to_json()
    assert "finite" not in json.loads(text)
    assert Manifest.from_json(text).to_json() == text
    assert Manifest.from_json(text).is_good
    text = replace(manifest(1), finite=False).to_json()
    assert Manifest.from_json(text).to_json() == text
    assert not Manifest.from_json(text).is_good


def test_the_newest_good_checkpoint_is_chosen(tmp_path: Path) -> None:
    folders = saved(tmp_path, None, True, False, False)
    found = newest_good(tmp_path)
    assert found is not None
    assert found[0] == folders[1]
    (reason,) = found[2]
    assert reason.startswith(f"{folders[3]} and 1 older checkpoint: ")
    assert newest_step(tmp_path) == 2
    mark(folders[0], False)
    mark(folders[1], False)
    with pytest.raises(ConfigError, match=r"no checkpoint can be used .*NaN"):
        newest_good(tmp_path)
    assert newest_step(tmp_path) == 0


def _save(checkpoints: Path, step: int, *finite: bool | None) -> Manifest:
    """Commit a checkpoint in which each rank recorded whether its tensors are finite."""
    temporary = temporary_folder(checkpoints, step)
    temporary.mkdir(parents=True)
    for rank in range(RANKS):
        write_part(temporary, rank=rank, save_id="id", files=write_files(temporary, rank, 100), finite=finite[rank])
    return commit(temporary, manifest(step), timeout_s=0.1)


def test_one_rank_with_nan_makes_the_checkpoint_bad(tmp_path: Path) -> None:
    assert _save(tmp_path, 1, True, True).finite is True
    assert _save(tmp_path, 2, True, None).finite is None
    assert (tmp_path / LATEST_FILE).read_text() == "global_step2"
    assert _save(tmp_path, 3, True, False).finite is False
    assert _save(tmp_path, 4, False, None).finite is False
    assert read_manifest(tmp_path / "global_step4").finite is False
    assert (tmp_path / LATEST_FILE).read_text() == "global_step2"
    with pytest.raises(SaveError, match="a good checkpoint of this step exists"):
        _save(tmp_path, 2, True, False)
    assert _save(tmp_path, 3, True, True).finite is True  # replaces the bad one
    assert steps_of(tmp_path) == [4, 3, 2, 1]


def test_retention_never_removes_good_checkpoints_for_bad_ones(tmp_path: Path) -> None:
    saved(tmp_path, True, True, True, False, False, False)
    for step in (4, 5, 6):
        changed = replace(read_manifest(tmp_path / f"global_step{step}"), eval_loss=0.0)
        (tmp_path / f"global_step{step}" / MANIFEST).write_text(changed.to_json())
    removed = prune(tmp_path, keep_checkpoints=2, keep_every=2, keep_best=3, verified=set())
    assert [folder.name for folder in removed] == ["global_step4", "global_step5", "global_step1"]
    assert steps_of(tmp_path) == [6, 3, 2]
    _save(tmp_path, 7, True, True)
    prune(tmp_path, keep_checkpoints=2, keep_every=0, keep_best=0, verified=set())
    assert steps_of(tmp_path) == [7, 3]


def test_retention_keeps_the_last_checkpoint_that_is_known_to_be_finite(tmp_path: Path) -> None:
    saved(tmp_path, True, None, None, None, False)
    (tmp_path / LATEST_FILE).write_text("global_step5")  # by another program
    for _ in range(3):
        prune(tmp_path, keep_checkpoints=1, keep_every=0, keep_best=0, verified=set())
    assert steps_of(tmp_path) == [5, 4, 3, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_in_nested_containers_is_found(value: float, dtype: torch.dtype) -> None:
    tensors = [torch.full((7, 5), torch.finfo(dtype).max, dtype=dtype) for _ in range(4)]
    state = {"a": [tensors[0], {"step": 3, "b": (tensors[1], torch.zeros(0, dtype=dtype))}], "c": tensors[2].t()[1:]}
    check = FiniteCheck()
    check.add("one.pt", {"ids": torch.arange(3), "flags": torch.tensor([True]), "name": "x"})
    check.add("two.pt", state)
    assert check.is_finite()
    tensors[1][6, 4] = value
    check.add("two.pt", state)
    check.add("three.pt", tensors[3])
    assert not check.is_finite()


def test_padding_is_not_checked() -> None:
    fragments = (Fragment("a", (3,), start=0, length=3, offset=0), Fragment("b", (2,), start=0, length=2, offset=4))
    flat = FlatTensor(0, torch.zeros(7), 7, fragments, (FileLocation("optim.pt", ("flat", 0)),
                                                        FileLocation("optim.pt", ("state", 0))))
    for index in range(7):
        for place in ("flat", "state"):
            check, weights, moments = FiniteCheck([flat]), torch.zeros(7), torch.zeros(7)
            (weights if place == "flat" else moments)[index] = torch.nan
            check.add("optim.pt", {"flat": [weights], "state": {0: {"step": torch.tensor(1.0), "exp_avg": moments}}})
            assert check.is_finite() == (index in (3, 6)), (place, index)


def test_a_damaged_latest_is_found(tmp_path: Path) -> None:
    folders = saved(tmp_path, True, True, False)
    latest, newest = tmp_path / LATEST_FILE, folders[1]
    (folders[0] / MANIFEST).write_text("{")
    for content, problem in ((b"global_step2", None), (b"global_step2\n", None), (b"", "the file is empty"),
                             (b"global_step9", "names global_step9, and there is no such checkpoint"),
                             (b"../other", "there is no such checkpoint"), (b"a\0b", "there is no such checkpoint"),
                             (b"\xff\xfe", "it is not text"), (b"global_step1", "names global_step1, which is damaged"),
                             (b"global_step3", "names global_step3, which has NaN")):
        latest.write_bytes(content)
        found = latest_problem(tmp_path, newest)
        assert (problem is None) == (found is None), content
        assert problem is None or (problem in str(found) and str(found).startswith(f"{latest}: ")), found
    latest.unlink()
    assert "there is no such file" in str(latest_problem(tmp_path, newest))
    latest.mkdir()
    assert "cannot be read" in str(latest_problem(tmp_path, newest))
