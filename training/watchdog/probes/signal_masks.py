"""What processes do at a signal."""

from __future__ import annotations

import re

from training.watchdog.probes import procfs


def catches(pid: int, number: int) -> bool:
    """Has it a handler for this signal?"""
    return _in_mask(pid, "SigCgt", number)


def ignores(pid: int, number: int) -> bool:
    return _in_mask(pid, "SigIgn", number)


def _in_mask(pid: int, name: str, number: int) -> bool:
    status = procfs.read_text(f"/proc/{pid}/status")
    mask = re.search(rf"^{name}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(mask and int(mask[1], 16) >> (number - 1) & 1)
