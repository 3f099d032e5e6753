"""A failure, a resume and the end of a run, in Chinese."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Launched

Launch = Callable[..., Launched]
SCRIPT = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py", "--lang=zh")
MESSAGE = re.compile(r"^\[(?:INFO|WARNING|ERROR|SUCCESS)\] \S+ \S+ (.*)", re.MULTILINE)
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def english(output: str) -> list[str]:
    """Messages without a Chinese word, except the line that programs look for."""
    found = [m[1] for m in MESSAGE.finditer(output)]
    assert found, output
    return [m for m in found if not CHINESE.search(m) and not m.startswith("run directory: ")]


@pytest.mark.soak
def test_failure_and_resume(launch: Launch) -> None:
    failed = launch(*SCRIPT, save_every=5, inject="raise@rank=1,step=7")
    assert failed.wait() == 4
    assert (failed.failure["cause"], failed.failure["rank"]) == ("exception", 1)
    assert english(failed.output) == []
    assert re.search(r"^  原因 +exception: .*\n  进程 +rank 1", failed.output, re.MULTILINE)
    resumed = launch(*SCRIPT, save_every=5, resume=failed.run.name).ok()
    assert english(resumed.output) == [] and "训练完成" in resumed.output
