"""Formatting of counts, sizes and durations: '1 rank', '2 ranks', '512 kB', '0.58 M parameters'."""

from __future__ import annotations

import math
import time

from training.core import messages

SMALL = 0.01  # smaller values need more than four decimal places
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def plural(count: int, one: str, many: str = "") -> str:
    """'1 rank', '2 ranks'; `one` is the key of the Chinese form in core/text/units.json."""
    if messages.language() == "zh" and one in (forms := messages.templates("units")):
        return forms[one]["zh"].format(n=count)
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(count: float) -> str:
    """Bytes, in decimal units: '999 bytes', '1.2 kB', '34 MB'."""
    for unit, one in SIZES:
        if count >= one:
            return f"{count / one:.1f} {unit}" if count < 10 * one else f"{count / one:,.0f} {unit}"
    return plural(int(count), "byte")


def millions(count: int) -> str:
    """A number of weights: '25.4 M', '0.58 M', '1,234' below 100,000."""
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count:,}"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def clock(unix_s: float | None, form: str = "%H:%M:%S") -> str:
    try:
        return "-" if unix_s is None else time.strftime(form, time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "-"


def count(value: float | None) -> str:
    """3.27 · 38,500 · 1.23 M · 4.56 G"""
    if value is None or not math.isfinite(value):
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return amount(value)


def amount(value: float) -> str:
    """12,346 · 3.27: below 100 with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def decimal(value: float | None, form: str = "") -> str:
    """Four decimal places; three significant digits below SMALL."""
    return (
        "-"
        if value is None
        else format(value, form or (".3g" if 0 < abs(value) < SMALL else ".4f"))
    )


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value / 1000:.2f} s"
        if value >= 10_000
        else f"{value:.0f} ms"
        if value >= 100
        else f"{value:.1f} ms"
    )


def joules(value: float) -> str:
    """'0.0123 J', '4.5 kJ'."""
    return f"{value / 1000:.3g} kJ" if value >= 1000 else f"{value:.3g} J"


def gib(value: float | None) -> str:
    """The number of GiB without the unit."""
    return (
        "-" if value is None else format(value / (1 << 30), ".1f" if value < 100 << 30 else ".0f")
    )
