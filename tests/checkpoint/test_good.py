"""A checkpoint with NaN or infinity is never chosen, and does not push good ones out of the run folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, newest_good, newest_step, read_manifest
from pretrain.errors import ConfigError
from tests.checkpoint.test_commit import manifest, save


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
    assert [str(folder) in reason for folder, reason in zip(folders[:1:-1], found[2], strict=True)] == [True, True]
    assert newest_step(tmp_path) == 2
    mark(folders[0], False)
    mark(folders[1], False)
    with pytest.raises(ConfigError, match=r"no checkpoint can be used .*NaN"):
        newest_good(tmp_path)
    assert newest_step(tmp_path) == 0
