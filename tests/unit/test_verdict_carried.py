"""Exceptions that were raised in another process: a data-loader worker, a process of mp.spawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.cases import each
from tests.unit.verdicts import failed, new_run, plan, report_error, spawned
from training.core.contracts.plan import Plan
from training.core.rundir import RunDir, write_json
from training.diagnose import advice
from training.diagnose.result import diagnose
from training.host import cgroups
from training.launcher import failed_gpus, failure_report
from training.launcher.outcome import Outcome


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def raised(worker: bool, *lines: str) -> str:
    """As torch's ExceptionWrapper reports an exception of a worker."""
    inside = (
        '  File "/data/own.py", line 9, in __getitem__\n    return self.files[index]\n    ^^^^\n'
    )
    return (
        "Caught ValueError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop\n'
        "    data = fetcher.fetch(index)  # type: ignore[possibly-undefined]\n"
        f"{inside * worker}"
        '  File "/env/site-packages/torch/utils/data/_utils/collate.py", line 398, in collate\n'
        "    raise error\n"
    ) + "".join(f"{line}\n" for line in lines)


@each(
    ("worker", "lines", "expected"),
    [
        (
            True,
            ["ValueError: bad sample 40", "  of a.png"],
            ("exception", "ValueError: bad sample 40", "/data/own.py:9"),
        ),
        (
            False,
            ["own.errors.Unreadable: b.png is truncated"],
            ("exception", "Unreadable: b.png is truncated", "model.py:1"),
        ),
        (
            True,
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
            (
                "gpu_oom",
                "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "/data/own.py:9",
            ),
        ),
        (
            True,
            ["[another line]"],
            (
                "exception",
                "ValueError: Caught ValueError in DataLoader worker process 1.",
                "model.py:1",
            ),
        ),
    ],
)
def test_an_exception_of_a_worker_is_reported_as_raised_there(
    tmp_path: Path, worker: bool, lines: list[str], expected: tuple[str, str, str]
) -> None:
    run = new_run(tmp_path)
    report_error(run, 1, "ValueError", raised(worker, *lines))
    record = failed(run)
    assert (record["cause"], record["summary"], record["where"]) == expected


@each("worker", [False, True])
def test_a_frame_that_cannot_be_read_is_to_be_corrected(worker: bool, run: RunDir) -> None:
    """No line of Duet is the place."""
    message = "b.png cannot be read: image file is truncated"
    report = raised(True, f"training.data.frames.pictures.Unreadable: {message}")
    trace = ["Traceback (most recent call last):\n"]
    text = report if worker else message
    report_error(run, 1, "Unreadable", text, where="", code=None, traceback=trace)
    record = failed(run)
    found = record["cause"], record["summary"], record["where"]
    assert found == ("exception", f"Unreadable: {message}", None)
    assert "./launch_train.sh 2 --resume=" in record["advice"][0]


@each(
    ("lines", "expected"),
    [
        (["ValueError: bad sample"], ("exception", "ValueError: bad sample", "/data/train.py:9")),
        (
            ["torch.OutOfMemoryError: CUDA out of memory. GPU 0 has no free memory"],
            (
                "gpu_oom",
                "OutOfMemoryError: CUDA out of memory. GPU 0 has no free memory",
                "/data/train.py:9",
            ),
        ),
        (
            raised(True, "KeyError: 'b.png'").replace("Caught", "ValueError: Caught").split("\n"),
            ("exception", "KeyError: 'b.png'", "/data/own.py:9"),
        ),
    ],
)
def test_an_exception_in_mp_spawn_is_that_of_its_process(
    run: RunDir, lines: list[str], expected: tuple[str, str, str]
) -> None:
    report_error(run, 0, "ProcessRaisedException", spawned(*lines))
    record = failed(run, rank=0)
    assert (record["cause"], record["summary"], record["where"]) == expected
    assert (record["rank"], record["process"], record["victim"]) == (0, 3, False)
    write_json(run.failure, record)
    write_json(run.plan, plan())
    assert diagnose([run.path])["process"] == 3


@pytest.mark.parametrize(
    ("ranks", "here", "spawns"),
    [(1, 1, False), (2, 2, True), (2, 1, False)],  # at last two machines
)
def test_ranks_that_start_all_ranks_themselves_have_the_same_port(
    run: RunDir, ranks: int, here: int, spawns: bool
) -> None:
    """Lightning's ddp_spawn in each of the ranks. The only rank of a machine may well do that."""
    error = "The server socket has failed to listen on any local network address. port: 29500"
    lines = f"torch.distributed.DistNetworkError: {error}, code: -98, name: EADDRINUSE"
    report_error(run, 0, "ProcessRaisedException", spawned(lines))
    outcome = Outcome(guilty=(0, 1), here=(0, 1), ours=False)
    of_run = plan(ranks=ranks, local_ranks=here)
    record = failure_report.failure(outcome, run, cast(Plan, of_run))
    assert (record["cause"], record.get("spawns", False)) == ("port_in_use", spawns)
    assert (record["advice"] == advice.of_kind("spawns", {"ranks": "2"})) == spawns


@each(
    ("how", "logged", "expected"),
    [
        ("exit code 3", "", ("exit_status", "died", "exited with status 3")),
        ("exit code 1", "", ("exit_status", "died", "exited with status 1")),
        ("exit code 1", "ModuleNotFoundError: No module named 'own'", ("module_missing", "died")),
        ("signal SIGKILL", "", ("killed", "error")),
        ("signal SIGTERM", "", ("killed", "error")),
        ("signal SIGSEGV", "", ("segfault", "error")),
        ("signal SIGABRT", "", ("unknown", "error")),
        ("signal SIGABRT", "OSError: [Errno 28] No space left on device", ("disk_full", "error")),
    ],
)
def test_the_end_of_a_process_of_mp_spawn_without_an_exception(
    tmp_path: Path, how: str, logged: str, expected: tuple[str, ...]
) -> None:
    """torch raises its end at the line that called mp.spawn, where nothing has failed."""
    run = new_run(tmp_path)
    text = f"process 1 terminated with {how}"
    report_error(run, 0, "ProcessExitedException", text)
    head = 'Traceback (most recent call last):\n  File "/own/main.py", line 3, in <module>\n'
    output = [head.replace("main", "data") + logged] * bool(logged) + [
        "W1128 12:53:37.648000 20040 spawn.py:165] Terminating process 20181 via signal SIGTERM",
        f"{head}torch.multiprocessing.spawn.ProcessExitedException: {text}\n",
    ]
    run.rank_log(0).write_text("\n".join(output))
    record = failed(run, rank=0)
    found = record["cause"], record["kind"], record["summary"]
    assert found[: len(expected)] == expected
    assert (record["rank"], record["process"], record["victim"]) == (0, 1, False)
    assert record["where"] == ("/own/data.py:3" if logged else None)


def test_a_process_of_mp_spawn_that_the_kernel_has_killed_for_lack_of_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 2)
    for name, cause in (("SIGKILL", "host_oom_killed"), ("SIGTERM", "killed")):
        report_error(run, 0, "ProcessExitedException", f"process 1 terminated with signal {name}")
        record = failed(run, rank=0, oom_kills=1)
        assert (record["cause"], record["process"]) == (cause, 1)


def test_the_gpu_of_a_process_of_mp_spawn_is_unknown(run: RunDir) -> None:
    """It selects one itself; torch's number is not the one of the rank."""
    gpus = [{"index": 5, "uuid": "GPU-5"}, {"index": 6, "uuid": "GPU-6"}]
    message = "CUDA out of memory. GPU 0 has no free memory"
    own = {"type": "OutOfMemoryError", "message": message, "rank": 0}
    record = {"cause": "gpu_oom", "rank": 0, "summary": message}
    for process, gpu in (({}, 5), ({"process": 0}, None)):
        found: Any = record | process
        failed_gpus.note(found, Outcome(), cast(Plan, plan(gpus=gpus)), (), cast(Any, own), "")
        assert found.get("gpu") == gpu
