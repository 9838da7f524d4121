"""Prepare a process for DeepSpeed, before DeepSpeed is imported."""

import functools
import os
import sys
from pathlib import Path

from pretrain.distributed.device import Device
from pretrain.patches.imports import silence_renamed_collectives


def prepare_deepspeed(device: Device) -> None:
    """Prepare this process for DeepSpeed, before DeepSpeed is imported (imports torch).

    Names the accelerator, which DeepSpeed would otherwise guess with a warning; puts this environment's `ninja` first
    in PATH; lets DeepSpeed ask for the CPU's features once, not for each operator (a second each); and lets it find
    its compiled operators where `operator_cache` keeps them.
    """
    import cpuinfo  # starts a process when it is imported

    from pretrain.engine.operator_cache import cache_operators

    silence_renamed_collectives()
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    os.environ.setdefault("DS_ACCELERATOR", device.kind)
    scripts = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    cache_operators()
