"""Which data and tokenizer a run may resume with, as it is decided before the ranks start."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, manifest_of
from pretrain.checkpoint.load import same_data
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.config.flags.arguments import parse_arguments
from pretrain.config.validate import Plan
from pretrain.data.files import index_file
from pretrain.data.files.hashes import hashes_path, read_hashes, write_hashes
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.resilience.data_watch import DataWatch
from tests.support.big_data import change_token, write_big_data
from tests.support.launch import ROOT

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
        args = parse_arguments(["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json"), "--model", "tiny",
                                "--model_overrides", "vocab_size=256", "--train_data", str(data), "--seq_length", "64",
                                "--split", "1,0,0", "--train_steps", "50", "--save", str(tmp_path / "run"), *flags])
        return check_start(args, world_size=1, device=cpu_device())

    return start


def _write_checkpoint(plan: Plan, **changes: object) -> Manifest:
    """Write a checkpoint that has only a manifest."""
    folder = Path(plan.args.save) / "checkpoints" / "global_step10"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = replace(manifest_of(plan, step=10, consumed_samples=80, versions={}), **changes)
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def _hash(plan: Plan) -> None:
    same_data.hash_if_fast(plan.datasets["train"].sources[0], seconds=600)


@pytest.fixture
def saved(start: Starter, data: Path) -> Manifest:
    """Write a checkpoint whose manifest has the hash of all data. No hashes are stored."""
    plan = start(data).plan
    _hash(plan)
    return _write_checkpoint(plan)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the data of these tests could take longer than 2 s."""
    monkeypatch.setattr(same_data, "_FAST_S", 600.0)


def test_moved_copied_and_rewritten_data_is_the_same(start: Starter, data: Path, saved: Manifest,
                                                     tmp_path: Path) -> None:
    assert saved.data is not None
    assert len(saved.data["sha256"]) == 64
    os.utime(f"{data}.bin", (1, 1))
    resume = start(data).resume
    assert resume is not None
    assert (resume.warnings, resume.other_data) == ([], "")
    other = write_big_data(tmp_path / "elsewhere" / "name")
    resume = start(other).resume
    assert resume is not None
    assert resume.warnings == []


def test_a_changed_token_is_rejected_unless_the_flag_is_given(start: Starter, data: Path, saved: Manifest) -> None:
    assert saved.data is not None
    change_token(data, keep_mtime=False)
    with pytest.raises(ConfigError) as error:
        start(data)
    line = str(error.value)
    assert line.startswith(f"--train_data {data}: this is not the data that ")
    assert f"global_step10 was trained on (SHA-256 {saved.data['sha256'][:12]} there, " in line
    assert line.endswith("Give the data of the checkpoint, or continue with this data by --allow_other_data.")
    resume = start(data, "--allow_other_data").resume
    assert resume is not None
    assert "training continues at sample 80 of this data" in resume.other_data
    assert resume.warnings == [resume.other_data]


def test_a_changed_token_with_the_old_time_is_rejected_if_its_block_is_read(
        start: Starter, data: Path, saved: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["python", "tools/data.py", "hash", str(data)], cwd=ROOT, check=True, capture_output=True)
    change_token(data, keep_mtime=True)
    monkeypatch.setattr(same_data, "check_blocks",
                        lambda indexed, found, **_: original(indexed, found, seconds=600))
    with pytest.raises(ConfigError, match=r"corpus\.bin: bytes 83886080 to 100663296 do not have the SHA-256"):
        start(data, "--allow_other_data")


original = same_data.check_blocks


def test_other_data_is_rejected_by_its_samples_without_hashes(start: Starter, data: Path, corpus: str) -> None:
    """Manifests of older versions have no `data`."""
    manifest = _write_checkpoint(start(data).plan, data=None)
    assert '"data"' not in manifest.to_json()
    resume = start(data).resume
    assert resume is not None
    assert resume.warnings == []
    with pytest.raises(ConfigError, match=r"\(fingerprint \w{12} there, fingerprint \w{12} here\)"):
        start(Path(corpus))
    _write_checkpoint(start(data).plan)
    with pytest.raises(ConfigError, match=r"\([\d,]+ bytes there, [\d,]+ bytes here\)"):
        start(Path(corpus))


def test_another_split_is_named(start: Starter, corpus: str) -> None:
    plan = start(Path(corpus)).plan
    _write_checkpoint(plan)
    with pytest.raises(ConfigError, match=r"was trained on tokens 0 to .* of this data, and this run would train on "
                                          r"tokens 0 to .*: --split or the validation data is another one"):
        start(Path(corpus), "--split", "80,20,0")


def test_the_hash_of_a_checkpoint_that_was_saved_before_it_was_known(start: Starter, data: Path,
                                                                     tmp_path: Path) -> None:
    plan = start(data).plan
    manifest = _write_checkpoint(plan)
    assert manifest.data is not None
    assert manifest.data["sha256"] is None
    _hash(plan)
    row = {**plan.datasets["train"].record(), "event": same_data.HASHED_EVENT, "step": 12}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(row) + "\n")
    resume = start(data).resume
    assert resume is not None
    change_token(data, keep_mtime=False)
    with pytest.raises(ConfigError, match=f"SHA-256 {row['sha256'][:12]} there"):
        start(data)


def test_a_checkpoint_that_was_trained_on_changed_data_does_not_resume_with_the_restored_data(
        start: Starter, data: Path, tmp_path: Path) -> None:
    """The run noticed the change after it had saved this checkpoint, before it had hashed all of the changed data."""
    changed = start(data).plan
    _write_checkpoint(changed)
    row = {**changed.datasets["train"].record(), "event": same_data.HASHED_EVENT, "sha256": same_data.OTHER_BYTES}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(row) + "\n")
    os.utime(f"{data}.bin", (1, 1))  # restored
    with pytest.raises(ConfigError, match=r"is not the data that .*global_step10 was trained on \(SHA-256 unknown"):
        start(data)


def test_another_tokenizer_is_rejected(start: Starter, corpus: str, tmp_path: Path) -> None:
    plan = start(Path(corpus)).plan
    _write_checkpoint(plan, tokenizer_fingerprint="ab" * 32)
    resume = start(Path(corpus)).resume
    assert resume is not None
    assert resume.warnings == ["global_step10 was saved with --tokenizer"]
    other = replace(plan, tokenizer=_Tokenizer(), args=replace(plan.args, tokenizer="tok"))  # type: ignore[arg-type]
    manifest = _write_checkpoint(plan, tokenizer_fingerprint="ab" * 32)
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


class _Lines:
    """Stands for the screen and the run folder of a run, and collects what is written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def event(self, kind: str, **_: object) -> None:
        self.lines.append(kind)


def _watch(start: Start) -> tuple[DataWatch, _Lines, list[str]]:
    output, rejections = _Lines(), []
    watch = DataWatch(start.plan, start.resume, reject=rejections.append, active=True,
                      folder=output, screen=output)  # type: ignore[arg-type]
    return watch, output, rejections


def test_two_runs_may_hash_the_same_data_at_the_same_time(start: Starter, data: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.resilience.data_watch._FAST_S", -1.0)
    monkeypatch.setattr("pretrain.resilience.data_watch._POLL_S", 0.0)
    monkeypatch.setattr("pretrain.resilience.source_watch._STORE_S", 0.0)
    starts = [start(data), start(data)]
    runs = [_watch(each) for each in starts]
    hashed = [each.plan.datasets["train"].sources[0] for each in starts]
    deadline = time.monotonic() + 900
    while any(data.hashes is None for data in hashed) and time.monotonic() < deadline:
        for watch, _, _ in runs:
            watch.poll(1)
        time.sleep(0.01)
    assert read_hashes(hashes_path(data)) == hashed[0].hashes == hashed[1].hashes
    for watch, output, rejections in runs:
        watch.close()
        assert (output.lines, rejections) == ([same_data.HASHED_EVENT], [])


def test_unfinished_hashes_are_continued(start: Starter, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start(data).plan
    indexed = plan.datasets["train"].sources[0]
    _hash(plan)
    assert indexed.hashes is not None
    complete = indexed.hashes
    write_hashes(hashes_path(data), replace(complete, blocks=complete.blocks[:5]))
    monkeypatch.setattr("pretrain.resilience.data_watch._FAST_S", -1.0)
    again = start(data)
    assert again.plan.datasets["train"].sources[0].hashes is None
    watch, _, _ = _watch(again)
    process = watch.sources[0]._process
    assert process is not None
    assert process._process.args[-2:] == ["5", "7"]  # type: ignore[index]
    watch.close()
    assert not list(data.parent.glob("*.tmp-*"))


def test_data_with_a_large_index_is_hashed_in_the_background(start: Starter, data: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A start neither reads nor hashes such an index completely. Checkpoints of earlier versions resume."""
    monkeypatch.setattr(index_file, "SMALL_INDEX_BYTES", 100)
    monkeypatch.setattr("pretrain.resilience.data_watch._POLL_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(index_file.IndexFile, "_digest", None)
        first = start(data)
        _write_checkpoint(first.plan)
        again = start(data)
        assert again.resume is not None
        assert again.resume.warnings == []
        indexed = again.plan.datasets["train"].sources[0]
        watch, output, rejections = _watch(again)
        assert indexed.hashes is None
        deadline = time.monotonic() + 900
        while indexed.hashes is None and time.monotonic() < deadline:
            watch.poll(1)
            time.sleep(0.01)
        watch.close()
        assert (output.lines, rejections) == ([same_data.HASHED_EVENT], [])
        assert start(data).plan.datasets["train"].sources[0].hashes == indexed.hashes == read_hashes(hashes_path(data))
    dataset = first.plan.datasets["train"]
    assert isinstance(dataset, ShuffledWindows)
    facts = {"sha256": None, "bin_bytes": Path(f"{data}.bin").stat().st_size}
    manifest = _write_checkpoint(first.plan, data_fingerprint=dataset.earlier_fingerprint(), data=facts)
    assert manifest.data_fingerprint != dataset.fingerprint
    resume = start(data).resume
    assert resume is not None
    assert resume.warnings == []
    _write_checkpoint(first.plan, data_fingerprint="ab" * 32, data=facts)
    with pytest.raises(ConfigError, match="this is not the data that"):
        start(data)


def test_each_sequence_of_a_merged_file_is_a_document(start: Starter, data: Path) -> None:
    """`merge_file_` of GPT-NeoX writes a document index of 0 to 0."""
    content = bytearray(Path(f"{data}.idx").read_bytes())
    number = int.from_bytes(content[18:26], "little")
    content[26:34] = (1).to_bytes(8, "little")
    Path(f"{data}.idx").write_bytes(content[:34 + 12 * number] + bytes(8))
    plan = start(data, "--split", "80,20,0").plan
    assert plan.datasets["train"].sources[0].num_documents == number
    assert plan.datasets["train"].num_tokens == round(number * 0.8) * 2**20
    assert [note for note in plan.notes if note.startswith(f"{data}.idx: its document index ends at sequence 0 of")]


@pytest.mark.root
def test_hashes_of_read_only_data_are_kept_in_the_run_folder(start: Starter, data: Path, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.resilience.data_watch._FAST_S", 600.0)
    folder, run = tmp_path / "read_only", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    for path in data.parent.glob("corpus.*"):
        shutil.move(path, folder)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        _, output, _ = _watch(start(folder / "corpus"))
        assert output.lines == [same_data.HASHED_EVENT]
        assert not hashes_path(folder / "corpus").exists()
        again = start(folder / "corpus").plan.datasets["train"].sources[0]
        assert again.hashes is not None, "the hashes in the run folder were not found"
        _, output, _ = _watch(start(folder / "corpus"))
        assert output.lines == []
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert (run / "train_data.sha256.json").is_file()
