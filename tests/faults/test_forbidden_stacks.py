"""A machine on which no process may read the stacks of another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Ended
from tests.faults.test_matrix import STUCK

# As py-spy reports it: EPERM of ptrace or process_vm_readv, by Yama or seccomp.
FORBIDDEN = """
import subprocess
real = subprocess.run
def run(command, *args, **kwargs):
    if str(command[0]).endswith("py-spy"):
        error = "Error: Permission denied (os error 13)"
        return subprocess.CompletedProcess(command, 1, "", error)
    return real(command, *args, **kwargs)
subprocess.run = run
"""


@pytest.mark.soak
def test_the_ranks_write_their_stacks_themselves(inject: Callable[..., Ended]) -> None:
    ended = inject("sleep@step=5", hook=FORBIDDEN)
    verdict, failure = ended.verdict, ended.failure
    assert (verdict["kind"], verdict["rank"], ended.code) == ("hang", 1, 5)
    assert ended.seconds <= 6
    assert re.search(STUCK, verdict["where"]) and "backward" in verdict["waiting"]["0"]
    texts = [(Path(failure["stacks"]) / f"rank{rank}.txt") for rank in range(2)]
    kept = [(ended.run.run.path / text).read_text() for text in texts]
    assert all("(faulthandler)" in text and "(py-spy)" not in text for text in kept)
    assert "_stuck_in_a_lock" in kept[1]
