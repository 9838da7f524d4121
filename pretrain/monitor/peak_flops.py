"""The peak rates that MFU divides by."""

# Dense peak TFLOP/s by a part of the device's name, from the vendors' data sheets: (16-bit, fp32 without TF32)
_PEAK_TFLOPS = {
    "H200": (989.0, 67.0), "H100 PCIe": (756.0, 51.0), "H100": (989.0, 67.0), "B200": (2250.0, 80.0),
    "A100": (312.0, 19.5), "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0), "A10": (125.0, 31.2), "V100": (125.0, 15.7), "T4": (65.0, 8.1),
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Of one device, by its name; None for one that the table does not have."""
    for part, (half, single) in _PEAK_TFLOPS.items():
        if part in device_name:
            return single if precision == "fp32" else half
    return None
