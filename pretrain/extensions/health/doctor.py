"""Examine this machine, or all hosts of a hostfile: versions, GPUs, operators, disks, limits, clocks.

    ds-pretrain doctor --config run.yaml
    ds-pretrain doctor --hostfile HOSTS --measure

Prints a page of facts (facts.py), and a line with the remedy for each finding. Imports neither torch nor DeepSpeed.
Exit codes: 0 no findings (notes are allowed); 2 findings, or bad input.
"""

import argparse
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.child import WITHOUT_WORKING_FOLDER
from pretrain.cli import Parser, whole_number
from pretrain.cluster.hosts.hostfile import hosts_from_flags
from pretrain.cluster.hosts.preflight import (
    ROOT,
    HostFacts,
    PreflightRequest,
    differences,
    inspect_hosts,
    words_request,
)
from pretrain.cluster.hosts.rank_environment import user_variables
from pretrain.cluster.hosts.remote import HostError, Transport, call_on_all, call_probe
from pretrain.cluster.launcher_flags import LAUNCHER_PROGRAMS, add_host_flags, split_command_line
from pretrain.cluster.multihost_launch import host_transport
from pretrain.config.auto_values import NVME_PATH_VARIABLE
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.process import PROGRAM
from pretrain.distributed.requirements import requirements
from pretrain.errors import REJECTED, ConfigError, begin_sentence, counted, printable
from pretrain.extensions.health import machine
from pretrain.extensions.health.facts import PARTS, Fact, Parts, all_facts

THIS_HOST = "this host"
_LARGEST_SKEW_S = 1.0
_MARGIN_S = 15.0  # margin of the connection to a host
_COLUMNS = 80
_NAME_WIDTH = 15
_OF_HOSTS = ("include", "exclude", "num_nodes", "num_gpus", "master_addr", "ssh_port", "launcher")


@dataclass(frozen=True)
class Remark:
    """A finding or a note about one or several hosts."""

    hosts: tuple[str, ...]
    problem: str
    remedy: str


@dataclass
class Diagnosis:
    """Result of the examination."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)  # host -> name of a fact -> value
    findings: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)  # host -> what was read there
    can_launch: bool = True  # all hosts answer, and have the same environment and code

    def add(self, host: str, problem: str, remedy: str, *, is_note: bool = False) -> None:
        """Add a remark about a host. Equal remarks about several hosts become one."""
        remarks = self.notes if is_note else self.findings
        for number, each in enumerate(remarks):
            if (each.problem, each.remedy) == (problem, remedy):
                remarks[number] = Remark((*each.hosts, host), problem, remedy)
                return
        remarks.append(Remark((host,), problem, remedy))

    def to_json(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        return {"ok": not self.findings, "hosts": {host: {"facts": self.facts.get(host, {}), "parts": parts}
                                                   for host, parts in self.parts.items()},
                "findings": [asdict(each) for each in self.findings], "notes": [asdict(each) for each in self.notes]}


def examine(folders: Mapping[str, str], request: PreflightRequest, transport: Transport | None,
            ranks: Mapping[str, int]) -> Diagnosis:
    """Examine this machine, or the hosts of `ranks` (host -> number of ranks) over `transport`. Raises ConfigError.

    `folders`: label -> path of folders whose disks are measured. `request`: files that all hosts must have.
    """
    diagnosis = Diagnosis()
    local_facts, answers = inspect_hosts(transport or _no_transport, ranks, request)
    if transport is None:
        answers = {THIS_HOST: local_facts}
    hosts: dict[str, HostFacts] = {}
    for host, answer in answers.items():
        if isinstance(answer, HostFacts):
            hosts[host] = answer
        else:
            diagnosis.can_launch = False
            diagnosis.add(host, f"no answer: {answer}",
                          f"try `ssh {host} hostname`; all hosts must accept your ssh key without a password")
    for host, problem in differences(THIS_HOST, local_facts, hosts, ranks) if transport else []:
        diagnosis.can_launch = False
        diagnosis.add(host, problem, "install the same versions, code and files on all hosts")
    _read(diagnosis, hosts, folders, request, transport)
    table = all_facts(part for parts in diagnosis.parts.values() for part in parts)
    for host, parts in diagnosis.parts.items():
        diagnosis.facts[host] = {fact.name: _evaluate(diagnosis, host, fact, parts) for fact in table}
    for fact in table:
        _compare(diagnosis, fact)
    return diagnosis


def _read(diagnosis: Diagnosis, hosts: Mapping[str, HostFacts], folders: Mapping[str, str], request: PreflightRequest,
          transport: Transport | None) -> None:
    """Read the parts of all hosts at the same time, and report those that cannot be read, and wrong clocks."""
    limits_s = {part: limit_s for part, (limit_s, _) in PARTS.items()}
    program = WITHOUT_WORKING_FOLDER + inspect.getsource(machine)
    task = {"source": program, "root": str(ROOT), "packages": [each.name for each in requirements()],
            "folders": dict(folders), "environ": user_variables(os.environ, [Path.home(), request.folder]),
            "limits_s": limits_s}

    def collect(host: str) -> dict[str, Any]:
        begin = time.time()
        found: dict[str, Any] = machine.collect(task) if transport is None else call_probe(
            transport, host, "collect", task, timeout_s=max(limits_s.values()) + _MARGIN_S, module=machine)
        return {**found, "asked": begin, "answered": time.time()}

    # this host alone in the main thread, which gets Ctrl-C, and then kills the processes of `machine.collect`
    answers = {host: collect(host) for host in hosts} if transport is None else call_on_all(hosts, collect)
    for host, found in answers.items():
        if isinstance(found, HostError):
            diagnosis.add(host, f"the facts cannot be read: {found}", "run `ds-pretrain doctor` on this host")
            continue
        results: dict[str, dict[str, Any]] = found["parts"]
        read = {part: result["value"] for part, result in results.items() if "value" in result}
        diagnosis.parts[host] = {**read, "host": asdict(hosts[host])}
        _report_errors(diagnosis, host, results)
        report_clock(diagnosis, host, found)


def _no_transport(host: str, command: str) -> list[str]:
    raise AssertionError("there are no other hosts")


def _report_errors(diagnosis: Diagnosis, host: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Report parts that cannot be read. A broken torch is reported once, not for each package that imports it."""
    reported = set()
    for part, result in results.items():
        if "error" in result and result["error"] not in reported:
            kind, _, label = part.partition(" ")
            reported.add(result["error"])
            diagnosis.add(host, f"{label or kind}: {printable(result['error'])}", PARTS[kind][1])


def report_clock(diagnosis: Diagnosis, host: str, found: Mapping[str, float]) -> None:
    """Report a clock that was not between the times, on this host, of the request and of the answer."""
    skew_s = max(found["asked"] - found["begin"], 0.0) or min(found["answered"] - found["end"], 0.0)
    if abs(skew_s) > _LARGEST_SKEW_S:
        diagnosis.add(host, f"its clock is at least {abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'} the "
                            "clock of this host", "start a time service, such as chrony, on all hosts")


def _evaluate(diagnosis: Diagnosis, host: str, fact: Fact, parts: Parts) -> str:
    """Add the remarks of a fact. Returns its value; "?" if the part could not be read."""
    is_complete = all(part in parts for part in fact.needs)
    if is_complete:
        for rule in fact.rules:
            if problem := rule.problem(parts):
                diagnosis.add(host, f"{fact.name}: {problem}", rule.remedy, is_note=rule.is_note)
    try:
        return printable(fact.value(parts))
    except KeyError:
        if is_complete:
            raise
        return "?"


def _compare(diagnosis: Diagnosis, fact: Fact) -> None:
    """Report hosts whose value differs from the one that most hosts have."""
    values = {host: facts[fact.name] for host, facts in diagnosis.facts.items()}
    usual = max(values.values(), key=list(values.values()).count, default="")
    for host, value in values.items():
        if fact.is_equal and value != usual:
            diagnosis.add(host, f"{fact.name}: {value}; other hosts have: {usual}",
                          "use hosts of one kind, with the same software")


def page(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of the page: facts, findings, notes, and a summary. Only long paths need more than 80 columns."""
    names = dict.fromkeys(name for facts in diagnosis.facts.values() for name in facts)
    for name in (name for name in names if any(facts[name] for facts in diagnosis.facts.values())):
        hosts_of: dict[str, list[str]] = {}
        for host, facts in diagnosis.facts.items():
            hosts_of.setdefault(facts[name], []).append(host)
        for number, (value, hosts) in enumerate(hosts_of.items()):
            text = value if len(hosts_of) == 1 else f"{value} ({', '.join(hosts)})"
            yield _wrapped(f"{'' if number else name:<{_NAME_WIDTH}}", text)
    if diagnosis.findings or diagnosis.notes:
        yield ""
    for kind, remarks in (("BAD", diagnosis.findings), ("NOTE", diagnosis.notes)):
        for each in remarks:
            where = "" if each.hosts == (THIS_HOST,) else f"{', '.join(each.hosts)}: "
            text = f"{where}{each.problem.rstrip('.')}. {begin_sentence(each.remedy)}"
            yield _wrapped(f"{kind:<6}", text.rstrip(". ") + ".")
    yield ""
    yield f"{counted(len(diagnosis.findings), 'finding')}, {counted(len(diagnosis.notes), 'note')}"


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent=label, subsequent_indent=" " * len(label),
                         break_on_hyphens=False, break_long_words=False)


def main() -> int:
    """Run the program and return its exit code. Raises ConfigError."""
    parser = Parser(description="Examine this machine, or all hosts of a hostfile: versions that fit each other, GPUs, "
                                "compiled operators, libraries, limits, clocks and disks.",
                    epilog="The flags of `ds-pretrain train` are accepted too: the disks of --save and --nvme_path are "
                           "measured, and all hosts must have the files that the flags name. Exit code 0: no findings; "
                           "2: findings, or bad input.")
    add_host_flags(parser)
    add = parser.add_argument
    add("--launcher", choices=sorted(LAUNCHER_PROGRAMS), default="pdsh",
        help="how the hosts are reached: by srun with slurm, otherwise by ssh (default: %(default)s)")
    add("--master_port", type=whole_number(1, 65535), help="with --measure: free port on the first host")
    add("--json", action="store_true", help="print one JSON object instead of the page")
    add("--measure", action="store_true",
        help="also measure devices, disks and the network, with `ds-pretrain check-cluster` on all ranks (minutes)")
    words = sys.argv[1:]
    own, rest = parser.parse_known_args(words)
    if own.json and own.measure:
        raise ConfigError("--json", problem="it prints the page only",
                          remedy="for measurements, use `ds-pretrain check-cluster --json`")
    useless = {**dict.fromkeys(_OF_HOSTS, own.hostfile is None and not own.measure), "master_port": not own.measure}
    for name in (name for name, is_useless in useless.items() if is_useless):
        if getattr(own, name) != parser.get_default(name):
            needed = "--measure" if name == "master_port" else "--hostfile"
            raise ConfigError(f"--{name}", problem=f"it has no effect without {needed}",
                              remedy=f"remove it, or give {needed}")
    diagnosis = _examine(own, rest)
    print(json.dumps(diagnosis.to_json(), indent=1) if own.json else "\n".join(page(diagnosis)), flush=True)
    is_bad = bool(diagnosis.findings)
    if own.measure and not diagnosis.can_launch:
        print("not measured: first repair the hosts")
    elif own.measure:
        is_bad |= _measure([word for word in words if word != "--measure"]) != 0
    return REJECTED if is_bad else 0


def _examine(own: argparse.Namespace, rest: list[str]) -> Diagnosis:
    """Examine this machine or the hosts. `rest`: flags of a run."""
    run = parse_arguments(rest)
    folders = {"--save" if run.save else "this folder": str(Path(run.save or ".").absolute())}
    nvme = run.nvme_path or os.environ.get(NVME_PATH_VARIABLE)
    folders |= {"--nvme_path": str(Path(nvme).absolute())} if nvme else {}
    request = words_request(rest, Path.cwd())
    if own.hostfile is None:
        return examine(folders, request, None, {})
    ranks = {host: len(slots) for host, slots in hosts_from_flags(own).items()}
    request = dataclasses.replace(request, run=Path(run.save).absolute() if run.save else None)
    return examine(folders, request, host_transport(own), ranks)


def _measure(words: list[str]) -> int:
    """Measure with all ranks of the hosts, or of this machine. Returns the exit code of the check."""
    print("\nMeasuring with `ds-pretrain check-cluster`:", flush=True)
    launcher_words, rest = split_command_line(words)
    command = [sys.executable, PROGRAM, "train", *launcher_words, "check-cluster", *rest]
    return subprocess.run(command, check=False).returncode
