"""Peak FLOP/s of devices, the denominator of MFU."""

# Part of the device's name -> dense peak TFLOP/s (16-bit, fp32 without TF32), from the vendors' data sheets. The first
# match counts.
_PEAK_TFLOPS = {
    "H200": (989.0, 67.0), "H100 PCIe": (756.0, 51.0), "H100": (989.0, 67.0), "B200": (2250.0, 80.0),
    "A100": (312.0, 19.5), "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0), "A10": (125.0, 31.2), "V100": (125.0, 15.7), "T4": (65.0, 8.1),
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a device; None if the table does not have its name."""
    for part, (half, single) in _PEAK_TFLOPS.items():
        if part in device_name:
            return single if precision == "fp32" else half
    return None
