"""DeepSpeed 0.19.8's optimizer wrappers: the wrapper of a layout, and the bytes of the optimizer's tensors.

A wrapper is the class that DeepSpeed puts around the optimizer. It owns the master weights and divides the states.
"""

from collections.abc import Iterator

from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank_parameters import ParameterGroup
from pretrain.model.operator_memory import FP32

Allocation = tuple[tuple[str, str], int]  # ((role, location), bytes)


def optimizer_wrapper(layout: Layout) -> str:
    """Name the wrapper that DeepSpeed chooses (runtime/engine.py, _do_optimizer_sanity_check).

    "zero3" (DeepSpeedZeroOptimizer_Stage3), "zero12" (DeepSpeedZeroOptimizer), "bf16" (BF16_Optimizer), "fp16"
    (FP16_Optimizer) or "none" (fp32 at ZeRO stage 0). In this project ZeRO stages 0 and 1 run as a PipelineModule; for
    it DeepSpeed chooses BF16_Optimizer in bf16 at stage 0.
    """
    if layout.zero_stage == 3:
        return "zero3"
    if layout.uses_bf16_optimizer:
        return "bf16"
    if layout.zero_stage > 0:
        return "zero12"
    return "fp16" if layout.precision == "fp16" else "none"


def reduces_gradients(layout: Layout) -> bool:
    """Return whether ZeRO stages 1 and 2 copy gradients to reduce them; see patches/zero.py."""
    in_place = layout.zero_size == 1 and layout.contiguous_gradients and layout.offload_optimizer == "none"
    return not in_place or layout.grad_accum_bytes != layout.element_bytes


def optimizer_location(layout: Layout) -> str:
    """Return the location of an offloaded optimizer's tensors that DeepSpeed pins if `pin_memory` is true."""
    if layout.offload_optimizer == "none":
        return "device"
    return "pinned" if layout.offload_optimizer_pinned else "host"


def unpinned_location(layout: Layout) -> str:
    """Return the location of an offloaded optimizer's tensors that DeepSpeed never pins.

    These are the optimizer states and ZeRO-3's master weights, which are converted to fp32 after pinning.
    """
    return "device" if layout.offload_optimizer == "none" else "host"


def master_weight_bytes(layout: Layout) -> int:
    """Bytes of one element of the master weights, and of the gradient that the optimizer is given."""
    return layout.element_bytes if layout.masters_in_16bit else FP32


def optimizer_state_bytes(layout: Layout) -> int:
    """Bytes of the optimizer states of one element, for every optimizer except Muon.

    DeepSpeed's Lion on the CPU allocates two tensors, as Adam does (ops/lion/cpu_lion.py).
    """
    tensors = layout.optimizer_moments
    if layout.optimizer == "lion" and layout.offload_optimizer != "none":
        tensors += 1
    return tensors * (2 if layout.moments_in_16bit else FP32)


def eight_bit_state_bytes(elements: int) -> int:
    """Bytes of both states of one tensor of bitsandbytes' AdamW8bit (optim/optimizer.py, Optimizer2State.init_state).

    Each state has a byte for each element, and an fp32 maximum for each block of 256 elements. Tensors of less than
    4,096 elements have fp32 states. The two tables of 256 values that all tensors share are not counted.
    """
    if elements < 4096:
        return 2 * FP32 * elements
    return 2 * (elements + FP32 * -(-elements // 256))


def optimizer_states(group: ParameterGroup, elements: int, layout: Layout) -> Iterator[Allocation]:
    """Yield the optimizer states of `elements` elements of a group.

    Muon updates hidden matrices. It keeps one momentum tensor in the gradients' dtype, and a second one until the step
    is known to have no overflow (`_muon_pending_momentum`). An offloaded momentum is fp32, and the only one.
    Embeddings, head and vectors use Adam.
    """
    location = unpinned_location(layout)
    if layout.optimizer == "adamw8bit":
        yield ("optimizer_states", location), eight_bit_state_bytes(elements)
        return
    if layout.optimizer != "muon":
        yield ("optimizer_states", location), elements * optimizer_state_bytes(layout)
        return
    muon_elements = round(elements * group.muon_size / group.size)
    momentum = muon_elements * (layout.grad_accum_bytes if layout.offload_optimizer == "none" else FP32)
    yield ("optimizer_states", location), momentum + (elements - muon_elements) * 2 * FP32
    if layout.zero_stage < 3 and layout.offload_optimizer == "none":
        yield ("buffers", "device"), momentum
