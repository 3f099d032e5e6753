"""Which processes have memory of a null GPU."""

from __future__ import annotations

import json
import os

from tests.null_gpu import programs
from tests.null_gpu.conftest import CONTEXT, GIB, NullGpus
from training.watchdog.probes import procfs

PROGRAM = """
import ctypes, json, os
from training.host import bare_nvml

cuda, free, total = ctypes.CDLL(os.environ["LD_PRELOAD"]), ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
print(json.dumps([total.value - free.value, total.value - bare_nvml.count().gpus[0].free_bytes]))
"""


def test_a_later_process_has_none_of_an_earlier_one_with_its_pid(gpus: NullGpus) -> None:
    own, began = os.getpid(), procfs.began(os.getpid())
    for its_start, used in ((began, 4 * GIB + 2 * CONTEXT), (began - 1, CONTEXT)):
        gpus.enter(0, own, its_start, 4 * GIB)
        assert gpus.processes(0) == ({own} if its_start == began else set())
        assert json.loads(programs.printed(gpus.environ, PROGRAM)) == [used] * 2
