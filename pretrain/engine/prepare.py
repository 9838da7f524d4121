"""Set up a process before it uses DeepSpeed."""

import os
import sys
from pathlib import Path

from pretrain.distributed.device import Device
from pretrain.patches.cpu_features import read_features_from_proc
from pretrain.patches.imports import import_muon_uncompiled, silence_missing_cuda, silence_renamed_collectives


def prepare_deepspeed(device: Device) -> None:
    """Prepare this process for DeepSpeed. Imports torch.

    - Let CUDA's allocator extend its segments, so that tensors of changing sizes leave fewer unusable gaps.
    - Set the accelerator; otherwise DeepSpeed guesses it and prints a warning.
    - Put this environment's `ninja` first in PATH.
    - Read the CPU's features from /proc/cpuinfo; DeepSpeed would measure them for 1 s.
    - Load compiled operators from the cache of `operator_cache`.
    - On a CPU, import DeepSpeed with a Muon that compiles nothing.
    """
    if device.kind == "cuda" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at the first allocation
    if device.kind == "cpu":
        silence_missing_cuda()
    from pretrain.engine.operators.operator_cache import cache_operators

    silence_renamed_collectives()
    read_features_from_proc()
    os.environ.setdefault("DS_ACCELERATOR", device.kind)
    scripts = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    cache_operators()
    if device.kind == "cpu":
        import_muon_uncompiled()
