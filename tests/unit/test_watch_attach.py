"""`duet attach`: finding the ranks, their display, wrong usage."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from tests.unit.test_watch_samples import LIBRARY, look
from training.core import rundir
from training.core.errors import Exit, Problem, UserError
from training.monitor import attach
from training.monitor.health import target
from training.watchdog import discovery
from training.watchdog.hang_report import GPU_WORKS, MAY_END, WORKS, NoFinding
from training.watchdog.probes import procfs
from training.watchdog.probes.sampling import Sample, take
from training.watchdog.probes.stacks import Frame

NOW = re.compile(r"^\[(ERROR)\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)
# Looks are samples: a process that gets no CPU time meanwhile is in the same place in all of them.
TRIES = 5


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LOOK_S", 0.4)
    monkeypatch.setattr(attach, "CONFIRM_S", 0.6)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = attach.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, NOW.sub("", captured.err)


def test_a_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with targets.ranks(tmp_path, "waits", "locks") as (pids, script):
        code, out, err = shown(capsys, f"--pid={pids[0]}")
    waits, locks = (
        f"{script}:{targets.line_of(script, text, name)}"
        for text, name in (("all_reduce()", "waits"), ("acquire()", "locks"))
    )
    assert (code, err) == (5, "")
    lines = out.splitlines()
    assert lines[:4] == [
        f"rank 0  pid {pids[0]}  sleeping, 0 % of a core",
        f"        at {waits} (waits), waits in all_reduce, kernel: {lines[1].rpartition(' ')[2]}",
        f"rank 1  pid {pids[1]}  sleeping, 0 % of a core",
        f"        at {locks} (locks), kernel: {lines[3].rpartition(' ')[2]}",
    ]
    assert re.fullmatch(
        rf"HANG rank 1 is stuck at {re.escape(locks)} \(locks\), for [\d.]+ s", lines[4]
    )
    assert lines[5:] == [
        f"    where   {locks}",
        f"    others  rank 0: waits in all_reduce at {waits} (waits)",
    ]


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with targets.ranks(tmp_path, "loads", "waits") as (pids, script):
        (worker,) = procfs.workers(pids[0])
        code, out, _ = shown(capsys, "--json", "--pid", str(pids[1]))
    found = json.loads(out)
    place = f"{script}:{targets.line_of(script, 'lock.acquire()', 'stuck_in_the_dataset')}"
    assert code == 5 and found["stuck"] is True and found["reason"] is None
    assert (found["verdict"]["kind"], found["verdict"]["rank"], found["verdict"]["where"]) == (
        "hang",
        0,
        place,
    )
    first, second = found["ranks"]
    assert first["workers"] == [{"pid": worker, "state": "sleeping"}] and first["waits_in"] is None
    assert (second["rank"], second["pid"], second["waits_in"], second["function"]) == (
        1,
        pids[1],
        "all_reduce",
        "waits",
    )
    assert (
        second["phase"] is None
        and second["problem"] is None
        and second["stack"][0].endswith("(all_reduce)")
    )


def test_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        targets.stopped(pids[0])
        code, out, _ = shown(capsys, f"--pid={pids[1]}")
        assert (
            code == 5
            and f"STOPPED rank 0 is stopped (SIGSTOP; resume: kill -CONT {pids[0]})" in out
        )
        targets.stopped(pids[1])
        code, out, _ = shown(capsys, f"--pid={pids[1]}")
        assert code == 5 and out.endswith(
            f"Stopped (SIGSTOP): all ranks; resume: kill -CONT {pids[0]} {pids[1]}\n"
        )


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("works", "no hang: one of them works: rank 0 is at "),
        ("uploads", "no hang: one of them works: rank 0 is at "),
        (
            "spins",
            "undetermined: in the same Python functions all the time, an endless loop or long "
            "work: rank 0 is at ",
        ),
    ],
)
def test_uncertain_states_are_not_a_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, expected: str
) -> None:
    with targets.ranks(tmp_path, role, "waits") as (pids, _):
        for _ in range(TRIES):
            code, out, _ = shown(capsys, f"--pid={pids[1]}")
            if out.splitlines()[-1].startswith(expected):
                break
    assert (
        code == 0
        and out.splitlines()[-1].startswith(expected)
        and "; rank 1 waits in all_reduce at " in out.splitlines()[-1]
    )


def test_the_reason_without_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        targets.stopped(pids[0])
        targets.stopped(pids[1])
        code, out, _ = shown(capsys, f"--pid={pids[1]}", "--json")
    found = json.loads(out)
    assert (code, found["stuck"], found["verdict"], found["reason"]) == (5, True, None, "paused")


def test_a_process_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, _, _):
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        code, _, err = shown(capsys, f"--pid={pid}")
    assert code == 3 and f"sudo ./duet attach --pid={pid}" in err


def test_a_single_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, _, _):
        targets.asleep(pid, "futex")
        code, out, _ = shown(capsys, f"--pid={pid}")
    assert code == 0 and "undetermined: no rank waits for another, none works: rank 0 is at " in out


@pytest.mark.parametrize(
    ("reason", "seconds"), [(MAY_END, [attach.LOOK_S, attach.CONFIRM_S]), (WORKS, [attach.LOOK_S])]
)
def test_an_undecided_verdict_takes_a_longer_look(
    monkeypatch: pytest.MonkeyPatch, reason: str, seconds: list[float]
) -> None:
    """The verdict is that of all samples."""
    monkeypatch.undo()
    looks, judged = list[float](), list[int]()

    def look(pids: dict[int, int], for_s: float) -> list[Sample]:
        looks.append(for_s)
        return [take(pids), take(pids)]

    def judge(samples: list[Sample]) -> NoFinding:
        judged.append(len(samples))
        return NoFinding(reason, "")

    monkeypatch.setattr(attach, "_looks", look)
    monkeypatch.setattr(attach, "_verdict", judge)
    assert attach.main([f"--pid={os.getpid()}", "--json"]) == 0
    assert looks == seconds and judged == [2, 4][: len(seconds)]


def test_the_ranks_are_found_from_any_process_of_a_training(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "loads", "waits", "waits") as (pids, _):
        (worker,) = procfs.workers(pids[0])
        for pid in (*pids.values(), worker, os.getpid()):
            assert discovery.of_process(pid) == pids


def test_two_trainings_below_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with targets.ranks(tmp_path / "a", "waits", "waits") as (pids, _):
        real = os.getpid
        monkeypatch.setattr(os, "getpid", lambda: real() + 1)  # another port
        with targets.ranks(tmp_path / "b", "waits", "waits") as (others, _):
            monkeypatch.undo()
            assert (
                discovery.of_process(pids[1]) == pids and discovery.of_process(others[0]) == others
            )
            with pytest.raises(UserError) as caught:
                discovery.of_process(os.getpid())
    text = f"more than one training below process {os.getpid()} (--pid)"
    fixes = [f"./duet attach --pid={pid}" for pid in (pids[0], others[0])]
    assert caught.value.problems == [
        Problem("process.several", text, "a rank of one of them", fixes)
    ]


def run_directory(
    folder: Path, pids: dict[int, int], host: str = "", supervisor: int | None = None
) -> Path:
    run = rundir.RunDir(folder / "run")
    run.create()
    rundir.write_json(run.plan, {})
    started = [{"rank": rank, "pid": pid} for rank, pid in pids.items()]
    facts = {
        "pid": supervisor or os.getpid(),
        "host": host or socket.gethostname(),
        "started": 0.0,
        "ranks": started,
    }
    rundir.write_json(run.supervisor, facts)
    return run.path


def test_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").mkdir()
    with targets.ranks(tmp_path / "ranks", "locks", "waits") as (pids, _):
        path = run_directory(tmp_path, pids)
        assert discovery.of_run(path) == pids
        code, out, _ = shown(capsys, f"--run={path}")
        assert code == 5 and "HANG rank 0 is stuck at " in out
        run_directory(tmp_path, pids, supervisor=1)
        with pytest.raises(UserError):  # the same PIDs, of processes that are not its ranks
            discovery.of_run(path)


def test_a_run_by_its_name_and_by_a_path_with_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_directory(tmp_path / "my experiments", {0: 1 << 22})
    monkeypatch.setattr(attach, "WORK", tmp_path)
    monkeypatch.setattr(attach, "EXPERIMENTS", "my experiments")
    for wanted in ("run", str(path), "latest"):
        code, _, err = shown(capsys, f"--run={wanted}")
        assert code == 2 and f"./monitor_training.sh --run={shlex.quote(str(path))} --once" in err
    assert shlex.split(
        next(fix for fix in shown(capsys, "--run=runn")[2].splitlines() if "try:" in fix)
    )[1:] == [
        *COMMAND.split(),
        "--run=run",
    ]


def test_a_run_started_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    with targets.ranks(tmp_path / "ranks", "waits", "waits") as (pids, _):
        path = run_directory(tmp_path, {}, supervisor=os.getppid())
        facts = rundir.read_json(path / "supervisor.json") or {}
        rundir.write_json(
            path / "supervisor.json", facts | {"ranks": [{"rank": None, "pid": os.getpid()}]}
        )
        assert discovery.of_run(path) == pids


def test_the_ranks_that_the_only_rank_of_a_run_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is their launcher."""
    (tmp_path / "ranks").mkdir()
    with targets.ranks(tmp_path / "ranks", "waits", "waits") as (pids, _):
        path = run_directory(tmp_path, {0: os.getpid()}, supervisor=os.getppid())
        found = target.of_run(rundir.RunDir(path))
        assert found.pids == pids
        rundir.write_json(path / "plan.json", {"ranks": 1, "local_ranks": 1})
        found = target.of_run(rundir.RunDir(path))
        assert (found.world, found.here, found.known_by) == (2, 2, "WORLD_SIZE")
        # by torch.multiprocessing: they inherit the variables of the only rank
        monkeypatch.setattr(target, "variables", lambda pid: {"WORLD_SIZE": "1"})
        found = target.of_run(rundir.RunDir(path))
        assert (found.world, found.here, found.missing) == (None, None, ())


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path, {0: 1 << 22})
    assert shown(capsys, f"--run={path}") == (
        2,
        "",
        f"no rank of {path} runs on this machine\n    allowed: a run in progress\n"
        f"    try:     ./monitor_training.sh --run={path} --once   # how it ended\n1 problem; "
        f"nothing was inspected (exit 2)\n",
    )
    run_directory(tmp_path, {0: 1}, host="far-away")
    assert shown(capsys, f"--run={path}")[2].startswith(
        f"no rank of {path} runs on this machine; it was started on far-away\n    try:     "
        f"ssh far-away\n"
    )


@pytest.mark.parametrize(("gpu", "code"), [(True, Exit.DONE), (False, Exit.HANG)])
def test_ranks_whose_gpus_may_compute_do_not_hang(gpu: bool, code: Exit) -> None:
    backward = look(Frame(f"{LIBRARY}/autograd/graph.py", 800, "_engine_run_backward"), gpu=gpu)
    samples = [Sample(at, {0: backward, 1: backward}) for at in (0.0, 1.0)]
    verdict = attach._verdict(samples)
    assert getattr(verdict, "code", GPU_WORKS) == GPU_WORKS
    assert "backward" in attach._conclusion(verdict)[1], "the place is shown in both cases"
    assert attach._conclusion(verdict)[0] == code


def test_ranks_in_launches_of_kernels_do_not_hang() -> None:
    forward, samples = Frame(f"{LIBRARY}/nn/modules/linear.py", 125, "forward"), []
    for at in (0.0, 1.0):
        now = look(forward, gpu=True, state="R", cpu_s=at, main_cpu_s=at)
        samples.append(Sample(at, {0: now, 1: now}))
    assert getattr(attach._verdict(samples), "code", None) == GPU_WORKS


COMMAND = "./duet attach"
PGREP = "pgrep -af python   # all Python processes, with their pids"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            [],
            f"neither --pid nor --run is given\n    allowed: one of them\n    try: "
            f"    {COMMAND} --run=experiments/RUN\n"
            f"    or:      {COMMAND} --pid=PID   # any process of it: pgrep -af python\n1 problem; ",
        ),
        (["--pid=1", "--run=x"], "both --pid and --run are given\n    allowed: one of them\n"),
        (
            ["--pid=x", "17"],
            f"--pid is 'x'\n    allowed: the PID of a training process\n    try:     "
            f"{PGREP}\nunknown argument '17'\n"
            f"    allowed: --pid=PID or --run=DIR, and --json\n    try:     {COMMAND} --pid=17\n2 "
            f"problems; ",
        ),
        (
            ["--pid=4194304"],
            f"process 4194304 (--pid) does not exist\n    try:     {PGREP}\n1 problem; nothing was "
            f"inspected (exit 2)\n",
        ),
        (
            ["--run"],
            f"--run has no value\n    allowed: a run directory\n    try:     {COMMAND} "
            f"--run=experiments/RUN\n",
        ),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    code, out, err = shown(capsys, *argv)
    assert (code, out) == (2, "") and err.startswith(text)


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path, {})
    text = (
        f"{tmp_path} (--run) is not a run directory\n    allowed: a folder with a plan.json\n    "
        f"try:     {COMMAND} --run={path}\n"
    )
    assert shown(capsys, f"--run={tmp_path}")[2].startswith(text)


def test_a_process_that_is_not_python(capsys: pytest.CaptureFixture[str]) -> None:
    sleeper = os.posix_spawnp("sleep", ["sleep", "1000"], {"PATH": os.environ["PATH"]})
    try:
        wait_until(
            lambda: (now := procfs.read_process(sleeper)) and now.command == "sleep 1000",
            20,
            "it sleeps",
        )
        code, _, err = shown(capsys, f"--pid={sleeper}")
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)
    assert code == 2
    assert err.startswith(
        f"process {sleeper} (--pid: sleep 1000) is not Python and has no rank below it\n    try:   "
        f"  {PGREP}\n"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = shown(capsys, "--help")
    assert (
        (code, err) == (0, "")
        and "attach --pid=PID | --run=RUN [--json]" in out
        and sys.argv[0] not in out
    )
