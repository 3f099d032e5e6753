"""Signals that ask to stop are never lost, and never come in the middle of something."""

from __future__ import annotations

import os
import signal

import pytest

from training.core.errors import Exit
from training.host.process import STOP_SIGNALS
from training.launcher import stop_signals
from training.launcher.stop_signals import StopSignals

pytestmark = pytest.mark.usefixtures("handlers")


def test_a_wish_waits_until_it_is_read() -> None:
    with StopSignals() as wanted:
        assert wanted.wait(0) is None
        os.kill(os.getpid(), signal.SIGTERM)
        with wanted:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert wanted.wait(3600) == signal.SIGTERM and wanted.read() == [], (
            "one read takes all that have come"
        )
    assert all(signal.getsignal(number) == signal.SIG_IGN for number in STOP_SIGNALS), (
        "who stops is not disturbed"
    )


def test_who_was_not_asked_leaves_everything_as_it_was() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_long_work_is_ended_by_a_wish_that_still_counts() -> None:
    done = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the wish")

    with StopSignals() as wanted:
        wanted.unless_asked(work)
        assert not done and wanted.wait(0) == signal.SIGINT
        work()
        assert done, "other work goes on"


def test_names_and_codes() -> None:
    assert [(stop_signals.name(n), stop_signals.code(n)) for n in STOP_SIGNALS] == [
        ("Ctrl-C", Exit.INTERRUPTED),
        ("SIGTERM", Exit.PREEMPTED),
        ("SIGUSR1", Exit.PREEMPTED),
    ]
