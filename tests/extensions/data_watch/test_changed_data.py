"""Training data that changes between two starts or while a run trains: two real ranks stop, and save nothing."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pretrain.checkpoint.load.same_data import HASHED_EVENT
from pretrain.monitor.read_run_folder import read_metrics, read_rows
from tests.support.big_data import change_token, write_big_data
from tests.support.launch import ROOT, WORKERS, run_ranks, train_ranks

CHANGED_BYTE = 2**24 + 12345  # in the second block; not in a sample of the fingerprint
Ranks = list[subprocess.CompletedProcess[str]]


def _flags(base: Path, *others: str) -> list[str]:
    return ["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json"), "--model", "tiny",
            "--model_overrides", "vocab_size=256,n_layer=1,n_embd=32", "--train_data", str(base / "corpus"),
            "--seq_length", "32", "--split", "1,0,0", "--log_interval", "1", "--save_interval", "100000",
            "--save", str(base / "run"), *others]


def _files(base: Path) -> dict[str, bytes]:
    """Return the content of all files of the checkpoints."""
    folder = base / "run" / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with data and a run that was stopped after two steps."""
    base = tmp_path_factory.mktemp("watched")
    write_big_data(base / "corpus", num_blocks=2, hashes=True)
    done = train_ranks(2, _flags(base, "--train_steps", "1000000", "--exit_step", "2"), base)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout
    return base


def _resume(base: Path, folder: Path) -> Ranks:
    """Resume with short time-outs of the data watch: data of any size is hashed in the background."""
    folder.mkdir()
    times = {"checkpoint.load.same_data:_FAST_S": -1.0, "extensions.data_watch.watch:_FAST_S": -1.0,
             "extensions.data_watch.watch:_STATUS_S": 0.1, "extensions.data_watch.watch:_POLL_S": 0.1}
    (folder / "faults.json").write_text(json.dumps({
        "set": {f"pretrain.{name}": each for name, each in times.items()},
        "pause_s": 0.3}))  # the hashing process has a low priority
    return run_ranks([str(WORKERS / "faulty_train.py"), "faults.json", *_flags(base, "--train_steps", "1000000")], 2,
                     cwd=folder)


def _assert_stopped(done: Ranks, base: Path, before: dict[str, bytes], problem: str) -> None:
    assert [process.returncode for process in done] == [2, 2], done[0].stdout + done[1].stdout
    errors = [line for line in done[0].stdout.splitlines() if line.startswith("ds-pretrain: error: ")]
    assert len(errors) == 1, done[0].stdout
    assert f"{base}/corpus.bin: {problem}" in errors[0]
    assert "Traceback" not in done[0].stdout + done[1].stdout
    assert _files(base) == before


def test_changed_data_that_only_its_hash_shows_stops_all_ranks(base: Path, tmp_path: Path) -> None:
    before = _files(base)
    change_token(base / "corpus", keep_mtime=False, byte=CHANGED_BYTE)
    status = os.stat(base / "corpus.bin")
    done = _resume(base, tmp_path / "ranks")
    _assert_stopped(done, base, before, "bytes 16777216 to 32505856 are not those that "
                                        f"{base}/run/checkpoints/global_step2 was trained on.")
    rows = read_rows(base / "run" / "events.jsonl")
    assert [row["sha256"] for row in rows if row["event"] == HASHED_EVENT
            and row["bin_mtime_ns"] == status.st_mtime_ns] == ["unknown"]
    print(f"stopped after step {read_metrics(base / 'run')[-1]['step']}")
    change_token(base / "corpus", keep_mtime=False, byte=CHANGED_BYTE)  # restores it


def test_data_that_is_overwritten_while_a_run_trains_stops_all_ranks(base: Path, tmp_path: Path) -> None:
    before = _files(base)
    rows = len(read_metrics(base / "run"))

    def overwrite() -> None:
        while len(read_metrics(base / "run")) < rows + 3:
            time.sleep(0.1)
        change_token(base / "corpus", keep_mtime=False, byte=0)

    thread = threading.Thread(target=overwrite, daemon=True)
    thread.start()
    done = _resume(base, tmp_path / "ranks")
    _assert_stopped(done, base, before, "the file was changed while the run was training.")
    thread.join()
