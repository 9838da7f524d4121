"""The table of `ds-pretrain doctor`: facts about a machine, when each one is a finding or a note, and the remedy.

`machine.py` reads the parts on each host; the part "host" is `HostFacts` of the preflight check.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pretrain.engine.build_ops import READY
from pretrain.extensions.health.conditions import (
    Parts,
    bad_gpus,
    driver_too_old,
    few,
    gpus,
    has_gpus,
    hidden_gpus,
    impossible_operators,
    is_positive,
    memory,
    missing_tools,
    nvcc_differs,
    operators_in,
    other_mpi,
    other_nccl,
    package,
    size,
    uncompiled,
    unknown_architecture,
    when,
)

# part of machine.py -> (time limit in seconds, remedy if the part cannot be read)
PARTS = {
    "packages": (60.0, "reinstall ds-pretrain and its packages in this environment"),
    "torch": (120.0, "reinstall torch in this environment; `python -c 'import torch'` shows the whole error"),
    "deepspeed": (120.0, "reinstall DeepSpeed and ds-pretrain in this environment; `python -c 'import deepspeed'` "
                         "shows the whole error"),
    "transformers": (120.0, "reinstall transformers; `python -c 'import transformers'` shows the whole error"),
    "mpi": (60.0, "repair the MPI installation, or remove it from PATH"),
    "gpus": (60.0, "look for Xid errors of the driver in `dmesg`; reset the GPU, or restart the host"),
    "compilers": (30.0, "repair the compiler that CXX, CUDA_HOME or PATH names"),
    "libraries": (30.0, "repair the system's libraries with ldconfig"),
    "cpu": (10.0, "mount /proc"),
    "memory": (10.0, "mount /proc"),
    "limits": (10.0, "mount a tmpfs at /dev/shm"),
    "disk": (60.0, "repair or unmount this file system, or choose another folder"),
}
_GIB = 2**30
_LEAST_SHM_BYTES = 2**29
_LEAST_DISK_BYTES = _GIB
_LEAST_WRITE_BYTES_PER_S = 20e6
_LEAST_OPEN_FILES, _FEW_OPEN_FILES = 1024, 8192
_LEAST_PROCESSES = 1024


@dataclass(frozen=True)
class Rule:
    """A condition that is a finding, or only a note."""

    problem: Callable[[Parts], str]  # what is wrong; "": nothing
    remedy: str
    is_note: bool = False


@dataclass(frozen=True)
class Fact:
    """A row of the table."""

    name: str
    needs: tuple[str, ...]  # parts; the first one gives the value
    value: Callable[[Parts], str]
    rules: tuple[Rule, ...] = ()
    is_equal: bool = False  # a difference between hosts is a finding


def _gpu_rule(key: str, is_bad: Callable[[str], bool], problem: str, remedy: str, *, is_note: bool = False) -> Rule:
    return Rule(lambda parts: bad_gpus(parts, key, problem=problem, is_bad=is_bad), remedy, is_note)


def _host_row(name: str, value: Callable[[Any], str]) -> Fact:
    return Fact(name, ("host",), lambda parts: value(parts["host"]))


FACTS = (
    Fact("ds-pretrain", ("host",), package),  # differences: preflight.py
    _host_row("Python", lambda host: host["python"]),
    Fact("packages", ("packages", "host"),
         lambda parts: ", ".join(f"{name} {parts['host']['packages'][name]}" for name in ("numpy", "pydantic")
                                 if name in parts["host"]["packages"]), (
        Rule(lambda parts: "; ".join(parts["packages"]), "pip install the versions that are needed"),)),
    Fact("torch", ("torch",), lambda parts: parts["torch"]["version"]
         + (f", built for CUDA {parts['torch']['cuda']}" if parts["torch"]["cuda"] else ", without CUDA")),
    Fact("NCCL", ("torch",), lambda parts: parts["torch"]["nccl"] or "none", (
        Rule(other_nccl, "remove the other library from LD_LIBRARY_PATH and LD_PRELOAD, unless it is intended",
             is_note=True),), is_equal=True),
    Fact("GPUs", ("gpus",), gpus, (
        Rule(when(lambda parts: parts["gpus"]["devices"] and not parts["gpus"]["has_smi"],
                   "there are NVIDIA devices, but no nvidia-smi"),
             "install the utilities of the driver; start a container with --gpus all"),
        Rule(when(lambda parts: parts["gpus"]["has_smi"] and len(parts["gpus"]["gpus"]) < parts["gpus"]["devices"],
                   "nvidia-smi does not list all NVIDIA devices"),
             "look for Xid errors of the driver in `dmesg`, and restart the host"),
        _gpu_rule("ecc.errors.uncorrected.volatile.total", is_positive, "uncorrectable ECC errors of the memory",
                  "reset the GPU (nvidia-smi --gpu-reset -i N), and replace it if they come back"),
        _gpu_rule("remapped_rows.failure", "Yes".__eq__, "a faulty row of the memory cannot be remapped",
                  "replace the GPU"),
        _gpu_rule("remapped_rows.pending", "Yes".__eq__, "a faulty row of the memory waits to be remapped",
                  "reset the GPU: nvidia-smi --gpu-reset -i N"),
        _gpu_rule("compute_mode", ("Prohibited", "Exclusive_Thread").__contains__,
                  "the compute mode lets no run use it", "sudo nvidia-smi --compute-mode=DEFAULT"),
        _gpu_rule("memory.used", lambda word: word.isdecimal() and int(word) > 1024,
                  "other programs use more than 1 GiB of its memory", "nvidia-smi lists them: end them", is_note=True),
        _gpu_rule("persistence_mode", "Disabled".__eq__, "persistence mode is off, so each start initializes it again",
                  "sudo nvidia-smi --persistence-mode=1", is_note=True)), is_equal=True),
    Fact("GPUs in torch", ("torch", "gpus"), lambda parts: str(parts["torch"]["gpus"]) if has_gpus(parts) else "", (
        Rule(when(lambda parts: has_gpus(parts) and not parts["torch"]["cuda"],
                   "torch is a build without CUDA, on a host with GPUs"),
             "install torch's build for the driver's CUDA version"),
        Rule(driver_too_old, "update the driver, or install torch's build for the driver's CUDA version"),
        Rule(lambda parts: parts["torch"]["problem"] and f"torch cannot use the GPUs: {parts['torch']['problem']}",
             "check the driver with nvidia-smi and `dmesg`"),
        Rule(hidden_gpus, "check the driver with nvidia-smi and `dmesg`"),
        Rule(unknown_architecture, "install a build of torch for these GPUs"))),
    Fact("DeepSpeed", ("deepspeed",), lambda parts: parts["deepspeed"]["version"], (
        Rule(lambda parts: parts["deepspeed"]["untested"], "", is_note=True),)),
    Fact("operators", ("deepspeed", "compilers"),
         lambda parts: ", ".join(operators_in(parts, READY.__eq__)) + " compiled"
         if operators_in(parts, READY.__eq__) else "none compiled", (
        Rule(missing_tools, "sudo apt-get install g++ python3-dev; pip install ninja"),
        Rule(uncompiled, "`python -m pretrain.engine.build_ops --offload` compiles them now", is_note=True),
        Rule(impossible_operators, "offload needs them; the other settings do not", is_note=True))),
    Fact("transformers", ("transformers",), lambda parts: parts["transformers"]),
    Fact("MPI", ("mpi",), lambda parts: parts["mpi"]["mpirun"] or "no mpirun", (
        Rule(other_mpi, "put the mpirun of mpi4py's library first in PATH"),
        Rule(lambda parts: parts["mpi"]["problem"] and f"mpi4py cannot be used: {parts['mpi']['problem']}",
             "ds-pretrain does not need it: it reads the variables of mpirun. For other programs, install mpi4py for "
             "this MPI", is_note=True))),
    Fact("compilers", ("compilers",), lambda parts: ", ".join(
        found for found in (parts["compilers"]["compiler"], parts["compilers"]["ninja"] and "ninja",
                            parts["compilers"]["python_header"] and "Python.h") if found) or "none"),
    Fact("nvcc", ("compilers", "torch", "gpus"), lambda parts: parts["compilers"]["nvcc"] or "none", (
        Rule(lambda parts: nvcc_differs(parts) if has_gpus(parts) else "",
             "set CUDA_HOME to the CUDA toolkit of torch's version"),
        Rule(when(lambda parts: has_gpus(parts) and not parts["compilers"]["nvcc"],
                   "no nvcc: AdamW is torch's, and operators for offload cannot be compiled"),
             "install the CUDA toolkit of torch's version, and set CUDA_HOME", is_note=True),
        Rule(lambda parts: f"the toolkit of nvcc has no {', '.join(parts['compilers']['missing_headers'])}: AdamW is "
             "torch's" if has_gpus(parts) and parts["compilers"]["missing_headers"] else "",
             "install the complete CUDA toolkit of torch's version, and set CUDA_HOME", is_note=True))),
    Fact("libraries", ("libraries", "gpus"), lambda parts: ", ".join(
        name for name in ("jemalloc", "libaio") if parts["libraries"][name]) or "neither jemalloc nor libaio", (
        Rule(when(lambda parts: not parts["libraries"]["jemalloc"] and not has_gpus(parts),
                   "no jemalloc: a run on CPUs needs more memory"), "sudo apt-get install libjemalloc2", is_note=True),
        Rule(when(lambda parts: not (parts["libraries"]["libaio"] and parts["libraries"]["libaio_header"]),
                   "no libaio: offload to NVMe cannot be used"), "sudo apt-get install libaio-dev", is_note=True))),
    Fact("CPU", ("cpu",), lambda parts: f"{parts['cpu']['model']}, {parts['cpu']['cores']} cores"
         + (f" (limit {parts['cpu']['quota']:g})" if parts["cpu"]["quota"] else "")
         + ", " + (" ".join(parts["cpu"]["features"]) or "no vector features"), (
        Rule(when(lambda parts: not {"avx2", "sve", "bf16"} & {*parts["cpu"]["features"]},
                   "no AVX2: DeepSpeed's operators for CPUs are slow"), "use another CPU", is_note=True),
        Rule(when(lambda parts: not {"amx_bf16", "avx512_bf16", "bf16"} & {*parts["cpu"]["features"]},
                   "no instructions for bf16: training in bf16 on this CPU is slower than in fp32"),
             "use fp32 on CPUs", is_note=True)), is_equal=True),
    Fact("memory", ("memory",), memory, (
        Rule(lambda parts: f"only {size(parts['memory']['available'])} of memory are available"
             if parts["memory"]["available"] < _GIB else "", "end other programs"),
        Rule(lambda parts: f"{size(parts['memory']['swap_used'])} of swap are in use"
             if parts["memory"]["swap_used"] > _GIB else "", "end other programs: a run that swaps is slow",
             is_note=True))),
    Fact("open files", ("limits",), lambda parts: f"{parts['limits']['open_files'] or 'unlimited'}", (
        Rule(few("limits", "open_files", _LEAST_OPEN_FILES, "the limit of open files"),
             "raise it: ulimit -n 65536, nofile in /etc/security/limits.conf, LimitNOFILE of the SLURM daemon"),
        Rule(lambda parts: "" if (parts["limits"]["open_files"] or 2**62) < _LEAST_OPEN_FILES else
             few("limits", "open_files", _FEW_OPEN_FILES, "the limit of open files")(parts),
             "for jobs of many ranks: ulimit -n 65536", is_note=True))),
    Fact("locked memory", ("limits",), lambda parts: size(parts["limits"]["locked_bytes"]), (
        Rule(when(lambda parts: parts["limits"]["infiniband"] and parts["limits"]["locked_bytes"] is not None,
                   "locked memory is limited, on a host with InfiniBand: NCCL cannot register its buffers"),
             "ulimit -l unlimited, memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of sshd and slurmd"),)),
    Fact("processes", ("limits",), lambda parts: f"{parts['limits']['processes'] or 'unlimited'}", (
        Rule(few("limits", "processes", _LEAST_PROCESSES, "the limit of processes and threads"),
             "raise it: ulimit -u 65536, nproc in /etc/security/limits.conf, --pids-limit of a container"),)),
    Fact("/dev/shm", ("limits",), lambda parts: f"{size(parts['limits']['shm_bytes'])}, "
         f"{size(parts['limits']['shm_free_bytes'])} free", (
        Rule(lambda parts: f"/dev/shm has only {size(parts['limits']['shm_free_bytes'])} free, and the ranks of a "
             "host exchange data there" if parts["limits"]["shm_free_bytes"] < _LEAST_SHM_BYTES else "",
             "remove files of dead processes there; give a container --shm-size=8g, or --ipc=host"),)),
    _host_row("network", lambda host: f"{host['interface'][0]} {host['interface'][1]}" if host["interface"] else ""),
)
_FOLDER_REMEDIES = {"--save": "--save", "--nvme_path": "--nvme_path", "TMPDIR": "the variable TMPDIR",
                    "operator cache": "the variable TORCH_EXTENSIONS_DIR", "hub cache": "the variable HF_HOME"}


def all_facts(parts: Iterable[str]) -> list[Fact]:
    """Return the table for hosts with these parts: FACTS, and a row for each folder."""
    return [*FACTS, *(_folder_fact(part) for part in dict.fromkeys(parts) if part.startswith("disk "))]


def _folder_fact(part: str) -> Fact:
    label = part.removeprefix("disk ")
    remedy = f"choose another folder with {_FOLDER_REMEDIES[label]}" if label in _FOLDER_REMEDIES else \
        "choose another folder"

    def value(parts: Parts) -> str:
        found = parts[part]
        rates = " write {:,.0f} MB/s, read {:,.0f} MB/s,".format(*(rate / 1e6 for rate in found["rates"])) \
            if found["rates"] else ""
        return f"{found['path']},{rates} {size(found['free_bytes'])} free"

    def slow(parts: Parts) -> str:
        rate = (parts[part]["rates"] or [float("inf")])[0]
        return f"{parts[part]['path']}: it is written with only {rate / 1e6:.1f} MB/s" \
            if rate < _LEAST_WRITE_BYTES_PER_S else ""

    return Fact(label, (part,), value, (
        Rule(lambda parts: parts[part]["problem"] and f"{parts[part]['path']}: {parts[part]['problem']}", remedy),
        Rule(lambda parts: f"{parts[part]['path']}: only {size(parts[part]['free_bytes'])} are free"
             if parts[part]["free_bytes"] < _LEAST_DISK_BYTES and not parts[part]["problem"] else "",
             f"free some space, or {remedy}"),
        Rule(slow, f"use a faster disk: {remedy}")))
