"""The communication test with real processes on the CPU: measurements, names of failing ranks, and
no leftovers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.communication import (
    FIGURES,
    FOREVER,
    LARGE,
    SMALL,
    Attempt,
    around_all_reduce,
    attempt,
    before,
    key,
    left,
    place,
    plan,
    told,
)
from tests.e2e.conftest import HOOK
from training.host import p2p_cache
from training.launcher.communication import runner
from training.launcher.communication.run import run

__all__ = ["attempt", "place"]  # fixtures

# Success


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_that_can_communicate(ranks: int, attempt: Attempt) -> None:
    result = attempt(ranks=ranks)
    assert result.ok and re.fullmatch(FIGURES, told(result)), told(result)
    figures = result.figures
    assert figures and figures.size_bytes == 8 << 20 and figures.small_ms > 0
    assert figures.bus_gb_per_s == pytest.approx(
        figures.algorithm_gb_per_s * 2 * (ranks - 1) / ranks
    )
    assert (result.checks()[0].status, result.backend) == ("ok", "gloo")
    assert not p2p_cache.remembered(key()) and result.verdict is None


def test_one_rank_starts_nothing(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", None)
    assert told(attempt(ranks=1)) == "one rank: nothing to test"


@pytest.mark.soak
def test_leftovers_of_an_outer_launcher_are_ignored(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    assert attempt().ok


# Failures


@pytest.mark.slow
def test_wrong_data_is_named(attempt: Attempt) -> None:
    result = attempt(around_all_reduce("real()\ndata[3] += 1", SMALL, "1"))
    assert result.finding and (result.finding.kind, result.finding.guilty) == ("wrong data", [1])
    assert (
        told(result) == "wrong data in the all_reduce of 1 KiB: rank 1 element 3 is 13, expected 12"
    )


@pytest.mark.soak
def test_wrong_data_of_a_broadcast_is_named(attempt: Attempt) -> None:
    patch = """
import torch.distributed as dist
original = dist.broadcast
def planted(data, source):
    original(data, source)
    if data.numel() > 256 and source == 0:
        data[-1] = float("nan")
dist.broadcast = planted
"""
    result = attempt(before("training.launcher.communication.collectives", patch, "1"))
    last = (8 << 18) - 1
    text = (
        f"wrong data in the broadcast from rank 0 of 8 MiB: rank 1 element {last} is nan, "
        f"expected {last % 31 + 1}"
    )
    assert (told(result), result.finding and result.finding.stage) == (text, "broadcast of 8 MiB")


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.slow)]
)
def test_the_killed_rank_is_named_not_a_waiting_one(rank: int, attempt: Attempt) -> None:
    result = attempt(around_all_reduce("os.kill(os.getpid(), signal.SIGKILL)", LARGE, str(rank)))
    assert (
        told(result).splitlines()[0]
        == f"rank {rank} was killed by SIGKILL in the all_reduce of 8 MiB"
    )


@pytest.mark.soak
def test_a_rank_that_raises_is_shown_with_its_last_output(attempt: Attempt) -> None:
    result = attempt(around_all_reduce("raise ValueError('planted')", SMALL, "0"))
    first, *evidence = told(result).splitlines()
    assert first == "rank 0 failed in the all_reduce of 1 KiB: ValueError: planted"
    assert evidence[-1] == "    │ ValueError: planted" and any(
        f'{HOOK}", line' in line for line in evidence
    )


@pytest.mark.soak
def test_a_missing_interface(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    result = attempt()
    assert re.match(r"rank \d failed in the rendezvous: RuntimeError: .*nosuch0", told(result)), (
        told(result)
    )
    assert (
        result.checks()[0].fixes[0]
        == "unset GLOO_SOCKET_IFNAME   # it is 'nosuch0'; ranks of one machine communicate over 'lo'"
    )


def test_no_space_for_temporary_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "missing"))
    result = run(plan())
    assert told(result).startswith(
        f"the ranks cannot be started: No such file or directory: "
        f"{place}/missing/duet-communication-"
    )
    assert result.checks()[0].fixes[0].startswith("TMPDIR=/another/folder ")


# The command


@pytest.fixture
def start(project: Path, place: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def begin(*words: str, hook: str = "") -> subprocess.Popen[str]:
        env = dict(os.environ)
        if hook:
            (tmp_path / HOOK).write_text(hook)
            env["PYTHONPATH"] = str(tmp_path)
        argv = [
            sys.executable,
            str(project / "lib/run_module.py"),
            "training.cli.communication",
            *words,
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv,
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    return begin


Start = Callable[..., subprocess.Popen[str]]


def test_the_command_reports(start: Start, place: Path) -> None:
    out, err = (command := start("2", "--device=cpu", "--limit=60")).communicate(timeout=120)
    assert command.returncode == 0, err
    assert re.fullmatch(rf"  ok       communication  {FIGURES}\n", out), out
    assert "communication test: 2 ranks on cpu (as asked) by gloo" in err and not left(place)


@pytest.mark.slow
def test_the_command_fails_with_evidence_and_a_fix(start: Start, place: Path) -> None:
    out, err = (
        command := start(
            "2", "--device=cpu", hook=around_all_reduce("raise ValueError('planted')", SMALL, "1")
        )
    ).communicate(timeout=180)
    assert command.returncode == 3, err
    assert out.startswith(
        "  error    communication  rank 1 failed in the all_reduce of 1 KiB: ValueError: planted\n "
        "   │ "
    )
    assert re.search(
        r"\n +try: +TORCH_CPP_LOG_LEVEL=INFO \./duet communication 2 --device=cpu\n$", out
    ), out
    assert not left(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_ctrl_c_during_the_test(
    start: Start, place: Path, token: str, number: signal.Signals, status: int
) -> None:
    """The `token` fixture asserts that no process is left."""
    command = start("2", "--device=cpu", "--limit=600", hook=before("torch", FOREVER))
    wait_until(
        lambda: len(list(place.glob(f"{runner.PREFIX}*/rank*.stack"))) == 2, what="two ranks"
    )
    command.send_signal(number)
    out, err = command.communicate(timeout=180)
    assert (command.returncode, out) == (status, ""), err
    assert "Traceback" not in err
    wait_until(lambda: not processes(token), what="no process")
    if number != signal.SIGKILL:
        assert not left(place)
    if number == signal.SIGINT:
        assert "Ctrl-C: stopped, nothing is left behind" in err
