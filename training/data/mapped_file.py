"""Files mapped into memory that do not stay open: a process may usually have 1024 open files, and a
large corpus has more shards. Python's own mapping keeps its file open (before 3.13)."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
FAILED = ctypes.c_void_p(-1).value


def read_only(path: Path, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """The content of a file as an array, which is unmapped with the last view of it. Raises
    OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.zeros(0, kind)
        place = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if place == FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    content = (ctypes.c_char * size).from_address(place)
    weakref.finalize(content, _libc.munmap, place, size).atexit = False
    array = np.frombuffer(memoryview(content), kind)
    array.flags.writeable = False
    return array
