"""A SLURM cluster of two nodes on this machine: munged, slurmctld and a slurmd for each node.

Each slurmd is the first process of a PID namespace. When a slurmd is killed, all processes of its node end, as in a
power failure. Each node has one core. Limits are not enforced. Both nodes share the file system.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.workers.packages import PATH, need_packages
from tests.cluster.workers.ssh_hosts import end_with_parent
from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.support.supervised import wait_until

SBATCH = ROOT / "launch" / "slurm" / "pretrain.sbatch"
NODES = ("n1", "n2")
_PACKAGES = {"slurmctld": "slurm-wlm", "munged": "munge"}
# cred_expire: seconds before a requeued job starts. SlurmdTimeout: seconds before a node that does not answer is down.
_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
LaunchParameters=use_interactive_step
JobRequeue=1
SlurmdTimeout=30
KillWait=20
SchedulerParameters=sched_interval=1,sched_min_interval=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_n1} CPUs=1 RealMemory=500 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_n2} CPUs=1 RealMemory=500 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """Nodes n1 and n2, and the environment for SLURM's commands."""

    folder: Path
    environ: dict[str, str]
    stack: contextlib.ExitStack
    slurmds: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def run(self, *command: str) -> str:
        """Run a SLURM command. Returns its stdout."""
        done = subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True,
                              timeout=LIMIT_S)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, **environ: str) -> str:
        """Run `sbatch WORDS`. Returns the job id."""
        done = subprocess.run(["sbatch", "--parsable", *words], env={**self.environ, **environ}, cwd=self.folder,
                              capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the job's state: RUNNING, PENDING, COMPLETED, ..."""
        return self._shown("JobState", job)

    def exit_code(self, job: str) -> int:
        return int(self._shown("ExitCode", job).split(":")[0])

    def _shown(self, key: str, job: str) -> str:
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def log(self, job: str) -> str:
        path = self.folder / f"pretrain-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, job: str, *states: str) -> None:
        """Wait until the job is in one of the states. Fails with the job's log after the time-out."""
        wait_until(lambda: self.state(job) in states, lambda: f"{self.state(job)}\n{self.log(job)}")

    def start_node(self, name: str) -> None:
        # --mount-proc also gives the node its own mount namespace, which is needed for /etc/hosts
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
                   f"mount --bind '{self.folder}/hosts' /etc/hosts; exec slurmd -D -N {name} -f \"$SLURM_CONF\""]
        self.slurmds[name] = _daemon(command, self.folder, self.environ, self.stack)

    def end_node(self, name: str) -> None:
        """Kill all processes of the node at once."""
        self.slurmds[name].kill()
        self.slurmds[name].wait()


def _daemon(command: list[str], folder: Path, environ: dict[str, str],
            stack: contextlib.ExitStack) -> "subprocess.Popen[bytes]":
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log,
                                   preexec_fn=end_with_parent)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _start_munged(folder: Path, environ: dict[str, str], stack: contextlib.ExitStack) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}
    # --force: accept a folder that only root can read; all clients run as root
    _daemon(["munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())],
            folder, environ, stack)
    wait_until((folder / "munge.socket").exists, lambda: (folder / "daemons.log").read_text())


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster with two idle nodes, and stop it at the end. Needs root. Skips if there are no namespaces."""
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine cannot create PID namespaces")
    need_packages("SLURM tests", _PACKAGES)
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), PATH]),
               "SLURM_CONF": str(folder / "slurm.conf"), "DS_PRETRAIN": str(ROOT), "DS_ACCELERATOR": "cpu",
               "VENV": str(Path(sys.executable).parents[1])}
    ports = {"controller_port": free_port(), "port_n1": free_port(), "port_n2": free_port()}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=socket.gethostname(), **ports))
    (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n{_own_address()} {' '.join(NODES)}\n")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack:
        _start_munged(folder, environ, stack)
        _daemon(["slurmctld", "-D", "-f", environ["SLURM_CONF"]], folder, environ, stack)
        cluster = SlurmCluster(folder, environ, stack)
        for name in NODES:
            cluster.start_node(name)
        wait_until(lambda: _idle(cluster) == 2, lambda: (folder / "daemons.log").read_text())
        yield cluster


def _own_address() -> str:
    """Return this machine's first address, or the loopback address if it has no network."""
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return words[0] if words else "127.0.0.1"


def _idle(cluster: SlurmCluster) -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=cluster.environ, capture_output=True, text=True)
    return done.stdout.split().count("idle")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a cluster with the nodes n1 and n2."""
    with two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
