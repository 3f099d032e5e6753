"""Slowdown reasons and compute modes of GPUs in the selected language; records have those of
training.host.gpus."""

from __future__ import annotations

from training.core.messages import msg
from training.host.gpus import BY_HARDWARE, EXCLUSIVE, PROHIBITED, SLOWDOWNS


def slowdown(reason: str) -> str:
    """`reason`: one of SLOWDOWNS, or of another version, as it is."""
    words = {
        BY_HARDWARE: msg("host.slowdown.hardware"),
        0x20: msg("host.slowdown.heat_driver"),
        0x40: msg("host.slowdown.heat_hardware"),
        0x80: msg("host.slowdown.power_brake"),
    }
    return {SLOWDOWNS[bit]: word for bit, word in words.items()}.get(reason, reason)


def compute_mode(mode: str) -> str:
    words = {
        EXCLUSIVE: msg("host.compute_mode.exclusive"),
        PROHIBITED: msg("host.compute_mode.prohibited"),
    }
    return words.get(mode, mode)
