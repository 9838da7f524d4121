"""launch/cluster.sh with two hosts over ssh: training, rejected hosts, signals, and failures that end all hosts."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import pytest

from pretrain import __version__
from pretrain.checkpoint.format.run_checkpoints import newest_good
from pretrain.cluster.hosts.multihost_job import LOST
from pretrain.errors import HANG
from tests.cluster.workers.mpi import mpi
from tests.cluster.workers.ssh_hosts import Host, Hosts
from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.support.supervised import wait_for_rows
from tests.test_train import _flags, launch, losses, rows

__all__ = ["mpi"]  # the fixture
pytestmark = pytest.mark.root
ZERO2 = ROOT / "ds_configs" / "zero2_bf16.json"
PIPELINE = ROOT / "ds_configs" / "pipeline2_zero1_bf16.json"
TRAIN = str(ROOT / "pretrain" / "train.py")


def _command(hosts: Hosts, folder: Path, *words: str) -> list[str]:
    hostfile = hosts.hostfile(folder / "hosts")
    return [str(ROOT / "launch" / "cluster.sh"), "--hostfile", str(hostfile), "--master_port", str(free_port()), *words]


@contextlib.contextmanager
def _launched(hosts: Hosts, folder: Path, flags: list[str], *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run launch/cluster.sh as a process. At the end, kill all processes on its hosts, even if the test fails."""
    command = [*_command(hosts, folder, *words), "--", *flags]
    process = subprocess.Popen(command, env=hosts.environ, cwd=folder, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        for host in (hosts.a, hosts.b):
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _rank(host: Host) -> int:
    (pid,) = [pid for pid, command in host.processes().items() if re.search(r"-u \S*train.py", command)]
    return pid


def test_two_hosts_train_with_unchanged_values_of_all_variables(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    train_on_two_hosts(hosts, corpus, tmp_path)


def train_on_two_hosts(hosts: Hosts, corpus: str, tmp_path: Path, *words: str, **environ: str) -> str:
    """The shell of the hosts, which gets the values from pdsh, runs none of their text. Returns what the run leaves."""
    values = {"NCCL_NOTE": f"a  $(touch {tmp_path}/executed) `touch {tmp_path}/executed`; \\ 'x' \"y\" 100%h",
              "UCX_NOTE": f"$(touch {tmp_path}/executed)"}
    (tmp_path / ".deepspeed_env").write_text(f"NCCL_NOTE={values['NCCL_NOTE']}\n")
    if sys.version_info >= (3, 11):  # before, `python -m deepspeed.launcher.launch` imports from the working folder
        for name in ("json", "torch", "deepspeed", "sitecustomize"):
            (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    run = tmp_path / "run"
    command = [*_command(hosts, tmp_path), "--", *_flags(corpus, run, "--train_steps", "1", config=ZERO2), *words]
    done = subprocess.run(command, env={**hosts.environ, "UCX_NOTE": values["UCX_NOTE"], **environ}, cwd=tmp_path,
                          capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "executed").exists()
    start = json.loads((run / "run.json").read_text())[-1]
    assert values.items() <= start["environment"].items()
    assert len(losses(run)) == 1
    return (run / "run.json").read_text() + done.stdout + done.stderr


@pytest.mark.slow
def test_two_hosts_have_the_losses_of_one_host(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    """ZeRO-2 runs with launch/cluster.sh, a pipeline with plain `deepspeed`. No setting names a network interface."""
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")  # more threads would change the rounding
    commands = {ZERO2: [*_command(hosts, tmp_path), "--"],
                PIPELINE: ["deepspeed", "--hostfile", str(hosts.hostfile(tmp_path / "hosts")),
                           "--master_port", str(free_port()), TRAIN]}
    for config, command in commands.items():
        run, one = tmp_path / config.stem, tmp_path / f"{config.stem}-one"
        done = subprocess.run([*command, *_flags(corpus, run, "--train_steps", "3", config=config)], env=hosts.environ,
                              cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        hosts.wait_until_empty()
        alone = launch(2, _flags(corpus, one, "--train_steps", "3", config=config))
        assert alone.returncode == 0, alone.stdout + alone.stderr
        assert losses(run) == [pytest.approx(row, rel=1e-6) for row in losses(one)]


@pytest.mark.slow
def test_openmpi_and_mpich_give_equal_losses(hosts: Hosts, mpi: None, corpus: str, tmp_path: Path) -> None:
    """With `--launcher openmpi` or `mpich`, DeepSpeed calls `mpirun` of this MPI, which reaches the hosts by ssh."""
    found = {}
    for launcher in ("openmpi", "mpich"):
        folder, run = tmp_path / launcher, tmp_path / f"run-{launcher}"
        folder.mkdir()
        (folder / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(f"mpirun.{launcher}")} "$@"\n')
        (folder / "mpirun").chmod(0o755)
        environ = {**hosts.environ, "PATH": os.pathsep.join([str(folder), hosts.environ["PATH"]]),
                   "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # With MPICH, the hosts connect back to this machine. The hosts cannot resolve its name, so pass its address.
        network = hosts.a.address.rpartition(".")[0]
        own_address = [f"--launcher_args=-localhost {network}.254"] if launcher == "mpich" else []
        command = [*_command(hosts, tmp_path, "--launcher", launcher, *own_address), "--"]
        done = subprocess.run([*command, *_flags(corpus, run, "--train_steps", "3", config=ZERO2)], env=environ,
                              cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 data-parallel" in done.stdout
        hosts.wait_until_empty()
        found[launcher] = losses(run)
    assert len(found["openmpi"]) == 3
    assert found["openmpi"] == found["mpich"]


def rejection(hosts: Hosts, command: list[str], folder: Path) -> str:
    done = subprocess.run(command, env=hosts.environ, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds-pretrain: error: ")
    hosts.wait_until_empty()
    return line


def test_unreachable_or_different_hosts_are_rejected(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    flags = ["--", *_flags(corpus, tmp_path / "runs" / "one", "--train_steps", "3", config=ZERO2)]
    unreachable = hosts.b.address.replace(".2", ".77")
    hostfile = hosts.hostfile(tmp_path / "hosts3")
    hostfile.write_text(hostfile.read_text() + f"{unreachable} slots=1\n")
    line = rejection(hosts, [*_command(hosts, tmp_path), "--hostfile", str(hostfile), *flags], tmp_path)
    assert f"hosts: {unreachable}: ssh failed" in line
    assert hosts.a.address not in line

    metadata = next(Path(str(file.locate())) for file in files("transformers") or () if file.name == "METADATA")
    other = tmp_path / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*", "Version: 4.0.0", metadata.read_text(), count=1))
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "runs").mkdir()
    with hosts.b.bind(other, metadata):
        line = rejection(hosts, [*_command(hosts, tmp_path), *flags], tmp_path)
        assert f"{hosts.b.address}: transformers 4.0.0, but 5." in line
    with hosts.b.bind(empty, Path(corpus).parent), hosts.b.bind(empty, tmp_path / "runs"):
        line = rejection(hosts, [*_command(hosts, tmp_path), *flags], tmp_path)
    assert f"{hosts.b.address}: no {corpus}.bin; {hosts.b.address}: no {corpus}.idx" in line
    assert f"{hosts.b.address}: --save does not exist on this host" in line
    assert hosts.a.address not in line
    line = rejection(hosts, [*_command(hosts, tmp_path), *flags, "--seq_length", "0"], tmp_path)
    assert line == "ds-pretrain: error: --seq_length: found 0; expected at least 1."  # before any rank starts
    assert not (tmp_path / "runs" / "one").exists()


def test_an_installed_package_of_another_version_is_rejected(hosts: Hosts, tmp_path: Path) -> None:
    """The package is not in a checkout. On host B it has another version, then another file, then it is missing."""
    site, other, empty = tmp_path / "site", tmp_path / "other", tmp_path / "empty"
    shutil.copytree(ROOT / "pretrain", site / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(site, other)
    empty.mkdir()
    installed = replace(hosts, environ={**hosts.environ, "PYTHONPATH": str(site)})
    command = [sys.executable, "-m", "pretrain", "--hostfile", str(hosts.hostfile(tmp_path / "hosts")), "evaluate",
               "model"]
    remedy = f"(run `{sys.executable} -m pip install --force-reinstall --no-deps ds-pretrain=={__version__}` there)"
    (other / "pretrain" / "trainer.py").write_text("")
    with hosts.b.bind(other, site):
        line = rejection(installed, command, tmp_path)
    assert f"same version {__version__}, with changed files {remedy}" in line
    (other / "pretrain" / "__init__.py").write_text('__version__ = "9.9"\n')
    with hosts.b.bind(other, site):
        line = rejection(installed, command, tmp_path)
    assert f"{hosts.b.address}: ds-pretrain 9.9, but {__version__} on this host {remedy}" in line
    with hosts.b.bind(empty, site):
        line = rejection(installed, command, tmp_path)
    assert f"{hosts.b.address}: no ds-pretrain at {site} {remedy}" in line


@pytest.mark.slow
def test_signals_and_failures_end_all_hosts(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", config=PIPELINE)
    for number in (signal.SIGTERM, signal.SIGINT):
        with _launched(hosts, tmp_path, flags) as process:
            wait_for_rows(process, run, len(rows(run)) + 2 if run.exists() else 2)
            process.send_signal(number)
            output = process.communicate(timeout=LIMIT_S)[0]
            assert process.returncode == 75, output
            assert rows(run, "events.jsonl")[-1]["reason"] == number.name
            hosts.wait_until_empty()
    found = newest_good(run / "checkpoints")
    assert found is not None
    with _launched(hosts, tmp_path, flags, "--grace", "1") as process:
        wait_for_rows(process, run, len(rows(run)) + 2)
        os.kill(_rank(hosts.a), signal.SIGSTOP)  # a stopped rank cannot notice the failure of the other rank
        os.kill(_rank(hosts.b), signal.SIGKILL)
        output = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 256 - signal.SIGKILL, output
        assert f"{hosts.b.address} (rank 1) failed with exit code 247" in output
        hosts.wait_until_empty()
    assert f"resumed from {run / 'checkpoints' / found[0].name}" in output


def _start_without_ssh(hosts: Hosts, folder: Path, flags: list[str],
                       *words: str) -> list["subprocess.Popen[str]"]:
    """Start the same command on both hosts, as a scheduler would. Each host gets its own --node_rank."""
    port, hostfile = free_port(), hosts.hostfile(folder / "hosts")
    command = [str(ROOT / "launch" / "cluster.sh"), "--hostfile", str(hostfile), "--no_ssh", "--master_addr",
               hosts.a.address, "--master_port", str(port), *words]
    lines = [shlex.join(["cd", str(folder)]) + "; OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu "
             + shlex.join([f"VENV={hosts.environ['VENV']}"]) + " exec "
             + shlex.join([*command, "--node_rank", str(number), "--", *flags]) for number in range(2)]
    return [subprocess.Popen(["ssh", host.address, line], env=hosts.environ, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for host, line in zip((hosts.a, hosts.b), lines, strict=True)]


@pytest.mark.slow
def test_without_ssh_a_failed_host_ends_the_other(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", config=PIPELINE)
    empty = tmp_path / "empty"
    empty.mkdir()
    with hosts.b.bind(empty, Path(corpus).parent):
        both = _start_without_ssh(hosts, tmp_path, flags)
        output = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in both]
    assert [launcher.returncode for launcher in both] == [2, 2], output
    assert f"{hosts.b.address}: no {corpus}.bin" in output[0]
    assert f"missing files of the run: {corpus}.bin" in output[1]
    both = _start_without_ssh(hosts, tmp_path, flags, "--grace", "1")
    wait_for_rows(both[0], run, 2)
    os.kill(_rank(hosts.a), signal.SIGSTOP)
    os.kill(_rank(hosts.b), signal.SIGKILL)
    output = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in both]
    assert [launcher.returncode for launcher in both] == [256 - signal.SIGKILL] * 2, output
    assert f"{hosts.b.address} (rank 1) failed with exit code 247" in output[0]
    hosts.wait_until_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "words"), [(False, "all 2 ranks are in phase step of"), (True, "rank 1 (host ")])
def test_the_watchdog_reports_a_cut_network_or_a_lost_host(hosts: Hosts, corpus: str, tmp_path: Path, lost: bool,
                                                           words: str) -> None:
    """The network of host B is cut. If the host is lost, all its processes end, too: rank 0 receives no notice.

    Otherwise both ranks wait in a collective, and meet in the run folder, which the simulated hosts still share.
    """
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", "--step_timeout", "15", config=ZERO2)
    with _launched(hosts, tmp_path, flags, "--grace", "1") as process:
        wait_for_rows(process, run, 2)
        hosts.b.set_link("down")
        for pid in hosts.b.processes() if lost else ():
            os.kill(pid, signal.SIGKILL)
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        finally:
            hosts.b.set_link("up")
        assert process.returncode == HANG, output
        assert f"ds-pretrain: hang: no progress for 15 s (--step_timeout 15): {words}" in output
        assert lost == ("1 rank waits in phase step of step" in output)
        if not lost:
            hosts.wait_until_empty()
    assert lost or len(list((run / "hangs" / "1").glob("rank_?.txt"))) == 2


@pytest.mark.slow
def test_a_cut_network_ends_all_ranks(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    """On both hosts, gloo waits until the time-out of the process group. Then the ranks of each host exit."""
    run = tmp_path / "run"
    flags = _flags(corpus, run, "--train_steps", "100000", config=ZERO2)
    with _launched(replace(hosts, environ={**hosts.environ, "DEEPSPEED_TIMEOUT": "1"}), tmp_path,
                  flags, "--grace", "1") as process:
        wait_for_rows(process, run, 2)
        hosts.b.set_link("down")
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
            assert process.returncode == LOST, output
            assert f"the connection to {hosts.b.address} (rank 1) was lost" in output
            hosts.wait_until_empty()
        finally:
            hosts.b.set_link("up")
