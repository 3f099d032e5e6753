"""Hang detection of the ranks that a watched command has started (./duet watch)."""

from __future__ import annotations

import os

import pytest

from tests.unit.test_watch_start import PLAN, run
from training.core.rundir import RunDir
from training.watchdog import discovery
from training.watchdog.hang_report import HANG, UNEVEN, HangFinding
from training.watchdog.probes.stacks import Frame, Stack, Thread
from training.watchdog.rank_exit import RankExit
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.start import RanksWatch

__all__ = ["run"]  # a fixture

WATCHED = {
    "script": {"path": "bash", "python": "python3"},
    "launcher": {"value": "watch", "reason": ""},
}


@pytest.fixture
def watched(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> tuple[RanksWatch, list[dict[int, int | None]]]:
    """A watched command whose rank 1 of two has ended, which is a finding once both were seen; the
    statuses that were passed on."""
    passed: list[dict[int, int | None]] = []

    def look(self: ScriptWatch, pids: object, ended: dict[int, int | None]) -> HangFinding | None:
        passed.append(ended)
        how = "has ended (status unknown), the others wait for it"
        return HangFinding(UNEVEN, 1, None, how, {}, {}, 4.0) if ended else None

    found = {0: os.getpid(), 1: 1}
    monkeypatch.setattr(ScriptWatch, "look", look)
    monkeypatch.setattr(
        discovery, "started_by", lambda pid, settled: discovery.Started(found, 2, 2)
    )
    monkeypatch.setattr(
        "training.watchdog.probes.procfs.lives", lambda pid: pid != 1 or len(passed) < 1
    )
    run.launcher_log("bash").write_text("ValueError: of an earlier attempt\n")
    return RanksWatch(run, PLAN | WATCHED, range(2), 2), passed


def test_the_status_of_a_rank_of_a_watched_command_is_unknown(
    run: RunDir, watched: tuple[RanksWatch, list[dict[int, int | None]]]
) -> None:
    watch, passed = watched
    assert watch.look({None: 7}, {}) is None
    with run.launcher_log("bash").open("a") as log:
        log.write(
            'Traceback (most recent call last):\n  File "/x/train.py", line 8, in <module>\n'
            "    open(path)\nFileNotFoundError: [Errno 2] No such file: 'data.bin'\n"
        )
    found = watch.look({None: 7}, {})
    assert passed == [{}, {1: None}]
    assert watch.trained.items() >= {os.getpid(): 0, 1: 1}.items(), "also of the ended one"
    assert found and found.death == RankExit(
        "error", 1, "/x/train.py:8", "FileNotFoundError: [Errno 2] No such file: 'data.bin'"
    )
    assert not list(run.hangs.glob("*")), "no record of a hang"


@pytest.mark.parametrize("name", ["_shutdown", "main"])
def test_only_a_rank_at_its_exit_has_failed_with_the_error_in_the_log(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A rank that hangs in its program has survived an error that it logged."""
    main = Frame("/x/train.py", 3, "<module>")
    frames = (Frame("/usr/lib/python3.12/threading.py", 1624, name), main)
    stack = Stack(1, "py-spy", (Thread("MainThread", True, False, False, frames),))
    found = HangFinding(HANG, 1, "threading.py:1624", "is stuck", {}, {1: stack}, 4.0)
    monkeypatch.setattr(ScriptWatch, "look", lambda *_: found)
    monkeypatch.setattr(RanksWatch, "_adopt", lambda *_: {0: 6, 1: 8})
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 2)
    run.launcher_log("bash").write_text(
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/train.py", line 8, in f\n'
        "[rank1]:     read()\n[rank1]: ValueError: bad sample 17\n"
    )
    again = watch.look({None: 7}, {})
    assert again and (again.death is not None) == (name == "_shutdown")


def test_the_error_of_another_rank_is_not_that_of_the_rank_that_has_ended(
    run: RunDir, watched: tuple[RanksWatch, list[dict[int, int | None]]]
) -> None:
    watch, _ = watched
    watch.look({None: 7}, {})
    with run.launcher_log("bash").open("a") as log:
        log.write(
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/x/t.py", line 8, in f\n'
            "[rank0]:     read()\n[rank0]: ValueError: bad sample 17\n"
        )
    found = watch.look({None: 7}, {})
    assert found and (found.kind, found.death) == (UNEVEN, None)


def test_without_a_failure_in_its_log_the_finding_stays(
    watched: tuple[RanksWatch, list[dict[int, int | None]]],
) -> None:
    watch, _ = watched
    watch.look({None: 7}, {})
    found = watch.look({None: 7}, {})
    assert found and (found.kind, found.death) == (UNEVEN, None)


@pytest.mark.parametrize("found", [{}, {0: 1, 1: 1}])
def test_a_search_without_a_result_is_reported_after_the_last_attempt(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: dict[int, int],
) -> None:
    """Some ranks are only recognised when the others have settled."""
    clock, asked = [1000.0], list[bool]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: None)

    def started_by(pid: int, settled: bool) -> discovery.Started:
        asked.append(settled)
        return discovery.Started(found, 2, 2, 1) if found and settled else discovery.Started({})

    monkeypatch.setattr(discovery, "started_by", started_by)
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 2)
    clock[0] += 59.5
    watch.look({None: 7}, {})
    clock[0] += 0.7
    watch.look({None: 7}, {})
    assert asked == [False] and "no ranks found" not in capsys.readouterr().err
    clock[0] += 0.4
    watch.look({None: 7}, {})
    assert asked == [False, True]
    assert ("no ranks found" in capsys.readouterr().err) is not bool(found)
    assert watch._script and watch._script.joining is bool(found)
    assert not watch._script.others_elsewhere


def test_a_later_round_has_no_ended_ranks_of_the_one_before(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the loss of a machine torchrun gives other numbers to the ranks of this one."""
    clock, alive = [1000.0], {14, 15}
    seen: list[tuple[dict[int, int], dict[int, int | None]]] = []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        ScriptWatch, "look", lambda self, pids, ended: seen.append((dict(pids), dict(ended)))
    )
    monkeypatch.setattr("training.watchdog.probes.procfs.lives", lambda pid: pid in alive)
    monkeypatch.setattr("training.watchdog.wrapped._training", lambda pid, tree, others: pid)
    found = [discovery.Started({4: 14, 5: 15}, 2, 6)]
    monkeypatch.setattr(discovery, "started_by", lambda pid, settled: found[0])
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 6)

    def look() -> None:
        clock[0] += 100
        watch.look({None: 7}, {})

    look()
    alive.discard(15)
    found[0] = discovery.Started({4: 14}, 2, 6)
    look()
    alive.clear()
    found[0] = discovery.Started({})
    look()
    assert not watch._ranks_seen, "torchrun alone"
    found[0] = discovery.Started({0: 20, 1: 21}, 2, 4)
    alive.update((20, 21))
    look()
    assert seen == [
        ({4: 14, 5: 15}, {}),
        ({4: 14}, {5: None}),
        ({}, {}),
        ({0: 20, 1: 21}, {}),
    ]
    assert "no ranks found" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (  # Lightning on node 1 of two: the number of ranks on each is not known at first
            [({2: 7, 3: 8}, {7, 8}), ({4: 7, 5: 8, 6: 9, 7: 10}, {7, 8, 9, 10})],
            [({2: 7, 3: 8}, {}), ({4: 7, 5: 8, 6: 9, 7: 10}, {})],
        ),
        (  # two of them have ended: the others keep their numbers
            [({4: 7, 5: 8, 6: 9, 7: 10}, {7, 8, 9, 10}), ({2: 7, 3: 8}, {7, 8})],
            [({4: 7, 5: 8, 6: 9, 7: 10}, {}), ({4: 7, 5: 8}, {6: None, 7: None})],
        ),
        (  # the only one that the first rank has started has ended
            [({0: 7, 1: 8}, {7, 8}), ({}, {7})],
            [({0: 7, 1: 8}, {}), ({0: 7}, {1: None})],
        ),
    ],
)
def test_the_numbers_of_ranks_are_known_when_all_have_started(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[tuple[dict[int, int], set[int]]],
    expected: list[tuple[dict[int, int], dict[int, int | None]]],
) -> None:
    clock, now = [1000.0], [rounds[0]]
    seen: list[tuple[dict[int, int], dict[int, int | None]]] = []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: seen.append((pids, ended)))
    monkeypatch.setattr("training.watchdog.probes.procfs.lives", lambda pid: pid in now[0][1])
    monkeypatch.setattr("training.watchdog.wrapped._training", lambda pid, tree, others: pid)
    monkeypatch.setattr(
        discovery,
        "started_by",
        lambda pid, settled: discovery.Started(now[0][0], len(now[0][0]), 8, 1),
    )
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 8)
    for one in rounds:
        now[0] = one
        clock[0] += 100
        watch.look({None: 7}, {})
    assert seen == expected


def test_the_ranks_that_the_only_rank_has_started_are_watched_until_the_last_has_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, alive = [1000.0], {7, 11, 12}
    seen: list[tuple[dict[int, int], dict[int, int | None]]] = []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        ScriptWatch, "look", lambda self, pids, ended: seen.append((dict(pids), ended))
    )
    monkeypatch.setattr("training.watchdog.probes.procfs.lives", lambda pid: pid in alive)
    monkeypatch.setattr("training.watchdog.wrapped._training", lambda pid, tree, others: pid)
    found = [discovery.Started({0: 11, 1: 12}, 2, 4)]
    monkeypatch.setattr(discovery, "own_ranks", lambda pid, settled: found[0])
    script = WATCHED | {"launcher": {"value": "spawn", "reason": ""}}
    watch = RanksWatch(run, PLAN | script, range(1), 1)
    assert watch._script
    watch.look({0: 7}, {})
    assert watch._script.others_elsewhere
    alive.discard(12)
    watch.look({0: 7}, {})
    alive.discard(11)
    found[0] = discovery.Started({})
    clock[0] += 100
    watch.look({0: 7}, {})
    assert not watch._script.others_elsewhere
    found[0] = discovery.Started({0: 13, 1: 14}, 2, 2)
    alive.update((13, 14))
    clock[0] += 100
    watch.look({0: 7}, {})
    assert seen == [
        ({0: 11, 1: 12}, {}),
        ({0: 11}, {1: None}),
        ({0: 7}, {}),
        ({0: 13, 1: 14}, {}),
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_the_ranks_that_the_only_rank_of_a_watched_command_has_started_are_watched(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """torch.multiprocessing.spawn under torchrun --nproc-per-node=1, on one machine."""
    seen: list[dict[int, int]] = []
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: seen.append(dict(pids)))
    monkeypatch.setattr("training.watchdog.probes.procfs.lives", lambda pid: True)
    monkeypatch.setattr("training.watchdog.wrapped._training", lambda pid, tree, others: pid)
    of_torchrun = discovery.Started({0: 8}, 1, world)
    monkeypatch.setattr(discovery, "started_by", lambda pid, settled: of_torchrun)
    found = discovery.Started({0: 11, 1: 12}, 2, 2)
    monkeypatch.setattr(discovery, "own_ranks", lambda pid, settled: found if pid == 8 else None)
    watch = RanksWatch(run, PLAN | WATCHED, range(1), 1)
    watch.look({None: 7}, {})
    ranks = {0: 11, 1: 12} if world == 1 else {0: 8}
    assert seen == [ranks] and watch.adopted == ranks
    assert watch._script and watch._script.others_elsewhere is (world > 1)


def test_the_time_from_the_output_of_a_watched_launcher_to_that_of_its_ranks_does_not_count(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun prints about OMP_NUM_THREADS, then the ranks import for long."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: None)
    monkeypatch.setattr("training.watchdog.probes.procfs.lives", lambda pid: True)
    monkeypatch.setattr("training.watchdog.wrapped._training", lambda pid, tree, others: pid)
    started = discovery.Started({0: 8, 1: 9}, 2, 2)
    monkeypatch.setattr(discovery, "started_by", lambda pid, settled: started)
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 2)
    assert watch._script
    watch.output()
    watch.look({None: 7}, {})
    clock[0] += 40
    watch.output()
    assert watch._script.patience_s() == PLAN["config"]["hang_timeout"]
    clock[0] += 2
    watch.output()
    assert watch._script.patience_s() == 10
