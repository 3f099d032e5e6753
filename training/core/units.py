"""Formatting of counts, sizes and durations: '1 rank', '2 ranks', '512 kB', '0.58 M parameters'."""

from __future__ import annotations

import math
import re
import time

from training.core import messages
from training.core.messages import msg

SMALL = 0.01  # smaller values need more than four decimal places
LEAST_PERCENT = 0.1  # shown by `percent`
LARGE = 1e9  # larger values, of a diverged model, have up to 300 digits
ROUNDED = 9999.5  # from here on four significant digits would need an exponent
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
MIB, GIB = 1 << 20, 1 << 30


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# compiled at their first use, by `re`
_PART = r"(\d+(?:\.\d+)?)([smhdw])"
_CLOCK = r"(?:\d+:)?\d+:\d\d:\d\d"
_CLOCK_S = (1, 60, 3600, 86400)
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("b", 1000), ("ib", 1024))
}
_SIZE = r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)"


def plural(count: int, one: str, many: str = "") -> str:
    """'1 rank', '2 ranks'; `one` is the key of the Chinese form in core/text/units.json."""
    if messages.language() == "zh" and one in (forms := messages.templates("units")):
        return forms[one]["zh"].format(n=count)
    return f"{count} {one if count == 1 else many or one + 's'}"


def steps(first: int | None, last: int | None) -> str:
    """'step 2', 'steps 2 to 4'."""
    if first == last:
        return msg("core.units.one_step", step=first)
    return msg("core.units.steps", first=first, last=last)


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


def age(seconds: float) -> str:
    """'30 s', '19 min', '5 h', '2 d'."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def clock(unix_s: float | None, form: str = "%H:%M:%S") -> str:
    try:
        return "-" if unix_s is None else time.strftime(form, time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "-"


def moment(unix_s: float | None, now: float) -> str:
    """'03:12:08'; '11-28 03:12' of another day than `now`."""
    day = "%Y-%m-%d"
    today = unix_s is None or clock(unix_s, day) == clock(now, day)
    return clock(unix_s) if today else clock(unix_s, "%m-%d %H:%M")


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


def significant(value: float) -> str:
    """0.004117 · 29.83 · 12346: four significant digits, or all before the point; an exponent from
    LARGE on."""
    return format(value, ".0f" if ROUNDED <= abs(value) < LARGE else ".4g")


def decimal(value: float | None, form: str = "", *, places: int = 4) -> str:
    """With decimal places; three significant digits below SMALL, four from LARGE on."""
    if value is None:
        return "-"
    size = abs(value)
    plain = ".3g" if 0 < size < SMALL else ".4g" if size >= LARGE else f".{places}f"
    return format(value, form or plain)


def narrow(value: float | None, width: int) -> str:
    """decimal() with fewer digits where it is longer than `width` characters."""
    texts = [decimal(value, places=places) for places in (4, 3, 2, 1, 0)]
    texts += [decimal(value, form) for form in (".3g", ".2g")]
    return next((text for text in texts if len(text) <= width), decimal(value, ".1g"))


def unknown() -> str:
    """A missing value in a sentence; cells of tables have '-'."""
    return msg("core.units.unknown")


def below(bound: str) -> str:
    """A value that its format would round to zero."""
    return msg("core.units.below", bound=bound)


def percent(value: float) -> str:
    """'41.3 %', 'less than 0.1 %'."""
    if 0 < value < LEAST_PERCENT:
        return below(f"{LEAST_PERCENT} %")
    return f"{value:.1f} %"


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


def part(used: int | None, total: int | None) -> str:
    """'13.2/24 GiB', '1.4/1.5 GiB'; MiB if the total is below 1 GiB, as /dev/shm of a container."""
    if total is not None and total < 1 << 30:
        return f"{'-' if used is None else used >> 20}/{total >> 20} MiB"
    return f"{gib(used)}/{gib(total).removesuffix('.0')} GiB"


def read_duration(text: str) -> float:
    """Seconds of '90s', '30m', '8h', '1h30m', '2d', '1w', '8:30:00', '1:08:30:00' or of a number.
    Raises ValueError."""
    text = text.strip().lower()
    parts = re.findall(_PART, text)
    if re.fullmatch(_CLOCK, text):  # [days:]hours:minutes:seconds
        text = str(
            sum(int(n) * one for n, one in zip(reversed(text.split(":")), _CLOCK_S, strict=False))
        )
        parts = []
    if parts and "".join(number + unit for number, unit in parts) == text:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    else:
        seconds = float(text)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(text)
    return seconds


def read_size(text: str) -> float:
    """Bytes of '10GB', '1.5 GiB', '300MB', or of a number. Raises ValueError."""
    found = re.fullmatch(_SIZE, text.strip().lower())
    if not found or found[2] not in _BYTES:
        raise ValueError(text)
    return float(found[1]) * _BYTES[found[2]]
