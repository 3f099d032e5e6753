"""Stop signals are never lost and never interrupt an action."""

from __future__ import annotations

import os
import signal

import pytest

from training.core.errors import Exit
from training.host.process import STOP_SIGNALS
from training.launcher import stop_signals
from training.launcher.stop_signals import StopSignals

pytestmark = pytest.mark.usefixtures("handlers")


def test_a_stop_signal_is_kept_until_read() -> None:
    with StopSignals() as wanted:
        assert wanted.wait(0) is None
        os.kill(os.getpid(), signal.SIGTERM)
        with wanted:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert wanted.wait(3600) == signal.SIGTERM and wanted.read() == [], (
            "one read returns all of them"
        )
    assert all(signal.getsignal(number) == signal.SIG_IGN for number in STOP_SIGNALS), (
        "ignored while stopping"
    )


def test_without_a_signal_the_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_long_work_is_interrupted_by_a_signal_that_still_counts() -> None:
    done = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the signal")

    with StopSignals() as wanted:
        wanted.unless_asked(work)
        assert not done and wanted.wait(0) == signal.SIGINT
        work()
        assert done, "other work continues"


def test_names_and_codes() -> None:
    assert [(stop_signals.name(n), stop_signals.code(n)) for n in STOP_SIGNALS] == [
        ("Ctrl-C", Exit.INTERRUPTED),
        ("SIGTERM", Exit.PREEMPTED),
        ("SIGUSR1", Exit.PREEMPTED),
    ]
