"""Hashes of the training data while a run trains: of several runs, of unfinished files, of large indexes."""

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.load import same_data
from pretrain.checkpoint.load.start import Start
from pretrain.data.token_files import index_file
from pretrain.data.token_files.hashes import hashes_path, read_hashes, write_hashes
from pretrain.errors import ConfigError
from tests.checkpoint.starts import hash_data, start_run, write_checkpoint
from tests.extensions.data_watch.watching import watch_data
from tests.support.big_data import write_big_data

Starter = Callable[..., Start]
NAMES = ("web", "code", "books")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prefix of a data set of 7 blocks without hashes."""
    return write_big_data(tmp_path / "corpus")


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    """Validate the start of a run in tmp_path/run, as check_config.py, the launchers and the ranks do."""

    def start(data: Path, *flags: str) -> Start:
        return start_run(tmp_path / "run", "--train_data", str(data), "--seq_length", "64", "--split", "1,0,0", *flags)

    return start


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the data of these tests could take longer than 2 s."""
    monkeypatch.setattr(same_data, "_FAST_S", 600.0)


def test_two_runs_may_hash_the_same_data_at_the_same_time(start: Starter, data: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._FAST_S", -1.0)
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._POLL_S", 0.0)
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._STORE_S", 0.0)
    starts = [start(data), start(data)]
    runs = [watch_data(each) for each in starts]
    hashed = [each.plan.datasets["train"].sources[0] for each in starts]
    deadline = time.monotonic() + 900
    while any(data.hashes is None for data in hashed) and time.monotonic() < deadline:
        for watch, output, _ in runs:
            watch.end_step(output.run)
        time.sleep(0.01)
    assert read_hashes(hashes_path(data)) == hashed[0].hashes == hashed[1].hashes
    for watch, output, rejections in runs:
        watch.close(output.run)
        assert (output.lines, rejections) == ([same_data.HASHED_EVENT], [])


def test_unfinished_hashes_are_continued(start: Starter, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start(data).plan
    indexed = plan.datasets["train"].sources[0]
    hash_data(plan)
    assert indexed.hashes is not None
    complete = indexed.hashes
    write_hashes(hashes_path(data), replace(complete, blocks=complete.blocks[:5]))
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._FAST_S", -1.0)
    again = start(data)
    assert again.plan.datasets["train"].sources[0].hashes is None
    watch, output, _ = watch_data(again)
    process = watch.sources[0]._process
    assert process is not None
    assert process._process.args[-2:] == ["5", "7"]  # type: ignore[index]
    watch.close(output.run)
    assert not list(data.parent.glob("*.tmp-*"))


def test_data_with_a_large_index_is_hashed_in_the_background(start: Starter, data: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A start neither reads nor hashes such an index completely."""
    monkeypatch.setattr(index_file, "SMALL_INDEX_BYTES", 100)
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._POLL_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(index_file.IndexFile, "_digest", None)
        first = start(data)
        write_checkpoint(first.plan)
        again = start(data)
        assert again.resume is not None
        assert again.resume.warnings == []
        indexed = again.plan.datasets["train"].sources[0]
        watch, output, rejections = watch_data(again)
        assert indexed.hashes is None
        deadline = time.monotonic() + 900
        while indexed.hashes is None and time.monotonic() < deadline:
            watch.end_step(output.run)
            time.sleep(0.01)
        watch.close(output.run)
        assert (output.lines, rejections) == ([same_data.HASHED_EVENT], [])
        assert start(data).plan.datasets["train"].sources[0].hashes == indexed.hashes == read_hashes(hashes_path(data))
    facts = {"sha256": None, "bin_bytes": Path(f"{data}.bin").stat().st_size}
    write_checkpoint(first.plan, data_fingerprint="ab" * 32, data=facts)
    with pytest.raises(ConfigError, match="this is not the data that"):
        start(data)


@pytest.mark.root
def test_hashes_of_read_only_data_are_kept_in_the_run_folder(start: Starter, data: Path, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._FAST_S", 600.0)
    folder, run = tmp_path / "read_only", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    for path in data.parent.glob("corpus.*"):
        shutil.move(path, folder)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        _, output, _ = watch_data(start(folder / "corpus"))
        assert output.lines == [same_data.HASHED_EVENT]
        assert not hashes_path(folder / "corpus").exists()
        again = start(folder / "corpus").plan.datasets["train"].sources[0]
        assert again.hashes is not None, "the hashes in the run folder were not found"
        _, output, _ = watch_data(start(folder / "corpus"))
        assert output.lines == []
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert (run / "train_data.sha256.json").is_file()


def test_sources_are_hashed_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        write_big_data(tmp_path / name, num_blocks=2)
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._FAST_S", -1.0)
    monkeypatch.setattr("pretrain.extensions.data_watch.watch._POLL_S", 0.0)
    blend = [word for name in NAMES for word in ("1", str(tmp_path / name))]
    started = start_run(tmp_path / "run", "--train_data", *blend, "--seq_length", "16", "--split", "80,20,0")
    watch, output, rejections = watch_data(started)
    most, deadline = 0, time.monotonic() + 900
    sources = started.plan.datasets["train"].sources
    while any(source.hashes is None for source in sources) and time.monotonic() < deadline:
        most = max(most, sum(source.is_hashing for source in watch.sources))
        watch.end_step(output.run)
        time.sleep(0.01)
    watch.close(output.run)
    assert (most, output.lines, rejections) == (1, [same_data.HASHED_EVENT] * 3, [])
    assert [read_hashes(hashes_path(tmp_path / name)) for name in NAMES] == [source.hashes for source in sources]
    paths = {same_data.fallback_path(started.plan, source).name for source in sources}
    assert len(paths) == 3
    assert all(name.startswith("train_data.") for name in paths)
