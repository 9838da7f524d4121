"""Modules and operators that the warm process of the tests has, beside those of every warm process."""

import torch._inductor.compile_fx  # noqa: F401
import transformers.hf_argparser  # noqa: F401 (takes a second to import)
from deepspeed.accelerator import get_accelerator

for name in ("FusedAdamBuilder", "CPUAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder"):
    if get_accelerator().create_op_builder(name).is_compatible(verbose=False):
        get_accelerator().create_op_builder(name).load(verbose=False)
