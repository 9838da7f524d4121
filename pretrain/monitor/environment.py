"""Facts about the machines, the software and the command of a start, for run.json."""

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil

from pretrain import __version__
from pretrain.cli import OWNED
from pretrain.config.flags.arguments import FLAGS
from pretrain.distributed.device import cpu_name, output_of
from pretrain.remote import without_credentials

_PACKAGES = ("torch", "deepspeed", "transformers", "sentencepiece")
_MORE_PACKAGES = ("tokenizers", "numpy", "safetensors", "accelerate", "triton", "bitsandbytes", "mpi4py", "psutil",
                  "fsspec", "ninja", "pyarrow", "tensorboard", "wandb", "comet_ml")
# Variables that change results or speed. Others may hold secrets, and are not recorded.
RECORDED_PREFIXES = ("NCCL_", "CUDA_", "OMP_", "DS_", "DEEPSPEED_", "PYTORCH_", "TORCH_", "GLOO_", "MKL_", "KMP_",
                     "CUBLAS_", "TRITON_", "UCX_", "MALLOC_", "TOKENIZERS_PARALLELISM")
_NOT_RECORDED = ("DS_PRETRAIN_LAUNCHER", OWNED)  # variables of the processes of one start
_SECRETS = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_LARGEST_DIFF = 2**20  # bytes
_MOST_FILES = 100
_GIT_S = 10.0


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of the packages that a result depends on."""
    found = {"python": platform.python_version(), "ds-pretrain": __version__}
    return found | {package: _version(package) or "not installed" for package in _PACKAGES}


def software() -> dict[str, Any]:
    """Return the versions of further installed packages, of CUDA and NCCL, of the driver, and of the system."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else None
    return {"packages": {package: found for package in _MORE_PACKAGES if (found := _version(package))},
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)) if nccl else None, "driver": _driver(),
            "system": platform.platform(), "libc": " ".join(platform.libc_ver())}


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _driver() -> str | None:
    """Return the first line that NVIDIA's driver reports; None without a driver."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return None


def host_record() -> dict[str, Any]:
    """Return this host's name, processors, memory and GPUs."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {"host": gethostname(), "cpu": cpu_name() or platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "gpus": gpus}


def environment_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of known prefixes, without secrets."""
    return {name: without_credentials(value) for name, value in sorted(environ.items())
            if name.startswith(RECORDED_PREFIXES) and name not in _NOT_RECORDED and not _SECRETS.search(name)}


def command() -> dict[str, Any]:
    """Return the command of this process, as the launcher started it, and its working directory.

    Values that may hold secrets are left out.
    """
    words = [sys.executable, *(word for word in sys.argv if not word.startswith("--local_rank"))]
    for at, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and (known := FLAGS.get(flag[2:].replace("-", "_"))) and known.is_secret:
            words[at:at + (1 if equals else 2)] = [f"{flag}=..."]
    return {"words": [without_credentials(word) for word in words], "directory": os.getcwd()}


def code_record(run: Path) -> dict[str, Any]:
    """Return commit and changes of this package's source code. The changes are written to a file in `run`.

    `commit` is None without git, or if the package is not in a repository of its own. Changes of more than 1 MiB are
    not written; their size is recorded.
    """
    folder = Path(__file__).parent
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(folder, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return {"commit": None}
    diff = _git(folder, "diff", "--no-ext-diff", "HEAD") or ""
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", ":/") or "").splitlines()
    record: dict[str, Any] = {"commit": commit, "diff": None, "diff_bytes": len(diff.encode()),
                              "untracked": untracked[:_MOST_FILES], "num_untracked": len(untracked)}
    if 0 < record["diff_bytes"] <= _LARGEST_DIFF:
        name = f"code-{hashlib.sha256(diff.encode()).hexdigest()[:12]}.diff"
        with contextlib.suppress(OSError):  # the record itself is written to the same disk, and reports it
            (run / name).write_text(f"{diff}\n", encoding="utf-8")
            record["diff"] = name
    return record


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command; None if it fails."""
    output = output_of("git", "-C", str(folder), *words, timeout_s=_GIT_S)
    return None if output is None else output.strip()
