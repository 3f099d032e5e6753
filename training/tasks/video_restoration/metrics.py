"""Losses and metrics: restored against sharp frames, both (B, T, 3, H, W), 0 … 1."""

from __future__ import annotations

import torch
from torch.nn import functional as F

WINDOW, SIGMA = 11, 1.5  # SSIM: Wang 2004 (doi:10.1109/TIP.2003.819861)
STABLE = (0.01**2, 0.03**2)
EXACT = 1e-10  # a smaller mean square error is reported as 100 dB


def loss(kind: str, found: torch.Tensor, wanted: torch.Tensor, eps: float) -> torch.Tensor:
    """The mean over all pixels; `eps`: of Charbonnier, √(d² + eps)."""
    difference = found.float() - wanted.float()
    if kind == "l1":
        return difference.abs().mean()
    if kind == "l2":
        return difference.square().mean()
    return (difference.square() + eps).sqrt().mean()


def rounded(found: torch.Tensor) -> torch.Tensor:
    """The values as a picture has them, 8 bits per colour: published scores are of pictures."""
    return found.float().clamp(0, 1).mul_(255).round_().div_(255)


def psnr(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(B,) dB, the mean over the frames."""
    error = (rounded(found) - wanted.float()).square().mean((2, 3, 4))
    return (-10 * error.clamp(min=EXACT).log10()).mean(1)


def ssim(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(B,), the mean over frames, colours and positions at which the whole window is inside the
    picture.

    Sides of at least 11 pixels.
    """
    count, steps = found.shape[:2]
    # One frame at a time: five blurred copies of a whole clip in float64 would fill the memory.
    each = [_ssim(rounded(found[:, t]).double(), wanted[:, t].double()) for t in range(steps)]
    return torch.stack(each, 1).mean(1).float().view(count)


def _ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) float64 → (B,)."""
    mean_a, mean_b = _blurred(a), _blurred(b)
    square_a, square_b, product = (
        _blurred(a * a) - mean_a**2,
        _blurred(b * b) - mean_b**2,
        _blurred(a * b) - mean_a * mean_b,
    )
    first, second = STABLE
    light = (2 * mean_a * mean_b + first) / (mean_a**2 + mean_b**2 + first)
    shape = (2 * product + second) / (square_a + square_b + second)
    return (light * shape).mean((1, 2, 3))


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """Gaussian window, down and then across, without padding."""
    place = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weight = torch.exp(-(place**2) / (2 * SIGMA**2))
    weight = (weight / weight.sum()).expand(x.shape[1], 1, -1)
    down = F.conv2d(x, weight[..., None], groups=x.shape[1])
    return F.conv2d(down, weight[:, :, None], groups=x.shape[1])
