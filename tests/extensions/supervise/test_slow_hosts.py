"""--exclude_stragglers: hosts that events name as slow are left out of the next starts, if the run can lose them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.cluster.fewer_hosts import SLOW_HOSTS, STARTS, record_start, slow_hosts_of
from pretrain.cluster.hosts.remote import local_transport
from pretrain.cluster.slurm_job import after
from pretrain.extensions.supervise.next_start import HostChoice, SupervisorSettings, choose_hosts
from tests.support.launch import ROOT

RECORD = {"train_steps": 9, "layout": {"world_size": 3, "data_parallel_size": 3},
          "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": 12}}


def event(kind: str, *ranks: int, hosts: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"time": 1.0, "event": kind, "step": 5, "reason": f"ranks {list(ranks)} are slow", "ranks": list(ranks),
            "hosts": list(hosts), **more}


def test_hosts_that_were_slow_until_the_end_of_the_last_start() -> None:
    """An event names hosts as they name themselves; a hostfile may have addresses, and then the ranks say which."""
    ranks_on = {"10.0.0.1": 2, "10.0.0.2": 2, "10.0.0.3": 2}
    start = {"event": "start", "step": 0, "reason": "", "world_size": 6}
    slow = [event("slow_rank", 2, hosts=("b",), ratio=1.5), event("slow_rank", 4, 5, hosts=("c",), ratio=2.5)]
    assert list(slow_hosts_of([start, *slow], ranks_on)) == ["10.0.0.3", "10.0.0.2"], "the slowest first"
    assert list(slow_hosts_of([start, *slow, event("slow_rank_over", 4, 5)], ranks_on)) == ["10.0.0.2"]
    assert slow_hosts_of([start, *slow, start], ranks_on) == {}, "an earlier start"
    assert list(slow_hosts_of([start, *slow], {"a": 2, "b": 2, "c": 2})) == ["c", "b"]
    fewer = [{**start, "world_size": 4}, *slow]
    assert list(slow_hosts_of(fewer, ranks_on)) == ["c", "b"], "the ranks are those of other hosts"
    for damaged in ({"ranks": "x"}, {"ranks": [99, None, -1, 1.5, "2"], "hosts": [1]}, {"ratio": "x", "hosts": None}):
        assert set(slow_hosts_of([event("slow_rank") | damaged], ranks_on)) <= set(ranks_on)


class Supervisor:
    """Chooses the hosts of starts that have no ranks."""

    def __init__(self, folder: Path, *, batch: int = 12, min_hosts: int = 1) -> None:
        (folder / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n")
        record = {**RECORD, "batch": {**RECORD["batch"], "global_batch_size": batch}}  # type: ignore[dict-item]
        (folder / "run.json").write_text(json.dumps([record]))
        self.run, self.lines = folder, list[str]()
        self.settings = SupervisorSettings(["deepspeed", "train.py"], folder, hostfile=folder / "hosts",
                                           min_hosts=min_hosts, exclude_stragglers=True, health_command="true",
                                           transport=local_transport)

    def start(self, *events: dict[str, Any]) -> list[str]:
        """Return the hosts of a start, during which these events are written."""
        choice: HostChoice = choose_hosts(self.settings, self.lines.append)
        record_start(self.run, choice.hosts, choice.left_out)
        with open(self.run / "events.jsonl", "a") as file:
            started = {"event": "start", "step": 0, "reason": "", "world_size": len(choice.hosts)}
            file.writelines(json.dumps(each) + "\n" for each in (started, *events))
        assert ("--global_batch_size=12" in choice.command) == (len(choice.hosts) < 3)
        return list(choice.hosts)


def test_a_slow_host_is_left_out_of_three_starts_or_until_it_is_wanted_again(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    assert supervisor.start(event("slow_rank", 1, hosts=("host-b",), ratio=2.0)) == ["a", "b", "c"]
    assert [supervisor.start() for _ in range(STARTS)] == [["a", "c"]] * STARTS
    assert supervisor.lines[0] == ("host b is left out of 3 starts from now on, because it was slow: ranks [1] are "
                                   "slow; to use it again, delete slow_hosts.json in the run folder")
    assert supervisor.start(event("slow_rank", 1)) == ["a", "b", "c"]
    assert supervisor.start(event("slow_rank", 1)) == ["a", "c"]  # rank 1 is now on c
    assert supervisor.start() == ["a"]
    (tmp_path / SLOW_HOSTS).unlink()
    assert supervisor.start() == ["a", "b", "c"]


@pytest.mark.parametrize(("batch", "min_hosts", "hosts", "line"), [
    (12, 2, ["a", "b"], "host b was slow (ranks [1] are slow), but cannot be left out: at least 2 hosts must remain"),
    (6, 1, ["a", "b", "c"], "cannot be left out: the other 2 ranks cannot divide the global batch"),
    (12, 3, ["a", "b", "c"], "at least 3 hosts must remain"),
])
def test_hosts_that_the_run_needs_remain(tmp_path: Path, batch: int, min_hosts: int, hosts: list[str],
                                         line: str) -> None:
    supervisor = Supervisor(tmp_path, batch=batch, min_hosts=min_hosts)
    slow = [event("slow_rank", 1, ratio=1.5), *([event("slow_rank", 2, ratio=2.0)] if batch == 12 else [])]
    supervisor.start(*slow)
    assert supervisor.start() == hosts
    assert any(line in each for each in supervisor.lines), supervisor.lines


def test_a_slurm_job_names_the_node_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps(event("slow_rank", 1, hosts=("n2",))) + "\n")
    assert after(tmp_path, {"SLURM_JOB_ID": "7"}, exit_code=75) == 0
    assert "scontrol update JobId=7 ExcNodeList=n2" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "problem"), [
    (["supervise", "--exclude_stragglers", "--", "deepspeed", "train.py", "--save", "x"], "needs --min_hosts"),
    (["supervise", "--exclude_stragglers", "--min_hosts", "1", "--hostfile", "HOSTS", "--", "ds-pretrain",
      "--exclude_stragglers", "--hostfile", "HOSTS", "--save", "x"], "Give it to the supervisor instead"),
    (["--exclude_stragglers", "--hostfile", "HOSTS", "--exclude", "b", "--save", "x"], "cannot be combined with"),
    (["--exclude_stragglers", "--save", "x"], "this flag is for several hosts"),
    (["--exclude_stragglers", "--hostfile", "HOSTS", "evaluate", "x"], "it is for runs, not for evaluate"),
])
def test_commands_that_cannot_leave_out_hosts(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n")
    command = [str(tmp_path / "hosts") if word == "HOSTS" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "pretrain", *command], capture_output=True, text=True, cwd=tmp_path,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert problem in done.stderr
