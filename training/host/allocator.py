"""glibc allocator settings for training on the CPU."""

from __future__ import annotations

import ctypes
import os

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 32 << 20  # bytes; limits of mallopt(3)


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. A step frees all its activations; glibc would return them
    to the kernel and fault them in again page by page, a tenth of the step time. False if nothing
    was changed: the user has set MALLOC_… variables, or the C library is not glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(
        mallopt
        and mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)
        and mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM)
    )
