"""launch/supervise.py with two hosts: the supervisor finds ranks over ssh, and a host is lost during a run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pretrain.cluster.hosts.remote import default_transport, ranks_on, unhealthy_hosts
from tests.cluster.workers.ssh_hosts import Host, Hosts, two_hosts
from tests.support.launch import LIMIT_S, ROOT, free_port, run_forked
from tests.support.supervised import (
    flag_pairs,
    kill_tree,
    read_restart_log,
    rows,
    supervise,
    wait_for_end,
    wait_for_rows,
    wait_until,
)

pytestmark = pytest.mark.root
STEPS = 30
JSON = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                  "weight_decay": "auto"}}}


def flags(corpus: str, folder: Path) -> list[str]:
    return ["--deepspeed_config", str(folder / "zero2.json"), "--model", "tiny", "--model_overrides",
            "vocab_size=256,n_layer=2,n_embd=64", "--train_data", corpus, "--seq_length", "64", "--split", "100,0,0",
            "--micro_batch_size", "2", "--gradient_accumulation_steps", "1", "--learning_rate", "1e-3",
            "--log_interval", "1", "--save_interval", "1", "--keep_checkpoints", "2", "--train_steps", str(STEPS),
            "--save", str(folder / "run")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Start two hosts for this file only, because its last test kills one of the hosts."""
    with two_hosts(tmp_path_factory.mktemp("supervised_hosts")) as hosts:
        yield hosts


def kill_host(host: Host) -> None:
    """Kill the host's sshd, connections and ranks."""
    host.sshd.kill()
    for word in subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(word), signal.SIGKILL)


def test_ranks_on_another_host_are_listed_signalled_and_ended(pair: Hosts, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", pair.environ["PATH"])
    (tmp_path / "train.py").write_text("import signal, time, pathlib\n"
                                       "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('saved').touch())\n"
                                       "pathlib.Path('began').touch()\nwhile True: time.sleep(1)\n")
    monkeypatch.chdir(tmp_path)
    words, address, transport = ["--save", "a run", "--lr", "1%"], pair.b.address, default_transport()
    script = f"cd {tmp_path}; RANK=1 exec {sys.executable} train.py --local_rank=0 --save 'a run' --lr 1%"
    with subprocess.Popen(["ssh", address, script], env=pair.environ) as rank:
        wait_until(lambda: (tmp_path / "began").exists())
        (pid,) = ranks_on([address], "list", words, transport)[address]
        assert ranks_on([address], "list", [*words, "--other"], transport) == {}
        assert ranks_on([address], "save", words, transport) == {address: [pid]}
        wait_until(lambda: (tmp_path / "saved").exists())
        assert ranks_on([address], "end", words, transport) == {address: [pid]}
        assert rank.wait(LIMIT_S) != 0
    assert ranks_on([address], "list", words, transport) == {}
    command = "ip addr | grep -q netb || { echo no netb >&2; false; }"
    assert unhealthy_hosts([pair.a.address, address], command, transport, LIMIT_S) == {pair.a.address: "no netb"}


def start_supervised(words: list[str], corpus: str, folder: Path, pair: Hosts, *, slots: int = 1,
                     more: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a supervised run on both hosts, with its output in FOLDER/log. `more`: further flags of the run."""
    (folder / "zero2.json").write_text(json.dumps(JSON))
    hostfile = pair.hostfile(folder / "hosts", slots)
    with open(folder / "log", "w", encoding="utf-8") as log:
        return supervise([*words, "--health_command", "true", "--", str(ROOT / "launch" / "cluster.sh"), "--hostfile",
                          str(hostfile), "--master_port", str(free_port()), "--grace", "1", "--",
                          *flags(corpus, folder), *more],
                         environ=pair.environ, stdout=log, stderr=log)


def check_losses(corpus: str, folder: Path) -> None:
    """Compare the losses of the run with the losses of an undisturbed run with two ranks on one host."""
    (folder / "alone").mkdir()
    words = [*flags(corpus, folder)[:-1], str(folder / "alone" / "run")]
    case = {"name": "reference", "kind": "run", "run": words[-1],
            "flags": [f"{name}={value}" for name, value in flag_pairs(words)]}
    assert run_forked([case], folder)["reference"]["status"] == [0, 0]
    expected = {row["step"]: row["loss"] for row in rows(folder / "alone" / "run")}
    assert {row["step"]: row["loss"] for row in rows(folder / "run")} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_supervisor_waits_for_a_host_without_network(corpus: str, tmp_path: Path, pair: Hosts) -> None:
    supervisor = start_supervised(["--max_restarts", "100", "--backoff_max_s", "2"], corpus, tmp_path, pair)
    try:
        wait_for_rows(supervisor, tmp_path / "run", 3)
        pair.b.set_link("down")
        wait_until(lambda: len(read_restart_log(tmp_path / "run")[0]) >= 2)
        pair.b.set_link("up")
        code, _ = wait_for_end(supervisor)
    finally:
        pair.b.set_link("up")
        kill_tree(supervisor)
        print((tmp_path / "log").read_text()[-8000:])
    assert code == 0
    pair.wait_until_empty()
    starts, _ = read_restart_log(tmp_path / "run")
    print(*starts, sep="\n")
    assert starts[0]["exit_code"] not in (0, 2)
    assert starts[1]["exit_code"] is None
    assert f"host {pair.b.address}: " in starts[1]["reason"]
    assert starts[-1]["hosts"] == [pair.a.address, pair.b.address]
    assert starts[-1]["first_step"] == starts[0]["kept_step"] >= 2
    check_losses(corpus, tmp_path)


@pytest.mark.slow
def test_with_min_hosts_the_run_continues_without_a_lost_host(corpus: str, tmp_path: Path, pair: Hosts) -> None:
    supervisor = start_supervised(["--min_hosts", "1", "--max_restarts", "2"], corpus, tmp_path, pair)
    try:
        wait_for_rows(supervisor, tmp_path / "run", 3)
        kill_host(pair.b)
        code, _ = wait_for_end(supervisor)
    finally:
        kill_tree(supervisor)
        print((tmp_path / "log").read_text()[-8000:])
    assert code == 0
    pair.a.wait_until_empty()
    starts, (summary,) = read_restart_log(tmp_path / "run")
    print(*starts, summary, sep="\n")
    assert [row["hosts"] for row in starts] == [[pair.a.address, pair.b.address], [pair.a.address]]
    assert starts[0]["exit_code"] not in (0, 2)
    assert starts[1]["first_step"] == starts[0]["kept_step"] >= 2
    assert summary["summary"] == "finished"
    batches = [start["batch"]["global_batch_size"] for start in json.loads((tmp_path / "run/run.json").read_text())]
    assert batches == [4, 4]
    check_losses(corpus, tmp_path)
