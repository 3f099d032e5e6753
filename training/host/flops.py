"""Peak arithmetic of GPUs, for MFU. Imports no torch."""

from __future__ import annotations

import re

# 10^12 operations per second, bf16 on tensor cores with fp32 sums, dense: half of what data sheets
# list "with sparsity". Keys: the driver's name without "NVIDIA ". Sources: NVIDIA's data sheets of
# B200 and B300 (HGX), GB200 and GB300 (NVL72), GB10, H100, H200, H800, H20, GH200, A100, A800, A40,
# A30, A10, A10G, L40S, L40, L20, L4, RTX A6000, A5000 and A4000, RTX 6000 and 5000 Ada; whitepapers
# GA102 (30xx), Ada (40xx) and RTX Blackwell (50xx, PRO), whose figures of GeForce are 4 × cores ×
# boost clock, as are those of the smaller cards here. Names not listed here (laptop GPUs, GPU
# slices, the custom A100 with 64 GB) have another peak or no published one. fp16 has the same peak.
PEAKS = {
    r"GB[23]00": 2500.0,
    r"B[23]00( SXM6 AC)?": 2250.0,
    r"GB10": 125.0,
    r"(GH200 \d+GB?( HBM3e?)?|H100 \d+GB HBM3|H100 SXM5.*|H200|H800)": 989.5,
    r"(H100|H200) NVL": 835.5,
    r"(H100|H800) PCIe": 756.5,
    r"H20(-3e)?": 148.0,
    r"(A100|A800)[- ](SXM4[- ]|PCIE[- ])?\d+GB( PCIe)?": 312.0,
    r"A40": 149.7,
    r"A30": 165.0,
    r"A10": 125.0,
    r"A10G": 70.0,
    r"L40S": 362.0,
    r"L40": 181.0,
    r"L20": 119.5,
    r"L4": 121.0,
    r"RTX A6000": 154.8,
    r"RTX A5000": 111.1,
    r"RTX A4000": 76.7,
    r"RTX 6000 Ada Generation": 364.2,
    r"RTX 5000 Ada Generation": 261.1,
    r"RTX PRO 6000 Blackwell (Workstation|Server) Edition": 503.8,
    r"RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    r"GeForce RTX 5090": 209.5,
    r"GeForce RTX 5080": 112.6,
    r"GeForce RTX 5070 Ti": 87.9,
    r"GeForce RTX 5070": 61.7,
    r"GeForce RTX 5060 Ti": 47.4,
    r"GeForce RTX 5060": 38.4,
    r"GeForce RTX 4090 D": 147.1,
    r"GeForce RTX 4090": 165.2,
    r"GeForce RTX 4080 SUPER": 104.4,
    r"GeForce RTX 4080": 97.5,
    r"GeForce RTX 4070 Ti SUPER": 88.2,
    r"GeForce RTX 4070 Ti": 80.2,
    r"GeForce RTX 4070 SUPER": 71.0,
    r"GeForce RTX 4070": 58.3,
    r"GeForce RTX 4060 Ti": 44.1,
    r"GeForce RTX 4060": 30.2,
    r"GeForce RTX 3090 Ti": 80.0,
    r"GeForce RTX 3090": 71.0,
    r"GeForce RTX 3080 Ti": 68.2,
    r"GeForce RTX 3080": 59.5,
    r"GeForce RTX 3070 Ti": 43.5,
    r"GeForce RTX 3070": 40.6,
    r"GeForce RTX 3060 Ti": 32.4,
    r"GeForce RTX 3060": 25.5,
}


# In fp16 with fp32 sums, of GPUs without bf16; data sheets of V100, V100S, DGX-2 (SXM3) and T4,
# whitepaper TU102 (RTX 2080 Ti at its reference clock, TITAN RTX, Quadro), product page of TITAN V.
FP16_PEAKS = {
    r"GeForce RTX 2080 Ti": 53.8,
    r"(TITAN RTX|Quadro RTX [68]000)": 130.5,
    r"TITAN V": 110.0,
    r"Tesla V100-SXM[23]-\d+GB": 125.0,
    r"Tesla V100-PCIE-\d+GB": 112.0,
    r"Tesla V100S-PCIE-\d+GB": 130.0,
    r"(Tesla )?T4": 65.0,
}
KNOWN = {"bf16": PEAKS, "fp16": PEAKS | FP16_PEAKS, "fp8": PEAKS}


def peak(name: str, precision: str) -> float | None:
    """Operations per second of a GPU with this name in `precision`; None if unknown, as always for
    fp32. For fp8 the bf16 peak: attention and head are in bf16, and the speed-up shows in the
    MFU."""
    name, known = name.removeprefix("NVIDIA "), KNOWN.get(precision, {})
    return next(
        (value * 1e12 for pattern, value in known.items() if re.fullmatch(pattern, name)), None
    )
