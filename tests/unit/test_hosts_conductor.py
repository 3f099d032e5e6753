"""How the launcher of --hosts runs its nodes to their end, here with stubs and a clock of its own."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from training.core.messages import load_all
from training.launcher.hosts import conductor, ssh
from training.launcher.hosts.conductor import (
    AGAIN_S,
    LOST_S,
    REFUSED_S,
    TOGETHER_S,
    Conductor,
)
from training.launcher.hosts.console import JOIN_S

LONG_S = 1000.0  # the nodes have been running for a while
HOUR_S = 3600.0
LOST = ssh.FAILED


class Clock:
    def __init__(self, asked: list[float]) -> None:
        self.now, self._asked = 0.0, asked

    def monotonic(self) -> float:
        return self.now

    def sigtimedwait(self, numbers: object, seconds: float) -> object:
        self.now += seconds
        assert self.now < 24 * HOUR_S, "the conductor does not end"
        if self._asked and self.now >= self._asked[0]:
            del self._asked[0]
            return SimpleNamespace(si_signo=signal.SIGTERM)
        return None


class Stub:
    """A node that ends `after` so many seconds with `code`, and has shown `text`."""

    errors = None

    def __init__(self, clock: Clock, rank: int, after: float, code: int, text: str = "") -> None:
        self.output = io.BytesIO(text.encode()) if text else None
        self.rank, self.name, self._clock = rank, "abc"[rank], clock
        self._end, self._code, self.code = clock.now + after, code, None
        self.closed: float | None = None  # while it ran
        self.signals: list[int] = []

    def ended(self) -> bool:
        if self._clock.now >= self._end:
            self.code = self._code  # type: ignore[assignment]
        return self.code is not None

    @property
    def link_lost(self) -> bool:
        return self.code == LOST

    def close(self) -> None:
        if not self.ended():
            self.closed = self._clock.now
            self._end, self._code = self._clock.now, 137

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def keep_alive(self) -> None: ...

    def becomes_first(self) -> None: ...

    kill = close


Run = Callable[..., tuple[int, list[list[Stub]]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`ends`: for each node, (seconds, exit code, perhaps output) of its starts; the last one
    repeats. The exit code, and the starts of each node."""

    def go(*ends: list[Any], asked: float | None = None, elastic: bool = True) -> Any:
        load_all()
        clock = Clock([] if asked is None else [asked, asked])  # as SLURM does
        monkeypatch.setattr(conductor, "time", clock)
        monkeypatch.setattr(conductor.signal, "sigtimedwait", clock.sigtimedwait)
        monkeypatch.setattr(conductor, "hurry", lambda: None)
        started: list[list[Stub]] = [[] for _ in ends]

        def start(rank: int) -> Any:
            which = min(len(started[rank]), len(ends[rank]) - 1)
            started[rank].append(Stub(clock, rank, *ends[rank][which]))
            return started[rank][-1]

        made = Conductor(elastic=elastic, again=lambda old: start(old.rank))
        for rank in range(len(ends)):
            made.add(start(rank))
        return made.run(), started

    return go


def test_a_machine_that_was_lost_before_a_stop_does_not_hurry_the_others(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their last checkpoint takes ten minutes."""
    saved = [(LONG_S + 600, 75)]
    code, (first, second, _) = run(saved, saved, [(10, LOST), (1, LOST)], asked=LONG_S)
    assert (code, first[0].closed, second[0].closed) == (75, None, None)
    assert first[0].signals == second[0].signals == [signal.SIGTERM]
    logged = capfd.readouterr().err
    assert logged.count("c (node 2) has left the run") == 1 and "[ERROR]" not in logged


def test_a_machine_that_was_lost_near_the_end_is_not_started_again(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    report = TOGETHER_S - 10
    ends = [(LONG_S + report, 0)], [(LONG_S, 0)], [(LONG_S + 5, LOST)]
    code, (first, _, third) = run(*ends)
    assert (code, first[0].closed, len(third)) == (0, None, 1)
    logged = capfd.readouterr().err
    assert logged.count("c (node 2)") == logged.count("[WARNING]") == 1 and "[ERROR]" not in logged


def test_a_machine_that_waits_to_be_started_near_the_end_is_not(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    report = TOGETHER_S - 10
    ends = [(LONG_S + report, 0)], [(LONG_S, 0)], [(LONG_S - AGAIN_S / 2, LOST)]
    code, (first, _, third) = run(*ends)
    assert (code, first[0].closed, len(third)) == (0, None, 1)
    logged = capfd.readouterr().err
    assert logged.count("c (node 2) has left the run") == 1 and "[ERROR]" not in logged


@pytest.mark.parametrize("code", [4, 5])
def test_a_failed_run_ends_for_all(run: Run, capfd: pytest.CaptureFixture[str], code: int) -> None:
    """The first machine ends last: it writes the report and notifies."""
    other = [(LONG_S, code)]
    found, starts = run([(LONG_S + TOGETHER_S - 10, code)], other, other)
    assert (found, [len(made) for made in starts]) == (code, [1, 1, 1])
    assert capfd.readouterr().err == ""


def test_a_failed_machine_without_which_the_run_continues_is_started_again(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    other = [(2 * HOUR_S, 0)]
    code, (_, second, _) = run(other, [(LONG_S, 4), (1, 4), (2 * HOUR_S, 0)], other)
    assert (code, len(second)) == (0, 3)
    logged = capfd.readouterr().err
    assert logged.count("b (node 1) has left the run") == 1, "once, not at every attempt"


def test_why_a_machine_does_not_come_back_is_shown_once(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    denied, full = "b: Permission denied (publickey).\n", "[ERROR] 2024-10-21 16:00:{}0 no space\n"
    starts = [
        *[(LONG_S, LOST), (1, LOST, denied), (1, LOST, denied)],
        *[(1, 3, full.format(second)) for second in (1, 2)],
        *[(1, 6, "[ERROR] 2024-10-21 16:01:00 has left\n"), (1, LOST, denied)],
    ]
    assert run([(HOUR_S, 0)], [*starts, (HOUR_S, 0)])[0] == 0
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[b] ")]
    assert shown == [f"[b] {text.rstrip()}" for text in (denied, full.format(1))]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_launcher_long_after_its_start_is_a_lost_machine(run: Run, rank: int) -> None:
    others = [(2 * HOUR_S, 0)]
    ends = [others, others, others]
    ends[rank] = [(LONG_S, 1), (2 * HOUR_S - LONG_S, 0)]
    code, starts = run(*ends)
    assert (code, [len(made) for made in starts]) == (0, [2 if r == rank else 1 for r in range(3)])


def test_a_launcher_with_an_error_at_its_start_ends_the_run(run: Run) -> None:
    code, (first, second, _) = run([(HOUR_S, 0)], [(2.0, 1)], [(HOUR_S, 0)])
    assert code and first[0].closed == pytest.approx(2 + REFUSED_S, abs=1) and len(second) == 1


def test_without_min_ranks_a_lost_machine_ends_the_run(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    code, (first, _) = run([(HOUR_S, 0)], [(LONG_S, LOST)], elastic=False)
    assert code == 4 and first[0].closed == pytest.approx(LONG_S + LOST_S, abs=1)
    assert "the ssh connection to b" in capfd.readouterr().err


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("status", [137, 143, -9])
def test_a_killed_launcher_is_a_failure_of_the_run(
    run: Run, capfd: pytest.CaptureFixture[str], killed: int, status: int
) -> None:
    """The other machine has time for the report and the notification."""
    ends = [[(LONG_S + TOGETHER_S - 10, 4)], [(LONG_S + TOGETHER_S - 10, 4)]]
    ends[killed] = [(LONG_S, status)]
    code, starts = run(*ends, elastic=False)
    assert (code, starts[1 - killed][0].closed) == (4, None)
    assert capfd.readouterr().err == "", "the other machine names it"


@pytest.mark.parametrize("status", [1, 126, 127])
def test_without_min_ranks_a_launcher_that_cannot_start_ends_the_others(
    run: Run, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    code, (first, _) = run([(HOUR_S, 0)], [(2.0, status)], elastic=False)
    assert code == 3 and first[0].closed == pytest.approx(2 + REFUSED_S, abs=1)


@pytest.mark.parametrize("status", [LOST, 137, -9])
def test_the_loss_of_the_last_machines_is_a_failure_of_the_run(run: Run, status: int) -> None:
    assert run([(LONG_S + 60, status)], [(LONG_S, LOST)])[0] == 4


@pytest.mark.parametrize(("status", "code"), [(0, 0), (LOST, 4), (137, 4), (5, 5)])
def test_the_last_machine_ends_while_the_loss_of_the_first_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    """The rest of a lost machine's output takes seconds."""
    report = Conductor._lost

    def slow(self: Any, node: Any, text: str) -> None:
        report(self, node, text)
        conductor.time.monotonic.__self__.now += JOIN_S  # type: ignore[attr-defined]

    monkeypatch.setattr(Conductor, "_lost", slow)
    assert run([(LONG_S, LOST)], [(LONG_S + JOIN_S / 2, status)])[0] == code
