"""Facts about a machine, for `ds-pretrain doctor`. Each part is read by a process of its own, with a time limit.

The source of this file is sent to other hosts (cluster/hosts/remote.py), which may have no working package: it imports
only the standard library, and what a part needs, and begins with
WITHOUT_WORKING_FOLDER (child.py) there. If a part raises, crashes or hangs, this is its result.
"""

import ctypes
import ctypes.util
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_TOOL_LIMIT_S = 20.0  # longest call of nvidia-smi, nvcc, mpirun ...
_GPU_FIELDS = ("name", "memory.total", "memory.used", "driver_version", "compute_mode", "persistence_mode",
               "compute_cap")
_ECC_FIELDS = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
_DISK_TEST_BYTES = 2**26
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "bf16", "sve")


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"begin", "end": this host's clock, "parts": {part: {"value": ...} or {"error": text}}}.

    Keys of the request: "source": the text of this file; "root": the folder that contains the package; "packages":
    names; "folders": label -> path; "environ": variables that the ranks get; "limits_s": part -> time limit.
    """
    begin = time.time()
    folders = {**request["folders"], **_standard_folders({**os.environ, **request["environ"]})}
    parts: dict[str, tuple[str, Any]] = {name: (name, request["packages"]) for name in request["limits_s"]
                                         if name != "disk"}
    parts |= {f"disk {label}": ("disk", [path, label in request["folders"]]) for label, path in folders.items()}
    with ThreadPoolExecutor(len(parts)) as pool:
        running: list[subprocess.Popen[str]] = []
        try:
            results = [*pool.map(lambda part: _read_in_process(part[0], part[1], request, running), parts.values())]
        except KeyboardInterrupt:
            for process in running:
                process.kill()  # otherwise the pool waits for all of them
            raise
    return {"parts": dict(zip(parts, results, strict=True)), "begin": begin, "end": time.time()}


def _read_in_process(function: str, argument: Any, request: dict[str, Any],
                     running: list["subprocess.Popen[str]"]) -> dict[str, Any]:
    program = f"{request['source']}\nprint_part({function!r}, {argument!r}, {request['root']!r})\n"
    limit_s = request["limits_s"][function]
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **request["environ"]}, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               errors="replace", start_new_session=True)
    running.append(process)
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Do not wait: a process that waits for a dead disk or driver does not end.
        os.killpg(process.pid, signal.SIGKILL)
        return {"error": f"no answer within {limit_s:g} s"}
    try:
        return {"value": json.loads(out.splitlines()[-1])}
    except (ValueError, IndexError):
        pass
    if process.returncode < 0:
        return {"error": f"the process was killed by {signal.Signals(-process.returncode).name}"}
    # the last line of a traceback, and its last file: a module of the same name may shadow a package
    files = re.findall(r'^  File "([^"<]+)", line (\d+)', errors, re.MULTILINE)
    reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return {"error": f"{reason} ({files[-1][0]}:{files[-1][1]})" if files else reason}


def print_part(function: str, argument: Any, root: str) -> None:
    """Call a function of this file and print its result as JSON. Modules are found as the ranks find them."""
    sys.path.insert(0, root)
    print("\n" + json.dumps(globals()[function](argument)), flush=True)
    os._exit(0)  # libraries may wait for threads or devices at exit


def _output(*command: str) -> str:
    """Return the stdout of a command. Raises RuntimeError with one line if it fails or hangs."""
    try:
        process = subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, errors="replace", start_new_session=True)
        out = process.communicate(timeout=_TOOL_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise RuntimeError(f"{command[0]} gave no answer within {_TOOL_LIMIT_S:g} s") from None
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error.strerror}") from None
    if process.returncode:
        reason = (out.strip().splitlines() or ["no output"])[0]
        raise RuntimeError(f"{command[0]} failed with exit code {process.returncode}: {reason}")
    return out


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def packages(names: list[str]) -> list[str]:
    """Return a line for each requirement of these packages, or of those that they need, that is not met."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    problems = [f"{name} is not installed" for name in names if _version(name) is None]
    seen, pending = set[str](), ["ds-pretrain", *names]
    while pending:
        name = pending.pop(0).lower().replace("_", "-")
        found = _version(name)
        if name in seen or found is None:
            continue
        seen.add(name)
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = _version(need.name)
            if version is not None and not need.specifier.contains(Version(version).base_version):
                problems.append(f"{name} {found} needs {need.name}{need.specifier}, but {version} is installed")
            elif version is None and need.name not in names:
                problems.append(f"{name} {found} needs {need.name}, which is not installed")
            pending.append(need.name)
    return problems


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch(_: Any) -> dict[str, Any]:
    """Import torch, and compute on each GPU that it sees."""
    import torch

    problem = ""
    try:
        for number in range(torch.cuda.device_count()):
            torch.ones(9, device=number).sum().item()
        if torch.version.cuda and Path("/dev/nvidia0").exists():
            torch.cuda.init()
    except Exception as error:  # whatever the driver raises
        problem = str(error).strip().splitlines()[0]
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
            "problem": problem, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "architectures": torch.cuda.get_arch_list(), "nccl": ".".join(map(str, nccl)),
            "nccl_package": next(filter(None, map(_version, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))), "")}


def deepspeed(_: Any) -> dict[str, Any]:
    """Import DeepSpeed, and look for its compiled operators."""
    from pretrain.distributed.requirements import untested_version
    from pretrain.engine.build_ops import operator_states
    from pretrain.errors import ConfigError

    operators = operator_states()
    import deepspeed

    try:
        untested = untested_version() or ""
    except ConfigError:
        untested = ""  # it is too old: `packages` reports it
    return {"version": deepspeed.__version__, "operators": operators, "untested": untested}


def transformers(_: Any) -> str:
    """Import transformers, and return its version."""
    import transformers

    return str(transformers.PretrainedConfig and transformers.__version__)


def mpi(_: Any) -> dict[str, str]:
    """Return the version of mpirun, and of the MPI library that mpi4py loads; "" without one."""
    mpirun = _output("mpirun", "--version").strip().splitlines()[0] if shutil.which("mpirun") else ""
    library = problem = ""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        library = MPI.Get_library_version().strip().splitlines()[0].strip("\0 ")
    except Exception as error:  # ImportError, or RuntimeError without an MPI library
        problem = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return {"mpirun": mpirun, "library": library, "problem": problem}


def gpus(_: Any) -> dict[str, Any]:
    """Return what nvidia-smi reports. Values that a GPU does not have are "[N/A]" there."""
    devices = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
    if shutil.which("nvidia-smi") is None:
        return {"devices": devices, "has_smi": False, "cuda": "", "gpus": []}
    rows = _nvidia_smi(_GPU_FIELDS)
    try:
        ecc = _nvidia_smi(_ECC_FIELDS)
    except RuntimeError:  # older drivers do not know these fields
        ecc = [{} for _ in rows]
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", _output("nvidia-smi"))
    return {"devices": devices, "has_smi": True, "cuda": cuda[1] if cuda else "",
            "gpus": [{**row, **more} for row, more in zip(rows, ecc, strict=True)]}


def _nvidia_smi(fields: tuple[str, ...]) -> list[dict[str, str]]:
    out = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [line.split(",") for line in out.splitlines() if line.strip()]
    return [dict(zip(fields, map(str.strip, row), strict=True)) for row in rows]


def compilers(_: Any) -> dict[str, Any]:
    """Return the versions of the C++ compiler, of ninja and of nvcc; "" without one."""
    from pretrain.distributed.device import missing_cuda_headers

    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (shutil.which(f"{home}/bin/nvcc") if home else None) or shutil.which("nvcc") \
        or shutil.which("/usr/local/cuda/bin/nvcc")
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    release = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version")) if nvcc else None
    return {"compiler": _output(compiler, "--version").splitlines()[0] if shutil.which(compiler) else "",
            "ninja": _output(ninja, "--version").strip() if ninja else "",
            "nvcc": release[1] if release else "",
            "missing_headers": missing_cuda_headers() if release else [],
            "any_nvcc": os.environ.get("DS_SKIP_CUDA_CHECK") == "1",
            "python_header": os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h"))}


def libraries(_: Any) -> dict[str, bool]:
    """Return which libraries can be loaded."""
    jemalloc = any(map(_loads, (f"{sys.prefix}/lib/libjemalloc.so.2", "libjemalloc.so.2")))
    return {"jemalloc": jemalloc, "libaio": _loads(ctypes.util.find_library("aio") or "libaio.so.1"),
            "libaio_header": Path("/usr/include/libaio.h").exists()}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return "static TLS" in str(error)  # it can be preloaded
    return True


def cpu(_: Any) -> dict[str, Any]:
    """Return the model, the usable cores and the features that matter here."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    words = set(text.split())
    quota, _, period = _first_line("/sys/fs/cgroup/cpu.max").partition(" ")
    return {"model": model[1] if model else platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "quota": int(quota) / int(period) if quota.isdecimal() else None,
            "features": [name for name in _CPU_FEATURES if name in words]}


def memory(_: Any) -> dict[str, int | None]:
    """Return the sizes of memory and swap in bytes; the limit is the one of a container."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(lines.get(name, "0").split()[0]) * 1024
             for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")}
    limit = _first_line("/sys/fs/cgroup/memory.max")
    return {"total": sizes["MemTotal"], "available": sizes["MemAvailable"], "swap": sizes["SwapTotal"],
            "swap_used": sizes["SwapTotal"] - sizes["SwapFree"], "limit": int(limit) if limit.isdecimal() else None}


def limits(_: Any) -> dict[str, Any]:
    """Return the limits of a process (None: unlimited), and the size of /dev/shm in bytes."""
    found: dict[str, Any] = {}
    for name, number in (("open_files", resource.RLIMIT_NOFILE), ("locked_bytes", resource.RLIMIT_MEMLOCK),
                         ("processes", resource.RLIMIT_NPROC)):
        soft = resource.getrlimit(number)[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    pids = _first_line("/sys/fs/cgroup/pids.max")
    if pids.isdecimal() and int(pids) < (found["processes"] or 2**62):
        found["processes"] = int(pids)
    shm = os.statvfs("/dev/shm")
    infiniband = Path("/sys/class/infiniband")
    return {**found, "shm_bytes": shm.f_blocks * shm.f_frsize, "shm_free_bytes": shm.f_bavail * shm.f_frsize,
            "infiniband": len(list(infiniband.iterdir())) if infiniband.is_dir() else 0}


def _standard_folders(environ: dict[str, str]) -> dict[str, str]:
    """Return the folders that every run writes to: label -> path on this host."""
    cache = os.path.join(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return {"TMPDIR": environ.get("TMPDIR") or "/tmp",
            "operator cache": environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"),
            "hub cache": environ.get("HF_HOME") or os.path.join(cache, "huggingface")}


def disk(argument: list[Any]) -> dict[str, Any]:
    """Return the free space of a folder, and whether it can be written; with `measured`, also the speed of its disk.

    `argument`: path and `measured`. A folder that does not exist is represented by the nearest one above it.
    """
    path, measured = argument
    folder = next(each for each in (Path(path).absolute(), *Path(path).absolute().parents) if each.is_dir())
    free = os.statvfs(folder)
    found: dict[str, Any] = {"path": path, "free_bytes": free.f_bavail * free.f_frsize, "problem": "", "rates": None}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        if measured and found["free_bytes"] > 2 * _DISK_TEST_BYTES:
            write, read, wrong = disk_rates(folder, _DISK_TEST_BYTES)
            found["rates"] = [write, read]
            found["problem"] = f"{wrong} MiB read back differ from what was written" if wrong else ""
    except OSError as error:
        found["problem"] = f"it cannot be written ({error.strerror or error})"
    return found


def disk_rates(folder: Path, num_bytes: int) -> tuple[float, float, int]:
    """Write a temporary file, sync it, and read it from the disk, like dd with bs=1M and conv=fsync.

    The bytes are random, because some disks do not write zeros. Returns the bytes per second of writing and of reading,
    and how many MiB differ from what was written. Raises OSError.
    """
    piece = os.urandom(min(num_bytes, 2**20))
    count = max(num_bytes // len(piece), 1)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # deleted even if this process is killed
        start = time.perf_counter()
        for _ in range(count):
            if file.write(piece) != len(piece):
                raise OSError(None, "no space left on device")
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from the cache
        file.seek(0)
        begin = time.perf_counter()
        wrong = sum(file.read(len(piece)) != piece for _ in range(count))
        end = time.perf_counter()
    return count * len(piece) / (written - start), count * len(piece) / (end - begin), wrong
