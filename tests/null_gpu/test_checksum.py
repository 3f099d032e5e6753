"""What the comparison of all parameters asks of a GPU: calls counted by the null GPU."""

from __future__ import annotations

import json

from tests.null_gpu import counters, programs
from tests.null_gpu.conftest import NullGpus

PROGRAM = """
import json
import torch
from tests.null_gpu import counters
from training.inspector import checksum
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import ModelDims

with torch.device("cuda"):
    model = GPT(ModelDims(12, 320, 256), MemorySavings(0, 1))
checksum.checksum(model)  # copies factors to the device, once
counters.take()
checksum.checksum(model)
print(json.dumps(counters.take()))
"""


def test_the_checksum_of_a_large_model_takes_few_launches_and_no_wait(gpus: NullGpus) -> None:
    calls = json.loads(programs.printed(gpus.environ, PROGRAM))
    assert 0 < counters.launches(calls) <= 90  # tensor by tensor they were 1,710
    assert not counters.waits(calls)
