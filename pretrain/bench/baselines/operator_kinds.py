"""The kind of each operator in a profile, and the bytes and floating-point operations that its shapes imply."""

import re
from collections.abc import Sequence
from math import prod

PRODUCTS, ATTENTION, NORMS, ACTIVATIONS = "matrix products", "attention", "norms", "activations"
COPIES, LOSS, EMBEDDING, ELEMENTWISE = "copies and casts", "loss", "embedding", "other elementwise and sums"
OPTIMIZER, COLLECTIVES, HOST = "optimizer", "collectives", "Python and host"
KINDS = (PRODUCTS, ATTENTION, NORMS, ACTIVATIONS, COPIES, LOSS, EMBEDDING, ELEMENTWISE, OPTIMIZER, COLLECTIVES, HOST)

OPTIMIZER_STEP = "optimizer step"  # names of our own ranges in the profile
TRAINING_STEP = "training step"

_PRODUCT = re.compile(r"::(mm|bmm|addmm|baddbmm|_linear_pointwise|mv|addmv)_?$")
# operators that move no data: views, allocation, and those that call other operators
_NO_DATA = re.compile(
    r"^aten::(as_strided|t|transpose|permute|view\w*|_unsafe_view|_reshape_alias|reshape\w*|flatten|unflatten|expand\w*|"
    r"select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|detach\w*|alias|lift_fresh|resolve_\w+|result_type|"
    r"empty\w*|new_\w+|resize_|set_|to|item|is_nonzero|_local_scalar_dense|contiguous|clone|matmul|linear|zeros\w*|ones\w*)$")
# (kind, pattern of names of C functions of this project, of torch's operators, or of CUDA kernels)
_BY_NAME = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in (
    (COLLECTIVES, r"nccl|gloo|c10d|record_param_comms|allreduce|all_gather|reduce_scatter"),
    (PRODUCTS, r"gemm|cutlass|cublas|nvjet|splitk|wgmma"),
    (LOSS, r"nll_loss|log_softmax|cross_entropy|logit|(^|_|::)loss"),
    (ATTENTION, r"softmax|scaled_dot|flash|fmha|attention|rope|rotate|sdpa"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta|^c::norm"),
    (ACTIVATIONS, r"gelu|silu|swiglu|threshold|relu|activat"),
    (OPTIMIZER, r"adam|multi_tensor|clip|lion|muon|sum_squares|find_not_finite|scale_to_float"),
    (EMBEDDING, r"embedding|index_(add|select|put)|^aten::index"),
    (COPIES, r"copy|^aten::(cat|stack|fill_|zero_|_to_copy)$|memcpy|memset|CatArray|transpose|cast|FillFunctor"),
))
# (kind of elementwise operators that are called by the function of this name, pattern)
_BY_CALLER = tuple((kind, re.compile(pattern)) for kind, pattern in (
    (NORMS, r"(?i)layer_norm|rms_?norm"), (ATTENTION, r"Attention|scaled_dot_product"),
    (LOSS, r"CrossEntropy|cross_entropy"), (ACTIVATIONS, r"ActivatedLinear|silu|gelu")))
_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8,
          "short": 2, "bool": 1, "unsigned char": 1, "signed char": 1, "c10::complex<float>": 8}
_OVERWRITES = re.compile(r"^aten::(copy|fill|zero)_$")  # their first argument is written, and not read
_REDUCES = re.compile(r"^aten::(sum|amax|amin|max|mean|linalg_vector_norm|norm|dot|argmax|nll_loss_forward|item)$")


def kind_of(name: str, callers: Sequence[str], shapes: Sequence[Sequence[int]], vocab_size: int) -> str:
    """Return the kind of an operator.

    Args:
        callers: names of the operators and functions that call it, from the outermost.
        shapes: of its tensors; [] for other arguments. Elementwise operators and copies of logits count as loss.
    """
    if kind_of_kernel(name) == COLLECTIVES:
        return COLLECTIVES
    if any(caller == OPTIMIZER_STEP or caller.startswith("Optimizer.step#") for caller in (*callers, name)):
        return OPTIMIZER
    if _PRODUCT.search(name):
        return PRODUCTS
    if not re.match(r"^(aten|c|c10d|mkldnn|prims|gloo|nccl)::|^record_param_comms", name) or _NO_DATA.match(name):
        return HOST
    kind = kind_of_kernel(name)
    if kind in (COPIES, ELEMENTWISE, ATTENTION) and any(shape and shape[-1] == vocab_size for shape in shapes):
        return LOSS
    if kind != ELEMENTWISE or name.startswith("c::"):
        return kind
    return next((found for found, pattern in _BY_CALLER if any(map(pattern.search, callers))), ELEMENTWISE)


def kind_of_kernel(name: str) -> str:
    """Return the kind that the name of an operator or of a CUDA kernel suggests."""
    return next((kind for kind, pattern in _BY_NAME if pattern.search(name)), ELEMENTWISE)


def bytes_moved(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Return the bytes that an operator reads and writes; 0 if its tensors are not recorded, as those of a list.

    C functions get their outputs as arguments. Torch's profiler records no outputs, so they are derived: an in-place
    operator writes its first argument; a reduction writes nothing worth counting; another operator writes a tensor as
    large as its largest argument.
    """
    if _NO_DATA.match(name):
        return 0
    sizes = [prod(shape) * _BYTES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False)]
    if not any(sizes) or name.startswith("c::") or _OVERWRITES.match(name) or _REDUCES.match(name):
        return sum(sizes)
    matrices = _matrices(shapes) if _PRODUCT.search(name) else None
    if matrices is not None:
        rows, _, columns = matrices
        return sum(sizes) + rows * columns * next(_BYTES.get(dtype, 0) for dtype in reversed(dtypes) if dtype in _BYTES)
    return sum(sizes) + (sizes[0] if name.endswith("_") else max(sizes))


def flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """Return the floating-point operations of a matrix product; 0 for other operators."""
    matrices = _matrices(shapes) if _PRODUCT.search(name) else None
    return 2 * prod(matrices) if matrices else 0


def _matrices(shapes: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Return (rows, inner size, columns) of the product of the last two matrices; rows include the batch."""
    found = [shape for shape in shapes if len(shape) >= 2]
    if len(found) < 2:
        return None
    left, right = found[-2:]
    if left[-1] == right[-2]:
        return prod(left[:-1]), left[-1], right[-1]
    return (prod(left[:-1]), left[-1], right[-2]) if left[-1] == right[-1] else None  # a linear layer's weight
