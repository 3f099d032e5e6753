"""Computed moving scenes: textured shapes over a textured background, in linear light, at any
moment.

A camera frame is the mean of the light while its shutter is open: the blurred frame is the mean of
many moments, the sharp frame the one in the middle. Everything derives from one numpy Generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Light = npt.NDArray[np.float32]
Generator = np.random.Generator

GAMMA = 2.2  # of the pictures: light = value ** 2.2
SHUTTER = 0.9  # share of a frame's time during which the shutter is open
MOMENTS = 11  # averaged in a blurred frame; less than a pixel apart at SPEED
SPEED = (3.0, 5.0)  # of background and shapes, root mean square, pixels per frame
EDGE = 1.2  # width of an anti-aliased edge in pixels


class Scene:
    """A background that moves like a hand-held camera, and independently moving shapes."""

    def __init__(self, random: Generator, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.background = texture(random, height + height // 2, width + width // 2)
        self.camera = MotionPath(random, SPEED[0])
        self.shapes = [MovingShape(random, height, width) for _ in range(random.integers(3, 6))]

    def at(self, moment: float) -> Light:
        """Light at a moment (frames from the start), (height, width, 3), 0 … 1."""
        picture = _window(self.background, *self.camera.at(moment), self.height, self.width)
        for shape in self.shapes:
            shape.paint(picture, moment)
        return picture

    def moments(self, frame: int) -> list[float]:
        """Moments while the shutter of a frame is open, including the middle."""
        return [frame + SHUTTER * (step / (MOMENTS - 1) - 0.5) for step in range(MOMENTS)]

    def frame(self, frame: int) -> tuple[Light, Light, Light]:
        """Light of (blurred, sharp), and of every moment averaged in the blurred frame."""
        lights = np.stack([self.at(moment) for moment in self.moments(frame)])
        return lights.mean(axis=0), lights[MOMENTS // 2], lights


class MotionPath:
    """Position as a function of time: a steady motion and two oscillations, so that some frames are
    slow and some fast."""

    def __init__(self, random: Generator, speed: float) -> None:
        """`speed`: root mean square, pixels per frame."""
        angle = random.uniform(0, 2 * np.pi)
        self.steady = 0.5 * speed * np.array([np.sin(angle), np.cos(angle)])
        self.turns = random.uniform(0.25, 0.9, (2, 2))  # radians per frame
        self.phases = random.uniform(0, 2 * np.pi, (2, 2))
        swing = speed * np.sqrt(0.75) * random.dirichlet(np.ones(4)).reshape(2, 2) ** 0.5
        self.reach = np.sqrt(2) * swing / self.turns

    def at(self, moment: float) -> tuple[float, float]:
        """(down, right), pixels."""
        down, right = self.steady * moment + (
            self.reach * np.sin(self.turns * moment + self.phases)
        ).sum(axis=0)
        return float(down), float(right)


class MovingShape:
    """A textured disc, box or star that rotates as it moves; it wraps around the picture's
    borders."""

    def __init__(self, random: Generator, height: int, width: int) -> None:
        self.radius = random.uniform(0.1, 0.2) * min(height, width)
        self.kind = int(random.integers(3))
        self.texture = texture(random, int(2 * self.radius) + 2, int(2 * self.radius) + 2)
        self.way = MotionPath(random, SPEED[1])
        self.start = random.uniform(0, 1, 2) * (height, width)
        self.angle, self.turn = random.uniform(0, 2 * np.pi), random.normal(0, 0.06)

    def paint(self, picture: Light, moment: float) -> None:
        height, width = picture.shape[:2]
        reach = self.radius * 1.5 + 2
        down, right = self.way.at(moment)
        middle_y = (self.start[0] + down + reach) % (height + 2 * reach) - reach
        middle_x = (self.start[1] + right + reach) % (width + 2 * reach) - reach
        top, bottom = max(0, int(middle_y - reach)), min(height, int(middle_y + reach) + 1)
        left, end = max(0, int(middle_x - reach)), min(width, int(middle_x + reach) + 1)
        if top >= bottom or left >= end:
            return
        y = np.arange(top, bottom, dtype=np.float32)[:, None] - np.float32(middle_y)
        x = np.arange(left, end, dtype=np.float32)[None, :] - np.float32(middle_x)
        angle = self.angle + self.turn * moment
        sine, cosine = np.float32(np.sin(angle)), np.float32(np.cos(angle))
        u, v = cosine * y - sine * x, sine * y + cosine * x
        cover = np.clip(0.5 - self._distance(u, v) / EDGE, 0, 1)[..., None]
        part = picture[top:bottom, left:end]
        part += cover * (_sampled(self.texture, u + self.radius, v + self.radius) - part)

    def _distance(self, u: Light, v: Light) -> Light:
        """Distance from the shape's edge, pixels; negative inside."""
        if self.kind == 0:
            return np.hypot(u, v) - np.float32(self.radius)
        if self.kind == 1:
            return np.maximum(np.abs(u), np.abs(v)) - np.float32(0.85 * self.radius)
        points = 1 + 0.25 * np.cos(5 * np.arctan2(u, v))
        return np.hypot(u, v) - np.float32(self.radius) * points.astype(np.float32)


def texture(random: Generator, height: int, width: int) -> Light:
    """Soft colours under patches and stripes with sharp edges, (height, width, 3) in linear light;
    periodic at its borders."""
    colours = np.stack([_noise(random, height, width, 4) for _ in range(3)], axis=-1)
    picture = 0.45 + 0.2 * colours
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None, :]
    for layer in range(9):
        cells = int(random.integers(3, 7)) * max(1, min(height, width) // 48)
        field = _noise(random, height, width, cells) - random.uniform(0.1, 0.9)
        cover = np.clip(0.5 + field * min(height, width) / cells / EDGE, 0, 1)
        if layer % 3 == 2:  # stripes, inside the patch
            waves = random.integers(-8, 9, 2) * max(1, min(height, width) // 64)
            stripes = np.sin(2 * np.pi * (waves[0] * y / height + waves[1] * x / width))
            cover = cover * np.clip(0.5 + 2.5 * stripes, 0, 1)
        picture += cover[..., None] * (random.uniform(0.02, 0.98, 3) - picture)
    light: Light = (np.clip(picture, 0, 1) ** GAMMA).astype(np.float32)
    return light


def encoded(light: Light) -> npt.NDArray[np.uint8]:
    """Light encoded as pixel values."""
    return np.rint(np.clip(light, 0, 1) ** (1 / GAMMA) * 255).astype(np.uint8)


class SpikeCamera:
    """Every pixel accumulates light and fires at a threshold; the remainder counts for its next
    spike."""

    def __init__(self, random: Generator, height: int, width: int) -> None:
        self.gathered = random.uniform(0, 1, (height, width)).astype(np.float32)

    def planes(self, lights: Light, count: int) -> npt.NDArray[np.bool_]:
        """Spikes while a frame's shutter is open, (count, height, width)."""
        grey = lights.mean(axis=-1)
        out = np.empty((count, *grey.shape[1:]), bool)
        for plane in range(count):
            self.gathered += grey[plane * len(grey) // count]
            out[plane] = self.gathered >= 1
            self.gathered -= out[plane]
        return out


def _noise(random: Generator, height: int, width: int, cells: int) -> Light:
    """Smooth noise, about 0 … 1 with mean 0.5, with `cells` cells on each side; it repeats without
    a seam."""
    grid = random.uniform(0, 1, (cells, cells)).astype(np.float32)
    return _stretched(_stretched(grid, height).T, width).T


def _stretched(grid: Light, length: int) -> Light:
    """Rows interpolated by smoothstep."""
    place = np.arange(length, dtype=np.float32) * len(grid) / length
    row = place.astype(int)
    share = (place - row)[:, None]
    share = share * share * (3 - 2 * share)
    return grid[row] * (1 - share) + grid[(row + 1) % len(grid)] * share


def _window(canvas: Light, down: float, right: float, height: int, width: int) -> Light:
    """A window of a periodic canvas at a fractional position."""
    top, left = int(np.floor(down)), int(np.floor(right))
    y, x = np.float32(down - top), np.float32(right - left)
    rows = np.arange(top, top + height + 1) % canvas.shape[0]
    columns = np.arange(left, left + width + 1) % canvas.shape[1]
    part = canvas[rows[:, None], columns[None, :]]
    part = part[:-1] * (1 - y) + part[1:] * y
    out: Light = part[:, :-1] * (1 - x) + part[:, 1:] * x
    return out


def _sampled(canvas: Light, y: Light, x: Light) -> Any:
    """A canvas sampled at fractional positions."""
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    share_y, share_x = (y - top)[..., None], (x - left)[..., None]
    rows, columns = canvas.shape[:2]
    upper, lower, first, second = top % rows, (top + 1) % rows, left % columns, (left + 1) % columns
    above = canvas[upper, first] * (1 - share_x) + canvas[upper, second] * share_x
    below = canvas[lower, first] * (1 - share_x) + canvas[lower, second] * share_x
    return above * (1 - share_y) + below * share_y
