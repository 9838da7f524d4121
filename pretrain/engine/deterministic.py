"""--deterministic: operators that give the same bits each time. The variables are set before torch is imported.

What differs between two runs on GPUs without it: kernels that add with atomic instructions (the backward passes of
attention and of embeddings, scatter_add), the workspace of cuBLAS, and choices that torch measures at the start.
"""

import os
import re
from collections.abc import MutableMapping

# cuBLAS is reproducible with a workspace of its own for each stream (NVIDIA's documentation of cuBLAS, section 2.1.4).
# The order of a sum over ranks depends on NCCL's algorithm, which NCCL chooses by its own estimates of times; with
# NVLS, the switch adds. torch's Inductor then chooses kernels without measurements (torch 2.10).
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_DETERMINISTIC": "1"}
_MISSING = re.compile(r"(\w+) does not have a deterministic implementation")


def set_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of a process that trains on a GPU. Those of the user remain: run_rules.py has checked them."""
    for name, value in VARIABLES.items():
        environ.setdefault(name, value)


def set_deterministic(deterministic: bool) -> None:
    """Make torch use deterministic operators only, and raise an error where there is none; or, as usual, the fastest.

    torch's flash attention is deterministic only if the mode is not `warn_only`; then cuDNN's attention is not used,
    and the memory-efficient kernel does not divide the keys (torch 2.13, native/transformers/cuda/sdp_utils.cpp,
    attention_backward.cu).
    """
    import torch

    if deterministic == torch.are_deterministic_algorithms_enabled():
        return  # the next call imports torch's compiler, which takes a second
    torch.use_deterministic_algorithms(deterministic)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", not deterministic)  # noqa: B010 (for mypy)
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False


def operator_without_variant(error: BaseException) -> str:
    """Return the operator of which torch has no deterministic variant, if this is the error; otherwise ""."""
    found = _MISSING.search(str(error))
    return found[1] if found else ""
