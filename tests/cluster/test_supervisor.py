"""When launch/supervise.py starts a command again, with small commands, and what it reads out of commands and runs."""

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

from pretrain.cluster.supervise import launch_command as launch
from pretrain.cluster.supervise.restart_log import Progress, read_ledger, step_seconds
from pretrain.cluster.supervise.supervisor import Settings, backoff, judge
from pretrain.errors import ConfigError
from tests.support.supervised import ended, supervise, wait_until

BEGAN = '{"event": "start", "step": 0, "reason": ""}'
FINISHED = '{"event": "stop", "step": 9, "reason": "finished"}'


def supervised(run: Path, script: str, *flags: str, **settings: Any) -> tuple[int, str]:
    """(exit code, stderr) of a supervised bash script, whose folder is the run's. Nothing of it may remain."""
    run.mkdir(exist_ok=True)
    done = ended(supervise(["--save", str(run), *flags, "--", "bash", "-c", f"cd {run}; {script}"],
                           stderr=subprocess.PIPE, **settings))
    assert "Traceback" not in done[1]
    return done


def test_it_gives_up_without_progress_and_pauses_longer_each_time(tmp_path: Path) -> None:
    code, said = supervised(tmp_path, "exit 9", "--max_restarts", "2")
    assert code == 9
    assert "gave up after 2 restarts without a step beyond 0" in said
    starts, (summary,) = read_ledger(tmp_path)
    assert [row["exit_code"] for row in starts] == [9, 9, 9]
    assert re.findall(r"goes on from step 0, in (\S+) s", said) == ["0.2", "0.4"]
    assert summary["goodput"] == 0
    many = Settings([], tmp_path, backoff_s=10, backoff_max_s=60)
    assert [backoff(many, number) for number in (0, 1, 2, 3, 1000)] == [10, 20, 40, 60, 60]


def test_progress_counts_anew(tmp_path: Path) -> None:
    """Four crashes, each one step further: more than --max_restarts allows in a row, were there no progress."""
    script = f"""echo '{BEGAN}' >> events.jsonl; echo >> starts; n=$(wc -l < starts)
        [ $n -lt 5 ] || {{ echo '{FINISHED}' >> events.jsonl; exit 0; }}
        echo "{{\\"step\\": $n, \\"loss\\": 1, \\"step_time_ms\\": 5}}" >> metrics.jsonl; kill -9 $$"""
    code, said = supervised(tmp_path, script, "--max_restarts", "1")
    assert code == 0, said
    assert [row["last_step"] for row in read_ledger(tmp_path)[0]][:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(("script", "code", "starts"), [
    ("exit 2", 2, 1),
    ("exit 76", 76, 1),
    ("exit 77", 77, 2),
    ("exit 75", 75, 2),
    ("true", 1, 2),  # the launcher's child was killed
])
def test_what_is_started_again(tmp_path: Path, script: str, code: int, starts: int) -> None:
    assert supervised(tmp_path, script, "--max_restarts", "1")[0] == code
    assert len(read_ledger(tmp_path)[0]) == starts


STOPPED = {"event": "stop", "step": 5, "reason": "SIGTERM"}


@pytest.mark.parametrize(("code", "events", "kept", "expected"), [
    (0, [{"event": "stop", "step": 9, "reason": "finished"}], 9, (0, "finished")),
    (1, [STOPPED], 5, (75, "saved on SIGTERM")),  # DeepSpeed's launcher was asked to end
    (241, [STOPPED], 5, (75, "saved on SIGTERM")),
    (75, [STOPPED], 9, (0, "finished")),  # stopped by a signal after its last step
    (0, [], 9, (0, "finished")),  # started again although complete
    (0, [], 5, (1, "crash: the launcher ended with 0, the run had not finished")),
    (247, [], 5, (247, "crash: SIGKILL (exit code 247)")),  # of a rank, by DeepSpeed's launcher
    (137, [], 5, (137, "crash: SIGKILL (exit code 137)")),  # by srun
    (-9, [], 5, (-9, "crash: SIGKILL (exit code -9)")),  # of the launcher
    (255, [], 5, (255, "crash: exit code 255, ssh's own when it loses a host")),
    (2, [], 5, (2, "refused")),
    (77, [STOPPED], 5, (77, "hang")),
])
def test_the_run_knows_better_than_its_launcher(code: int, events: list[dict[str, Any]], kept: int,
                                                expected: tuple[int, str]) -> None:
    assert judge(code, Progress(events, [], 0, kept), last_step=9) == expected


# A rank that saves on SIGUSR1, below a launcher that would die of it, beside a process that no tree shows.
RANK = f"""import signal, time
def save(*_):
    open('events.jsonl', 'a').write('{json.dumps({**STOPPED, "reason": "SIGUSR1"})}' + chr(10)); raise SystemExit(75)
signal.signal(signal.SIGUSR1, save)
open('events.jsonl', 'a').write('{BEGAN}' + chr(10))
time.sleep(3600)"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_nothing_remains(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    script = f"cd {tmp_path}; (setsid sleep 3600 & echo $! > orphan); {sys.executable} rank.py; exit $?"
    process = supervise(["--save", str(tmp_path), "--", "bash", "-c", script], stderr=subprocess.PIPE)
    wait_until(lambda: (tmp_path / "events.jsonl").is_file())
    orphan = int((tmp_path / "orphan").read_text())
    assert psutil.pid_exists(orphan)
    process.send_signal(number)
    code, said = ended(process)
    assert code == 75, said
    (start,), _ = read_ledger(tmp_path)
    assert (start["exit_code"], start["reason"]) == (75, "saved on SIGUSR1")
    assert not psutil.pid_exists(orphan)


def test_one_supervisor_and_one_run_in_a_folder(tmp_path: Path) -> None:
    rank = tmp_path / "train.py"
    rank.write_text("import pathlib, time; pathlib.Path(__file__).with_suffix('.began').touch(); time.sleep(3600)")
    command = [sys.executable, str(rank), "--save", str(tmp_path / "run")]
    alone = subprocess.Popen(command, env={**os.environ, "RANK": "0"})
    try:
        wait_until(rank.with_suffix(".began").exists)
        code, said = ended(supervise(["--", *command], stderr=subprocess.PIPE))
    finally:
        alone.kill()
        alone.wait()
        rank.with_suffix(".began").unlink(missing_ok=True)
    assert code == 2
    assert f"a run at work on localhost (process {alone.pid})" in said
    first = supervise(["--", *command], stderr=subprocess.PIPE)
    try:
        wait_until(rank.with_suffix(".began").exists)  # signals are passed on from then on
        code, said = ended(supervise(["--", *command], stderr=subprocess.PIPE))
        assert code == 2
        assert "another supervisor at work" in said
    finally:
        first.terminate()
        assert ended(first)[0] == 75


# ---- hosts

RECORD = {"train_steps": 9, "layout": {"world_size": 4, "data_parallel_size": 4},
          "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 8}}


def fewer_hosts(folder: Path, *, batch: int) -> tuple[int, str]:
    """A run that had 4 ranks on two hosts and goes on when one of them is not there."""
    (folder / "run").mkdir()
    (folder / "hosts").write_text("localhost slots=2\n\nhost.invalid slots=2\n")
    (folder / "run" / "run.json").write_text(json.dumps([{**RECORD, "batch": {**RECORD["batch"],
                                                                             "global_batch_size": batch}}]))
    (folder / "deepspeed").write_text(f"#!/bin/bash\necho \"$@\" > {folder}/words\n"
                                      f"echo '{FINISHED}' >> {folder}/run/events.jsonl\n")
    (folder / "deepspeed").chmod(0o755)
    return ended(supervise(["--min_hosts", "1", "--health_command", "true", "--", str(folder / "deepspeed"),
                            "--hostfile", str(folder / "hosts"), "--master_addr=host.invalid", "train.py", "--save",
                            str(folder / "run")], stderr=subprocess.PIPE))


def test_a_sick_host_is_left_out_at_the_same_global_batch(tmp_path: Path) -> None:
    code, said = fewer_hosts(tmp_path, batch=8)
    assert code == 0, said
    assert "host host.invalid is not well" in said
    hostfile = tmp_path / "run" / "hostfile.supervised"
    assert hostfile.read_text() == "localhost slots=2\n"
    assert (tmp_path / "words").read_text().split() == [
        "--force_multi", "--hostfile", str(hostfile), "--master_addr=localhost", "train.py",
        "--save", str(tmp_path / "run"), "--gradient_accumulation_steps=2", "--global_batch_size=8"]
    assert read_ledger(tmp_path / "run")[0][0]["hosts"] == ["localhost"]


def test_a_global_batch_that_the_rest_cannot_divide_is_refused(tmp_path: Path) -> None:
    code, said = fewer_hosts(tmp_path, batch=6)
    assert code == 2
    assert "2 ranks left" in said
    assert "global batch of 6" in said
    assert not (tmp_path / "words").exists()


def test_without_min_hosts_it_waits_for_the_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    sick = f"test -e {tmp_path}/well || {{ touch {tmp_path}/well; echo no disk >&2; false; }}"
    (tmp_path / "deepspeed").write_text(f"#!/bin/bash\necho '{FINISHED}' >> {tmp_path}/run/events.jsonl\n")
    (tmp_path / "deepspeed").chmod(0o755)
    code, said = ended(supervise(["--hostfile", str(tmp_path / "hosts"), "--health_command", sick, "--",
                                  str(tmp_path / "deepspeed"), "train.py", "--save", str(tmp_path / "run")],
                                 stderr=subprocess.PIPE))
    assert code == 0, said
    first, second = read_ledger(tmp_path / "run")[0]
    assert (first["exit_code"], first["reason"], second["exit_code"]) == (None, "host localhost: no disk", 0)


# ---- reading commands and progress

def test_what_a_command_says_about_its_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"save: {tmp_path}/a\ntrain-steps: 7\n")
    cluster = ["launch/cluster.sh", "--hostfile=h", "--ssh_port", "7", "--", "--config", str(tmp_path / "run.yaml")]
    assert launch.run_folder(cluster, None) == tmp_path / "a"
    assert launch.run_folder(cluster, "b") == Path("b").absolute()
    assert launch.run_setting(cluster, "train_steps") == "7"
    assert launch.run_setting([*cluster, "--train-steps=8"], "train_steps") == "8"
    assert launch.hostfile_of(cluster, None) == Path("h")
    assert launch.ssh_port(cluster) == "7"
    own = launch.with_separator(["ds-pretrain", "--save=a", "--num_gpus", "2", "-H", "h", "--config", "run.yaml"])
    assert own == ["ds-pretrain", "--num_gpus", "2", "-H", "h", "--", "--save=a", "--config", "run.yaml"]
    assert (launch.hostfile_of(own, None), launch.identity(own)) == (Path("h"), ["--save=a", "--config", "run.yaml"])
    assert launch.with_separator(["deepspeed", "x.py"]) == ["deepspeed", "x.py"]
    srun = ["srun", "-n2", "--", "python", "pretrain/train.py", "--save", "x", "--hostfile", "no"]
    assert launch.identity(srun) == ["--save", "x", "--hostfile", "no"]
    assert launch.hostfile_of(srun, None) is None
    assert launch.with_hostfile(["deepspeed", "train.py"], Path("h")) == ["deepspeed", "--hostfile", "h", "train.py"]
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=4\n")
    assert launch.hosts_of(["deepspeed", "--include=b@c:1,2", "train.py", "--exclude", "c"], tmp_path / "hosts") == {
        "b": 4, "c": 2}
    with pytest.raises(ConfigError, match="srun, which takes no hostfile"):
        launch.check_can_lose_hosts(srun)
    with pytest.raises(ConfigError, match="--include: found beside --min_hosts"):
        launch.check_can_lose_hosts(["deepspeed", "--include", "a", "train.py"])


def test_only_steps_that_need_not_be_done_again_are_productive() -> None:
    steps = [{"step": 1, "step_time_ms": 9000}, {"step": 10, "step_time_ms": 1000}, {"step": 20, "step_time_ms": 2000}]
    assert sum(step_seconds(Progress([], steps, 0, 15)).values()) == 9 + 9 * 1 + 5 * 2
    assert sum(step_seconds(Progress([], steps, 0, 22)).values()) == 9 + 9 * 1 + 12 * 2  # saved before the next row
    assert step_seconds(Progress([], [], 5, 5)) == {}
