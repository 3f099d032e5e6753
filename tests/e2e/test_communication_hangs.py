"""The communication test with real ranks that hang, also only with peer-to-peer copies of GPUs."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import pytest

from tests.e2e import communication
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
    place,
    plan,
    told,
)
from tests.e2e.conftest import HOOK
from training.host import p2p_cache
from training.launcher.communication import runner, stages
from training.launcher.communication.run import run

__all__ = ["attempt", "place"]  # fixtures


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
    assert result.ok and result.first and result.figures, told(result)
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

    monkeypatch.setattr(communication, "plan", lambda ranks, made=plan: made(ranks, **known))
    again = attempt(P2P_HANGS, limit_s=short, backend="nccl")
    assert again.ok and not again.first, "what is known is not tried again"
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
    assert result.ok and result.first, told(result)
    assert (result.first.kind, result.first.stage) == ("hang", "all_reduce of 8 MiB")
