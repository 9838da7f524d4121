"""Less time of the host in a step: the declaration."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "host_time", "Saves time of the host in each step: passes over all parameters, reads from the device, and waits.",
    patch="passes:patch_engine")
