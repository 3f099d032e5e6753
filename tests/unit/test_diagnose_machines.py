"""Logs of several machines: the times and ranks in them, and what their launchers report."""

from __future__ import annotations

import calendar
import time
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.diagnosed import OOM
from training.core import messages
from training.core.rundir import write_json
from training.diagnose import log_line, result, world_size
from training.host.placement import NODE, RANK, Topology


def found(folder: Path, **logs: str) -> tuple[str, int | None]:
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    record = result.diagnose([folder])
    return record["cause"], record["rank"]


def raised(rank: int, exception: str = "KeyError: 0") -> str:
    lines = ("Traceback (most recent call last):", '  File "/u/a.py", line 3, in f', exception)
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def ended(rank: int, status: int, at: str = "02:40:05") -> str:
    """torchrun's report of the first failure, on a machine with four ranks."""
    return (
        f"E1130 {at}.0 99 torch/distributed/elastic/multiprocessing/api.py:906] failed (exitcode: "
        f"{status}) local_rank: {rank % 4} (pid: {1000 + rank}) of binary: /usr/bin/python\n"
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : 2026-11-30_{at}\n  host      : n\n"
        f"  rank      : {rank} (local_rank: {rank % 4})\n"
        f"  exitcode  : {status} (pid: {1000 + rank})\n"
    )


@each(
    ("day", "expected"),
    [
        ("1231", (2025, 12, 31)),
        ("114", (2026, 1, 14)),
        ("0301", (2025, 3, 1)),
        ("229", (2024, 2, 29)),
    ],
)
def test_a_date_without_a_year_is_in_the_past(
    day: str, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = calendar.timegm((2026, 1, 15, 0, 0, 0))
    monkeypatch.setattr(time, "time", lambda: now)
    moment = log_line.time_of(f"[rank0]:[W{day} 23:58:03.5 ProcessGroupNCCL.cpp:1] x")
    assert moment and tuple(time.gmtime(moment)[:3]) == expected


def test_a_date_without_a_year_is_near_the_others_of_its_log(tmp_path: Path) -> None:
    """Rank 5 fails last, after midnight."""
    node0 = (
        "2021-12-31 23:58:04 step 1 loss 2.0\n"
        f"[rank0]:[W101 00:01:00.0 ProcessGroupNCCL.cpp:1] x\n{raised(0)}"
    )
    node1 = f"2022-01-01 00:02:00 step 1 loss 2.0\n{raised(5)}"
    assert found(tmp_path, node0=node1, node1=node0) == ("exception", 0)


@each("form", ["whole", "table alone"])
def test_an_exception_is_dated_by_the_report_of_its_launcher(form: str, tmp_path: Path) -> None:
    """The last line before it may be hours old."""
    first, later = ended(2, 1, "02:40:05"), ended(5, 1, "02:40:09")
    if form == "table alone":
        first, later = (text.partition("\n")[2] for text in (first, later))
    node0 = f"2026-11-30 02:39:59 step 9 loss 2.0\n{raised(2)}{first}"
    node1 = f"2026-11-30 02:00:00 loading\n{raised(5)}{later}"
    assert found(tmp_path, node0=node0, node1=node1) == ("exception", 2)
    late = f"2026-11-30 02:39:58 step 9 loss 2.0\n{raised(5)}2026-11-30 03:10:00 waiting\n{later}"
    assert found(tmp_path, node0=node0, node1=late) == ("exception", 5), "not by any later line"
    slow = "2026-11-30 02:39:50 " + raised(5).strip().replace("\n", "\n2026-11-30 02:39:50 ")
    text = f"{slow}\n{ended(5, 1, '02:41:20')}"
    assert found(tmp_path, node0=node0, node1=text) == ("exception", 5), "by its own time"


@each(
    ("head", "rank"),
    [
        ("2026-11-30 02:39:50 ERROR training failed\n", 5),
        ("2026-11-30 02:39:50 | CRITICAL | __main__:f:3 - training failed\n", 5),
        ("E1130 02:39:50.123456 140 a.py:3] training failed\n", 5),
        ("[rank5]: 2026-11-30 02:39:50 ERROR training failed\n[rank4]: x\n", 5),
        ("2026-11-30 02:39:50 ERROR ", 5),  # before the head of the traceback itself
        ("2026-11-30 02:39:50 ERROR training failed\nstep 9\n", 2),
        ("2026-11-30 02:39:50 INFO step 9\n", 2),
        ("2026-11-30 02:39:50 ERROR upload failed, retrying in 60 s\n", 2),  # continues
        ("2026-11-30 02:39:50 ERROR corrupt image 17.jpg, skipping\n", 2),
        ("2026-11-30 02:39:50 ERROR Skipping batch 17\n", 2),
        ("2026-11-30 02:39:50 ERROR upload failed, ignored\n", 2),
        ("2026-11-30 02:39:50 ERROR upload failed, continuing without it\n", 2),
        ("2026-11-30 02:39:50 ERROR 429 Too Many Requests, retrying in 5 s\n", 2),
        ("2026-11-30 02:39:50 ERROR connection aborted, retrying\n", 2),
        ("2026-11-30 02:39:50 ERROR giving up on image 17, skipping\n", 2),
        ("2026-11-30 02:39:50 ERROR upload failed, continuing training\n", 2),
        ("2026-11-30 02:39:50 CRITICAL upload failed, retrying in 60 s\n", 2),
        ("2026-11-30 02:39:50 ERROR training failed after retrying 3 times\n", 5),
        ("2026-11-30 02:39:50 ERROR job 12 retried 3 times, aborting\n", 5),
        ("2026-11-30 02:39:50 ERROR training failed, not retrying\n", 5),
        ("2026-11-30 02:39:50 ERROR training failed, gave up retrying\n", 5),
        ("2026-11-30 02:39:50 ERROR training failed, no longer retrying\n", 5),
        ("2026-11-30 02:39:50 ERROR training failed after skipping 9 batches\n", 5),
        ("2026-11-30 02:39:50 CRITICAL aborting: 100 batches skipped\n", 5),
        ("2026-11-30 02:39:50 CRITICAL 100 batches skipped\n", 5),
        ("2026-11-30 02:39:50 ERROR too many skipped batches, aborting\n", 5),
        ("2026-11-30 02:39:50 ERROR 100 batches skipped, giving up\n", 5),
        ("2026-11-30 02:39:50 ERROR error while continuing from checkpoint 400\n", 5),
        ("F1130 02:39:50.123456 140 a.py:3] 100 batches skipped\n", 5),
        ("2026-11-30 02:39:50 ERROR error in skip connection\n", 5),
        ("2026-11-30 02:39:50 ERROR Recovering from checkpoint failed\n", 5),
        ("2026-11-30 02:25:00 ERROR upload failed\n", 2),  # no launcher waits that long
        ("2026-11-30 02:25:00 ERROR ", 5),
    ],
)
def test_a_logged_exception_has_the_time_of_its_message(
    head: str, rank: int, tmp_path: Path
) -> None:
    """`logging.exception` prints a line with a time, then the traceback without any; the launcher
    waits for the slow ends of other ranks before its report."""
    node0 = f"2026-11-30 02:40:10 ERROR lost\n{raised(2)}{ended(2, 1, '02:40:12')}"
    text = raised(5) if "[rank5]" in head else raised(5).replace("[rank5]: ", "")
    node1 = f"{head}{text}{ended(5, 1, '02:41:20')}"
    assert found(tmp_path, node0=node0, node1=node1)[1] == rank


def timeout(rank: int, enqueued: int = 0, in_mesh: int = 0) -> str:
    """torch's lines of a rank that has waited in vain for another one; `in_mesh`: of its second
    process group."""
    before = f"[rank{rank}]:[E1130 03:12:02.0 ProcessGroupNCCL.cpp"
    text = (
        f"{before}:688] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600002 "
        "milliseconds before timing out.\n"
    )
    for group, number in (
        ("ID 0 PG GUID 0(default_pg)", enqueued),
        ("ID 3 PG GUID 9(dp)", in_mesh),
    ):
        if number:
            text += (
                f"{before}:2241] [PG {group} Rank {rank}] failure detected by watchdog at work "
                f"sequence id: 5 PG status: last enqueued work: {number}, last completed work: 4\n"
            )
    return text


@each(
    ("command", "world"),
    [
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nnodes=1 --nproc-per-node=4 train.py", 4),
        ("torchrun --nnodes 2 --nproc_per_node 4 train.py", 8),
        ("torchrun --nnodes=1:4 --nproc_per_node=4 train.py", None),
        ("torchrun --nproc_per_node=gpu train.py", None),
        ("+ WORLD_SIZE=16 NNODES=2", 16),
    ],
)
def test_the_number_of_ranks_in_a_command(command: str, world: int | None) -> None:
    assert world_size.world_size(command) == world


@each(
    ("nodes", "waiting", "rank"),
    [
        ("", (0, 1, 3), 2),
        ("--nnodes=2 ", (0, 1, 3), None),
        ("--nnodes=2 ", (0, 1, 2, 4, 5, 6, 7), 3),
        ("", (0, 1, 7), None),
    ],
)
def test_the_rank_that_does_not_wait_is_one_of_all_machines(
    nodes: str, waiting: tuple[int, ...], rank: int | None, tmp_path: Path
) -> None:
    command = f"+ torchrun {nodes}--nproc_per_node=4 train.py\n"
    node0 = f"{command}step 1 loss 2.0\n" + "".join(map(timeout, waiting))
    assert found(tmp_path, node0=node0) == ("collective_timeout", rank)
    assert found(tmp_path, node1=ended(12, -6)) == ("collective_timeout", None), "of 16 ranks"


@each("late", [1, 5])
def test_a_hang_after_a_restart_has_its_own_rank(late: int, tmp_path: Path) -> None:
    """Rank `late` was late in the first attempt, rank 2 in the second one."""
    first = [timeout(rank, 8 if rank == late else 10) for rank in range(8)]
    then = [timeout(rank, 880 if rank == 2 else 910) for rank in range(8)]
    steps = "".join(f"step {n} loss 2.0\n" for n in range(20, 80))
    node0 = f"step 1 loss 2.0\n{''.join(first[:4])}{steps}{''.join(then[:4])}"
    assert found(tmp_path, node0=node0) == ("collective_timeout", 2)
    node1 = f"loading\n{''.join(first[4:])}loading\n{''.join(then[4:])}"  # without steps
    assert found(tmp_path, node0=node0, node1=node1) == ("collective_timeout", 2)


@each(
    ("numbers", "rank"),
    [
        ([(910, 50), (910, 50)], None),
        ([(910, 50), (910, 50), (800, 50)], 2),
        ([(910, 50), (910, 50), (910, 40)], 2),
        ([(910, 50), (910, 40), (910, 50), (800, 50)], None),  # the groups differ
        ([(910, 50), (800, 0)], 1),
        ([(910, 0), (0, 50)], None),
    ],
)
def test_collectives_are_counted_in_each_process_group(
    numbers: list[tuple[int, int]], rank: int | None, tmp_path: Path
) -> None:
    """Every rank has a machine of its own; only rank 0 prints steps."""
    texts = [timeout(rank, *counts) for rank, counts in enumerate(numbers)]
    logs = {f"n{i}": f"{'loading' if i else STEPS}\n{text}" for i, text in enumerate(texts)}
    assert found(tmp_path, **logs) == ("collective_timeout", rank)


STEPS = "step 1 loss 2.0\nstep 2 loss 2.0\n"
ABORTED = "srun: Terminating StepId=77.0\nsrun: error: n1: tasks 0-3: Killed\n"


def lost(rank: int) -> str:
    return (
        f"[rank{rank}]:[E1130 03:12:02.0 ProcessGroupNCCL.cpp:2115] [PG ID 0 PG GUID 0(default_pg) "
        f"Rank {rank}] Process group watchdog thread terminated with exception: NCCL error: remote "
        "process exited or there was a network error\n"
    )


def task(number: int, end: str) -> str:
    return f"srun: error: n2: task {number}: {end}\n"


@each(
    ("end", "cause"),
    [
        ("Out Of Memory", "host_oom_killed"),
        ("Killed", "killed"),
        ("Segmentation fault", "segfault"),
    ],
)
def test_a_launcher_started_by_srun_is_not_a_rank(end: str, cause: str, tmp_path: Path) -> None:
    ranks = STEPS + "".join(map(lost, range(4)))
    assert found(tmp_path, node0=ranks + task(1, end)) == (cause, 1)
    assert found(tmp_path, node0=ranks + ended(0, -6) + task(1, end)) == (cause, None)
    assert found(tmp_path, node0=ranks + ended(0, -6), srun=task(1, end)) == (cause, None)


@each("language", messages.LANGUAGES)
def test_the_launcher_of_duet_in_a_task_is_not_a_rank(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(messages.VARIABLE, language)
    began = "[INFO] 2026-11-30 02:00:00"
    for kind, rank in ((NODE, None), (RANK, 1)):
        mode = Topology(kind, "slurm", "x", world_size=2, nnodes=2).sentence()
        head = f"{began} {mode}\n{began} run directory: /moved\n{STEPS}"
        assert found(tmp_path, job=head + task(1, "Out Of Memory")) == ("host_oom_killed", rank)
    head = f"{began} run directory: /moved\n{STEPS}"  # the launcher of a single machine
    assert found(tmp_path, job=head + task(0, "Out Of Memory")) == ("host_oom_killed", None)


@each(
    ("text", "rank"),
    [
        (task(5, "Exited with exit code 3") + ABORTED, 5),
        (lost(5) + task(5, "Exited with exit code 3") + ABORTED, None),
        (ABORTED + task(5, "Exited with exit code 3"), None),
        (ended(0, -6) + task(1, "Exited with exit code 1") + ABORTED, 0),
        (task(1, "Exited with exit code 127") + ABORTED, None),  # before any rank was started
        (task(1, "Exited with exit code 126") + ABORTED, None),
    ],
)
def test_the_task_of_srun_that_ended_first_is_the_cause(
    text: str, rank: int | None, tmp_path: Path
) -> None:
    assert found(tmp_path, node0=STEPS + text)[1] == rank


@each("name", ["node1", "zone1"])
def test_the_first_failure_may_be_in_the_report_of_another_machine(
    name: str, tmp_path: Path
) -> None:
    """Rank 5 exits without any output."""
    node0 = STEPS + "".join(map(lost, range(4))) + ended(0, -6)
    node1 = "".join(map(lost, (4, 6, 7))) + ended(5, 1)
    (tmp_path / f"{name}.log").write_text(node1)
    assert found(tmp_path, node0=node0) == ("exit_status", 5)


def steps(hour: int) -> str:
    return "".join(f"2026-11-30 {hour:02}:{n:02}:00 step {n} loss 2.0\n" for n in range(60))


# As torchrun prints it where it starts the ranks again.
RESTARTED = ended(5, 1, "02:40:05").partition("\n")[0] + "\n"


@each(
    ("node0", "node1", "expected"),
    [
        (steps(2) + steps(3), raised(5) + RESTARTED, ("none", None)),
        (steps(2) + steps(3) + raised(2), raised(5, OOM) + RESTARTED + lost(5), ("exception", 2)),
        (steps(2), raised(5) + ended(5, 1, "02:58:50"), ("exception", 5)),
        (steps(2), f"2026-11-30 02:00:00 loading\n{raised(5)}", ("exception", 5)),  # at any time
        ("step 1 loss 2.0\n" * 9, raised(5) + RESTARTED, ("exception", 5)),
    ],
)
def test_a_failure_may_be_survived_by_the_steps_of_another_machine(
    node0: str,
    node1: str,
    expected: tuple[str, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Years later: only the steps have a year."""
    monkeypatch.setattr(time, "time", lambda: calendar.timegm((2029, 1, 15, 0, 0, 0)))
    assert found(tmp_path, node0=node0, node1=node1) == expected
    swapped = tmp_path / "swapped"  # node1 is read first
    swapped.mkdir()
    assert found(swapped, node0=node1, node1=node0) == expected


def test_a_log_of_no_rank_may_be_in_another_time_zone(tmp_path: Path) -> None:
    """The kernel's log, read on the host of a container."""
    text = "[Mon Nov 30 01:30:05 2026] Out of memory: Killed process 4321 (python) total-vm:1kB\n"
    assert found(tmp_path, train=steps(2), dmesg=text) == ("host_oom_killed", None)
    text = text.replace("[Mon Nov 30 01:30:05 2026]", "Nov 30 01:30:05 host kernel:")
    assert found(tmp_path, train=steps(2), dmesg=text) == ("host_oom_killed", None)


def of_rank(attempt: int, rank: int, folder: Path) -> Path:
    """torchrun's folder for the files of a rank."""
    place = folder / f"attempt_7/none_x/attempt_{attempt}/{rank}"
    place.mkdir(parents=True, exist_ok=True)
    return place


@each(
    ("last", "expected"),
    [
        (raised(2), ("exception", 2)),
        ("Training completed\n", ("none", None)),
        ("", ("gpu_oom", 3)),
        ("/u/a.py:3: UserWarning: x\n", ("gpu_oom", 3)),
        (" \n", ("gpu_oom", 3)),
    ],
)
def test_the_last_attempt_of_torchrun_decides(
    last: str, expected: tuple[str, int | None], tmp_path: Path
) -> None:
    (of_rank(0, 3, tmp_path) / "stderr.log").write_text(raised(3, OOM))
    (of_rank(1, 2, tmp_path) / "stderr.log").write_text(last)
    assert found(tmp_path) == expected


@each("logs", [(0, 1), (0,), (1,), ()])
def test_error_files_of_earlier_attempts_do_not_count(
    logs: tuple[int, ...], tmp_path: Path
) -> None:
    for attempt, rank, text in ((0, 3, OOM), (1, 2, "NotImplementedError: no")):
        place = of_rank(attempt, rank, tmp_path)
        message = {"message": text.strip(), "extraInfo": {"timestamp": "1790000000"}}
        write_json(place / "error.json", {"message": message})
        if attempt in logs:
            (place / "stderr.log").write_text(raised(rank, text))
    assert found(tmp_path) == ("exception", 2)
