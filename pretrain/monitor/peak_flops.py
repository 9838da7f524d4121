"""Peak FLOP/s of devices, the denominator of MFU."""

import re

# Device -> dense peak TFLOP/s (16-bit, TF32, fp32 without TF32), from the vendors' data sheets. The first match counts.
_PEAK_TFLOPS = {
    "H200": (989.0, 494.5, 67.0), "H100 PCIe": (756.0, 378.0, 51.0), "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.0, 494.5, 67.0), "GB200": (2500.0, 1250.0, 80.0), "B200": (2250.0, 1100.0, 75.0),
    "A100": (312.0, 156.0, 19.5), "A800": (312.0, 156.0, 19.5), "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5), "L4": (121.0, 60.0, 30.3), "A10G": (70.0, 35.0, 35.0), "A10": (125.0, 62.5, 31.2),
    "V100": (125.0, 15.7, 15.7), "T4": (65.0, 8.1, 8.1),
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a device in bf16, fp16, tf32 or fp32; None if the table does not have its name.

    A name matches as a complete word, or after a G: a GH200 is an H200, but an RTX A1000 is not an A100.
    """
    for name, (half, tf32, single) in _PEAK_TFLOPS.items():
        if re.search(rf"\bG?{name}\b", device_name):
            return {"fp32": single, "tf32": tf32}.get(precision, half)
    return None
