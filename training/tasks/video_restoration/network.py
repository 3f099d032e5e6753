"""Restoration network: bidirectional and recurrent, small enough for a CPU.

As in BasicVSR (Chan 2021, arXiv:2012.02181), features propagate from the last frame to the first
and back, so that each frame uses all others. Instead of optical flow, each frame's features include
its differences from the frames before and after it; and the blocks multiply features (as the gates
of NAFNet, arXiv:2204.04676), so that sharpening can follow the detected motion. The features keep
the input's resolution: at half of it the same arithmetic learned less than half as much. The output
is the enlarged input plus a learned residual.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SLOPE = 0.1  # of leaky ReLU, as in BasicVSR
# pixels around each one whose mean is subtracted: sharpening needs the remainder, which is small
# compared with the light itself
DETAIL = 5
# so it is amplified; without both, a network learned half as much in its first hundred steps
GAIN = 8.0
START = 0.3  # initial scale of a block's output, so that a stack of blocks keeps its scale


class GatedBlock(nn.Module):
    """x plus a product of features; `width` is even."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _conv(width, width), _conv(width // 2, width)
        for conv in (self.first, self.second):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            nn.init.zeros_(conv.bias)
        with torch.no_grad():
            self.second.weight.mul_(START)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        what, where = self.first(x).chunk(2, 1)
        return x + self.second(what * where)


class PropagationStep(nn.Module):
    """One step in one direction: a frame's features and the propagated ones → the propagated
    features."""

    def __init__(self, incoming: int, width: int, blocks: int) -> None:
        super().__init__()
        self.mix = _conv(incoming, width)
        self.blocks = nn.Sequential(*(GatedBlock(width) for _ in range(blocks)))

    def forward(self, *features: torch.Tensor) -> torch.Tensor:
        return self.blocks(F.leaky_relu(self.mix(torch.cat(features, 1)), SLOPE))


class Recurrent(nn.Module):
    """(B, T, C, h, w) → (B, T, 3, h × scale, w × scale). The first three input channels are the
    picture, 0 … 1; the output is too, but may slightly exceed this range.

    `width`: channels of the features, even; `blocks`: residual blocks per direction; `scale`:
    1, 2 or 4.
    """

    def __init__(self, channels: int, width: int, blocks: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.stem = _conv(4 * channels, width)
        self.backward_way = PropagationStep(2 * width, width, blocks)
        self.forward_way = PropagationStep(3 * width, width, blocks)
        self.last = _conv(2 * width, width)
        self.out = _conv(width, 3 * scale**2)
        # The first output is the input itself: training starts from the picture, not from noise.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        seen = self._stem(frames.transpose(0, 1))  # frame by frame, each contiguous
        still = torch.zeros_like(seen[0])
        travelled, back = still, [still] * len(seen)
        for step in reversed(range(len(seen))):
            travelled = self.backward_way(seen[step], travelled)
            back[step] = travelled
        travelled, forth = still, [still] * len(seen)
        for step in range(len(seen)):
            travelled = self.forward_way(seen[step], back[step], travelled)
            forth[step] = travelled
        both = torch.cat([torch.cat(back), torch.cat(forth)], 1)
        added = self.out(F.leaky_relu(self.last(both), SLOPE))
        if self.scale > 1:
            added = F.pixel_shuffle(added, self.scale)
        return enlarged(frames, self.scale).float() + added.float().unflatten(
            0, (len(seen), -1)
        ).transpose(0, 1)

    def reach(self, frames: int) -> int:
        """How many pixels away the input can change a pixel of a clip of `frames` frames."""
        step = 1 + 2 * len(self.backward_way.blocks)
        return 1 + DETAIL // 2 + 2 * frames * step + 2 + (self.scale > 1)

    def step_bytes(self, frames: int) -> int:
        """Memory for each input pixel of a clip of `frames` frames, without gradients; measured on
        a CPU and rounded up."""
        width, channels = self.last.out_channels, self.stem.in_channels // 4
        return 4 * frames * (10 * width + 8 * channels + 12 * self.scale**2)

    def _stem(self, frames: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(T, B, …) → features of each frame: of its light, its detail, and its difference from the
        frames before and after it."""
        before, after = torch.cat([frames[:1], frames[:-1]]), torch.cat([frames[1:], frames[-1:]])
        flat = frames.flatten(0, 1)
        detail = flat - F.avg_pool2d(
            flat, DETAIL, stride=1, padding=DETAIL // 2, count_include_pad=False
        )
        changes = [(other - frames).flatten(0, 1) for other in (before, after)]
        seen = F.leaky_relu(
            self.stem(torch.cat([flat - 0.5, *(GAIN * x for x in (detail, *changes))], 1)), SLOPE
        )
        return seen.unflatten(0, frames.shape[:2]).unbind(0)


def enlarged(frames: torch.Tensor, scale: int) -> torch.Tensor:
    """The enlarged input alone, (B, T, 3, h × scale, w × scale): the result without a network."""
    pictures = frames[:, :, :3]
    if scale == 1:
        return pictures
    large = F.interpolate(
        pictures.flatten(0, 1), scale_factor=float(scale), mode="bilinear", align_corners=False
    )
    return large.unflatten(0, frames.shape[:2])


def _conv(incoming: int, outgoing: int) -> nn.Conv2d:
    return nn.Conv2d(incoming, outgoing, 3, padding=1)
