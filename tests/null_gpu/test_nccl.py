"""NCCL of the null GPU: its memory ends with the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import wait_until
from tests.null_gpu.conftest import NullGpus

LIMIT_S = 60
# Waits in its initialisation for a second rank, which never comes.
ALONE = """
import ctypes, os
nccl = ctypes.CDLL(os.environ["LD_PRELOAD"])
class Id(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128)]
made, comm = Id(), ctypes.c_void_p()
assert nccl.ncclGetUniqueId(ctypes.byref(made)) == 0
nccl.ncclCommInitRank(ctypes.byref(comm), 2, made, 0)
"""


def test_a_rank_killed_before_all_have_joined_leaves_nothing(gpus: NullGpus) -> None:
    shared, own = Path("/dev/shm"), os.environ | gpus.environ
    with subprocess.Popen([sys.executable, "-c", ALONE], env=own) as alone:
        mapped = Path(f"/proc/{alone.pid}/maps")
        try:
            wait_until(lambda: "null-nccl" in mapped.read_text(), LIMIT_S, "the mapping")
        finally:
            alone.kill()
    assert not list(shared.glob(f"*nccl-{alone.pid}-*"))
