"""Diagnosis of real failures without a supervisor: two ranks of a user script under bare torchrun,
from their log alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from training.diagnose.result import diagnose
from training.host import process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "scripts" / "faulty.py"


@pytest.mark.parametrize(
    ("fault", "cause", "ranks", "text"),
    [
        pytest.param(
            "raise",
            "exception",
            {0},
            "ValueError: something is wrong with sample 80",
            marks=pytest.mark.slow,
        ),
        pytest.param("kill", "killed", {0}, "-9", marks=pytest.mark.soak),
        pytest.param(
            "worker_kill",
            "dataloader_worker_died",
            {0},
            # the second, if the worker was just about to hand over a batch
            "is killed by signal: Killed|ConnectionResetError",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "sleep", "collective_timeout", {0, None}, "Timed out waiting", marks=pytest.mark.soak
        ),
    ],
)
def test_the_cause_is_found_in_the_log_alone(
    fault: str, cause: str, ranks: set[int | None], text: str, tmp_path: Path, token: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(SCRIPT),
        fault,
    ]
    env = os.environ | {
        process.TOKEN: token,
        "GLOO_SOCKET_IFNAME": "lo",
        "GROUP_TIMEOUT_S": "5",
    }
    log = tmp_path / "train.log"
    with log.open("wb") as out:
        started = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            assert started.wait(timeout=240) != 0  # two imports of torch on busy cores
        finally:
            started.kill()
            started.wait()
    found = diagnose([log])
    evidence = re.search(text, found["evidence"])
    assert found["cause"] == cause and evidence, log.read_text()
    assert found["rank"] in ranks
