"""Error file of a rank: the place of an error, the exception of torch where a data-loader worker
was killed, complete, and the memory of an exhausted GPU."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.conftest import clean_environment
from tests.unit.test_launch_attempt import PLAN
from tests.unit.test_launch_unwritten import read as read_output
from training.cli import train
from training.core import cause_ids, rundir
from training.core.errors import RANK_FAILED, Exit, Problem, RunStopped
from training.core.project import ROOT
from training.core.rundir import RunDir, read_json
from training.data.frames.pictures import Unreadable
from training.diagnose import card, exception_cause
from training.launcher import failure_report
from training.launcher.outcome import Outcome
from training.trainer import error_file, memory_snapshot, worker
from training.trainer.sanity_checks import EmptyBatch, NotFinite
from training.watchdog.probes import flight_recorder
from training.watchdog.probes.flight_recorder import Call

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def handler(number: int, frame: FrameType | None) -> None:
    """The handler of torch.utils.data."""
    raise RuntimeError(KILLED)


@pytest.fixture
def torchs_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("torchs_handler")
def test_a_broken_connection_waits_for_the_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        os.kill(
            os.getpid(), signal.SIGCHLD
        )  # the death of the worker is noticed while the rank waits

    monkeypatch.setattr(error_file.time, "sleep", sleep)
    lost = ConnectionResetError(104, "Connection reset by peer")
    found = error_file.final(lost)
    assert (str(found), found.__context__, waited) == (KILLED, lost, [error_file.SIGCHLD_S])
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def test_an_error_that_torchs_loader_makes_vague_is_reported_as_it_was() -> None:
    exact = RuntimeError(KILLED)
    try:
        try:
            raise exact
        except RuntimeError as error:
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from error
    except RuntimeError as vague:
        found, trace = error_file.final(vague), vague.__traceback__
    assert found is exact and found.__traceback__ is trace
    other = RuntimeError("of the program")
    other.__cause__ = ValueError("its reason")
    assert error_file.final(other) is other


@pytest.mark.usefixtures("torchs_handler")
def test_the_handler_is_removed_while_the_error_is_written() -> None:
    error = ValueError("planted")
    assert error_file.final(error) is error
    assert subprocess.run(["true"], check=False).returncode == 0
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.usefixtures("torchs_handler")
def test_a_worker_killed_as_the_error_is_handled_is_the_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may call the handler on the way into any function."""
    lost, reported = ConnectionRefusedError(111, "Connection refused"), list[BaseException]()

    def live(*_: object) -> None:
        raise lost

    def final(error: BaseException) -> BaseException:
        if error is lost:
            os.kill(os.getpid(), signal.SIGCHLD)
        return error_file.final(error)

    def fail(_run: RunDir, _plan: object, error: BaseException, *_: object, watched: bool) -> None:
        assert watched
        reported.append(error)

    monkeypatch.setattr(worker, "planned", lambda _: PLAN)
    monkeypatch.setattr(train, "_meet", lambda *_: None)
    monkeypatch.setattr(worker, "live", live)
    monkeypatch.setattr(train, "_final", final)
    monkeypatch.setattr(train, "_fail", fail)
    train.main([], {rundir.VARIABLE: str(run.path), worker.SUPERVISED: "1"})
    (error,) = reported
    assert (str(error), error.__context__) == (KILLED, lost)


LOSES_A_WORKER = """
import os, signal, time
from torch.utils.data._utils import signal_handling as handling
handling._set_SIGCHLD_handler()
worker = os.fork()
if not worker:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
handling._set_worker_pids(1, (worker,))
raise ConnectionRefusedError(111, f"of {worker}")
"""


def test_the_killed_worker_of_a_script_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSES_A_WORKER)
    command = [sys.executable, ROOT / "lib/run_script.py", tmp_path, script]
    done = subprocess.run(command, env=clean_environment(), check=False, timeout=120)
    assert done.returncode == 1
    found = read_json(RunDir(tmp_path).path / "rank0.error.json") or {}
    pid = found["before"][0]["message"].rpartition(" ")[2]
    assert found["message"] == f"DataLoader worker (pid {pid}) is killed by signal: Killed. "


def _raises(file: str) -> Callable[[], object]:
    """A function in this file that raises."""
    library: dict[str, Any] = {}
    exec(compile("def fail():\n    raise ValueError", file, "exec"), library)
    return library["fail"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        (lambda: json.loads("{"), '(lambda: json.loads("{"), '),
        (_raises("/venv/site-packages/some.py"), "fails()"),
    ],
)
def test_the_place_is_the_last_one_outside_of_libraries(
    tmp_path: Path, fails: Callable[[], object], code: str
) -> None:
    with pytest.raises(ValueError) as caught:
        fails()
    found = error_file._facts(RunDir(tmp_path), 0, caught.value)
    assert found["where"].startswith(f"{__file__}:")
    assert (found["code"] or "").startswith(code)


def shapes(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, torch.ones(4, 5))


def devices(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(3, device="meta")


def index(x: torch.Tensor) -> torch.Tensor:
    return x[:, 7]


@pytest.mark.parametrize(
    ("forward", "message", "cause"),
    [
        (index, r"index 7 is out of bounds for dimension 1 with size 3", cause_ids.RAISED),
        (shapes, r"a and b .* reduction dim, but got \[2, 3\] X \[5, 4\]\.", "shape_mismatch"),
        (devices, r"(Expected all|Unhandled) .* two (different )?devices.*", "invalid_device"),
    ],
)
def test_an_error_of_compiled_code_is_reported_as_without_compilation(
    tmp_path: Path, forward: Callable[[torch.Tensor], torch.Tensor], message: str, cause: str
) -> None:
    with pytest.raises(Exception) as caught:
        torch.compile(forward, backend="eager")(torch.ones(2, 3))
    found = error_file._facts(RunDir(tmp_path), 0, caught.value)
    assert found["type"] == ("IndexError" if forward is index else "RuntimeError")
    assert re.fullmatch(message, found["message"])
    assert found["where"] == f"{__file__}:{forward.__code__.co_firstlineno + 1}"
    assert exception_cause.of_error(found) == cause


def test_a_failed_check_has_no_place_in_the_code(tmp_path: Path) -> None:
    for error, rank in (
        (NotFinite("loss is nan on rank 1 at step 5", 1), 1),
        (EmptyBatch("none", 0), 0),
        (Unreadable("a.png is truncated"), 0),
    ):
        with pytest.raises(type(error)) as caught:
            raise error
        found = error_file._facts(RunDir(tmp_path), 0, caught.value)
        assert (found["where"], found["code"], found["guilty_rank"]) == ("", None, rank)
        assert found["traceback"]


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "full"), KeyError("segments")])
def test_an_error_is_written_without_the_memory_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fails(*_: object) -> None:
        raise problem

    run = RunDir(tmp_path)
    run.create()
    monkeypatch.setenv("DUET_SUPERVISED", "1")
    monkeypatch.setattr(memory_snapshot, "keep", fails)
    assert error_file.record(run, 1, RuntimeError("CUDA out of memory")) == RANK_FAILED
    found = read_json(run.rank_error(1)) or {}
    assert found["message"] == "CUDA out of memory" and "memory" not in found
    assert "CUDA out of memory" in run.rank_log(1).read_text()


def test_the_traceback_is_logged_before_anything_that_takes_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may abort the rank meanwhile."""
    run, logged = RunDir(tmp_path), []
    run.create()
    keep = lambda *_: logged.append(run.rank_log(1).read_text())  # noqa: E731
    monkeypatch.setattr(memory_snapshot, "keep", keep)
    error_file.record(run, 1, RuntimeError("planted"))
    assert logged == ["RuntimeError: planted\n"] == [run.rank_log(1).read_text()]


def block(size: int, state: str) -> dict[str, object]:
    return {"size": size, "state": state, "address": 0, "frames": []}


SNAPSHOT = {
    "segments": [
        {
            "device": 1,
            "total_size": 60 << 20,
            "blocks": [
                *[block(12 << 20, "active_allocated") for _ in range(3)],
                block(20 << 20, "active_allocated"),
                block(4 << 20, "inactive"),
            ],
        },
        {"device": 1, "total_size": 2 << 20, "blocks": [block(512, "active_pending_free")]},
        {"device": 0, "total_size": 99 << 20, "blocks": [block(99 << 20, "inactive")]},
    ]
}


def test_the_memory_of_an_exhausted_gpu_is_kept_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    run = RunDir(tmp_path)
    run.create()
    monkeypatch.setenv("DUET_SUPERVISED", "1")
    monkeypatch.setattr(memory_snapshot, "_seen", None)
    error_file.record(run, 1, OutOfMemoryError("of another GPU library"))
    assert "memory" not in (read_json(run.rank_error(1)) or {})
    monkeypatch.setattr(memory_snapshot, "_seen", (1, 8 << 20, SNAPSHOT))
    error_file.record(run, 1, ValueError("raised after an exhausted GPU that was handled"))
    assert "memory" not in (read_json(run.rank_error(1)) or {})
    assert not run.memory_snapshot(1).exists()
    error_file.record(run, 1, OutOfMemoryError("CUDA out of memory"))
    memory = (read_json(run.rank_error(1)) or {})["memory"]
    assert memory == {
        "file": str(run.memory_snapshot(1)),
        "requested_bytes": 8 << 20,
        "allocated_bytes": (56 << 20) + 512,
        "reserved_bytes": 62 << 20,
        "largest_free_bytes": 4 << 20,
        "largest": [{"bytes": 12 << 20, "count": 3}, {"bytes": 20 << 20, "count": 1}],
    }
    assert pickle.loads(run.memory_snapshot(1).read_bytes()) == SNAPSHOT
    assert any(memory["file"] in line for line in card._memory({"memory": memory}))


def test_a_run_that_stops_on_a_full_disk_is_not_a_rejected_input(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without room for the rank's error file, its cause is in the rank's output."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_: object) -> None:
        raise full

    monkeypatch.setattr(rundir, "write_bytes", fails)
    problem = Problem("checkpoint.unwritable", "two checkpoints were not saved")
    error_file.note(run, 0, RunStopped(problem, "stopped at step 8", full))
    printed = capfd.readouterr().err.encode()
    text = read_output(tmp := run.path / "rank0.log", printed, 3).unwritten()
    assert tmp.read_bytes() == printed
    outcome = Outcome(guilty=(0, Exit.RESOURCES), here=(0, Exit.RESOURCES), unwritten={0: text})
    record = failure_report.failure(outcome, run, PLAN)
    found = record["cause"], record["kind"], record["rank"], record["exit_code"]
    assert found == ("disk_full", "error", 0, Exit.RESOURCES)
    assert record["summary"] == str(full)
    rejected = Outcome(guilty=(0, Exit.RESOURCES), here=(0, Exit.RESOURCES))
    assert failure_report.failure(rejected, run, PLAN)["cause"] == "config_error"


class CompilerFailed(RuntimeError):
    """As InductorError of torch, which is raised from None."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(f"{type(inner).__name__}: {inner}")
        self.inner_exception = inner


def raised_from(cause: Exception) -> Exception:
    error = RuntimeError("of torch")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "file"),
    [
        (OSError(errno.ENOSPC, "full", "/a/x"), "/a/x"),
        (OSError(errno.ENOSPC, "full", "/a/x", None, "/b/y"), "/b/y"),  # of a copy
        (OSError(errno.ENOSPC, "full"), None),
        (OSError(errno.EBADF, "bad", 3), None),
        (ValueError("x"), None),
        (CompilerFailed(OSError(errno.ENOSPC, "full", "/tmp/x")), "/tmp/x"),
        (CompilerFailed(OSError(errno.ENOENT, "missing", "/tmp/x")), None),
        (raised_from(OSError(errno.EDQUOT, "full", "/tmp/x")), "/tmp/x"),
    ],
)
def test_the_file_of_an_error(tmp_path: Path, error: Exception, file: str | None) -> None:
    run = RunDir(tmp_path)
    assert error_file._facts(run, 0, error).get("file") == file
    path = str(tmp_path / "error.json")
    runpy.run_path(str(ROOT / "lib" / "run_script.py"))["_keep"](path, 0, "t.py", error)
    assert (read_json(Path(path)) or {}).get("file") == file


REDUCES = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from training.core.rundir import RunDir
from training.trainer import error_file
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
for size in (2, 5):
    dist.all_reduce(torch.ones(size))
error_file.record(RunDir(sys.argv[2]), 0, RuntimeError("Connection reset by peer"))
os._exit(0)
"""


def test_an_error_report_has_the_newest_collective(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    command = [sys.executable, "-c", REDUCES, str(ROOT), str(tmp_path)]
    subprocess.run(command, env=clean_environment(), check=True, timeout=120)
    found = read_json(run.rank_error(0)) or {}
    assert flight_recorder.call_of(found["collective"]) == Call(
        "0", 2, "all_reduce", "float [5]", backend="gloo"
    )
