"""A null GPU has the same identity for CUDA's runtime, its driver and NVML."""

from __future__ import annotations

import json

from tests.null_gpu import programs
from tests.null_gpu.conftest import NullGpus

PROGRAM = """
import ctypes, json, os, uuid
import torch
from training.host import bare_nvml

driver, raw = ctypes.CDLL(os.environ["LD_PRELOAD"]), ctypes.create_string_buffer(16)
for number in range(torch.cuda.device_count()):
    assert driver.cuDeviceGetUuid(raw, number) == 0
    runtime = torch.cuda.get_device_properties(number).uuid
    print(json.dumps([str(runtime), str(uuid.UUID(bytes=raw.raw))]))
print(json.dumps([gpu.uuid for gpu in bare_nvml.count().gpus]))
"""


def test_uuids_are_those_of_nvml(gpus: NullGpus) -> None:
    printed = programs.printed(gpus.environ, PROGRAM)
    *of_cuda, of_nvml = map(json.loads, printed.splitlines())
    assert len(of_nvml) == len(set(of_nvml)) == 2
    assert of_cuda == [2 * [name.removeprefix("GPU-")] for name in of_nvml]
