"""Signals to real launchers, and launchers that are killed: plain `deepspeed` and ds-pretrain. No step is lost, and no
process remains.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from pretrain.checkpoint.format.run_checkpoints import newest_good
from pretrain.monitor.read_run_folder import read_events
from tests.support.launch import LIMIT_S, ROOT, free_port, train_ranks
from tests.support.supervised import wait_for_rows, wait_until
from tests.test_train import _environment, _flags, losses, rows

STEPS = 2000  # the death of a launcher is noticed within a second
ZERO1, ZERO3, PIPELINE = (ROOT / "ds_configs" / f"{name}_bf16.json" for name in ("zero1", "zero3", "pipeline2_zero1"))


def deepspeed(flags: Sequence[str]) -> list[str]:
    return ["deepspeed", "--quiet", "--num_accelerators", "2", "--master_port", str(free_port()),
            str(ROOT / "pretrain" / "train.py"), *flags]


def ds_pretrain(flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pretrain", "--num_gpus", "2", *flags]


def start(command: list[str], run: Path) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """Start a launcher in a session of its own, and wait until it trains.

    Returns the launcher and its descendants: for `deepspeed`, first its second launcher process, then the ranks.
    """
    steps = len(losses(run)) if run.exists() else 0
    with open(run.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command, env={**_environment(), "PYTHONPATH": str(ROOT)}, cwd=run.parent, stdout=log,
                                   stderr=log, start_new_session=True)
    wait_for_rows(process, run, steps + 3)
    return process, psutil.Process(process.pid).children(recursive=True)


def end(process: "subprocess.Popen[bytes]", others: list[psutil.Process]) -> int:
    """Wait until all processes have ended, and return the launcher's exit code."""
    code = process.wait(LIMIT_S)
    alive = psutil.wait_procs(others, timeout=60)[1]
    for each in alive:
        each.kill()
    assert alive == [], "processes remain after the end of the launcher"
    return code


def check_last_step_was_saved(run: Path, reason: str) -> None:
    stop = rows(run, "events.jsonl")[-1]
    found = newest_good(run / "checkpoints")
    assert (stop["event"], stop["reason"]) == ("stop", reason), run.with_suffix(".log").read_text()
    assert found is not None
    assert found[1].step == stop["step"] == losses(run)[-1][0]


Act = Callable[["subprocess.Popen[bytes]", list[psutil.Process]], None]
ACTIONS: dict[str, tuple[Act, str]] = {  # on (`deepspeed`, [its second process, ranks ...]) -> reason of the stop
    "kill -9 of the second process": (lambda _, others: others[0].kill(), "the end of the launcher"),
    "kill -9 of deepspeed": (lambda process, _: process.kill(), "the end of the launcher"),
    "SIGTERM to deepspeed": (lambda process, _: process.terminate(), "the end of the launcher"),
    "SIGTERM to the second process": (lambda _, others: others[0].terminate(), "SIGTERM"),
    "Ctrl-C": (lambda process, _: os.killpg(process.pid, signal.SIGINT), "SIGINT"),
    "SIGTERM to all": (lambda process, _: os.killpg(process.pid, signal.SIGTERM), "SIGTERM"),
}


@pytest.mark.slow
def test_no_rank_remains_when_the_launcher_of_plain_deepspeed_dies(corpus: str, tmp_path: Path) -> None:
    """Each start resumes from the step that the previous one saved. All losses equal an uninterrupted run's."""
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", str(STEPS), "--save_interval", "0", config=PIPELINE)
    for name, (act, reason) in ACTIONS.items():
        process, others = start(deepspeed(flags), run)
        began = time.monotonic()
        act(process, others)
        code = end(process, others)
        print(f"{name}: exit code {code}, all processes ended after {time.monotonic() - began:.1f} s")
        check_last_step_was_saved(run, reason)
    _check_losses(run, flags, tmp_path)


@pytest.mark.parametrize("names", [("SIGTERM",),
                                   pytest.param(("SIGKILL", "SIGINT", "SIGHUP", "SIGUSR1"), marks=pytest.mark.slow)])
def test_the_launcher_below_ds_pretrain_gets_a_signal(names: Sequence[str], corpus: str, tmp_path: Path) -> None:
    """DeepSpeed's launcher then exits with 1 or is killed, but the run has saved: 75."""
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", str(STEPS), "--save_interval", "0", config=ZERO1)
    for name in names:
        process, others = start(ds_pretrain(flags), run)
        others[0].send_signal(signal.Signals[name])
        assert end(process, others) == 75, run.with_suffix(".log").read_text()
        # DeepSpeed's launcher ends its ranks with SIGTERM after each of these two signals
        check_last_step_was_saved(run, "SIGTERM" if name in ("SIGTERM", "SIGINT") else "the end of the launcher")


@pytest.mark.slow
@pytest.mark.parametrize("config", [ZERO1, ZERO3, PIPELINE], ids=lambda path: path.stem)
def test_signals_to_ds_pretrain_lose_no_step(config: Path, corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", str(STEPS), "--save_interval", "0", config=config)
    for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"):
        process, others = start(ds_pretrain(flags), run)
        os.killpg(process.pid, signal.Signals[name])
        assert end(process, others) == 75
        check_last_step_was_saved(run, name)
    process, others = start(ds_pretrain(flags), run)
    process.kill()
    assert end(process, others) == -signal.SIGKILL
    check_last_step_was_saved(run, "the end of the launcher")
    _check_losses(run, flags, tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_rank_without_a_request_to_save(corpus: str, tmp_path: Path) -> None:
    """The launcher sends SIGTERM to the other rank, which cannot save any more."""
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", "--save_interval", "0", config=ZERO1)
    process, others = start(deepspeed(flags), run)
    (rank_1,) = [each for each in others[0].children() if "--local_rank=1" in each.cmdline()]
    rank_1.kill()
    assert end(process, others) == 256 - signal.SIGKILL
    log = run.with_suffix(".log").read_text()
    assert "rank 0 on " in log
    assert "lost the connection to another rank" in log
    assert "SIGTERM" not in log


@pytest.mark.slow
def test_a_run_in_the_background_survives_its_shell(corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "60", config=PIPELINE)
    words = " ".join(ds_pretrain(flags)).replace(corpus, f"'{corpus}'")
    subprocess.run(["bash", "-c", f"nohup {words} > run.log 2>&1 & disown"], cwd=tmp_path, check=True,
                   env={**_environment(), "PYTHONPATH": str(ROOT)})
    wait_until(lambda: any(row["event"] == "stop" for row in read_events(run)), (tmp_path / "run.log").read_text)
    assert rows(run, "events.jsonl")[-1]["reason"] == "finished"


def _check_losses(run: Path, flags: list[str], folder: Path) -> None:
    """Finish the run, and compare its losses with an uninterrupted run's."""
    other = [str(folder / "uninterrupted") if word == str(run) else word for word in flags]
    for words in (flags, other):
        assert [rank.returncode for rank in train_ranks(2, words, folder)] == [0, 0]
    assert losses(run) == losses(folder / "uninterrupted")
