"""Size of a checkpoint on disk, computed from the layout alone."""

from pretrain.config.layout import DTYPE_BYTES, Layout


def checkpoint_bytes(layout: Layout, num_parameters: int) -> int:
    """Bytes of a checkpoint's tensors: master weights, optimizer states and, except with ZeRO-3, the model's weights.

    fp32 at ZeRO stage 0 has no separate master weights. File headers and padding are not counted.
    """
    in_fp32 = layout.precision == "fp32"
    master_bytes = 0 if in_fp32 and layout.zero_stage == 0 else 2 if layout.masters_in_16bit else 4
    state_bytes = (2 if layout.moments_in_16bit else 4) * layout.optimizer_moments
    model_bytes = 0 if layout.zero_stage == 3 else DTYPE_BYTES[layout.precision]
    return num_parameters * (master_bytes + state_bytes + model_bytes)
