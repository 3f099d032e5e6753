"""The communication test with real processes on the CPU: measurements, names of failing ranks, and
no leftovers."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests.conftest import TOKEN, processes, wait_until
from tests.e2e.conftest import HOOK
from training.host import p2p_cache
from training.launcher.communication import runner, stages
from training.launcher.communication.result import CommunicationResult
from training.launcher.communication.run import run

GPUS = [{"uuid": f"GPU-{n}", "index": i, "use_percent": 0} for i, n in enumerate("ab")]
FIGURES = (
    r"all_reduce of 8 MiB over (\d) ranks: [\d.]+ GB/s(?: \(on the bus [\d.]+\))?, 1 KiB in "
    r"[\d.]+ ms; data correct"
)
FOREVER = "__import__('time').sleep(600)"


def before(module: str, statements: str, ranks: str = "01") -> str:
    """`statements` run in these ranks just before `module` is imported."""
    return f"""
import os, sys
if os.environ.get("RANK", "none") in {ranks!r}:
    import importlib.abc
    class AtImport(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                sys.meta_path.remove(self)
                plant()
            return None
    sys.meta_path.insert(0, AtImport())
    def plant():
{indent(dedent(statements), "        ")}
"""


def around_all_reduce(statements: str, condition: str, ranks: str = "01") -> str:
    """In these ranks, `statements` replace an all_reduce whose `data` meets `condition`; `real()`
    calls the real one."""
    patch = f"""
import os, signal, torch.distributed as dist
original = dist.all_reduce
def planted(data):
    if not ({condition}):
        return original(data)
    def real():
        return original(data)
{indent(dedent(statements), "    ")}
dist.all_reduce = planted
"""
    return before("training.launcher.communication.collectives", patch, ranks)


def key() -> p2p_cache.Key:
    return p2p_cache.key(["GPU-a", "GPU-b"], "580.65.06", "2.13.0")


SMALL, LARGE = "data.numel() == 256", "data.numel() > 256"


def plan(ranks: int = 2, **variables: str) -> dict[str, Any]:
    chosen = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return {
        "local_ranks": ranks,
        "device": {"value": "cpu", "reason": "as asked"},
        "variables": [
            {"name": n, "value": v, "why": "", "origin": "kept" if n in os.environ else "set here"}
            for n, v in chosen.items()
        ],
        "gpus": GPUS,
        "driver": "580.65.06",
        "torch": "2.13.0",
    }


@pytest.fixture
def place(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent of the launcher's temporary folder; must be empty at the end."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise it is cached
    monkeypatch.setenv(TOKEN, token)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def left(place: Path) -> list[Path]:
    return list(place.glob(f"{runner.PREFIX}*"))


Attempt = Callable[..., CommunicationResult]


@pytest.fixture
def attempt(place: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Runs the communication test in this process, with a hook in the ranks; it must leave nothing
    when it returns."""

    def go(
        hook: str = "", ranks: int = 2, limit_s: float = 60.0, **options: Any
    ) -> CommunicationResult:
        if hook:
            (tmp_path / HOOK).write_text(hook)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        result = run(plan(ranks), limit_s, **options)
        ours = {os.getpid()}
        assert not set(processes(token)) - ours and not left(place)
        return result

    return go


@pytest.fixture(scope="module")
def usual_s() -> float:
    """Seconds that two ranks take on this machine under its current load."""
    result = run(plan(), 120.0)
    assert result.ok, told(result)
    return result.seconds


@pytest.fixture
def short(usual_s: float) -> int:
    """Limit in seconds for an attempt that hangs: long enough for the other ranks to reach their
    wait."""
    return max(4, math.ceil(2.5 * usual_s))


def told(result: CommunicationResult) -> str:
    (check,) = result.checks()
    return check.text


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


# Hangs


@pytest.mark.soak
def test_a_slow_import_is_not_part_of_the_test(attempt: Attempt, short: int) -> None:
    assert attempt(before("torch", f"__import__('time').sleep({short + 1})"), limit_s=short).ok


@pytest.mark.slow
def test_a_rank_that_never_reaches_the_rendezvous(attempt: Attempt, short: int) -> None:
    begin = time.monotonic()
    result = attempt(before("torch", FOREVER, "1"), limit_s=short)
    limit = runner.START_FACTOR * short
    assert limit <= time.monotonic() - begin < limit + 10
    assert result.finding and (result.finding.kind, result.finding.guilty) == ("hang", [1])
    text, where, *_ = told(result).splitlines()
    assert (
        text
        == f"rank 1 never reached the rendezvous: after {limit} s it was in the import of torch; "
        f"rank 0 reached the rendezvous"
    )
    assert re.fullmatch(rf"    │ rank 1 at .*/{HOOK}:\d+ in plant", where)


@pytest.mark.slow
def test_a_rank_that_hangs_while_the_others_wait_for_it(attempt: Attempt, short: int) -> None:
    result = attempt(around_all_reduce(FOREVER, LARGE, "1"), limit_s=short)
    text, where, *_ = told(result).splitlines()
    assert (
        text
        == f"after {short} s rank 1 hangs in the all_reduce of 8 MiB, outside of torch; rank 0 "
        f"waits for it"
    )
    assert re.fullmatch(rf"    │ rank 1 at .*/{HOOK}:\d+ in planted", where)
    assert result.checks()[0].status == "error"


@pytest.mark.soak
def test_a_rank_that_is_stopped_does_not_answer(attempt: Attempt, short: int) -> None:
    result = attempt(
        around_all_reduce("os.kill(os.getpid(), signal.SIGSTOP)", SMALL, "0"), limit_s=short
    )
    how = "unresponsive (stopped, or blocked in the kernel)"
    assert (
        told(result).splitlines()[0]
        == f"after {short} s rank 0 hangs in the all_reduce of 1 KiB, {how}; rank 1 waits for it"
    )


# GPUs that hang with peer-to-peer copies: simulated in gloo, which the launcher takes for NCCL


P2P_HANGS = around_all_reduce(
    f"return real() if os.environ.get('NCCL_P2P_DISABLE') == '1' else {FOREVER}", LARGE
)


@pytest.mark.slow
def test_gpus_that_work_without_peer_to_peer_copies_and_later_starts(
    attempt: Attempt,
    short: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = attempt(P2P_HANGS, limit_s=short, backend="nccl")
    assert result.only_without_p2p and result.figures, told(result)
    assert re.fullmatch(
        rf"works only without GPU peer-to-peer copies \(NCCL_P2P_DISABLE=1\)\. With them: after "
        rf"{short} s all ranks hang in the "
        rf"all_reduce of 8 MiB\. Without: {FIGURES}; cached in "
        rf"{re.escape(str(p2p_cache.path()))}: later starts .*",
        told(result),
    ), told(result)
    assert (
        f"after {short} s all ranks hang in the all_reduce of 8 MiB; retrying with "
        f"NCCL_P2P_DISABLE=1" in capsys.readouterr().err
    )
    known = p2p_cache.remembered(key())
    assert known == {"NCCL_P2P_DISABLE": "1"}
    assert result.verdict == p2p_cache.known(key())

    monkeypatch.setattr(
        sys.modules[__name__], "plan", lambda ranks, made=plan: made(ranks, **known)
    )
    begin = time.monotonic()
    again = attempt(P2P_HANGS, limit_s=short, backend="nccl")
    assert again.ok and not again.only_without_p2p and time.monotonic() - begin < short, (
        "what is known is not tried again"
    )
    assert told(again).endswith(
        "; data correct; without GPU peer-to-peer copies (NCCL_P2P_DISABLE=1)"
    )


@pytest.mark.soak
def test_the_users_choice_is_kept_and_success_clears_the_cache(
    attempt: Attempt, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = p2p_cache.verdict(key(), p2p_cache.WITHOUT_P2P, gb_per_s=1.0, small_ms=1.0)
    p2p_cache.remember(key(), without)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    result = attempt(P2P_HANGS, limit_s=short, backend="nccl")
    assert (
        told(result).splitlines()[0] == f"after {short} s all ranks hang in the all_reduce of 8 MiB"
    )
    assert result.checks()[0].fixes[0] == "export NCCL_P2P_DISABLE=1" and result.first is None
    (Path(os.environ["PYTHONPATH"]) / HOOK).unlink()
    assert "; peer-to-peer copies work now: " in told(attempt(backend="nccl"))
    assert p2p_cache.remembered(key()) == {}


@pytest.mark.soak
def test_a_hang_without_peer_to_peer_copies_too(attempt: Attempt, short: int) -> None:
    result = attempt(around_all_reduce(FOREVER, LARGE), limit_s=short, backend="nccl")
    text = told(result).splitlines()[0]
    assert (
        text == f"after {short} s all ranks hang in the all_reduce of 8 MiB; the same with "
        f"NCCL_P2P_DISABLE=1"
    )
    assert result.checks()[0].fixes[0].startswith("NCCL_DEBUG=INFO ")
    assert p2p_cache.remembered(key()) == {}


@pytest.mark.slow
def test_a_slow_start_is_not_taken_for_a_hang(
    attempt: Attempt, usual_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is read from a cold disk: the limit is over before the ranks meet."""
    monkeypatch.setattr(stages, "STILL_S", usual_s + 2)
    slow = before("torch", "__import__('time').sleep(2.5)")
    result = attempt(slow, limit_s=2, backend="nccl", patience_s=60)
    assert result.ok and result.first is None, told(result)


@pytest.mark.soak
def test_a_slow_start_is_followed_by_a_hang(
    attempt: Attempt, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "STILL_S", short)
    result = attempt(P2P_HANGS, limit_s=1, backend="nccl", patience_s=100)
    assert result.only_without_p2p and result.first, told(result)
    assert (result.first.kind, result.first.stage) == ("hang", "all_reduce of 8 MiB")


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
    ).communicate(timeout=60)
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
    wait_until(lambda: len(list(place.glob(f"{runner.PREFIX}*/rank*.stack"))) == 2, 60, "two ranks")
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (status, ""), err
    assert "Traceback" not in err
    wait_until(lambda: len(processes(token)) == 0, 8, "no process")
    if number != signal.SIGKILL:
        assert not left(place)
    if number == signal.SIGINT:
        assert "Ctrl-C: stopped, nothing is left behind" in err
