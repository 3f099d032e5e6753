"""Options that are comma-separated text: 1,2 or 0.9,0.99."""

from __future__ import annotations

import math


def whole(text: str) -> list[int]:
    """List of integers. Raises ValueError."""
    return [int(word) for word in _words(text)]


def numbers(text: str) -> list[float]:
    """List of finite numbers. Raises ValueError."""
    found = [float(word) for word in _words(text)]
    if not all(math.isfinite(x) for x in found):
        raise ValueError(text)
    return found


def _words(text: str) -> list[str]:
    return text.split(",") if text.strip() else []
