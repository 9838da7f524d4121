"""Detect the device of this machine, its data types and its peak FLOP/s, without importing torch."""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.paths import text_of

# values of ONEDNN_MAX_CPU_ISA with which oneDNN has no products in bf16, or in fp16
_ISAS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_ISAS_WITHOUT_FP16 = (*_ISAS_WITHOUT_BF16, "AVX512_CORE_BF16")
# ATen/cuda/CUDAContextLight.h, which DeepSpeed's CUDA operators include
_CUDA_HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_VISIBLE_DEVICES = re.compile(r"\s*(-?\d+|(GPU|MIG)-[\w/-]+)?(\s*,\s*(-?\d+|(GPU|MIG)-[\w/-]+))*\s*")
# GPU -> dense peak TFLOP/s (16-bit, TF32, fp32 without TF32), from the vendors' data sheets. The first match counts.
_PEAK_TFLOPS = {
    "H200": (989.0, 494.5, 67.0), "H100 PCIe": (756.0, 378.0, 51.0), "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.0, 494.5, 67.0), "GB200": (2500.0, 1250.0, 80.0), "B200": (2250.0, 1100.0, 75.0),
    "A100": (312.0, 156.0, 19.5), "A800": (312.0, 156.0, 19.5), "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5), "L4": (121.0, 60.0, 30.3), "A10G": (70.0, 35.0, 35.0), "A10": (125.0, 62.5, 31.2),
    "V100": (125.0, 15.7, 15.7), "T4": (65.0, 8.1, 8.1), "GB300": (2500.0, 1250.0, 80.0),
    "B300": (2250.0, 1125.0, 75.0), "H20": (148.0, 74.0, 44.0), "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 6000 Ada": (364.2, 182.1, 91.1), "RTX 3090 Ti": (80.0, 40.0, 40.0), "RTX 3090": (71.2, 35.6, 35.6),
    "RTX 4090 D": (147.1, 73.5, 73.5), "RTX 4090": (165.2, 82.6, 82.6), "RTX 5090": (209.5, 104.8, 104.8),
}


@dataclass(frozen=True)
class Device:
    """The accelerator (or the CPU) of this machine."""

    kind: str  # "cpu" or "cuda"
    fp16: bool  # can train in float16
    bf16: bool  # can train in bfloat16
    memory_bytes: int  # memory of one GPU, or of the host for a CPU; 0: unknown
    compiles: bool = True  # DeepSpeed can compile operators for the device; cuda needs nvcc and its headers
    capability: float = math.inf  # CUDA's compute capability, of the weakest GPU; inf: not known
    kinds: tuple[str, ...] = ()  # kinds of GPUs, where those of this host differ: "2 x NAME (80 GiB)"


def detect_device() -> Device:
    """Return the device that torch and DeepSpeed will use; `DS_ACCELERATOR=cpu` overrides, as in DeepSpeed."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen and chosen not in ("cpu", "cuda"):
        raise ConfigError("DS_ACCELERATOR", found=repr(chosen), expected="cpu or cuda in this environment variable")
    if chosen != "cpu" and _torch_built_for("hip") not in ("", "None") and (chosen or Path("/dev/kfd").exists()):
        raise ConfigError("torch", problem="this is a build for AMD's ROCm, and GPUs of AMD are not supported",
                          remedy="DS_ACCELERATOR=cpu trains on the CPU")
    if wants_cpu():
        return cpu_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if not _VISIBLE_DEVICES.fullmatch(visible):
        raise ConfigError("CUDA_VISIBLE_DEVICES", found=repr(visible),
                          expected="numbers or UUIDs of GPUs, separated by commas, in this environment variable")
    if chosen and (visible.strip() in ("", "-1") or not _torch_has_cuda() or not _sees_cuda()):
        raise ConfigError("DS_ACCELERATOR", problem="it is cuda, and torch sees no CUDA device here",
                          remedy="unset it, or use a machine with a GPU and a CUDA build of torch")
    return cuda_device()


def cpu_device() -> Device:
    """Describe the CPU. bf16 runs on every CPU, emulated if necessary.

    fp16 needs AVX512_FP16, and DeepSpeed rejects it where oneDNN may not use these instructions.
    """
    memory_bytes = 0
    with contextlib.suppress(ValueError, OSError):
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fp16 = "avx512_fp16" in cpuinfo() and not _is_limited(_ISAS_WITHOUT_FP16)
    return Device("cpu", fp16=fp16, bf16=True, memory_bytes=memory_bytes)


def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 products. Without them, bf16 is slower than fp32."""
    flags = "" if _is_limited(_ISAS_WITHOUT_BF16) else cpuinfo()
    return any(name in flags for name in ("amx_bf16", "avx512_bf16", " bf16 "))  # the last one: Arm


def instruction_limits() -> list[str]:
    """Return the values of the variables that keep oneDNN and torch from using all instructions of this CPU."""
    onednn = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return [onednn.upper(), os.environ.get("ATEN_CPU_CAPABILITY", "").lower()]


def _is_limited(isas: tuple[str, ...]) -> bool:
    """Return whether the user limits oneDNN to one of these instruction sets."""
    return instruction_limits()[0] in isas


def cpu_name() -> str:
    """Return the name of the CPU; "" if Linux does not know it."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    return found[1] if found else ""


def cpuinfo() -> str:
    """Return Linux's description of the CPUs, /proc/cpuinfo; "" on other systems."""
    return text_of(Path("/proc/cpuinfo"))


def cpu_features() -> str:
    """Return the CPU's instruction sets, on which the code of -march=native depends."""
    return "".join(sorted({line for line in cpuinfo().splitlines() if line.startswith(("flags", "Features"))}))


def cuda_device() -> Device:
    """Describe what each visible NVIDIA device can do. If nvidia-smi fails, assume Ampere GPUs and nvcc.

    Raises ConfigError if CUDA_VISIBLE_DEVICES names a device that nvidia-smi does not list.
    """
    lines = [re.match(r"([\d.]+)\s*,\s*(\d+)[,\s]*([^,]*)[,\s]*(.*)", line)
             for line in nvidia_smi("compute_cap,memory.total,uuid,name")]
    gpus = visible_gpus([_Gpu(float(found[1]), int(found[2]), found[3], found[4]) for found in lines if found])
    if not gpus:
        return Device("cuda", fp16=True, bf16=True, memory_bytes=0)
    capability, mebibytes = min(gpu.capability for gpu in gpus), min(gpu.mebibytes for gpu in gpus)
    names = [f"{gpu.name} ({gpu.mebibytes / 1024:.3g} GiB)" for gpu in gpus]
    kinds = tuple(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    has_mig = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")  # parts of a GPU, whose memory is not listed
    return Device("cuda", fp16=capability >= 7.0, bf16=capability >= 8.0,
                  memory_bytes=0 if has_mig else mebibytes * 2**20, compiles=compiles_cuda(), capability=capability,
                  kinds=kinds if len(kinds) > 1 else ())


@dataclass(frozen=True)
class _Gpu:
    """A GPU of this host, according to nvidia-smi."""

    capability: float
    mebibytes: int
    uuid: str
    name: str


def visible_gpus(gpus: list[_Gpu]) -> list[_Gpu]:
    """Return those GPUs of nvidia-smi that CUDA_VISIBLE_DEVICES names. Raises ConfigError for a wrong name.

    CUDA ignores the variable's words from the first wrong one on, and gives no device at all if one is repeated.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if len({*words}) < len(words):
        raise ConfigError(VISIBLE, found=repr(text), expected="each device once")
    found: list[_Gpu] = []
    for word in words if gpus else []:
        if word == "-1":
            break
        named = gpus[int(word):int(word) + 1] if word.isdecimal() else [g for g in gpus if g.uuid.startswith(word)]
        if word.startswith("MIG-"):  # an instance of any of them
            named = gpus
        elif len(named) != 1:
            raise ConfigError(VISIBLE, found=repr(text), expected=f"numbers below {len(gpus)} or UUIDs, as "
                              "`nvidia-smi -L` lists them")
        found += named
    # CUDA counts from the fastest GPU on, nvidia-smi by the bus
    other_order = os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and any(map(str.isdecimal, words))
    return gpus if other_order or not found else found


def nvidia_smi(fields: str) -> list[str]:
    """Return one line per GPU with the values of `fields` (comma-separated), sizes in MiB; [] if nvidia-smi fails."""
    answer = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits") or ""
    return [line.strip() for line in answer.splitlines() if line.strip()]


def output_of(*command: str, timeout_s: float = 20.0) -> str | None:
    """Return what a command prints; None if it fails, does not exist or takes too long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=True)
        return done.stdout.decode(errors="replace")
    return None


def has_nvcc() -> bool:
    """Return whether nvcc is where torch looks for it: in CUDA_HOME, PATH or /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").exists()


def compiles_cuda() -> bool:
    """Return whether DeepSpeed can compile CUDA operators."""
    return not why_not_nvcc()


def why_not_nvcc() -> str:
    """Return why DeepSpeed 0.19.8 cannot compile CUDA operators; "" if it can.

    nvcc must be of the CUDA version that torch was built for: DS_SKIP_CUDA_CHECK=1 accepts every version. The headers
    that torch's own headers include must be there, too.
    """
    if not has_nvcc():
        return "there is no nvcc"
    if missing := missing_cuda_headers():
        return f"the CUDA toolkit has no {', '.join(missing)}"
    built_for = re.match(r"(\d+)\.(\d+)", _torch_cuda_version())
    if built_for is None or os.environ.get("DS_SKIP_CUDA_CHECK") == "1":
        return ""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    answer = output_of(nvcc, "--version")
    if answer is None:
        return f"{nvcc} does not run"  # CUDA_HOME, for example, without a compiler
    found = re.search(r"release (\d+\.\d+)", answer)
    return "" if found is None or cuda_versions_fit(found[1], built_for[0]) else \
        f"nvcc is of CUDA {found[1]}, and torch is built for CUDA {built_for[0]}"


def missing_cuda_headers() -> list[str]:
    """Return the headers of the CUDA toolkit that torch's include, and that no folder has where nvcc looks for them.

    A toolkit of conda, or an image with the compiler alone, may lack them.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    toolkit = Path(home) if home else Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")
    given = os.pathsep.join(os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH"))
    folders = [toolkit / "include", *toolkit.glob("targets/*/include"),
               Path("/usr/include"), Path("/usr/local/include"), *map(Path, filter(None, given.split(os.pathsep)))]
    return [name for name in _CUDA_HEADERS if not any((folder / name).exists() for folder in folders)]


def cuda_versions_fit(nvcc: str, built_for: str) -> bool:
    """Return whether DeepSpeed 0.19.8 compiles with an nvcc of this CUDA version for the version of torch's build.

    ops/op_builder/builder.py, assert_no_cuda_mismatch: of CUDA 11 and 12 it accepts any minor version.
    """
    (major, minor), (built_major, built_minor) = nvcc.split(".")[:2], built_for.split(".")[:2]
    return major == built_major and (minor == built_minor or major in ("11", "12"))


def wants_cpu() -> bool:
    """Return whether `detect_device` returns the CPU, without calling a driver."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen == "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return True
    return not _sees_cuda() or not _torch_has_cuda()


def _sees_cuda() -> bool:
    """Return whether there is an NVIDIA GPU. Containers may expose any subset; WSL has another name for them."""
    return Path("/dev/dxg").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build; True if its version cannot be read."""
    return _torch_cuda_version() != "None"


def _torch_cuda_version() -> str:
    return _torch_built_for("cuda")


def _torch_built_for(platform: str) -> str:
    """Return the version of "cuda" or "hip" (ROCm) of the installed torch, such as "12.8", from its version.py.

    Importing torch takes 1.5 s. Returns "None" without torch or for another build, and "" if it cannot be read.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "None"
    text = text_of(Path(spec.origin).parent / "version.py")
    found = re.search(rf"^{platform}\b[^=]*=\s*(\S+)", text, re.MULTILINE)
    return found[1].strip("'\"") if found is not None else ""


@lru_cache(maxsize=256)
def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a GPU in bf16, fp16, tf32 or fp32, the denominator of MFU; None if it is not known.

    A name matches as a complete word, or after a G: a GH200 is an H200, but an RTX A1000 is not an A100. GPUs of
    laptops are slower than their namesakes.
    """
    if "Laptop" in device_name:
        return None
    for name, (half, tf32, single) in _PEAK_TFLOPS.items():
        if re.search(rf"\bG?{name}\b", device_name):
            return {"fp32": single, "tf32": tf32}.get(precision, half)
    return None
