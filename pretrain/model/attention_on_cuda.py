"""Which operator computes attention on CUDA: plain values, without torch."""

FLEX_BLOCK = 128  # queries and keys; the default of flex_attention, whose kernels divide it
_LARGEST_HEAD = 256  # elements; of torch's flash kernel too


def why_not_flex(*, precision: str, head_size: int, seq_length: int, dropout: float) -> str:
    """Return why flex_attention.py cannot compute an attention on CUDA; "" if it can."""
    if dropout:
        return "attention dropout"
    if precision not in ("bf16", "fp16"):
        return f"{precision} instead of bf16 or fp16"
    if seq_length % FLEX_BLOCK:
        return f"a sequence of {seq_length} tokens, not a multiple of {FLEX_BLOCK}"
    if not 16 <= head_size <= _LARGEST_HEAD or head_size & (head_size - 1):
        return f"heads of {head_size} elements, not a power of 2 from 16 to {_LARGEST_HEAD}"
    return ""


def has_flash(*, precision: str, head_size: int) -> bool:
    """Return whether torch's flash kernel computes attention without a mask."""
    return precision != "fp32" and head_size <= _LARGEST_HEAD


def expected_operator(*, precision: str, head_size: int, seq_length: int, dropout: float, special: bool,
                      softcap: bool, plain: bool) -> str:
    """Describe the operator that a run on CUDA will probably use; the run itself asks torch, and reports the answer.

    Args:
        special: scores with documents, a window, ALiBi or soft-capping.
        softcap: scores with soft-capping.
        plain: the custom kernels are disabled.
    """
    if not special:
        if precision == "fp32":
            return "torch's efficient kernel: the flash kernel needs bf16 or fp16"
        if head_size > _LARGEST_HEAD:
            return f"torch's efficient kernel: the flash kernel takes heads of up to {_LARGEST_HEAD} elements"
        return "torch's flash or cuDNN kernel"
    reason = why_not_flex(precision=precision, head_size=head_size, seq_length=seq_length, dropout=dropout)
    if plain:
        reason = "--plain_operators"
    if not reason:
        return "flex_attention, a fused kernel that triton compiles"
    operators = "separate operators" if softcap else "torch's efficient kernel with a mask"
    return f"{operators}, not flex_attention: {reason}"
