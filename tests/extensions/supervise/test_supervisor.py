"""launch/supervise.py: restarts of small shell scripts, and the reading of launch commands and of progress."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain.cluster.outcome import RunProgress, classify_exit
from pretrain.errors import ConfigError
from pretrain.extensions.supervise.next_start import (
    SupervisorSettings,
    check_can_lose_hosts,
    hostfile_of,
    hosts_of,
    identity,
    launcher_host_flags,
    run_folder,
    run_setting,
    with_hostfile,
    with_separator,
)
from pretrain.extensions.supervise.supervisor import backoff
from pretrain.extensions.supervise.supervisor_files import RestartLog
from pretrain.resilience.lease_file import Owner
from pretrain.resilience.run_lock import LOCK
from tests.support.launch import ROOT
from tests.support.lock_race import write_lease
from tests.support.supervised import read_restart_log, supervise, wait_for_end, wait_until

BEGAN = '{"event": "start", "step": 0, "reason": ""}'
FINISHED = '{"event": "stop", "step": 9, "reason": "finished"}'


def supervised(run: Path, script: str, *flags: str, **settings: Any) -> tuple[int, str]:
    """Supervise a bash script that runs in the run folder. Returns (exit code, stderr)."""
    run.mkdir(exist_ok=True)
    done = wait_for_end(supervise(["--save", str(run), *flags, "--", "bash", "-c", f"cd {run}; {script}"],
                           stderr=subprocess.PIPE, **settings))
    assert "Traceback" not in done[1]
    return done


def test_without_progress_the_pauses_grow_and_the_supervisor_gives_up(tmp_path: Path) -> None:
    code, stderr = supervised(tmp_path, "exit 9", "--max_restarts", "2")
    assert code == 9
    assert "gave up after 2 restarts without a step beyond 0" in stderr
    starts, (summary,) = read_restart_log(tmp_path)
    assert [row["exit_code"] for row in starts] == [9, 9, 9]
    assert re.findall(r"restarting from step 0 in (\S+) s", stderr) == ["0.2", "0.4"]
    assert summary["goodput"] == 0
    many = SupervisorSettings([], tmp_path, backoff_s=10, backoff_max_s=60)
    assert [backoff(many, number) for number in (0, 1, 2, 3, 1000)] == [10, 20, 40, 60, 60]


def test_progress_resets_the_count_of_restarts(tmp_path: Path) -> None:
    """The script crashes four times, each time one step later. Without progress, --max_restarts 1 allows two starts."""
    script = f"""echo '{BEGAN}' >> events.jsonl; echo >> starts; n=$(wc -l < starts)
        [ $n -lt 5 ] || {{ echo '{FINISHED}' >> events.jsonl; exit 0; }}
        echo "{{\\"step\\": $n, \\"loss\\": 1, \\"step_time_ms\\": 5}}" >> metrics.jsonl; kill -9 $$"""
    code, stderr = supervised(tmp_path, script, "--max_restarts", "1")
    assert code == 0, stderr
    assert [row["last_step"] for row in read_restart_log(tmp_path)[0]][:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(("script", "code", "starts"), [
    ("exit 2", 2, 1),
    ("exit 76", 76, 1),
    ("exit 77", 77, 2),
    ("exit 75", 75, 2),
    ("true", 1, 2),  # the launcher exits with 0, but the run has not finished
])
def test_exit_codes_that_lead_to_a_restart(tmp_path: Path, script: str, code: int, starts: int) -> None:
    assert supervised(tmp_path, script, "--max_restarts", "1")[0] == code
    assert len(read_restart_log(tmp_path)[0]) == starts


HUNG = {"event": "hang", "step": 5, "reason": "rank 1 is stopped"}
STOPPED = {"event": "stop", "step": 5, "reason": "SIGTERM"}


@pytest.mark.parametrize(("code", "events", "kept", "expected"), [
    (0, [{"event": "stop", "step": 9, "reason": "finished"}], 9, (0, "finished")),
    (1, [STOPPED], 5, (75, "saved on SIGTERM")),  # DeepSpeed's launcher got SIGTERM
    (241, [STOPPED], 5, (75, "saved on SIGTERM")),
    (0, [{"event": "stop", "step": 5, "reason": "early_stop"}], 5, (0, "finished")),  # also if it is started again
    (0, [{**STOPPED, "reason": "--mine", "is_done": True}], 5, (0, "finished")),
    (75, [STOPPED], 9, (0, "finished")),  # stopped by a signal after the last step
    (0, [], 9, (0, "finished")),  # a complete run was started again
    (0, [], 5, (1, "crash: the launcher exited with 0, but the run has not finished")),
    (247, [], 5, (247, "crash: SIGKILL (exit code 247)")),  # DeepSpeed's launcher reports a killed rank
    (137, [], 5, (137, "crash: SIGKILL (exit code 137)")),  # srun reports a killed rank
    (-9, [], 5, (-9, "crash: SIGKILL (exit code -9)")),  # the launcher itself was killed
    (255, [], 5, (255, "crash: exit code 255, which ssh uses for a lost connection")),
    (2, [], 5, (2, "rejected")),
    (77, [STOPPED], 5, (77, "hang")),
    (247, [HUNG], 5, (77, "hang: rank 1 is stopped")),  # DeepSpeed's launcher saw the killed rank first
    (77, [HUNG], 5, (77, "hang: rank 1 is stopped")),
    (1, [{**STOPPED, "reason": "step 5: ...", "exit_code": 76}], 4, (76, "stopped by the bad-step guard")),
])
def test_the_files_of_the_run_take_precedence_over_the_exit_code(code: int, events: list[dict[str, Any]], kept: int,
                                                                 expected: tuple[int, str]) -> None:
    assert classify_exit(code, RunProgress(events, [], 0, kept), last_step=9) == expected


# A rank that saves on SIGUSR1. SIGUSR1 would kill its launcher, which is a shell.
RANK = f"""import signal, time
def save(*_):
    open('events.jsonl', 'a').write('{json.dumps({**STOPPED, "reason": "SIGUSR1"})}' + chr(10)); raise SystemExit(75)
signal.signal(signal.SIGUSR1, save)
open('events.jsonl', 'a').write('{BEGAN}' + chr(10))
time.sleep(3600)"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded_and_no_process_remains(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    script = f"cd {tmp_path}; (setsid sleep 3600 & echo $! > orphan); {sys.executable} rank.py; exit $?"
    process = supervise(["--save", str(tmp_path), "--", "bash", "-c", script], stderr=subprocess.PIPE)
    wait_until(lambda: (tmp_path / "events.jsonl").is_file())
    orphan = int((tmp_path / "orphan").read_text())
    assert psutil.pid_exists(orphan)
    process.send_signal(number)
    code, stderr = wait_for_end(process)
    assert code == 75, stderr
    (start,), _ = read_restart_log(tmp_path)
    assert (start["exit_code"], start["reason"]) == (75, "saved on SIGUSR1")
    assert f"supervise: {number.name}: asking the run to save and stop\n" in stderr
    assert "all ranks save" not in stderr, "the ranks report this"
    assert not psutil.pid_exists(orphan)


def test_ranks_of_a_killed_launcher_save_before_the_restart(tmp_path: Path) -> None:
    """The rank notices that its launcher has ended, and saves 1 s later. SIGTERM would end it before."""
    (tmp_path / "rank.py").write_text(f"""import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: None)
open('events.jsonl', 'a').write('{BEGAN}' + chr(10))
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.05)
time.sleep(1)
open('events.jsonl', 'a').write('{json.dumps({**STOPPED, "reason": "the end of the launcher"})}' + chr(10))""")
    script = f"[ -e events.jsonl ] && {{ echo '{FINISHED}' >> events.jsonl; exit 0; }}; " \
             f"{sys.executable} rank.py $$ & while [ ! -e events.jsonl ]; do sleep 0.1; done; kill -9 $$"
    code, stderr = supervised(tmp_path, script)
    assert code == 0, stderr
    assert [row["reason"] for row in read_restart_log(tmp_path)[0]] == ["saved on the end of the launcher", "finished"]


def test_the_third_signal_ends_at_once(tmp_path: Path) -> None:
    """The rank handles all signals, and never ends."""
    (tmp_path / "rank.py").write_text(RANK.replace("; raise SystemExit(75)", "").replace(
        "time.sleep(3600)", "[time.sleep(0.1) for _ in range(36000)]"))
    process = supervise(["--save", str(tmp_path), "--", sys.executable, str(tmp_path / "rank.py")],
                        stderr=subprocess.PIPE, cwd=tmp_path)
    wait_until(lambda: (tmp_path / "events.jsonl").is_file())
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stop" in (tmp_path / "events.jsonl").read_text())
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    code, stderr = wait_for_end(process)
    assert code == 130, stderr
    assert "SIGINT: the run is about to save and stop; the next signal ends it at once" in stderr


def test_a_stop_file_prevents_the_restart(tmp_path: Path) -> None:
    code, stderr = supervised(tmp_path, f"echo '{json.dumps(STOPPED)}' >> events.jsonl; touch STOP; exit 75")
    assert code == 75
    assert f"no restart, because {tmp_path / 'STOP'} exists; 1 start," in stderr
    assert len(read_restart_log(tmp_path)[0]) == 1


def test_a_start_that_still_lives_elsewhere_delays_the_restart(tmp_path: Path) -> None:
    """The first start ends, but leaves a lock that a live process holds: here this test."""
    run, lease = tmp_path / "run", tmp_path / "lease"
    run.mkdir()
    write_lease(lease, Owner())
    script = f"cd {run}; [ -e {LOCK} ] || {{ cp {lease} {LOCK}; exit 9; }}; echo '{FINISHED}' >> events.jsonl"
    process = supervise(["--save", str(run), "--max_restarts", "1000", "--", "bash", "-c", script],
                        stderr=subprocess.PIPE)
    wait_until(lambda: len(read_restart_log(run)[0]) >= 3)
    write_lease(run / LOCK, Owner(), rest='{"released": 0}\n')
    code, stderr = wait_for_end(process)
    assert code == 0, stderr
    starts, _ = read_restart_log(run)
    assert [starts[0]["exit_code"], starts[1]["exit_code"], starts[-1]["exit_code"]] == [9, None, 0]
    assert starts[1]["reason"].startswith(f"another start is training in the run folder (process {os.getpid()} on ")


def test_a_second_supervisor_or_run_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    rank = tmp_path / "train.py"
    rank.write_text("import pathlib, time; pathlib.Path(__file__).with_suffix('.began').touch(); time.sleep(3600)")
    command = [sys.executable, str(rank), "--save", str(tmp_path / "run")]
    alone = subprocess.Popen(command, env={**os.environ, "RANK": "0"})
    try:
        wait_until(rank.with_suffix(".began").exists)
        code, stderr = wait_for_end(supervise(["--", *command], stderr=subprocess.PIPE))
    finally:
        alone.kill()
        alone.wait()
        rank.with_suffix(".began").unlink(missing_ok=True)
    assert code == 2
    assert f"this run is already running on localhost (process {alone.pid})" in stderr
    first = supervise(["--", *command], stderr=subprocess.PIPE)
    try:
        wait_until(rank.with_suffix(".began").exists)  # from now on, the supervisor forwards signals
        code, stderr = wait_for_end(supervise(["--", *command], stderr=subprocess.PIPE))
        assert code == 2
        assert "another supervisor is already running" in stderr
    finally:
        first.terminate()
        assert wait_for_end(first)[0] == 75


# A rank that holds the lock of the run folder. The first one waits for the file `go`, then finishes or crashes.
LOCKING_RANK = f"""import pathlib, signal, sys, time
from pretrain.resilience.run_lock import RunLock
def log(row):
    open('events.jsonl', 'a').write(row + chr(10))
def save(*_):
    log('{json.dumps({**STOPPED, "reason": "SIGUSR1"})}')
    raise SystemExit(75)
signal.signal(signal.SIGUSR1, save)
with RunLock(pathlib.Path('.')):
    first = not pathlib.Path('events.jsonl').exists()
    log('{BEGAN}')
    while first and not pathlib.Path('go').exists():
        time.sleep(0.05)
    if first and pathlib.Path('go').read_text() == 'crash':
        sys.exit(9)
    log('{FINISHED}')"""


@pytest.mark.parametrize(("kill", "then", "expected"), [
    (signal.SIGKILL, "finish", [(0, "finished")]), (signal.SIGQUIT, "crash", [(1, "crash: "), (0, "finished")]),
    (signal.SIGKILL, "SIGTERM", [(75, "saved on SIGUSR1")])])
def test_the_run_of_a_killed_supervisor_is_adopted(tmp_path: Path, kill: signal.Signals, then: str,
                                                   expected: list[tuple[int, str]]) -> None:
    (tmp_path / "rank.py").write_text(LOCKING_RANK)
    words = ["--save", str(tmp_path), "--", sys.executable, str(tmp_path / "rank.py")]
    settings = {"cwd": tmp_path, "environ": {**os.environ, "PYTHONPATH": str(ROOT)}}
    first = supervise(words, **settings)
    try:
        wait_until((tmp_path / "events.jsonl").exists)
    finally:
        first.send_signal(kill)
        first.wait()
    second = supervise(words, stderr=subprocess.PIPE, **settings)
    assert second.stderr is not None
    line = second.stderr.readline()
    assert line == "supervise: an earlier supervisor was killed, and its run continues; waiting until the run ends\n"
    code, stderr = wait_for_end(supervise(words, stderr=subprocess.PIPE, **settings))
    assert (code, "another supervisor is already running" in stderr) == (2, True), stderr
    if then == "SIGTERM":
        second.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "go.new").write_text(then)
        (tmp_path / "go.new").rename(tmp_path / "go")
    code, stderr = wait_for_end(second)
    assert code == expected[-1][0], stderr
    starts, _ = read_restart_log(tmp_path)
    assert len(starts) == len(expected)
    for row, (code, reason) in zip(starts, expected, strict=True):
        assert row["exit_code"] == code
        assert row["reason"].startswith(reason)


# ---- hosts

RECORD = {"train_steps": 9, "layout": {"world_size": 4, "data_parallel_size": 4},
          "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 8}}


def fewer_hosts(folder: Path, *, batch: int, **flags: object) -> tuple[int, str]:
    """Supervise a run that had 4 ranks on two hosts, while one of the hosts is unreachable."""
    (folder / "run").mkdir()
    (folder / "hosts").write_text("localhost slots=2\n\nhost.invalid slots=2\n")
    (folder / "run" / "run.json").write_text(json.dumps([
        {**RECORD, "batch": {**RECORD["batch"], "global_batch_size": batch}, "flags": flags}]))
    (folder / "deepspeed").write_text(f"#!/bin/bash\necho \"$@\" > {folder}/words\n"
                                      f"echo '{FINISHED}' >> {folder}/run/events.jsonl\n")
    (folder / "deepspeed").chmod(0o755)
    return wait_for_end(supervise(["--min_hosts", "1", "--health_command", "true", "--", str(folder / "deepspeed"),
                            "--hostfile", str(folder / "hosts"), "--master_addr=host.invalid", "train.py", "--save",
                            str(folder / "run")], stderr=subprocess.PIPE))


def test_without_an_unhealthy_host_the_global_batch_stays_the_same(tmp_path: Path) -> None:
    code, stderr = fewer_hosts(tmp_path, batch=8)
    assert code == 0, stderr
    assert "host host.invalid is unhealthy" in stderr
    hostfile = tmp_path / "run" / "hostfile.supervised"
    assert hostfile.read_text() == "localhost slots=2\n"
    assert (tmp_path / "words").read_text().split() == [
        "--force_multi", "--hostfile", str(hostfile), "--master_addr=localhost", "train.py",
        "--save", str(tmp_path / "run"), "--gradient_accumulation_steps=2", "--global_batch_size=8"]
    assert read_restart_log(tmp_path / "run")[0][0]["hosts"] == ["localhost"]


@pytest.mark.parametrize(("batch", "flags"), [(6, {}), (8, {"batch_schedule": "0:6,1e3:8", "seq_length": 64})])
def test_a_global_batch_that_fewer_ranks_cannot_divide_is_rejected(batch: int, flags: dict[str, object],
                                                                   tmp_path: Path) -> None:
    code, stderr = fewer_hosts(tmp_path, batch=batch, **flags)
    assert code == 2
    assert "the 2 remaining ranks" in stderr
    assert "global batch of 6" in stderr
    assert not (tmp_path / "words").exists()


def test_without_min_hosts_the_supervisor_waits_for_the_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    fails_once = f"test -e {tmp_path}/healthy || {{ touch {tmp_path}/healthy; echo no disk >&2; false; }}"
    (tmp_path / "deepspeed").write_text(f"#!/bin/bash\necho '{FINISHED}' >> {tmp_path}/run/events.jsonl\n")
    (tmp_path / "deepspeed").chmod(0o755)
    code, stderr = wait_for_end(supervise(["--hostfile", str(tmp_path / "hosts"), "--health_command", fails_once, "--",
                                  str(tmp_path / "deepspeed"), "train.py", "--save", str(tmp_path / "run")],
                                 stderr=subprocess.PIPE))
    assert code == 0, stderr
    first, second = read_restart_log(tmp_path / "run")[0]
    assert (first["exit_code"], first["reason"], second["exit_code"]) == (None, "host localhost: no disk", 0)


# ---- reading commands and progress

def test_reading_and_rewriting_launch_commands(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"save: {tmp_path}/a\ntrain-steps: 7\n")
    cluster = ["launch/cluster.sh", "--hostfile=h", "--ssh_port", "7", "--", "--config", str(tmp_path / "run.yaml")]
    assert run_folder(cluster, None) == tmp_path / "a"
    assert run_folder(cluster, "b") == Path("b").absolute()
    assert run_setting(cluster, "train_steps") == "7"
    assert run_setting([*cluster, "--train-steps=8"], "train_steps") == "8"
    assert hostfile_of(cluster, None) == Path("h")
    assert launcher_host_flags(cluster).ssh_port == 7
    own = with_separator(["ds-pretrain", "--save=a", "--num_gpus", "2", "-H", "h", "--config", "run.yaml"])
    assert own == ["ds-pretrain", "--num_gpus", "2", "-H", "h", "--", "--save=a", "--config", "run.yaml"]
    assert hostfile_of(own, None) == Path("h")
    assert identity(own) == ["--save=a", "--config", "run.yaml"]
    assert with_separator(["deepspeed", "x.py"]) == ["deepspeed", "x.py"]
    srun = ["srun", "-n2", "--", "python", "pretrain/train.py", "--save", "x", "--hostfile", "no"]
    assert identity(srun) == ["--save", "x", "--hostfile", "no"]
    assert hostfile_of(srun, None) is None
    assert with_hostfile(["deepspeed", "train.py"], Path("h")) == ["deepspeed", "--hostfile", "h", "train.py"]
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=4\n")
    assert hosts_of(["deepspeed", "--include=b@c:1,2", "train.py", "--exclude", "c"], tmp_path / "hosts") == {
        "b": 4, "c": 2}
    with pytest.raises(ConfigError, match="the command srun accepts no hostfile"):
        check_can_lose_hosts(srun)
    with pytest.raises(ConfigError, match="--include: this flag cannot be combined with --min_hosts"):
        check_can_lose_hosts(["deepspeed", "--include", "a", "train.py"])


def test_only_steps_up_to_the_last_checkpoint_are_productive(tmp_path: Path) -> None:
    steps = [{"step": 1, "step_time_ms": 9000}, {"step": 10, "step_time_ms": 1000}, {"step": 20, "step_time_ms": 2000}]
    log = RestartLog(tmp_path)
    assert log.productive_seconds(RunProgress([], steps, 0, 15)) == 9 + 9 * 1 + 5 * 2
    repeated = [{"step": 16, "step_time_ms": 7000}]
    assert log.productive_seconds(RunProgress([], repeated, 10, 16)) == 6 * 7, "an older checkpoint was used"
    assert log.close("")["productive_seconds"] == 9 + 9 * 1 + 6 * 7
    # the last checkpoint (step 22) is newer than the last row (step 20)
    assert RestartLog(tmp_path).productive_seconds(RunProgress([], steps, 0, 22)) == 9 + 9 + 12 * 2
    assert RestartLog(tmp_path).productive_seconds(RunProgress([], [], 5, 5)) == 0


def test_old_names_of_flags_are_read_from_the_command() -> None:
    assert run_setting(["train.py", "--exit_at_step", "9"], "exit_step") == "9"
