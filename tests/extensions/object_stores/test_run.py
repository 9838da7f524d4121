"""Training from an S3 server: the same losses as from local files, also after kills, and from one to the other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from pretrain.checkpoint.format.manifest import MANIFEST
from tests.support.launch import ROOT, free_port, rank_environment, train_ranks
from tests.support.range_server import range_server
from tests.support.run_rows import rows
from tests.support.stores import s3_server

CONFIG = ROOT / "ds_configs" / "zero2_bf16.json"
STEPS = 8


@pytest.fixture(scope="module")
def url(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of the corpus on an S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket"):
        for path in Path(corpus).parent.glob(f"{Path(corpus).name}.*"):
            fsspec.filesystem("s3").put(str(path), f"bucket/corpora/{path.name}")
        yield f"s3://bucket/corpora/{Path(corpus).name}"


def flags(data: str, run: Path, *others: str, steps: int = STEPS) -> list[str]:
    cache = ["--data_cache", str(run.parent / "cache"), "--data_cache_gb", "0.1"] if "://" in data else []
    return ["--deepspeed_config", str(CONFIG), "--model", "tiny", "--model_overrides",
            "vocab_size=256,n_layer=2,n_embd=64", "--train_data", data, "--seq_length", "64", "--split", "80,20,0",
            "--micro_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3", "--eval_steps",
            "1", "--eval_interval", "4", "--log_interval", "1", "--save_interval", "2", "--train_steps", str(steps),
            "--save", str(run), *cache, *others]


def train(data: str, run: Path, *others: str) -> str:
    """Train on two ranks. Returns the output of rank 0."""
    done = train_ranks(2, flags(data, run, *others), run.parent)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout + done[1].stdout
    return done[0].stdout


def losses(run: Path) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(run) if "loss" in row}


def train_and_kill(data: str, run: Path, after_step: int) -> None:
    """Start two ranks, and kill both with SIGKILL after a step."""
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, str(ROOT / "pretrain" / "train.py"), *flags(data, run)],
                              cwd=run.parent, env=rank_environment(rank, 2, port), stdout=subprocess.DEVNULL)
             for rank in range(2)]
    wait_until(lambda: (run / "metrics.jsonl").is_file() and max(losses(run), default=0) >= after_step, ranks[0])
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2


def wait_until(condition: Callable[[], bool], rank: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert rank.poll() is None, "the rank has ended"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def local_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run from local files."""
    run: Path = tmp_path_factory.mktemp("local") / "run"
    train(corpus, run)
    return run


def test_a_run_from_s3_equals_the_run_from_local_files(local_run: Path, url: str, corpus: str, tmp_path: Path) -> None:
    """It is killed, resumes from the server with an empty cache, then from local files, then from the server."""
    run = tmp_path / "run"
    train_and_kill(url, run, after_step=3)
    shutil.rmtree(tmp_path / "cache")
    train(url, run, "--resume", "required", "--exit_step", "5")
    train(corpus, run, "--resume", "required", "--exit_step", "7")
    train(url, run, "--resume", "required")
    assert losses(run) == losses(local_run)
    assert len(losses(run)) == STEPS
    evaluations = [{row["step"]: row["eval_loss"] for row in rows(each) if "eval_loss" in row}
                   for each in (run, local_run)]
    assert {step: evaluations[0][step] for step in evaluations[1]} == evaluations[1] != {}
    manifests = [json.loads((each / "checkpoints" / f"global_step{STEPS}" / MANIFEST).read_text())
                 for each in (run, local_run)]
    assert manifests[0]["data_fingerprint"] == manifests[1]["data_fingerprint"]
    assert manifests[0]["data"]["sha256"] == manifests[1]["data"]["sha256"] is not None
    assert json.loads((run / "run.json").read_text())[-1]["flags"]["train_data"] == url
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3:")]


@pytest.mark.slow  # it waits for a time-out and for pauses between requests
def test_a_store_that_fails_is_named_and_the_run_resumes(corpus: str, tmp_path: Path) -> None:
    """The server names no version, so that nothing is cached. It fails until a warning, then until the time-out."""
    with range_server(Path(corpus).parent) as server:
        server.versions = ()
        run, data = tmp_path / "run", f"{server.url}/{Path(corpus).name}"
        words = flags(data, run, "--step_timeout", "40", steps=150)
        with (tmp_path / "log").open("w") as log:
            rank = subprocess.Popen([sys.executable, str(ROOT / "pretrain" / "train.py"), *words], stdout=log,
                                    stderr=log, env=rank_environment(0, 1, free_port()))
        wait_until(lambda: (run / "metrics.jsonl").is_file() and max(losses(run), default=0) >= 3, rank)
        server.status = 503
        wait_until(lambda: "waits for the store" in (tmp_path / "log").read_text(), rank)
        server.status = 0
        wait_until(lambda: "store_wait" in (run / "events.jsonl").read_text(), rank)
        server.status = 503
        assert rank.wait() == 77
        server.status = 0
        output, events = (tmp_path / "log").read_text(), rows(run, "events.jsonl")
        assert f"warning: {data}.bin: waits for the store since" in output
        assert f"{data}.bin: the store answers again after" in output
        (waited,) = (row for row in events if row["event"] == "store_wait")
        assert waited["name"] == f"{data}.bin"
        assert "503" in waited["reason"]
        (hang,) = (row for row in events if row["event"] == "hang")
        assert f"rank 0 has waited for its data: {data}.bin: waits for the store" in hang["reason"]
        done = train_ranks(1, [*words, "--resume", "required"], tmp_path)
        assert done[0].returncode == 0, done[0].stdout
    assert list(losses(run))[-1] == 150


def test_other_data_in_the_bucket_is_rejected(local_run: Path, url: str, tmp_path: Path) -> None:
    shutil.copytree(local_run, tmp_path / "run")
    files, folder = fsspec.filesystem("s3"), url.removeprefix("s3://").rpartition("/")[0]
    content = files.cat_file(f"{url}.bin")
    files.pipe_file(f"{folder}/other.bin", content[2:] + content[:2])
    files.copy(f"{url}.idx", f"{folder}/other.idx")
    done = train_ranks(2, flags(f"s3://{folder}/other", tmp_path / "run", "--resume", "required", steps=20), tmp_path)
    assert [rank.returncode for rank in done] == [2, 2]
    assert "this is not the data that" in done[0].stdout
    missing = train_ranks(1, flags("s3://nosuchbucket/corpus", tmp_path / "new"), tmp_path)
    assert (missing[0].returncode, missing[0].stdout.count("\n")) == (2, 1), missing[0].stdout
    assert "s3://nosuchbucket/corpus.idx: The specified bucket does not exist" in missing[0].stdout
    assert not os.path.exists(tmp_path / "new")
