"""Peak arithmetic of GPUs, for MFU. Imports no torch."""

from __future__ import annotations

import re

# 10^12 operations per second, bf16 on tensor cores with fp32 sums, dense: half of what data sheets
# list "with sparsity". Keys: the driver's name without "NVIDIA ". Sources: NVIDIA's data sheets of
# B200 (HGX), H100, H200, H20, GH200, A100, A800, A40, A30, A10, L40S, L40, L4, RTX A6000;
# whitepapers GA102 (30xx), Ada (40xx) and RTX Blackwell (50xx) for GeForce. Names not listed here
# (laptop GPUs, GPU slices) have another peak or no published one.
PEAKS = {
    r"B200": 2250.0,
    r"(GH200 \w+|H100 \d+GB HBM3|H100 SXM5.*|H200)": 989.5,
    r"(H100|H200) NVL": 835.5,
    r"H100 PCIe": 756.5,
    r"H20(-3e)?": 148.0,
    r"(A100|A800)[- ](SXM4[- ]|PCIE[- ])?\d+GB( PCIe)?": 312.0,
    r"A40": 149.7,
    r"A30": 165.0,
    r"A10": 125.0,
    r"L40S": 362.0,
    r"L40": 181.0,
    r"L4": 121.0,
    r"RTX A6000": 154.8,
    r"GeForce RTX 5090": 209.5,
    r"GeForce RTX 4090": 165.2,
    r"GeForce RTX 4080": 97.5,
    r"GeForce RTX 3090 Ti": 80.0,
    r"GeForce RTX 3090": 71.0,
}


def peak(name: str) -> float | None:
    """Operations per second of a GPU with this name; None if unknown."""
    name = name.removeprefix("NVIDIA ")
    return next(
        (value * 1e12 for pattern, value in PEAKS.items() if re.fullmatch(pattern, name)), None
    )
