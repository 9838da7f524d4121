"""`ds-pretrain`: check a run, then start DeepSpeed's launcher for it, on this host or on those of a hostfile.

    ds-pretrain --num_gpus 2 --config run.yaml
    ds-pretrain --hostfile hosts pretrain/train.py --config run.yaml

The flags are those of the `deepspeed` command (cluster/flags.py), followed by those of pretrain/train.py. Errors are
reported before torch or DeepSpeed is imported: `deepspeed` itself imports both twice before a rank reads its flags.
"""

import argparse
import base64
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from pretrain.checkpoint.load.resume import choose_resume
from pretrain.cli import run_main, say
from pretrain.cluster.hosts.hostfile import choose_hosts
from pretrain.cluster.hosts.rank_environment import launcher_environment
from pretrain.cluster.launcher_flags import NO_HOSTFILE, command_line, split_words
from pretrain.cluster.multihost_launch import chosen_hosts, launch_on_hosts
from pretrain.cluster.supervise.processes import ask_to_save, descendants, end_descendants
from pretrain.config.arguments import parse_arguments
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device, detect_device, nvidia_smi
from pretrain.distributed.process import ROOT, free_port, port_is_free
from pretrain.distributed.world import world_from_environment
from pretrain.errors import ConfigError

_LOCAL = "localhost"
_FOR_HOSTS = ("master_addr", "launcher", "launcher_args", "ssh_port", "no_ssh", "node_rank", "force_multi",
              "venv_script", "meet", "grace")
_POLL_S, _TERM_S = 0.5, 5.0
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


def program() -> None:
    """Entry point of the console script."""
    run_main(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the run's exit code. Raises ConfigError."""
    words, train = split_words(sys.argv[1:] if argv is None else argv)
    parser = command_line("ds-pretrain")
    flags = parser.parse_args(words)
    if not train:
        raise ConfigError("command line", found="no flags of pretrain/train.py",
                          expected="ds-pretrain --num_gpus RANKS --config run.yaml", remedy="--help lists the flags")
    world = world_from_environment(os.environ)
    if world.size > 1:
        raise ConfigError("ds-pretrain", found=f"rank {world.rank} of {world.size}, started by another launcher",
                          expected="one process, which starts all ranks",
                          remedy="let that launcher start `python pretrain/train.py` instead")
    if flags.hostfile is None and Path(NO_HOSTFILE).is_file():
        flags.hostfile = NO_HOSTFILE
    if flags.hostfile is not None and (flags.force_multi or flags.no_ssh or not _is_this_host(chosen_hosts(flags))):
        return launch_on_hosts(flags, train)
    for name in _FOR_HOSTS:
        if getattr(flags, name) != parser.get_default(name):
            found = "no --hostfile" if flags.hostfile is None else f"{flags.hostfile}, which names this host alone"
            raise ConfigError(f"--{name}", found=found, expected="other hosts, which this flag is for",
                              remedy=f"leave --{name} out, or give a --hostfile of several hosts")
    return _launch_here(flags, train)


def _is_this_host(slots: dict[str, list[int]]) -> bool:
    return len(slots) == 1 and next(iter(slots)) in (_LOCAL, "127.0.0.1", socket.gethostname())


def _launch_here(flags: argparse.Namespace, train: Sequence[str]) -> int:
    device = detect_device()
    slots = next(iter(chosen_hosts(flags).values())) if flags.hostfile else local_slots(flags, device)
    args = parse_arguments(list(train))
    choose_resume(check_run(args, world_size=len(slots), device=device))
    port = _port(flags.master_port)
    if flags.check_only:
        return 0
    say(f"{len(slots)} rank{'s' * (len(slots) > 1)} on this host, port {port}; starting DeepSpeed's launcher")
    threads = max(1, len(os.sched_getaffinity(0)) // len(slots))
    variables = {"DS_ACCELERATOR": device.kind, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return run_launcher(_command(flags, slots, port, train), launcher_environment(variables))


def local_slots(flags: argparse.Namespace, device: Device) -> list[int | str]:
    """Devices of this host's ranks, as CUDA_VISIBLE_DEVICES names them; on CPUs numbers from 0. Raises ConfigError."""
    if flags.num_nodes > 1:
        raise ConfigError("--num_nodes", found=f"{flags.num_nodes}, without --hostfile", expected="a file of the hosts",
                          remedy="--hostfile HOSTS, a line `NAME slots=RANKS` for each host")
    if flags.num_gpus == 0 or flags.num_gpus < -1:
        raise ConfigError("--num_gpus", found=flags.num_gpus, expected="at least 1")
    visible = [int(word) if word.isdecimal() else word
               for word in map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) if word]
    if device.kind != "cuda":
        slots: list[int | str] = list(range(max(flags.num_gpus, _numa_nodes())))
    elif visible and not (flags.include or flags.exclude):
        slots = visible
    else:
        slots = list(range(_gpus() or max(flags.num_gpus, 1)))
    if flags.num_gpus > len(slots):
        raise ConfigError("--num_gpus", found=flags.num_gpus, expected=f"at most {len(slots)}, the GPUs of this host"
                          + " in CUDA_VISIBLE_DEVICES" * (slots is visible))
    chosen = choose_hosts({_LOCAL: len(slots)}, include=flags.include, exclude=flags.exclude, num_slots=flags.num_gpus)
    return [slots[number] for number in chosen[_LOCAL]]


def _gpus() -> int:
    """NVIDIA devices of this host; 0: unknown."""
    return len(nvidia_smi("index")) or len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()])


def _numa_nodes() -> int:
    """Number of NUMA nodes with cores: DeepSpeed starts a rank on each unless a flag gives the number."""
    files = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(file.read_text().strip()) for file in files))


def _port(wanted: int | None) -> int:
    """--master_port, MASTER_PORT of the environment, or any free one. Raises ConfigError where it is taken."""
    where, text = ("--master_port", wanted) if wanted is not None else ("MASTER_PORT", os.environ.get("MASTER_PORT"))
    if text is None:
        return free_port()
    port = int(text) if str(text).isdecimal() else 0
    if not 0 < port < 2**16:
        raise ConfigError(where, found=repr(text), expected="a port from 1 to 65535")
    if not port_is_free(port):
        raise ConfigError(where, found=f"{port}, which another program listens on", expected="a free port",
                          remedy=f"leave {where} out: then a free one is chosen")
    return port


def _command(flags: argparse.Namespace, slots: Sequence[int | str], port: int, train: Sequence[str]) -> list[str]:
    """Command of DeepSpeed's launcher for one host, which `deepspeed` would start after its own import of torch."""
    world = base64.urlsafe_b64encode(json.dumps({_LOCAL: slots}).encode()).decode()
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}",
               "--master_addr=127.0.0.1", f"--master_port={port}", f"--log_level={flags.log_level or 'critical'}"]
    command += ["--bind_cores_to_rank"] if flags.bind_cores_to_rank else []
    for name in ("bind_core_list", "enable_each_rank_log"):
        command += [f"--{name}={getattr(flags, name)}"] if getattr(flags, name) else []
    return [*command, str(ROOT / "pretrain" / "train.py"), *train]


def run_launcher(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run DeepSpeed's launcher to its end. Returns the exit code of the run.

    SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1: all ranks save and end. Before training begins, or at a later Ctrl-C,
    all end at once. The launcher is in a session of its own, where Ctrl-C cannot end it before its ranks have saved.
    """
    asked = False
    with _heard() as signals:
        launcher = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=_end_with_parent)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _reported(launcher.wait(_POLL_S))
            if not signals:
                continue
            number = signals.pop(0)
            if asked and number != signal.SIGINT:
                continue
            if asked or not ask_to_save(descendants()):
                say(f"{signal.Signals(number).name}: " + ("ended without a save" if asked else "ended before training"))
                end_descendants(grace_s=_TERM_S)
                return 128 + number
            asked = True


def _reported(code: int) -> int:
    """The launcher's exit code as a shell would show it. A killed rank could not report it itself."""
    number = -code if code < 0 else 256 - code if 224 < code < 255 else 0  # sys.exit(-9) of a rank's -9
    if number in set(signal.Signals):
        say(f"{'DeepSpeed launcher' if code < 0 else 'a rank'} ended by {signal.Signals(number).name}")
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """Let the launcher get SIGTERM when this process is killed: it ends its ranks, which would run on otherwise."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def _heard() -> Iterator[list[int]]:
    """Collect signals in order of arrival. One that this process was started to ignore (nohup) remains ignored."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
               if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    program()
