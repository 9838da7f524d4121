"""A training run under launch/supervise.py: random ranks are killed or stopped (SIGSTOP), and a signal stops the run.
A second supervisor, with another launcher, finishes the run.
"""

import random
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launch import LIMIT_S, ROOT, free_port, run_forked
from tests.support.supervised import (
    flag_pairs,
    kill_tree,
    read_restart_log,
    rows,
    supervise,
    wait_for_end,
    wait_for_rows,
)

pytestmark = pytest.mark.slow
STEPS = 120
FAULTS = ((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL), (signal.SIGKILL, signal.SIGSTOP))
KILLS = len(FAULTS[0])
TIME_OUT_S = 15


def flags(corpus: str, run: Path) -> list[str]:
    return ["--deepspeed_config", str(ROOT / "ds_configs" / "pipeline2_zero1_bf16.json"), "--model", "tiny",
            "--model_overrides", "vocab_size=256,n_layer=2,n_embd=64,resid_pdrop=0.1", "--train_data", corpus,
            "--seq_length", "64", "--split", "100,0,0", "--micro_batch_size", "2", "--gradient_accumulation_steps", "2",
            "--learning_rate", "1e-3", "--log_interval", "1", "--save_interval", "1", "--keep_checkpoints", "2",
            "--train_steps", str(STEPS), "--step_timeout", str(TIME_OUT_S), "--save_timeout",
            str(TIME_OUT_S), "--save", str(run)]


def deepspeed(corpus: str, run: Path) -> list[str]:
    return ["deepspeed", "--quiet", "--num_accelerators", "2", "--master_port", str(free_port()),
            str(ROOT / "pretrain" / "train.py"), *flags(corpus, run)]


def ds_pretrain(corpus: str, run: Path) -> list[str]:
    return ["ds-pretrain", "--num_accelerators", "2", *flags(corpus, run)]


def ranks(supervisor: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(supervisor.pid).children(recursive=True):
        try:
            if any(word.startswith("--local_rank=") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:  # the process has ended in the meantime
            continue
    pids = {process.pid for process in found}
    # child processes of a rank have the same command line and are left out
    return [process for process in found if process.ppid() not in pids]


@pytest.fixture(scope="module")
def killed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Kill or stop random ranks, send SIGUSR1 to the supervisor, and finish the run with a second supervisor."""
    folder, chance, codes, walls = tmp_path_factory.mktemp("supervised"), random.Random(3), [], []
    run, victims = folder / "run", []
    for faults, command in zip(FAULTS, (deepspeed, ds_pretrain), strict=True):
        with open(folder / "log", "a", encoding="utf-8") as log:
            begin = time.monotonic()
            supervisor = supervise(["--", *command(corpus, run)], stdout=log, stderr=log)
            try:
                for fault in faults:
                    wait_for_rows(supervisor, run, len(rows(run)) + chance.randint(2, 4))
                    both = ranks(supervisor)
                    victim = chance.choice(both)
                    name = f"{command.__name__}: {fault.name} of {victim.cmdline()[3]}"
                    victim.send_signal(fault)
                    since = time.monotonic()
                    assert psutil.wait_procs(both, timeout=LIMIT_S)[1] == []
                    victims.append(f"{name}: no rank is left after {time.monotonic() - since:.1f} s")
                if command is deepspeed:
                    wait_for_rows(supervisor, run, len(rows(run)) + 2)
                    supervisor.send_signal(signal.SIGUSR1)
                codes.append(wait_for_end(supervisor)[0])
                walls.append(time.monotonic() - begin)
            finally:
                kill_tree(supervisor)
    print(*(line for line in (folder / "log").read_text().splitlines() if line.startswith("supervise: ")), sep="\n")
    return {"run": run, "codes": codes, "walls": walls, "victims": victims, "folder": folder}


def test_a_signal_stops_the_run_and_the_next_supervisor_finishes_it(killed: dict[str, Any]) -> None:
    assert killed["codes"] == [75, 0]
    starts, summaries = read_restart_log(killed["run"])
    assert starts[KILLS]["reason"] == "saved on SIGUSR1"
    assert starts[KILLS]["exit_code"] == 75
    assert [row["summary"] for row in summaries] == ["SIGUSR1: saved on SIGUSR1", "finished"]


def test_losses_equal_those_of_an_undisturbed_run(killed: dict[str, Any], corpus: str) -> None:
    reference = killed["folder"] / "reference"
    case = {"name": "reference", "kind": "run", "run": str(reference),
            "flags": [f"{name}={value}" for name, value in flag_pairs(flags(corpus, reference))]}
    assert run_forked([case], killed["folder"])["reference"]["status"] == [0, 0]
    expected = [(row["step"], row["loss"], row["grad_norm"]) for row in rows(reference)]
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))
    found = {row["step"]: (row["step"], row["loss"], row["grad_norm"]) for row in rows(killed["run"])}
    assert [found[step] for step in sorted(found)] == expected


def test_the_restart_log_records_every_start(killed: dict[str, Any]) -> None:
    starts, summaries = read_restart_log(killed["run"])
    print(*killed["victims"], *starts, *summaries, sep="\n")
    assert [row["start"] for row in starts] == [*range(1, KILLS + 2), *range(1, len(FAULTS[1]) + 2)]
    faulty = [*starts[:KILLS], *starts[KILLS + 1:-1]]
    for row, fault in zip(faulty, [*FAULTS[0], *FAULTS[1]], strict=True):
        assert row["reason"].startswith("hang: no progress for " if fault == signal.SIGSTOP else "crash: ")
        assert (row["exit_code"] == 77) == (fault == signal.SIGSTOP)
    assert sum("SIGKILL" in row["reason"] for row in starts) >= 1
    assert starts[0]["first_step"] == 0
    for before, after in pairwise(starts):
        assert after["first_step"] == before["kept_step"] <= before["last_step"]
    assert starts[-1]["kept_step"] == STEPS
    # a repeated step has several rows; its last step time counts
    times = {row["step"]: row["step_time_ms"] / 1e3 for row in rows(killed["run"])}
    split = starts[KILLS + 1]["first_step"]
    halves = (starts[:KILLS + 1], range(1, split + 1)), (starts[KILLS + 1:], range(split + 1, STEPS + 1))
    for row, wall, (own_starts, steps) in zip(summaries, killed["walls"], halves, strict=True):
        assert row["productive_seconds"] == pytest.approx(sum(times[step] for step in steps), abs=1e-2)
        assert row["goodput"] == pytest.approx(row["productive_seconds"] / row["wall_seconds"], abs=1e-3)
        assert sum(start["wall_seconds"] for start in own_starts) <= row["wall_seconds"] <= wall
