"""Counts and sizes in messages: '1 rank', '2 ranks', '512 kB', '0.58 M parameters'."""

from __future__ import annotations

SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def plural(count: int, one: str, many: str = "") -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(count: float) -> str:
    """Bytes, in decimal units: '999 bytes', '1.2 kB', '34 MB'."""
    for unit, one in SIZES:
        if count >= one:
            return f"{count / one:.1f} {unit}" if count < 10 * one else f"{count / one:,.0f} {unit}"
    return plural(int(count), "byte")


def millions(count: int) -> str:
    """A number of weights: '25.4 M', '0.58 M', '1,234' where M would leave nothing."""
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count:,}"
