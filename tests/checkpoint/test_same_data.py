"""Data and tokenizers that a resume accepts or rejects before the ranks start."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.load import same_data
from pretrain.checkpoint.load.start import Start
from pretrain.data.token_files.hashes import hashes_path
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tests.checkpoint.starts import hash_data, resumed, start_run, write_checkpoint
from tests.support.big_data import change_token, write_big_data
from tests.support.launch import ROOT
from tests.support.rejection import rejection

Starter = Callable[..., Start]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a data set of 7 blocks without hashes."""
    return write_big_data(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def data(big: Path, tmp_path: Path) -> Path:
    """Prefix of a copy."""
    for ending in ("bin", "idx", "meta.json"):
        subprocess.run(["cp", "-p", "--sparse=always", f"{big}.{ending}", tmp_path], check=True)
    return tmp_path / "corpus"


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    """Validate the start of a run in tmp_path/run, as check_config.py, the launchers and the ranks do."""

    def start(data: Path, *flags: str) -> Start:
        return start_run(tmp_path / "run", "--train_data", str(data), "--seq_length", "64", "--split", "1,0,0", *flags)

    return start


@pytest.fixture
def saved(start: Starter, data: Path) -> Manifest:
    """Write a checkpoint whose manifest has the hash of all data. No hashes are stored."""
    plan = start(data).plan
    hash_data(plan)
    return write_checkpoint(plan)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the data of these tests could take longer than 2 s."""
    monkeypatch.setattr(same_data, "_FAST_S", 600.0)


def test_moved_copied_and_rewritten_data_is_the_same(start: Starter, data: Path, saved: Manifest,
                                                     tmp_path: Path) -> None:
    assert saved.data is not None
    assert len(saved.data["sha256"]) == 64
    os.utime(f"{data}.bin", (1, 1))
    resume = resumed(start(data))
    assert (resume.warnings, resume.other_data) == ([], "")
    other = write_big_data(tmp_path / "elsewhere" / "name")
    resume = resumed(start(other))
    assert resume.warnings == []


def test_a_changed_token_is_rejected_unless_the_flag_is_given(start: Starter, data: Path, saved: Manifest) -> None:
    assert saved.data is not None
    change_token(data, keep_mtime=False)
    line = rejection(start, data)
    assert line.startswith(f"--train_data {data}: this is not the data that ")
    assert f"global_step10 was trained on (SHA-256 {saved.data['sha256'][:12]} there, " in line
    assert line.endswith("Give the data of the checkpoint, or continue with this data by --override data.")
    resume = resumed(start(data, "--allow_other_data"))
    assert "training continues at sample 80 of this data" in resume.other_data
    assert resume.warnings == [resume.other_data]


def test_a_changed_token_with_the_old_time_is_rejected_if_its_block_is_read(
        start: Starter, data: Path, saved: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["python", "-m", "pretrain", "data", "hash", str(data)], cwd=ROOT, check=True, capture_output=True)
    change_token(data, keep_mtime=True)
    monkeypatch.setattr(same_data, "check_blocks",
                        lambda indexed, found, **_: original(indexed, found, seconds=600))
    with pytest.raises(ConfigError, match=r"corpus\.bin: bytes 83886080 to 100663296 do not have the SHA-256"):
        start(data, "--allow_other_data")


original = same_data.check_blocks


def test_other_data_is_rejected_by_its_samples_without_hashes(start: Starter, data: Path, corpus: str) -> None:
    """Manifests of older versions have no `data`."""
    manifest = write_checkpoint(start(data).plan, data=None)
    assert '"data"' not in manifest.to_json()
    resume = resumed(start(data))
    assert resume.warnings == []
    with pytest.raises(ConfigError, match=r"\(fingerprint \w{12} there, fingerprint \w{12} here\)"):
        start(Path(corpus))
    write_checkpoint(start(data).plan)
    with pytest.raises(ConfigError, match=r"\([\d,]+ bytes there, [\d,]+ bytes here\)"):
        start(Path(corpus))


def test_another_split_is_named(start: Starter, corpus: str) -> None:
    plan = start(Path(corpus)).plan
    write_checkpoint(plan)
    with pytest.raises(ConfigError, match=r"was trained on tokens 0 to .* of this data, and this run would train on "
                                          r"tokens 0 to .*: --split or the validation data is another one"):
        start(Path(corpus), "--split", "80,20,0")


def test_the_hash_of_a_checkpoint_that_was_saved_before_it_was_known(start: Starter, data: Path,
                                                                     tmp_path: Path) -> None:
    plan = start(data).plan
    manifest = write_checkpoint(plan)
    assert manifest.data is not None
    assert manifest.data["sha256"] is None
    hash_data(plan)
    row = {**plan.datasets["train"].record(), "event": same_data.HASHED_EVENT, "step": 12}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(row) + "\n")
    resumed(start(data))
    change_token(data, keep_mtime=False)
    with pytest.raises(ConfigError, match=f"SHA-256 {row['sha256'][:12]} there"):
        start(data)


def test_a_checkpoint_that_was_trained_on_changed_data_does_not_resume_with_the_restored_data(
        start: Starter, data: Path, tmp_path: Path) -> None:
    """The run noticed the change after it had saved this checkpoint, before it had hashed all of the changed data."""
    changed = start(data).plan
    write_checkpoint(changed)
    row = {**changed.datasets["train"].record(), "event": same_data.HASHED_EVENT, "sha256": same_data.OTHER_BYTES}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(row) + "\n")
    os.utime(f"{data}.bin", (1, 1))  # restored
    with pytest.raises(ConfigError, match=r"is not the data that .*global_step10 was trained on \(SHA-256 unknown"):
        start(data)


def test_another_tokenizer_is_rejected(start: Starter, corpus: str, tmp_path: Path) -> None:
    plan = start(Path(corpus)).plan
    write_checkpoint(plan, tokenizer_fingerprint="ab" * 32)
    resume = resumed(start(Path(corpus)))
    assert resume.warnings == ["global_step10 was saved with --tokenizer"]
    other = replace(plan, tokenizer=_Tokenizer(), args=replace(plan.args, tokenizer="tok"))  # type: ignore[arg-type]
    manifest = write_checkpoint(plan, tokenizer_fingerprint="ab" * 32)
    with pytest.raises(ConfigError, match=r"--tokenizer tok: this is not the tokenizer of .* abab.* there, cdcd"):
        same_data.check_same_tokenizer(manifest, other, tmp_path)
    allowed = replace(other, args=replace(other.args, allow_other_data=True))
    assert "this is not the tokenizer" in same_data.check_same_tokenizer(manifest, allowed, tmp_path)


class _Tokenizer(Tokenizer):
    fingerprint = "cd" * 32

    def __init__(self) -> None:
        pass


def test_damaged_hashes_are_reported_and_ignored(start: Starter, data: Path) -> None:
    hashes_path(data).write_text("{")
    notes = start(data).plan.notes
    assert [note for note in notes if "corpus.sha256.json is ignored and will be written again" in note]
