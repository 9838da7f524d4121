"""A run on two hosts of which one is throttled: an event names the host, and the next start leaves it out."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.cluster.fewer_hosts import SLOW_HOSTS
from pretrain.monitor.read_run_folder import read_events
from tests.cluster.workers.ssh_hosts import Host, Hosts, two_hosts
from tests.extensions.supervise.test_hosts import flags, start_supervised
from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.support.supervised import kill_tree, read_restart_log, rows, wait_for_end, wait_for_rows, wait_until

pytestmark = [pytest.mark.root, pytest.mark.slow]
MORE = ["--train_steps", "100000", "--save_interval", "20"]
_CPU = Path("/sys/fs/cgroup/cpu")  # version 1
_UNIFIED = Path("/sys/fs/cgroup")  # version 2


def rank_pids(host: Host) -> list[int]:
    """Return the processes of the ranks on a host."""
    return [pid for pid, command in host.processes().items() if "--local_rank" in command and "launcher" not in command]


def _removed(group: Path) -> bool:
    """Remove the group. Returns False while a process of it has not ended."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextlib.contextmanager
def throttled(pids: list[int], *, percent: int) -> Iterator[None]:
    """Give the processes together this part of one CPU, as a container's CPU limit does."""
    is_v1 = (_CPU / "cpu.cfs_quota_us").exists()
    group = (_CPU if is_v1 else _UNIFIED) / f"slow_host_{os.getpid()}"
    try:
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if is_v1 else "cpu.max")).write_text(
            str(percent * 1000) if is_v1 else f"{percent * 1000} 100000")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"this machine has no control group that limits the CPU: {error}")
    try:
        yield
    finally:
        for word in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(word)
        wait_until(lambda: _removed(group))


def start_again(pair: Hosts, corpus: str, folder: Path, *, last_step: int) -> "subprocess.CompletedProcess[str]":
    """Start the run without a supervisor, up to a step, with the flag of `ds-pretrain` itself."""
    (folder / "run" / "STOP").unlink()
    command = [sys.executable, "-m", "pretrain", "--exclude_stragglers", "--hostfile", str(folder / "hosts"),
               "--master_port", str(free_port()), "--", *flags(corpus, folder), *MORE, "--exit_step", str(last_step)]
    return subprocess.run(command, env={**pair.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)


def test_a_throttled_host_is_named_and_the_next_start_leaves_it_out(corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "ssh").mkdir()
    with two_hosts(tmp_path / "ssh", own_names=True) as pair:
        supervisor = start_supervised(["--min_hosts", "1", "--exclude_stragglers", "--max_restarts", "2"], corpus,
                                      tmp_path, pair, slots=2, more=MORE)
        try:
            wait_for_rows(supervisor, run, 40)
            pids = rank_pids(pair.b)
            assert len(pids) == 2, pair.b.processes()
            began = time.monotonic()
            with throttled(pids, percent=10):
                wait_until(lambda: "slow_rank" in [event["event"] for event in read_events(run)],
                           lambda: (len(rows(run)), (tmp_path / "log").read_text()[-2000:]))
                named_s = time.monotonic() - began
                first = rows(run)[-1]["step"]
                os.kill(pids[0], signal.SIGKILL)
                wait_until(lambda: not set(pids) & set(pair.b.processes()))
            wait_until(lambda: rows(run)[-1]["step"] > first + 20 and len(read_restart_log(run)[0]) == 1)
            (run / "STOP").touch()
            code, _ = wait_for_end(supervisor)
        finally:
            kill_tree(supervisor)
            print((tmp_path / "log").read_text()[-6000:])
        event = next(event for event in read_events(run) if event["event"] == "slow_rank")
        starts, _ = read_restart_log(run)
        print(f"named after {named_s:.1f} s: {event}", *starts, sep="\n")
        assert code in (0, 75)
        assert event["hosts"] == [pair.b.namespace]
        assert set(event["ranks"]) <= {2, 3}
        assert [row["hosts"] for row in starts] == [[pair.a.address, pair.b.address], [pair.a.address]]
        assert list(starts[1]["left_out"]) == [pair.b.address]
        assert f"host {pair.b.address} is left out of 3 starts from now on" in (tmp_path / "log").read_text()
        assert json.loads((run / SLOW_HOSTS).read_text())["left_out"][pair.b.address]["starts"] == 3
        done = start_again(pair, corpus, tmp_path, last_step=rows(run)[-1]["step"] + 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"host {pair.b.address} is left out of 2 starts from now on" in done.stdout + done.stderr
    starts = json.loads((run / "run.json").read_text())
    assert [start["layout"]["world_size"] for start in starts] == [4, 2, 2]
    assert [start["batch"]["global_batch_size"] for start in starts] == [8, 8, 8]
