"""Answer DeepSpeed's questions about the CPU from /proc/cpuinfo.

Before DeepSpeed 0.19.8 loads an operator (ops/op_builder/builder.py, `cpu_arch` and `simd_width`), it calls py-cpuinfo
9.0.0. On x86 this package measures the clock rate in a child process, for 1.0 to 1.2 s, also if the operator is
compiled already. DeepSpeed reads only the architecture, the vendor and the names of the features.
Guarded by tests/engine/test_cpu_features.py.
"""

import functools
import platform
from pathlib import Path
from typing import Any

_PROC_CPUINFO = Path("/proc/cpuinfo")
_ARCHITECTURES = {"x86_64": "X86_64", "aarch64": "ARM_8"}  # platform.machine() -> py-cpuinfo's name
_FEATURES = ("flags", "Features")  # the keys of x86 and Arm


def read_features_from_proc() -> None:
    """Replace `cpuinfo.get_cpu_info` in this process. On other platforms, only cache its answer."""
    import cpuinfo  # here, because its import starts a process

    slow = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info = lambda: _from_proc() or slow()


@functools.cache
def _from_proc() -> dict[str, Any]:
    """Return architecture, vendor and features under py-cpuinfo's names; empty if they are unknown."""
    try:
        lines = _PROC_CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = next((values[key].split() for key in _FEATURES if key in values), [])
    if platform.machine() not in _ARCHITECTURES or not features:
        return {}
    vendor = {"vendor_id_raw": values["vendor_id"]} if "vendor_id" in values else {}  # Arm has none
    return {"arch": _ARCHITECTURES[platform.machine()], "flags": features, **vendor}
