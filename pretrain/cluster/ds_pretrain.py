"""`ds-pretrain train`: validate a run, then start DeepSpeed's launcher on this host or on several hosts.

    ds-pretrain --num_gpus 2 --config run.yaml
    ds-pretrain --hostfile hosts pretrain/train.py --config run.yaml
    ds-pretrain --hostfile hosts evaluate runs/gpt2

The command accepts most flags of `deepspeed` (cluster/launcher_flags.py) and all flags of pretrain/train.py. It reports
errors before it imports torch or DeepSpeed. The `deepspeed` command and its launcher process both import torch and
DeepSpeed before a rank reads its flags.
"""

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pretrain.active_extensions import advice_on, around_run
from pretrain.checkpoint.load.start import check_start
from pretrain.cli import say
from pretrain.cluster.hosts.hostfile import choose_hosts, hosts_from_flags
from pretrain.cluster.hosts.launcher_process import SignalRecorder, become_subreaper, descendants, wait_for_launcher
from pretrain.cluster.hosts.probe import ask_to_save, end_all
from pretrain.cluster.hosts.rank_environment import launcher_environment
from pretrain.cluster.hosts.remote import LOCAL
from pretrain.cluster.launcher_flags import find_rank_command, launcher_parser, split_command_line
from pretrain.cluster.multihost_launch import check_outer_launcher, launch_command_on_hosts, launch_on_hosts
from pretrain.cluster.outcome import (
    classify_exit,
    ending_signal,
    file_sizes,
    read_patiently,
    read_progress,
    shell_exit_code,
)
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import Device, detect_device, nvidia_smi
from pretrain.distributed.process import PROGRAM, ROOT, free_port, port_is_free
from pretrain.distributed.tcp_store import secret_variable
from pretrain.errors import CRASHED, ConfigError, counted
from pretrain.extension import LAUNCHER
from pretrain.memory.plan_remarks import plan_remarks
from pretrain.resilience.launcher_watch import launcher_variable
from pretrain.resilience.run_lock import reject_second_start, release_of_dead_owner

_MULTIHOST_FLAGS = ("master_addr", "launcher", "launcher_args", "ssh_port", "no_ssh", "node_rank", "force_multi",
                    "venv_script", "meet", "grace", "exclude_stragglers")
_SIGTERM_GRACE_S = 5.0  # time between SIGTERM and SIGKILL


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the run and return its exit code. Raises ConfigError."""
    words = sys.argv[1:] if argv is None else argv
    command = find_rank_command(words)
    launcher_words, rest = (split_command_line(words) if command is None else
                            (words[:command[0]], words[command[0] + 1:]))
    parser = launcher_parser("ds-pretrain train")
    if {"-h", "--help"} & set(launcher_words):
        parser.print_help()
        print()
        parse_arguments(["--help"])
    flags = parser.parse_args(launcher_words)
    if command is None and not rest:
        raise ConfigError("command line", problem="the flags of the run are missing",
                          remedy="; ".join(["write for example `ds-pretrain --num_gpus RANKS --config run.yaml`",
                                            ", ".join([*advice_on("no run"), "and `ds-pretrain --help` lists the "
                                                       "subcommands"])]))
    check_outer_launcher(flags)
    forces_multihost = flags.force_multi or flags.no_ssh
    if flags.hostfile is not None and (forces_multihost or not _only_this_host(hosts_from_flags(flags))):
        return launch_on_hosts(flags, rest) if command is None else launch_command_on_hosts(flags, command[1], rest)
    for name in _MULTIHOST_FLAGS:
        if getattr(flags, name) != parser.get_default(name):
            raise ConfigError(f"--{name}", problem=f"this flag is for several hosts, but {_single_host_reason(flags)}",
                              remedy=f"remove --{name}, or give a --hostfile with several hosts")
    return launch_locally(flags, rest) if command is None else launch_command(flags, command[1], rest)


def _only_this_host(slots: dict[str, list[int]]) -> bool:
    """Return whether the run uses a single host, and this host is the one."""
    return len(slots) == 1 and next(iter(slots)) in (LOCAL, "127.0.0.1", socket.gethostname())


def _single_host_reason(flags: argparse.Namespace) -> str:
    """Return why the run uses this host alone, as the end of an error message."""
    return "there is no --hostfile" if flags.hostfile is None else f"{flags.hostfile} names only this host"


def launch_locally(flags: argparse.Namespace, train: Sequence[str]) -> int:
    """Validate the run, then run it on this host. Returns its exit code. Raises ConfigError."""
    device = detect_device()
    slots = _slots(flags, device)
    args = parse_arguments(list(train))
    if not flags.check_only:
        reject_second_start(Path(args.save))
    start = check_start(args, world_size=len(slots), device=device)
    if flags.check_only:
        for kind, remark in plan_remarks(start.plan_to_run, device, warnings=start.warnings):
            say(f"{kind}: {remark}")
        say(f"the run is valid on {_ranks(slots)}; it is not started, because of --check_only")
        return 0
    for kind, remark in plan_remarks(start.plan_to_run, device):
        if kind == "warning":  # the ranks print the others
            say(f"{kind}: {remark}")
    with around_run(args, LAUNCHER) as report:
        code = _start(flags, device, slots, [str(ROOT / "pretrain" / "train.py"), *train], Path(args.save))
        report(code)
    return code


def launch_command(flags: argparse.Namespace, name: str, words: Sequence[str]) -> int:
    """Run a subcommand with its flags on this host, on several ranks. Returns its exit code. Raises ConfigError."""
    if flags.check_only:
        raise ConfigError("--check_only", problem=f"it is for runs, not for {name}", remedy="leave --check_only out")
    program = [PROGRAM, name, *words]
    device = detect_device()
    with tempfile.TemporaryDirectory() as no_run:  # these programs write no rows of a run
        return _start(flags, device, _slots(flags, device), program, Path(no_run))


def _slots(flags: argparse.Namespace, device: Device) -> Sequence[int | str]:
    return next(iter(hosts_from_flags(flags).values())) if flags.hostfile else local_slots(flags, device)


def _ranks(slots: Sequence[int | str]) -> str:
    return f"{counted(len(slots), 'rank')} on this host"


def _start(flags: argparse.Namespace, device: Device, slots: Sequence[int | str], program: Sequence[str],
           run: Path) -> int:
    """Start the ranks of a program with DeepSpeed's launcher, and wait for them. Returns the exit code."""
    port = _master_port(flags.master_port)
    say(f"{_ranks(slots)}, port {port}; starting DeepSpeed's launcher")
    threads = max(1, len(os.sched_getaffinity(0)) // len(slots))
    variables = {"DS_ACCELERATOR": device.kind, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
                 **secret_variable()}
    return run_launcher(_launcher_command(flags, slots, port, program), launcher_environment(variables), run)


def local_slots(flags: argparse.Namespace, device: Device) -> list[int | str]:
    """Return the device of each rank: an index or a UUID, as in CUDA_VISIBLE_DEVICES; on CPUs, numbers from 0.

    Raises ConfigError.
    """
    if flags.num_nodes > 1:
        raise ConfigError("--num_nodes", problem=f"{flags.num_nodes} hosts need a --hostfile",
                          remedy="give --hostfile HOSTS, a file with a line `NAME slots=RANKS` for each host")
    if flags.num_gpus == 0 or flags.num_gpus < -1:
        raise ConfigError("--num_gpus", found=flags.num_gpus, expected="at least 1")
    visible = [int(word) if word.isdecimal() else word
               for word in map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) if word]
    if device.kind != "cuda":
        slots: list[int | str] = list(range(max(flags.num_gpus, _num_numa_nodes())))
    elif visible and not (flags.include or flags.exclude):
        slots = visible
    else:
        slots = list(range(_num_gpus() or max(flags.num_gpus, 1)))
    if flags.num_gpus > len(slots):
        where = " in CUDA_VISIBLE_DEVICES" if slots is visible else ""
        raise ConfigError("--num_gpus", found=flags.num_gpus,
                          expected=f"at most {len(slots)}, the GPUs of this host{where}")
    if flags.num_gpus != 1 and len(slots) > 1 and any(str(slot).startswith("MIG-") for slot in slots):
        raise ConfigError("CUDA_VISIBLE_DEVICES", problem="CUDA gives a program one MIG instance at most",
                          remedy="train on one with --num_gpus 1, or disable MIG: sudo nvidia-smi -mig 0")
    chosen = choose_hosts({LOCAL: len(slots)}, include=flags.include, exclude=flags.exclude, num_slots=flags.num_gpus)
    return [slots[number] for number in chosen[LOCAL]]


def _num_gpus() -> int:
    """Return the number of NVIDIA devices of this host, or 0 if it is unknown."""
    return len(nvidia_smi("index")) or len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()])


def _num_numa_nodes() -> int:
    """Return the number of NUMA nodes with cores. By default DeepSpeed starts one rank on each of these nodes."""
    files = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(file.read_text().strip()) for file in files))


def _master_port(flag: int | None) -> int:
    """Return --master_port, the variable MASTER_PORT, or any free port. Raises ConfigError if the port is in use."""
    where, text = ("--master_port", flag) if flag is not None else ("MASTER_PORT", os.environ.get("MASTER_PORT"))
    if text is None:
        return free_port()
    port = int(text) if str(text).isdecimal() else 0
    if not 0 < port < 2**16:
        raise ConfigError(where, found=repr(text), expected="a port from 1 to 65535")
    if not port_is_free(port):
        raise ConfigError(where, problem=f"another program listens on port {port}",
                          remedy=f"remove {where}: ds-pretrain then chooses a free port")
    return port


def _launcher_command(flags: argparse.Namespace, slots: Sequence[int | str], port: int,
                      program: Sequence[str]) -> list[str]:
    """Return the command of DeepSpeed's launcher for one host, which starts the ranks within 0.2 s.

    The `deepspeed` command would import torch and DeepSpeed, then start the same launcher, which would import them too.
    """
    world = base64.urlsafe_b64encode(json.dumps({LOCAL: slots}).encode()).decode()
    command = [sys.executable, "-u", str(ROOT / "pretrain" / "cluster" / "without_torch.py"),
               "deepspeed.launcher.launch", f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={port}",
               f"--log_level={flags.log_level or 'critical'}"]
    command += ["--bind_cores_to_rank"] if flags.bind_cores_to_rank else []
    for name in ("bind_core_list", "enable_each_rank_log"):
        command += [f"--{name}={getattr(flags, name)}"] if getattr(flags, name) else []
    return [*command, *program]


def run_launcher(command: Sequence[str], environ: dict[str, str], run: Path) -> int:
    """Run DeepSpeed's launcher and wait until it and its ranks have ended. Returns the exit code of the run.

    On SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 all ranks save and stop. If training has not begun, all ranks end at
    once. A second signal changes nothing, a third one ends all ranks at once. The launcher runs in a session of its
    own: otherwise Ctrl-C would end the launcher before its ranks have saved. The ranks watch this process.

    If the launcher gets a signal or is killed, the ranks save, too. `run`: the run folder, which shows that they have.
    """
    sizes_before = read_patiently(run, lambda: file_sizes(run), otherwise=None)
    become_subreaper()
    with SignalRecorder() as signals:
        launcher = subprocess.Popen(command, env={**environ, **launcher_variable()}, start_new_session=True)
        code = wait_for_launcher(launcher, lambda: signals.must_end(
            lambda number: ask_to_save(descendants(), number)))
        if code is not None:
            return _exit_code(code, run, sizes_before)
        end_all(descendants, grace_s=_SIGTERM_GRACE_S)
        release_of_dead_owner(run)
        return 128 + signals.ended_by


def _exit_code(code: int, run: Path, sizes_before: dict[str, int] | None) -> int:
    """Return the exit code of the run. `code`: the launcher's, which is 1 after a signal to the launcher.

    `sizes_before`: of the run's files at its start; None: they could not be read.
    """
    if (code < 0 or 224 < code < 255) and (name := ending_signal(code)):
        say(f"{name} ended {'the launcher' if code < 0 else 'a rank'}")
    if sizes_before is not None and (code < 0 or code == CRASHED):  # no other code depends on the files of the run
        progress = read_patiently(run, lambda: read_progress(run, sizes_before), otherwise=None)
        if progress is not None and progress.stop is not None:
            return classify_exit(code, progress, last_step=None)[0]
    return shell_exit_code(code)
