"""The order in which the ranks of a watched command exit."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, look
from training.core import rundir
from training.launcher import adopted_ranks, endings
from training.launcher.adopted_ranks import AdoptedRanks
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.watchdog.probes import procfs


class Ranks:
    """Two processes that exit on request, and the loop that notices it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.adopted = AdoptedRanks(self.selector)
        self.processes: list[subprocess.Popen[str]] = []
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", "import sys; sys.exit(int(input()))"]
        self.processes += [
            subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(2)
        ]
        self.adopted.follow({rank: p.pid for rank, p in enumerate(self.processes[-2:])})

    def exit(self, rank: int, status: int) -> None:
        stdin = self.processes[-2:][rank].stdin
        assert stdin
        print(status, file=stdin, flush=True)
        for key, _ in self.selector.select(20):
            key.data(key.fd)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.adopted.close()
    assert not made.selector.get_map()
    made.selector.close()
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (3, None)])
def test_the_rank_that_left_first_has_exited_with_status_0(
    ranks: Ranks, status: int, expected: int | None
) -> None:
    assert ranks.adopted.left_first() is None
    ranks.exit(1, status)
    assert ranks.adopted.left_first() == expected
    ranks.exit(0, 1)
    assert ranks.adopted.left_first() == expected


@pytest.mark.parametrize(("outlived_s", "expected"), [(0.5, 1), (0.05, None)])
def test_a_launcher_that_has_waited_for_it_lets_the_others_run_only_after_status_0(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, outlived_s: float, expected: int | None
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(adopted_ranks.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(procfs, "exit_status", lambda pid: None)
    ranks.exit(1, 0)
    clock[0] += outlived_s
    assert ranks.adopted.left_first() == expected
    ranks.exit(0, 1)
    clock[0] += 60
    assert ranks.adopted.left_first() == expected


def test_a_restart_and_a_missed_exit(ranks: Ranks) -> None:
    ranks.exit(1, 0)
    ranks.start()
    assert ranks.adopted.left_first() is None
    ranks.exit(0, 0)
    assert ranks.adopted.left_first() == 0
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ranks.adopted.follow({2: gone.pid})
    assert ranks.adopted.left_first() is None


@pytest.mark.parametrize("missing", [None, errno.ENOSYS, errno.EPERM])
def test_without_pidfds_there_is_no_order(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, missing: int | None
) -> None:
    def refuse(pid: int) -> int:
        assert missing is not None
        raise OSError(missing, os.strerror(missing))

    if missing is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    ranks.start()
    for process in ranks.processes[-2:]:
        process.kill()
        process.wait()
    assert ranks.adopted.left_first() is None and not ranks.selector.get_map()


def test_the_status_of_a_process_that_was_not_waited_for(ranks: Ranks) -> None:
    pid = ranks.processes[0].pid
    assert procfs.exit_status(pid) is None
    ranks.processes[0].send_signal(signal.SIGKILL)
    ranks.selector.select(20)
    assert procfs.exit_status(pid) == signal.SIGKILL
    ranks.processes[0].wait()
    assert procfs.exit_status(pid) is None


def test_the_most_ranks_of_a_watched_command_are_those_of_its_run(tmp_path: Path) -> None:
    """They end before the command, which is the only process that is listed at the end."""
    made = Made(tmp_path / "run", ranks=1)
    plan = made.plan | {
        "script": {"path": "torchrun", "args": []},
        "launcher": {"value": "watch", "reason": ""},
        "launch": "x",
    }
    plan["config"] |= {"retries": "auto", "hang_timeout": 60, "show_ranks": "0", "notify": ""}
    rundir.write_json(made.run.plan, plan)
    own = os.getpid()
    rundir.write_json(made.run.supervisor, {"pid": own, "launch": "x", "started": made.at + 1})
    attempt = Attempt(made.run, plan, LocalRanks(range(1), 1), "")
    for found in ({0: own, 1: own}, {1: own}, {}):
        attempt.children.adopt(found)
    attempt.children.adopted.close()
    assert look(made.run)["run"]["ranks"] == 2
    endings.regular_end(
        made.run,
        plan,
        PostRun(made.run, plan),
        Outcome(ours=False, watched="torchrun"),
        Recovery(made.run, plan),
    )
    assert rundir.read_json(made.run.summary)["ranks"] == 2
    assert [rank["rank"] for rank in look(made.run)["ranks"]] == [0, 1]
