"""Launch a run, or a subcommand, on the hosts of a hostfile (launch/cluster.sh, `ds-pretrain --hostfile`).

This module checks the hosts and the run, writes RUN/.deepspeed_env and runs `deepspeed`. When a host fails, it ends the
ranks on all hosts.
"""

import argparse
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.active_extensions import around_run, secret_variables
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.cli import OWNED, run_main, say
from pretrain.cluster.fewer_hosts import (
    HOST_FILTERS,
    LeftOut,
    batch_flags,
    check_batch,
    choose_without,
    hosts_to_leave_out,
    is_one_of,
    record_start,
)
from pretrain.cluster.hosts.hostfile import hosts_from_flags
from pretrain.cluster.hosts.multihost_job import MultihostJob, run_job
from pretrain.cluster.hosts.preflight import (
    ROOT,
    HostFacts,
    PreflightRequest,
    check_hosts,
    preflight_request,
    words_request,
)
from pretrain.cluster.hosts.rank_environment import (
    launcher_environment,
    quote_variables,
    rank_variables,
    user_variables,
    write_environment,
)
from pretrain.cluster.hosts.remote import Transport, local_transport, srun_transport, ssh_options, ssh_transport
from pretrain.cluster.hosts.rendezvous import PORT_OFFSET, join_rendezvous
from pretrain.cluster.launcher_flags import LAUNCHER_PROGRAMS, launcher_parser, split_command_line
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import Device, cpu_device, detect_device
from pretrain.distributed.process import PROGRAM
from pretrain.distributed.world import DEFAULT_MASTER_PORT, world_from_environment
from pretrain.errors import REJECTED, ConfigError, counted
from pretrain.extension import LAUNCHER
from pretrain.memory.plan_remarks import plan_remarks
from pretrain.monitor.read_run_folder import newest_start
from pretrain.resilience.launcher_watch import launcher_variable
from pretrain.resilience.run_lock import reject_second_start

_TRAIN = str(ROOT / "pretrain" / "train.py")
_DEBIAN_PACKAGES = {"pdsh": "pdsh", "openmpi": "openmpi-bin", "mpich": "mpich", "slurm": "slurm-client"}
# what DeepSpeed puts into a shell command without quotes (0.19.8: launcher/multinode_runner.py); pdsh replaces %
_NEEDS_NO_QUOTES_IN_DEEPSPEED = re.compile(r"[\w@+=:,./~-]+")


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the run and return its exit code. Raises ConfigError."""
    launcher_words, train = split_command_line(sys.argv[1:] if argv is None else argv)
    flags = launcher_parser("cluster.sh").parse_args(launcher_words)
    if not flags.hostfile:
        raise ConfigError("command line", problem="--hostfile is missing",
                          remedy="give --hostfile HOSTS, a file with a line `NAME slots=RANKS` for each host; "
                                 "to run on this host alone, use ds-pretrain")
    check_outer_launcher(flags)
    return launch_on_hosts(flags, train)


def check_outer_launcher(flags: argparse.Namespace) -> None:
    """Raise ConfigError if another launcher started this process as one of several ranks.

    With --no_ssh, it may start this command once on each host. Then --node_rank is the rank by default.
    """
    world = world_from_environment(os.environ)
    if world.size == 1:
        return
    if not flags.no_ssh:
        raise ConfigError("ds-pretrain", problem="another launcher started this process as "
                                                 f"rank {world.rank} of {world.size}, but ds-pretrain starts all ranks",
                          remedy="let that launcher start `python -m pretrain.train` instead")
    if world.local_size > 1:
        raise ConfigError("--no_ssh", problem="this command was started "
                          f"{world.local_size} times on this host", remedy="start it once on each host: srun "
                          "--ntasks-per-node=1, mpirun --map-by ppr:1:node (MPICH: -ppn 1)")
    if flags.node_rank < 0:
        flags.node_rank = world.rank


def launch_on_hosts(flags: argparse.Namespace, train: Sequence[str]) -> int:
    """Check the hosts and the run, then run it on all hosts. Returns its exit code. Raises ConfigError."""
    args, left_out = parse_arguments(list(train)), dict[str, LeftOut]()
    if flags.exclude_stragglers:
        left_out = _without_slow_hosts(flags, Path(args.save))
    slots = hosts_from_flags(flags)
    if left_out:
        train = [*train, *batch_flags(sum(map(len, slots.values())), newest_start(Path(args.save)))]
        args = parse_arguments(list(train))
    _check_launcher(flags, slots)
    flags.master_port = flags.master_port or int(DEFAULT_MASTER_PORT)
    if not flags.check_only:
        reject_second_start(Path(args.save))
    if flags.no_ssh and flags.node_rank > 0:
        os.environ[OWNED] = "1"  # by the command of the first host
    folder = Path.cwd()
    user = {name: value for name, value in user_variables(os.environ, [Path.home(), folder], flags.launcher).items()
            if name not in secret_variables(args)}
    if not flags.no_ssh:
        _check_shell_words(flags, folder)
    transport = host_transport(flags)
    ranks = {host: len(numbers) for host, numbers in slots.items()}
    request = preflight_request(args, train, folder)
    if flags.no_ssh:
        return _run_without_ssh(flags, train, ranks, user, request, args)
    facts = check_hosts(transport, ranks, request)
    start = _validate_run(args, facts, ranks)
    print("\n".join(_host_table(facts, ranks)), flush=True)
    if flags.check_only:
        _say_remarks(start, facts, ranks)
        return 0
    if flags.exclude_stragglers:
        record_start(Path(args.save), ranks, left_out)
    job = MultihostJob(secrets.token_hex(8), ranks, list(slots), transport, flags.grace)
    with around_run(args, LAUNCHER) as report:
        user |= {name: os.environ[name] for name in (OWNED,) if name in os.environ}
        code = _run_from_this_host(flags, [_TRAIN, *train], facts, user, job, folder / args.save)
        report(code)
    return code


def _without_slow_hosts(flags: argparse.Namespace, run: Path) -> dict[str, LeftOut]:
    """Exclude the slow hosts from the flags, as long as half of the hosts remain. Returns them. Raises ConfigError."""
    for name in ("no_ssh", *HOST_FILTERS):
        if name != "exclude_stragglers" and getattr(flags, name) not in ("", -1, False):
            raise ConfigError(f"--{name}", problem="this flag cannot be combined with --exclude_stragglers",
                              remedy="list in the hostfile exactly the hosts and slots to use")
    hosts = {host: len(numbers) for host, numbers in hosts_from_flags(flags).items()}
    slow = hosts_to_leave_out(run, hosts)
    if not slow:
        return {}
    previous = newest_start(run)
    left_out = choose_without(hosts, slow, min_hosts=(len(hosts) + 1) // 2, print_line=say,
                              check=lambda rest: check_batch(rest, previous))
    flags.exclude = "@".join(left_out)
    if is_one_of(flags.master_addr, left_out):
        flags.master_addr = ""  # the first remaining host
    return left_out


def launch_command_on_hosts(flags: argparse.Namespace, name: str, words: Sequence[str]) -> int:
    """Check the hosts, then run a subcommand with its flags on all hosts. Returns its exit code. Raises ConfigError."""
    for flag in ("check_only", "no_ssh", "exclude_stragglers"):
        if getattr(flags, flag):
            raise ConfigError(f"--{flag}", problem=f"it is for runs, not for {name}", remedy=f"leave --{flag} out")
    slots, folder = hosts_from_flags(flags), Path.cwd()
    _check_launcher(flags, slots)
    _check_shell_words(flags, folder)
    flags.master_port = flags.master_port or int(DEFAULT_MASTER_PORT)
    transport, ranks = host_transport(flags), {host: len(numbers) for host, numbers in slots.items()}
    facts = check_hosts(transport, ranks, words_request(words, folder))
    job = MultihostJob(secrets.token_hex(8), ranks, list(slots), transport, flags.grace)
    user = user_variables(os.environ, [Path.home(), folder], flags.launcher)
    with tempfile.TemporaryDirectory() as no_run:  # the launcher writes its files here
        return _run_from_this_host(flags, [PROGRAM, name, *words], facts, user, job,
                                   Path(no_run))


def host_transport(flags: argparse.Namespace) -> Transport:
    """Return how commands are run on the hosts, for these flags of the launcher."""
    return srun_transport if flags.launcher == "slurm" else ssh_transport(flags.ssh_port)


def _validate_run(args: RunArguments, facts: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> Start:
    """Validate the run here, before the ranks start and validate it again. Raises ConfigError."""
    return check_start(args, world_size=sum(ranks.values()), device=_device_of(facts))


def _say_remarks(start: Start, facts: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> None:
    for kind, remark in plan_remarks(start.plan_to_run, _device_of(facts), warnings=start.warnings,
                                     ranks_per_host=max(ranks.values())):
        say(f"{kind}: {remark}")


def _device_of(facts: Mapping[str, HostFacts]) -> Device:
    """Return the device of the hosts: this host's GPU, a CPU if no host has GPUs, or an assumed GPU.

    If only other hosts have GPUs, assume that these support fp16 and bf16.
    """
    if not any(found.gpus for found in facts.values()):
        return cpu_device()
    here = detect_device()
    return here if here.kind == "cuda" else Device("cuda", fp16=True, bf16=True, memory_bytes=0)


def _check_launcher(flags: argparse.Namespace, slots: Mapping[str, list[int]]) -> None:
    """Raise ConfigError if the chosen --launcher is not installed or does not support the chosen slots."""
    launcher = flags.launcher
    if flags.no_ssh:
        if not flags.master_addr:
            raise ConfigError("--no_ssh", problem="--master_addr is missing",
                              remedy="give --master_addr, the address of the first host")
        return
    if shutil.which(LAUNCHER_PROGRAMS[launcher]) is None:
        raise ConfigError(f"--launcher {launcher}",
                          problem=f"the program {LAUNCHER_PROGRAMS[launcher]} is not installed on this host",
                          remedy=f"sudo apt-get install {_DEBIAN_PACKAGES[launcher]}")
    if launcher != "pdsh" and any(numbers != list(range(len(numbers))) for numbers in slots.values()):
        raise ConfigError(f"--launcher {launcher}",
                          problem="this launcher can use only the first slots of a host, without a gap",
                          remedy="use --launcher pdsh, or choose slots 0 to N-1 of each host")


def _check_shell_words(flags: argparse.Namespace, folder: Path) -> None:
    """Reject paths and flags that the shell of a host would split or execute. Raises ConfigError."""
    words = {"working folder": str(folder), "Python": sys.executable, "package": str(ROOT)}
    words |= {f"--{name}": getattr(flags, name) for name in ("master_addr", "venv_script", "enable_each_rank_log")
              if getattr(flags, name)}
    for where, word in words.items():
        if not _NEEDS_NO_QUOTES_IN_DEEPSPEED.fullmatch(word) or word.startswith(("-", "~")):
            raise ConfigError(where, problem=f"DeepSpeed passes {word!r} to the hosts' shells without quotes",
                              remedy="use a path without spaces and without characters that a shell interprets"
                              if where != "--master_addr" else "give a host name or an address")


def _host_table(facts: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> list[str]:
    """Return one line for each host."""
    width = max(map(len, facts))
    return [f"{host:<{width}}  {counted(ranks[host], 'rank')}, {found.cores} cores, {found.gpus} GPUs"
            + (f", {found.interface[0]} {found.interface[1]}" if found.interface else "")
            for host, found in facts.items()]


def _run_from_this_host(flags: argparse.Namespace, program: Sequence[str], facts: Mapping[str, HostFacts],
                        user: Mapping[str, str], job: MultihostJob, run: Path) -> int:
    """Run `deepspeed` on this host, which starts the ranks on all hosts. Returns the exit code of the run.

    `program`: file and flags of the ranks. `run`: folder for files of the launcher.
    """
    first = next(iter(job.ranks))
    interface = facts[first].interface
    address = flags.master_addr or (interface[1] if interface else first)
    variables = {**rank_variables(facts, job.ranks, user, job.name), **launcher_variable()}
    if flags.launcher != "pdsh":
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(flags.master_port)}
    names = variables.get("NCCL_SOCKET_IFNAME", "")
    variables = quote_variables(flags.launcher, variables, os.environ)
    environ = launcher_environment({"DS_ENV_FILE": str(write_environment(run, variables))})
    hostfile = Path(flags.hostfile).absolute()
    if flags.launcher != "pdsh":
        # The other launchers ignore --include and --exclude: give them a file with the chosen hosts only.
        hostfile = run.absolute() / ".hostfile"
        hostfile.write_text("".join(f"{host} slots={number}\n" for host, number in job.ranks.items()))
    environ["PDSH_SSH_ARGS_APPEND"] = " ".join([environ.get("PDSH_SSH_ARGS_APPEND", ""), *ssh_options()]).strip()
    command = deepspeed_command(flags, program, hostfile=hostfile, master_addr=address,
                                interface=names)
    return run_job(command, environ, job)


def _run_without_ssh(flags: argparse.Namespace, train: Sequence[str], ranks: Mapping[str, int],
                     user: Mapping[str, str], request: PreflightRequest, args: RunArguments) -> int:
    """Run the ranks of this host (--no_ssh); this command runs on every host. Returns the exit code."""
    hosts = tuple(ranks)
    rendezvous = join_rendezvous(hosts, flags.node_rank, flags.master_addr, flags.master_port + PORT_OFFSET, flags.meet)
    host = hosts[flags.node_rank]
    code = REJECTED
    try:
        facts, job_name = rendezvous.check_hosts(ranks, request)
        if flags.node_rank == 0:
            print("\n".join(_host_table(facts, ranks)), flush=True)
        start = _validate_run(args, facts, ranks)
        code = 0
        if flags.check_only and flags.node_rank == 0:
            _say_remarks(start, facts, ranks)
        if not flags.check_only:
            job = MultihostJob(job_name, ranks, [host], local_transport, flags.grace)
            variables = {**rank_variables({host: facts[host]}, ranks, user, job_name), **launcher_variable()}
            command = deepspeed_command(flags, [_TRAIN, *train], hostfile=Path(flags.hostfile).absolute(),
                                        master_addr=flags.master_addr, interface="")
            with around_run(args, LAUNCHER) as report:
                code = run_job(command, launcher_environment(variables), job, rendezvous.listen)
                report(code)
    finally:
        rendezvous.leave(code, flags.grace)
    return code


def deepspeed_command(flags: argparse.Namespace, program: Sequence[str], *, hostfile: Path, master_addr: str,
                      interface: str) -> list[str]:
    """Return the command line of plain `deepspeed`. The hosts have been checked, so it gets --no_ssh_check."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile), "--no_ssh_check",
               "--master_addr", master_addr, "--master_port", str(flags.master_port),
               "--launcher", flags.launcher, "--log_level", flags.log_level or "warning"]
    command += ["--no_ssh", "--node_rank", str(flags.node_rank)] if flags.no_ssh else ["--force_multi"]
    launcher_args = flags.launcher_args
    if flags.launcher == "pdsh":
        for name in ("include", "exclude", "num_nodes", "num_gpus"):
            value = getattr(flags, name)
            command += [f"--{name}", str(value)] if value not in ("", -1) else []
    elif flags.launcher == "slurm":
        launcher_args = f"--kill-on-bad-exit=1 {launcher_args}"
    elif flags.launcher == "openmpi" and "btl_tcp_if_include" not in launcher_args and interface:
        launcher_args = f"--mca btl_tcp_if_include {interface} {launcher_args}"  # instead of DeepSpeed's eth0
    command += [f"--launcher_args={launcher_args}"] if launcher_args else []
    for name in ("venv_script", "enable_each_rank_log", "bind_core_list"):
        command += [f"--{name}", getattr(flags, name)] if getattr(flags, name) else []
    command += ["--ssh_port", str(flags.ssh_port)] if flags.ssh_port else []
    command += ["--bind_cores_to_rank"] if flags.bind_cores_to_rank else []
    file, *words = program
    return [*command, file, *(map(quote_for_pdsh, words) if flags.launcher == "pdsh" and not flags.no_ssh else words)]


def quote_for_pdsh(word: str) -> str:
    """Quote a word, so that DeepSpeed's own quoting, pdsh and the host's shell leave it unchanged.

    pdsh replaces %h, %n and %u, and turns %% into %. DeepSpeed quotes only words with a space.
    """
    word = word.replace("%", "%%")
    if " " in word:  # DeepSpeed puts the word in double quotes, and a backslash before each " of the word
        return re.sub(r"([\\$`])", r"\\\1", word)
    return shlex.quote(word)


if __name__ == "__main__":
    run_main(main)
