"""Preflight check: collect facts on each host, and reject hosts that differ from the host that launches the run."""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.cluster.hosts import probe
from pretrain.cluster.hosts.remote import HostError, Transport, call_on_all, call_probe
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.parse import read_yaml
from pretrain.data.tokenizers.tokenizer import file_of_tokenizer
from pretrain.distributed.requirements import requirements
from pretrain.distributed.tcp_store import SECRET_VARIABLE, secret_variable
from pretrain.errors import ConfigError, file_errors
from pretrain.model.own_models import is_model_code
from pretrain.old_names import current_name
from pretrain.shipped import find_layout

ROOT = Path(__file__).resolve().parents[3]
_MAX_PROBLEMS = 6  # problems shown in one line; the line ends with the number of further problems
_REMEDY = "install the same versions, code and files on all hosts, or leave a host out with --exclude"
_IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
_MAY_DIFFER = ("save", "json", "plot", "nvme_path")  # flags whose files are outputs, or of one host only


@dataclass(frozen=True)
class HostFacts:
    """Result of `probe.host_facts` on one host. The keys of that dictionary are the names of these fields."""

    python: str
    packages: dict[str, str]  # name -> version
    has_folder: bool  # whether the launcher's working folder exists on this host
    code_version: str | None  # version of ds-pretrain; None: it is not there
    code_digest: str | None  # hash of the package's Python files; None: it is not there
    commit: str | None  # commit of a checkout; None: an installed package, or unknown
    files: dict[str, list[Any] | None]  # path -> [size in bytes, hash of both ends]; None: no such file
    run_problem: str  # what is wrong with the run folder; "": nothing
    interface: list[str] | None  # [name, address] of the network interface to the other hosts
    cores: int
    gpus: int  # number of NVIDIA GPUs


@dataclass(frozen=True)
class PreflightRequest:
    """Files and folders that every host must have. Paths are absolute."""

    run: Path | None  # run folder; None: it is not compared
    files: tuple[str, ...]  # files (or a tokenizer's folder) that each rank reads
    folder: Path  # working folder of the launcher and of the ranks

    def to_json(self, token: str, peer: str) -> dict[str, Any]:
        """Return the argument of `probe.host_facts`.

        Args:
            token: name of the file that `token_file` created in the run folder.
            peer: another host of the run; "": none.
        """
        return {"root": str(ROOT), "packages": [each.name for each in requirements()], "files": list(self.files),
                "run": str(self.run) if self.run else "", "folder": str(self.folder), "token": token, "peer": peer}


def preflight_request(args: RunArguments, train_words: Sequence[str], folder: Path) -> PreflightRequest:
    """List the files that each rank of this run opens. Raises ConfigError if there is no --save."""
    if not args.save:
        raise ConfigError("--save", problem="a run on several hosts needs a run folder",
                          remedy="add --save RUN_FOLDER, on storage that all hosts share")
    prefixes = args.data.prefixes
    names = [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]
    names += [str(find_layout(args.deepspeed_config))] if args.deepspeed_config else []
    names += [file_of_tokenizer(args.tokenizer) or ""] if args.tokenizer else []
    model_code = args.model if is_model_code(args.model) else args.model_code
    modules = [name.partition(":")[0] for name in (args.dataset_module, model_code, *(args.extension or ())) if name]
    own = [f"{module.replace('.', '/')}.py" for module in modules]
    names += [name for name in own if (folder / name).exists()]
    # otherwise --model is a preset's name, and --init_from a repository or, in a resumed run, no longer needed
    names += [name for name in (args.model, args.init_from) if name and Path(name).exists()]
    names += [word.partition("=")[2] or after for word, after in zip(train_words, [*train_words[1:], ""], strict=True)
              if word.partition("=")[0] == "--config"]
    files = tuple(str(folder / name) for name in names if name)
    return PreflightRequest(run=folder / args.save, files=files, folder=folder)


def words_request(words: Sequence[str], folder: Path) -> PreflightRequest:
    """List the files and folders that the words of a subcommand name, except those that may differ between hosts."""
    values: list[tuple[str, str]] = []  # (flag, value)
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        values += [(current_name(flag.removeprefix("--")), value)] if equals else []
    for name in [value for flag, value in values if flag == "config"]:
        values += [(flag, word) for flag, (_, entry) in read_yaml(name).items()
                   for word in (entry if isinstance(entry, list) else [entry])]
    paths = [folder / f"{value}{suffix}" for flag, value in values if value and flag not in _MAY_DIFFER
             for suffix in ("", ".bin", ".idx")]
    return PreflightRequest(run=None, folder=folder, files=tuple(str(path) for path in paths if os.path.exists(path)))


@contextmanager
def token_file(run: Path | None) -> Iterator[str]:
    """Create a file with a unique name in the run folder: a host that sees the file shares the folder.

    The file contains the secret of the start, and only its owner can read it. Yields the file's name. Afterwards this
    function removes the file, and the folders that it created if they are empty. Without a run folder, it yields "".
    """
    if run is None:
        yield ""
        return
    created = [path for path in (run, *run.parents) if not path.exists()]
    token = f".cluster-{secrets.token_hex(8)}"
    with file_errors(f"--save {run}", "the run folder cannot be written ({})"):
        run.mkdir(parents=True, exist_ok=True)
        with open(os.open(run / token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret_variable()[SECRET_VARIABLE])
    try:
        yield token
    finally:
        (run / token).unlink(missing_ok=True)
        for path in created:
            if not any(path.iterdir()):
                path.rmdir()


def check_hosts(transport: Transport, ranks: dict[str, int], request: PreflightRequest) -> dict[str, HostFacts]:
    """Collect the facts of all hosts and compare them with the facts of this host. Returns host -> facts.

    Raises ConfigError, in one line with all unreachable hosts, or with all differences of the hosts.

    Args:
        transport: runs a command on a host.
        ranks: host -> number of ranks; the first host has rank 0.
        request: the run's files and folders.
    """
    local_facts, answers = inspect_hosts(transport, ranks, request)
    errors = [f"{host}: {answer}" for host, answer in answers.items() if isinstance(answer, HostError)]
    if errors:
        raise ConfigError("hosts", problem=_join(errors),
                          remedy=f"try `ssh {errors[0].split(':')[0]} hostname`, or leave the host out with --exclude")
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, HostFacts)}
    check_equal("this host", local_facts, facts, ranks)
    return facts


def inspect_hosts(transport: Transport, ranks: Mapping[str, int],
                  request: PreflightRequest) -> tuple[HostFacts, dict[str, HostFacts | HostError]]:
    """Return (facts of this host, host -> its facts, or why they are unknown). Raises ConfigError for this host."""
    hosts = list(ranks)
    peers = {host: hosts[0] if host != hosts[0] else "".join(hosts[1:2]) for host in hosts}
    with token_file(request.run) as token:
        local_facts = HostFacts(**probe.host_facts(request.to_json(token, peer="")))
        check_local_files(local_facts)
        return local_facts, call_on_all(hosts, lambda host: HostFacts(**call_probe(
            transport, host, "host_facts", request.to_json(token, peers[host]))))


def check_local_files(facts: HostFacts) -> None:
    """Raise ConfigError if this host lacks a file of the run."""
    missing = [path for path, found in facts.files.items() if found is None]
    if missing:
        raise ConfigError("this host", problem=f"missing files of the run: {', '.join(missing)}")


def check_equal(reference: str, expected: HostFacts, facts: dict[str, HostFacts], ranks: dict[str, int]) -> None:
    """Raise ConfigError if a host differs. Its line has all differences.

    Args:
        reference: name of the host to compare with.
        expected: facts of that host.
        facts: host -> facts.
        ranks: host -> number of ranks.
    """
    problems = differences(reference, expected, facts, ranks)
    if problems:
        raise ConfigError("hosts", problem=_join([f"{host}: {problem}" for host, problem in problems]), remedy=_REMEDY)


def differences(reference: str, expected: HostFacts, facts: Mapping[str, HostFacts],
                ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return (host, problem) for each difference. Arguments: see `check_equal`."""
    return [(host, problem) for host, found in facts.items()
            for problem in (*_differences(reference, expected, found), *_device_problems(found, facts, ranks[host]))]


def _join(problems: list[str]) -> str:
    more = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _differences(reference: str, expected: HostFacts, found: HostFacts) -> Iterator[str]:
    if found.python != expected.python:
        yield f"Python {found.python}, but {expected.python} on {reference}"
    for name, version in expected.packages.items():
        if found.packages.get(name) != version:
            yield f"{name} {found.packages.get(name)}, but {version} on {reference}"
    if found.code_digest != expected.code_digest:
        yield _code_difference(reference, expected, found)
    if not found.has_folder:
        yield "the working folder of this command does not exist on that host"
    for path, fingerprint in expected.files.items():
        if found.files[path] is None:
            yield f"no {path}"
        elif found.files[path] != fingerprint:
            yield f"{path} differs from the file on {reference}"
    if found.run_problem:
        yield f"--save {found.run_problem}"


def _code_difference(reference: str, expected: HostFacts, found: HostFacts) -> str:
    """Return how the package on a host differs from the expected one, and how to install the same one there."""
    remedy = "" if _IS_CHECKOUT else f" (run `{sys.executable} -m pip install --force-reinstall --no-deps " \
                                     f"ds-pretrain=={expected.code_version}` there)"
    if found.code_digest is None:
        return f"no ds-pretrain at {ROOT}{remedy}"
    if found.code_version != expected.code_version:
        return f"ds-pretrain {found.code_version}, but {expected.code_version} on {reference}{remedy}"
    text = f"the code at {ROOT} differs from {reference}"
    if not _IS_CHECKOUT:
        return f"{text}: same version {found.code_version}, with changed files{remedy}"
    if found.commit == expected.commit:
        return f"{text}: same commit {found.commit}, with uncommitted changes"
    return f"{text}: commit {found.commit or 'unknown'} instead of {expected.commit or 'unknown'}"


def _device_problems(found: HostFacts, facts: Mapping[str, HostFacts], ranks: int) -> Iterator[str]:
    if 0 < found.gpus < ranks:
        yield f"{found.gpus} GPUs are too few for slots={ranks}"
    if found.gpus == 0 and any(other.gpus for other in facts.values()):
        yield "no GPU, but other hosts have GPUs"
    if len(facts) > 1 and found.interface is None:
        yield "no network interface reaches the other hosts"
