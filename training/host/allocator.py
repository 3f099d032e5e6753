"""The memory of a training on the CPU, as the C library manages it."""

from __future__ import annotations

import ctypes
import os

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 32 << 20  # bytes; what mallopt(3) takes


def keep_freed_memory() -> bool:
    """Freed memory stays with this process. A step frees all its activations; glibc would give them
    back to the kernel and take them again in the next one, page by page: a tenth of a step's time.
    False when somebody else decides: the user by MALLOC_… variables, or another C library."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(
        mallopt
        and mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)
        and mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM)
    )
