"""Kernels for CPUs: the declaration."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "cpu_kernels", "Computes a model on CPUs about twice as fast, by functions in C that are compiled at first use.",
    record="kernels:record", operators="kernels:CpuKernels", patch="gradient_passes:patch_engine",
    operator_memory="memory:CpuMemory")
