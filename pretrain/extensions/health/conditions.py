"""Conditions and texts of the table in facts.py: functions of what was read on one host."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.distributed.device import cuda_versions_fit
from pretrain.engine.build_ops import NOT_COMPILED, READY

Parts = Mapping[str, Any]  # part -> what `machine.py` has read; a part that cannot be read is not in it
_GIB = 2**30


def when(condition: Callable[[Parts], Any], problem: str) -> Callable[[Parts], str]:
    """Return a function that returns the problem if the condition is true."""
    return lambda parts: problem if condition(parts) else ""


def size(num_bytes: float | None) -> str:
    """Return a number of bytes as text; None: unlimited."""
    return "unlimited" if num_bytes is None else f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= 0.1 * _GIB else \
        f"{num_bytes / 2**20:,.1f} MiB"


def bad_gpus(parts: Parts, key: str, *, problem: str, is_bad: Callable[[str], bool]) -> str:
    """Return the problem with the numbers of the GPUs whose value is bad."""
    bad = [str(number) for number, gpu in enumerate(parts["gpus"]["gpus"]) if is_bad(gpu.get(key, ""))]
    return f"GPU {', '.join(bad)}: {problem}" if bad else ""


def is_positive(word: str) -> bool:
    """Return whether a value of nvidia-smi is a number above 0, not "[N/A]"."""
    return word.isdecimal() and int(word) > 0


def gpus(parts: Parts) -> str:
    """Return kinds, memory and driver of the GPUs."""
    found = parts["gpus"]
    if not found["gpus"]:
        return f"{found['devices']} devices" if found["devices"] else "none"
    names = [gpu["name"] for gpu in found["gpus"]]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    first = found["gpus"][0]
    return f"{counts}, {first['memory.total']} MiB, driver {first['driver_version']}, CUDA up to {found['cuda'] or '?'}"


def version_of(text: str | None) -> tuple[int, int]:
    """Return (major, minor); (0, 0) if it is unknown."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def driver_too_old(parts: Parts) -> str:
    """Drivers run programs of a newer minor version of CUDA, but not of a newer major version."""
    built, driver = parts["torch"]["cuda"], parts["gpus"]["cuda"]
    too_old = built and driver and version_of(built)[0] > version_of(driver)[0]
    return f"torch is built for CUDA {built}, but the driver supports CUDA up to {driver}" if too_old else ""


def hidden_gpus(parts: Parts) -> str:
    """Report GPUs that torch does not see, unless CUDA_VISIBLE_DEVICES hides them."""
    seen, found = parts["torch"]["gpus"], len(parts["gpus"]["gpus"])
    hidden = parts["torch"]["cuda"] and parts["torch"]["visible"] is None and seen < found
    return f"torch sees {seen} of {found} GPUs" if hidden else ""


def unknown_architecture(parts: Parts) -> str:
    """Code for sm_XY runs on GPUs of the same major and the same or a later minor; compute_XY on all later GPUs."""
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in parts["torch"]["architectures"]]
    known = [(each[1], (int(each[2]), int(each[3]))) for each in built if each]

    def runs(gpu: tuple[int, int]) -> bool:
        return any(built_for <= gpu and (kind == "compute" or built_for[0] == gpu[0]) for kind, built_for in known)

    gpus = {gpu.get("compute_cap", "") for gpu in parts["gpus"]["gpus"]}
    bad = sorted(gpu for gpu in gpus if version_of(gpu) > (0, 0) and not runs(version_of(gpu)))
    return f"torch has no kernels for GPUs of compute capability {', '.join(bad)}" if known and bad else ""


def nvcc_differs(parts: Parts) -> str:
    """Report an nvcc that DeepSpeed does not accept."""
    nvcc, built = parts["compilers"]["nvcc"], parts["torch"]["cuda"]
    if not nvcc or not built or parts["compilers"]["any_nvcc"] or cuda_versions_fit(nvcc, built):
        return ""
    return f"nvcc is of CUDA {nvcc}, but torch is built for CUDA {built}"


def other_nccl(parts: Parts) -> str:
    """Report another NCCL than the one that was installed with torch."""
    loaded, package = parts["torch"]["nccl"], parts["torch"]["nccl_package"]
    return f"NCCL {loaded} is loaded, but the package of torch is {package}" \
        if loaded and package and not package.startswith(loaded) else ""


def missing_tools(parts: Parts) -> str:
    """Report operators that must be compiled, and cannot be."""
    tools = parts["compilers"]
    missing = [name for name, found in (("C++ compiler", tools["compiler"]), ("ninja", tools["ninja"]),
                                        ("Python.h", tools["python_header"])) if not found]
    needed = operators_in(parts, lambda state: state == NOT_COMPILED)
    return f"{', '.join(needed)}: not compiled yet, and there is no {' and no '.join(missing)}" \
        if missing and needed else ""


def operators_in(parts: Parts, is_state: Callable[[str], bool]) -> list[str]:
    """Return the operators whose state fulfils a condition."""
    return [name for name, state in parts["deepspeed"]["operators"].items() if is_state(state)]


def impossible_operators(parts: Parts) -> str:
    """Report operators that cannot be compiled here."""
    found = operators_in(parts, lambda state: state not in (READY, NOT_COMPILED))
    return "; ".join(f"{name}: {parts['deepspeed']['operators'][name]}" for name in found)


def uncompiled(parts: Parts) -> str:
    """Report operators that can be compiled, and are not compiled yet."""
    found = operators_in(parts, lambda state: state == NOT_COMPILED)
    return f"{', '.join(found)}: compiled by the first run that needs them" \
        if found and not missing_tools(parts) else ""


def other_mpi(parts: Parts) -> str:
    """Report that mpirun and mpi4py belong to different implementations of MPI."""
    mpirun, library = parts["mpi"]["mpirun"], parts["mpi"]["library"]
    is_open = "Open MPI" in mpirun or "OpenRTE" in mpirun
    return f"mpirun is {mpirun!r}, but mpi4py loads {library!r}" \
        if mpirun and library and is_open != ("Open MPI" in library) else ""


def memory(parts: Parts) -> str:
    """Return the sizes of memory, of swap and of a container's limit."""
    found = parts["memory"]
    return f"{size(found['total'])}, {size(found['available'])} available, " \
           + (f"{size(found['swap'])} swap" if found["swap"] else "no swap") \
           + (f", limit of the container {size(found['limit'])}" if found["limit"] else "")


def few(part: str, key: str, least: float, what: str) -> Callable[[Parts], str]:
    """Return a condition: the value is below `least`."""
    return lambda parts: f"{what} is {parts[part][key]:,}; expected at least {least:,.0f}" \
        if parts[part][key] is not None and parts[part][key] < least else ""


def has_gpus(parts: Parts) -> bool:
    """Return whether the host has NVIDIA GPUs."""
    return bool(parts["gpus"]["gpus"] or parts["gpus"]["devices"])


def package(parts: Parts) -> str:
    """Return the version of ds-pretrain, and its commit or the hash of its files."""
    host = parts["host"]
    return "not installed" if host["code_digest"] is None else \
        f"{host['code_version']}, " + (f"commit {host['commit']}" if host["commit"] else f"hash {host['code_digest']}")
