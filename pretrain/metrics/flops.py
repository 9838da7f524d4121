"""Model FLOPs and the peak rates that MFU divides by."""

from pretrain.model.config import ModelConfig

# Dense peak TFLOP/s by a part of the device's name, from the vendors' data sheets: (16-bit, fp32 without TF32)
_PEAK_TFLOPS = {
    "H200": (989.0, 67.0), "H100 PCIe": (756.0, 51.0), "H100": (989.0, 67.0), "B200": (2250.0, 80.0),
    "A100": (312.0, 19.5), "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0), "A10": (125.0, 31.2), "V100": (125.0, 15.7), "T4": (65.0, 8.1),
}


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Forward and backward FLOPs a token, recomputation not counted: 6 N + 12 layers * hidden * T.

    N is the parameters that a token is multiplied with (no embedding look-ups; the head once, tied or not).
    Formula: PaLM (arXiv 2204.02311), appendix B, with attention over the whole sequence, as others count it.
    """
    return config.num_layers * block_flops_per_token(config, seq_length) + head_flops_per_token(config)


def block_flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Of flops_per_token, those of one block: its parameters and its attention."""
    return 6.0 * config.layer_parameters() + 12.0 * config.num_heads * config.head_size * seq_length


def head_flops_per_token(config: ModelConfig) -> float:
    """Of flops_per_token, those of the output layer, tied or not."""
    return 6.0 * config.vocab_size * config.hidden_size


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Of one device, by its name; None for one that the table does not have."""
    for part, (half, single) in _PEAK_TFLOPS.items():
        if part in device_name:
            return single if precision == "fp32" else half
    return None
