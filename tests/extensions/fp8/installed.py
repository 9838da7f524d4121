"""Looks for torchao, and for a torch that fits."""

from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from pretrain.extensions.fp8.extension import TORCH_SINCE

HAS_FP8 = Version(version("torch")) >= Version(TORCH_SINCE) and find_spec("torchao") is not None
