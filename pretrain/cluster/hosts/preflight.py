"""Whether the hosts are fit for one run: each is asked for its facts, and these are compared with this host's."""

import functools
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from pretrain.cluster.hosts import probe
from pretrain.cluster.hosts.remote import HostError, Reach, ask_all
from pretrain.config.arguments import RunArguments
from pretrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
_SHOWN = 6  # problems named in one line; the others are counted


@dataclass(frozen=True)
class Facts:
    """What `probe.examine` found on one host; its keys are these fields."""

    host_name: str
    python: str
    packages: dict[str, str]  # name -> version
    folder: bool  # whether the folder that the launcher runs in is there
    code: str | None  # digest of the package's files; None: no checkout
    commit: str | None
    files: dict[str, list[Any] | None]  # path -> [bytes, digest of both ends]
    run: str  # what is wrong with the run folder
    interface: list[str] | None  # [name, address] towards the other hosts
    cores: int
    gpus: int


@dataclass(frozen=True)
class Question:
    """What every host is asked about: absolute paths, but for the packages."""

    run: Path
    files: tuple[str, ...]
    folder: Path  # where the launcher runs, and the ranks will

    def request(self, token: str, peer: str) -> dict[str, Any]:
        return {"root": str(ROOT), "packages": list(packages()), "files": list(self.files), "run": str(self.run),
                "folder": str(self.folder), "token": token, "peer": peer}


@functools.cache
def packages() -> tuple[str, ...]:
    """The packages that this one needs at run time: their versions must agree."""
    try:
        lines = requires("ds-pretrain") or []
    except PackageNotFoundError:  # a checkout that was not installed
        lines = ["torch", "deepspeed", "transformers", "numpy"]
    return tuple(re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in lines if "extra ==" not in line)


def question_of(args: RunArguments, train_words: Sequence[str], folder: Path) -> Question:
    """The files that each rank of this run opens. Raises ConfigError where no run folder is named."""
    if not args.save:
        raise ConfigError("--save", found="nothing", expected="the run folder, on storage that all hosts share")
    prefixes = [prefix for prefix in (args.train_data, args.valid_data, args.test_data) if prefix]
    names = [args.deepspeed_config, *(f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx"))]
    names += [args.tokenizer] if args.tokenizer else []
    names += [args.model] if Path(args.model).exists() else []  # otherwise a preset
    names += [word.partition("=")[2] or after for word, after in zip(train_words, [*train_words[1:], ""], strict=True)
              if word.partition("=")[0] == "--config"]
    files = tuple(str(folder / name) for name in names if name)
    return Question(run=folder / args.save, files=files, folder=folder)


@contextmanager
def token_in(run: Path) -> Iterator[str]:
    """A file of a new name in the run folder; a folder that was made for it goes with it if it stays empty."""
    missing = [path for path in (run, *run.parents) if not path.exists()]
    token = f".cluster-{secrets.token_hex(8)}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / token).write_text("whoever can read this shares the run folder\n")
    except OSError as error:
        raise ConfigError(f"--save {run}", found=error.strerror, expected="a folder that can be written") from None
    try:
        yield token
    finally:
        (run / token).unlink(missing_ok=True)
        for path in missing:
            if not any(path.iterdir()):
                path.rmdir()


def examine_hosts(reach: Reach, slots: dict[str, int], question: Question) -> dict[str, Facts]:
    """Host -> facts, compared. Raises ConfigError: one line that names every host that is unfit, and why.

    Args:
        reach: how a command runs on a host.
        slots: host -> ranks on it, the first host being that of rank 0.
        question: the run's files and folders.
    """
    hosts = list(slots)
    peers = {host: hosts[0] if host != hosts[0] else "".join(hosts[1:2]) for host in hosts}
    with token_in(question.run) as token:
        here = Facts(**probe.examine(question.request(token, peer="")))
        check_here(here)
        questions = {host: ("examine", question.request(token, peers[host])) for host in hosts}
        answers = ask_all(reach, questions)
    lost = [f"{host}: {answer}" for host, answer in answers.items() if isinstance(answer, HostError)]
    if lost:
        raise ConfigError("hosts", found=_listed(lost), expected="an answer from each host of the hostfile",
                          remedy=f"try `ssh {lost[0].split(':')[0]} hostname`, or leave it out with --exclude")
    facts = {host: Facts(**answer) for host, answer in answers.items()}
    compare(here, facts, slots)
    return facts


def check_here(here: Facts) -> None:
    """Raises ConfigError where this host lacks a file of the run."""
    missing = [path for path, found in here.files.items() if found is None]
    if missing:
        raise ConfigError("this host", found=f"no {', no '.join(missing)}", expected="all files of the run")


def compare(here: Facts, facts: dict[str, Facts], slots: dict[str, int]) -> None:
    """Raises ConfigError: one line with every difference from this host, by host."""
    problems = [f"{host}: {text}" for host, found in facts.items() for text in
                [*_differences(here, found), *_devices(found, facts, slots[host])]]
    if problems:
        raise ConfigError("hosts", found=_listed(problems), remedy="mend the host, or leave it out with --exclude",
                          expected="the same environment, code, data and run folder on each host, as on this one")


def _listed(problems: list[str]) -> str:
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _differences(here: Facts, there: Facts) -> Iterator[str]:
    if there.python != here.python:
        yield f"Python {there.python} (here {here.python})"
    for name, version in here.packages.items():
        if there.packages[name] != version:
            yield f"{name} {there.packages[name]} (here {version})"
    if there.code is None:
        yield f"no checkout at {ROOT}"
    elif there.code != here.code:
        yield f"other code at {ROOT} (commit {there.commit or 'unknown'}, here {here.commit or 'unknown'})" \
            if there.commit != here.commit else f"other code at {ROOT} (commit {here.commit}, changed since)"
    if not there.folder:
        yield "not the folder that this command runs in"
    for path, found in here.files.items():
        if there.files[path] is None:
            yield f"no {path}"
        elif there.files[path] != found:
            yield f"another {path}"
    if there.run:
        yield f"--save is {there.run} there"


def _devices(found: Facts, facts: dict[str, Facts], slots: int) -> Iterator[str]:
    if 0 < found.gpus < slots:
        yield f"{found.gpus} GPUs for slots={slots}"
    if found.gpus == 0 and any(other.gpus for other in facts.values()):
        yield "no GPU, where others have some"
    if len(facts) > 1 and found.interface is None:
        yield "no network interface towards the other hosts"
