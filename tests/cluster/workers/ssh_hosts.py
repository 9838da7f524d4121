"""Two simulated hosts on this machine: network namespaces on one bridge, each with its own sshd, interface and mounts.

The hosts share the file system and the host name. `Host.bind` replaces a file or folder on one of the hosts only.
"""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cluster.workers.packages import PATH, need_packages
from tests.support.supervised import wait_until

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"sshd": "openssh-server", "pdsh": "pdsh", "ip": "iproute2", "nsenter": "util-linux"}
_SSHD = """
PermitRootLogin yes
StrictModes no
UsePAM no
PasswordAuthentication no
UseDNS no
MaxStartups 100
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/{name}.pid
"""
_CLIENT = """
Host *
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    """Create a network namespace, which is removed when the stack is closed."""
    _run("ip", "netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)


def add_host(name: str, interface: str, address: str, *, link: str, bridge: str, stack: contextlib.ExitStack,
             switch: str = "") -> None:
    """Create a network namespace with an interface on a bridge. `switch`: namespace of the bridge; "": this one."""
    add_namespace(name, stack)
    at = ["-n", switch] if switch else []
    _run("ip", *at, "link", "add", link, "type", "veth", "peer", "name", interface, "netns", name)
    _run("ip", *at, "link", "set", link, "master", bridge, "up")
    for words in (f"addr add {address}/24 dev {interface}", f"link set {interface} up", "link set lo up"):
        _run("ip", "-n", name, *words.split())


@dataclass
class Host:
    """One simulated host."""

    name: str
    address: str  # for hostfiles and ssh
    namespace: str  # network namespace, as `ip netns` names it
    link: str  # veth interface of the host on the bridge
    sshd: subprocess.Popen[bytes]  # `unshare`, the parent process of sshd

    def processes(self) -> dict[int, str]:
        """Return {process id: command line} of all processes on this host, except sshd."""
        found = {}
        for word in _run("ip", "netns", "pids", self.namespace).split():
            with contextlib.suppress(OSError):  # the process has ended in the meantime
                command = Path(f"/proc/{word}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not command.startswith("sshd: ") and int(word) != self.sshd.pid:
                    found[int(word)] = command
        return {pid: command for pid, command in found.items() if command}  # zombies have no command line

    def wait_until_empty(self) -> None:
        """Wait until no process runs on this host. Fails with the remaining processes after the time-out."""
        wait_until(lambda: not self.processes(), self.processes)

    @contextlib.contextmanager
    def bind(self, source: Path, target: Path) -> Iterator[None]:
        """Replace `target` by `source`, on this host only."""
        (daemon,) = psutil.Process(self.sshd.pid).children()
        enter = ["nsenter", "-t", str(daemon.pid), "-m", "-p"]  # -p: umount reads its own entry in /proc
        _run(*enter, "mount", "--bind", str(source), str(target))
        try:
            yield
        finally:
            _run(*enter, "umount", "-l", str(target))

    def set_link(self, state: str) -> None:
        """Set the network link of this host `up` or `down`."""
        _run("ip", "link", "set", self.link, state)


@dataclass
class Hosts:
    """Hosts `a` and `b`, and the environment with which `ssh` and `pdsh` reach the hosts."""

    a: Host
    b: Host
    environ: dict[str, str]
    folder: Path

    def hostfile(self, path: Path, slots: int = 1) -> Path:
        path.write_text("".join(f"{host.address} slots={slots}\n" for host in (self.a, self.b)))
        return path

    def wait_until_empty(self) -> None:
        for host in (self.a, self.b):
            host.wait_until_empty()


def _write_keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "client").write_text(_CLIENT.format(folder=folder))
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    (bin_folder / "ssh").chmod(0o755)


def end_with_parent() -> None:
    """Make the kernel kill a daemon when the test process ends, even if it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _start(name: str, number: int, pair: int, folder: Path, stack: contextlib.ExitStack, *, own_name: bool) -> Host:
    namespace, link, address = f"ds{pair}{name}", f"dv{pair}{name}", f"{_network(pair)}.{number}"
    add_host(namespace, f"net{name}", address, link=link, bridge=_bridge(pair), stack=stack)
    stack.callback(_end_all, namespace)
    config = folder / f"sshd_{name}"
    config.write_text(_SSHD.format(folder=folder, name=name))
    # The host also has its own mount and PID namespaces: its processes end with sshd, and sshd ends with `unshare`.
    command = ["ip", "netns", "exec", namespace, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
               *(["--uts", "sh", "-c", f'hostname {namespace}; exec "$0" "$@"'] if own_name else []),
               shutil.which("sshd", path=PATH) or "sshd", "-D", "-e", "-f", str(config)]
    with (folder / f"sshd_{name}.log").open("wb") as log:
        sshd = subprocess.Popen(command, stderr=log, preexec_fn=end_with_parent)
    stack.callback(sshd.wait)
    stack.callback(sshd.kill)
    return Host(name, address, namespace, link, sshd)


def _end_all(namespace: str) -> None:
    """Kill all processes in a namespace. Only these tests start processes there."""
    for word in subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(word), signal.SIGKILL)


def _bridge(pair: int) -> str:
    return f"dsbr{pair}"


def _free_pair() -> int:
    """Return a number for the names of bridge and network that no other test run on this machine uses."""
    used = _run("ip", "-o", "addr") + _run("ip", "netns", "list")
    while True:
        pair = random.SystemRandom().randrange(500)
        if f"{_network(pair)}." not in used and f"ds{pair}a" not in used:
            return pair


def _network(pair: int) -> str:
    """Return a network of 198.18.0.0/15, which is reserved for tests."""
    return f"198.{18 + pair // 250 % 2}.{pair % 250}"


@contextlib.contextmanager
def two_hosts(folder: Path, *, own_names: bool = False) -> Iterator[Hosts]:
    """Start two hosts that accept ssh, and remove the hosts at the end. Needs root. Skips without namespaces.

    `own_names`: each host is named as its namespace, instead of as this machine.
    """
    need_packages("simulated ssh hosts", PACKAGES)
    pair = _free_pair()
    with contextlib.ExitStack() as stack:
        try:
            _run("ip", "link", "add", _bridge(pair), "type", "bridge")
            stack.callback(subprocess.run, ["ip", "link", "del", _bridge(pair)], capture_output=True)
            _run("ip", "addr", "add", f"{_network(pair)}.254/24", "dev", _bridge(pair))
            _run("ip", "link", "set", _bridge(pair), "up")
            Path("/run/sshd").mkdir(exist_ok=True)
            _write_keys(folder)
            hosts = [_start(name, number, pair, folder, stack, own_name=own_names)
                     for number, name in enumerate("ab", 1)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine cannot create network namespaces: {error.cmd}: {error.stderr.strip()}")
        scripts = [str(folder / "bin"), str(Path(sys.executable).parent)]
        environ = {**os.environ, "PATH": os.pathsep.join([*scripts, PATH]), "OMP_NUM_THREADS": "1",
                   "DS_ACCELERATOR": "cpu", "VENV": str(Path(sys.executable).parents[1])}
        for host in hosts:
            wait_until(partial(_accepts_ssh, host, environ), partial(str, host))
        yield Hosts(hosts[0], hosts[1], environ, folder)


def _accepts_ssh(host: Host, environ: dict[str, str]) -> bool:
    return subprocess.run(["ssh", host.address, "true"], env=environ, capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Start hosts a and b for all tests of the session."""
    with two_hosts(tmp_path_factory.mktemp("ssh_hosts")) as both:
        yield both
