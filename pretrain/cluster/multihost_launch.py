"""launch/cluster.sh: hostfile -> hosts, checked -> RUN/.deepspeed_env -> `deepspeed` -> one end for all hosts."""

import argparse
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.checkpoint.load.resume import choose_resume
from pretrain.cli import run_main
from pretrain.cluster.hosts.hostfile import choose_hosts, read_hostfile
from pretrain.cluster.hosts.multihost_job import Job, run_job
from pretrain.cluster.hosts.preflight import ROOT, Facts, Question, examine_hosts, question_of
from pretrain.cluster.hosts.rank_environment import (
    launcher_environment,
    own_variables,
    run_variables,
    write_environment,
)
from pretrain.cluster.hosts.remote import by_srun, by_ssh, here, ssh_options
from pretrain.cluster.hosts.rendezvous import PORT_OFFSET, join
from pretrain.cluster.launcher_flags import LAUNCHERS, command_line, split_words
from pretrain.config.arguments import RunArguments, parse_arguments
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device, cpu_device, detect_device
from pretrain.distributed.world import DEFAULT_MASTER_PORT
from pretrain.errors import REJECTED, ConfigError

_PACKAGES = {"pdsh": "pdsh", "openmpi": "openmpi-bin", "mpich": "mpich", "slurm": "slurm-client"}  # Debian's
_PLAIN = re.compile(r"[\w@%+=:,./-]+")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the run's exit code. Raises ConfigError."""
    words, train = split_words(sys.argv[1:] if argv is None else argv)
    flags = command_line("launch/cluster.sh").parse_args(words)
    if not flags.hostfile:
        raise ConfigError("command line", found="no --hostfile", expected="--hostfile HOSTS, a line `NAME slots=RANKS` "
                          "for each host", remedy="ds-pretrain starts a run on this host alone")
    return launch_on_hosts(flags, train)


def chosen_hosts(flags: argparse.Namespace) -> dict[str, list[int]]:
    """Host -> the slots that take part. Raises ConfigError."""
    return choose_hosts(read_hostfile(flags.hostfile), include=flags.include, exclude=flags.exclude,
                        num_nodes=flags.num_nodes, num_slots=flags.num_gpus)


def launch_on_hosts(flags: argparse.Namespace, train: Sequence[str]) -> int:
    """Check the hosts and the run, and start the run on all of them. Returns its exit code. Raises ConfigError."""
    slots = chosen_hosts(flags)
    _check_launcher(flags, slots)
    flags.master_port = flags.master_port or int(DEFAULT_MASTER_PORT)
    args = parse_arguments(list(train))
    folder = Path.cwd()
    own = own_variables(os.environ, [Path.home(), folder])
    reach = by_srun if flags.launcher == "slurm" else by_ssh(flags.ssh_port)
    ranks = {host: len(numbers) for host, numbers in slots.items()}
    question = question_of(args, train, folder)
    if flags.no_ssh:
        return _start_here(flags, train, slots, own, question, args)
    facts = examine_hosts(reach, ranks, question)
    _check_run(args, facts, ranks)
    print("\n".join(_table(facts, ranks)), flush=True)
    if flags.check_only:
        return 0
    job = Job(secrets.token_hex(8), ranks, list(slots), reach, flags.grace)
    return _start(flags, train, facts, slots, own, job, folder / args.save)


def _check_run(args: RunArguments, facts: Mapping[str, Facts], ranks: Mapping[str, int]) -> None:
    """Reject on this host what each rank would reject after DeepSpeed's launcher has started. Raises ConfigError."""
    choose_resume(check_run(args, world_size=sum(ranks.values()), device=_device_of(facts)))


def _device_of(facts: Mapping[str, Facts]) -> Device:
    """The device of the hosts. Where this host lacks it, fp16 and bf16 are assumed to work on it."""
    if not any(found.gpus for found in facts.values()):
        return cpu_device()
    here = detect_device()
    return here if here.kind == "cuda" else Device("cuda", fp16=True, bf16=True, memory_bytes=0)


def _check_launcher(flags: argparse.Namespace, slots: Mapping[str, list[int]]) -> None:
    launcher = flags.launcher
    if flags.no_ssh:
        if not flags.master_addr:
            raise ConfigError("--no_ssh", found="no --master_addr", expected="the address of the first host")
        return
    if shutil.which(LAUNCHERS[launcher]) is None:
        raise ConfigError(f"--launcher {launcher}", found=f"no {LAUNCHERS[launcher]} on this host", expected="it",
                          remedy=f"sudo apt-get install {_PACKAGES[launcher]}")
    if launcher != "pdsh" and any(numbers != list(range(len(numbers))) for numbers in slots.values()):
        raise ConfigError(f"--launcher {launcher}", found="chosen slots of a host", expected="whole hosts",
                          remedy="--launcher pdsh can choose slots")


def _table(facts: Mapping[str, Facts], ranks: Mapping[str, int]) -> list[str]:
    """A line a host."""
    width = max(map(len, facts))
    return [f"{host:<{width}}  {ranks[host]} rank{'s' * (ranks[host] > 1)}, {found.cores} cores, {found.gpus} GPUs"
            + (f", {found.interface[0]} {found.interface[1]}" if found.interface else "")
            for host, found in facts.items()]


def _start(flags: argparse.Namespace, train: Sequence[str], facts: Mapping[str, Facts],
           slots: Mapping[str, list[int]], own: Mapping[str, str], job: Job, run: Path) -> int:
    ranks = {host: len(numbers) for host, numbers in slots.items()}
    first = next(iter(slots))
    interface = facts[first].interface
    address = flags.master_addr or (interface[1] if interface else first)
    variables = run_variables(facts, ranks, own, job.name)
    if flags.launcher != "pdsh":
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(flags.master_port)}
    environ = launcher_environment({"DS_ENV_FILE": str(write_environment(run, variables))})
    hostfile = Path(flags.hostfile).absolute()
    if flags.launcher != "pdsh":
        hostfile = run.absolute() / ".hostfile"  # the other launchers know no filters
        hostfile.write_text("".join(f"{host} slots={number}\n" for host, number in ranks.items()))
    environ["PDSH_SSH_ARGS_APPEND"] = " ".join([environ.get("PDSH_SSH_ARGS_APPEND", ""), *ssh_options()]).strip()
    command = deepspeed_command(flags, train, hostfile=hostfile, master_addr=address,
                                interface=variables.get("NCCL_SOCKET_IFNAME", ""))
    return run_job(command, environ, job)


def _start_here(flags: argparse.Namespace, train: Sequence[str], slots: Mapping[str, list[int]],
                own: Mapping[str, str], question: Question, args: RunArguments) -> int:
    """--no_ssh: this host's ranks alone, in step with the launchers of the others."""
    ranks, hosts = {host: len(numbers) for host, numbers in slots.items()}, tuple(slots)
    met = join(hosts, flags.node_rank, flags.master_addr, flags.master_port + PORT_OFFSET, flags.meet)
    facts, name = met.compare(ranks, question)
    host = hosts[flags.node_rank]
    if flags.node_rank == 0:
        print("\n".join(_table(facts, ranks)), flush=True)
    code = REJECTED
    try:
        _check_run(args, facts, ranks)
        code = 0
        if not flags.check_only:
            job = Job(name, ranks, [host], here, flags.grace)
            environ = launcher_environment(run_variables({host: facts[host]}, ranks, own, name))
            command = deepspeed_command(flags, train, hostfile=Path(flags.hostfile).absolute(),
                                        master_addr=flags.master_addr, interface="")
            code = run_job(command, environ, job, met.listen)
    finally:
        met.leave(code, flags.grace)
    return code


def deepspeed_command(flags: argparse.Namespace, train: Sequence[str], *, hostfile: Path, master_addr: str,
                      interface: str) -> list[str]:
    """The words of plain `deepspeed`, for hosts that have been checked."""
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
        launcher_args = f"--mca btl_tcp_if_include {interface} {launcher_args}"  # DeepSpeed would say eth0
    command += [f"--launcher_args={launcher_args}"] if launcher_args else []
    for name in ("venv_script", "enable_each_rank_log", "bind_core_list"):
        command += [f"--{name}", getattr(flags, name)] if getattr(flags, name) else []
    command += ["--ssh_port", str(flags.ssh_port)] if flags.ssh_port else []
    command += ["--bind_cores_to_rank"] if flags.bind_cores_to_rank else []
    return [*command, str(ROOT / "pretrain" / "train.py"),
            *(map(quoted_for_pdsh, train) if flags.launcher == "pdsh" and not flags.no_ssh else train)]


def quoted_for_pdsh(word: str) -> str:
    """A word that is the same again behind DeepSpeed's own quoting (of words with a space), pdsh and the host's shell.

    pdsh reads %h, %n, %u and %% as its own.
    """
    word = word.replace("%", "%%")
    if " " in word:  # DeepSpeed puts it between ", and \ before each " in it
        return re.sub(r"([\\$`])", r"\\\1", word)
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)


if __name__ == "__main__":
    run_main(main)
