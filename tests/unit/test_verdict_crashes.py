"""Verdicts on ranks that a signal of their own has ended: an abort, a crash."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.unit.verdicts import failed, new_run, report_error, verdict
from training.core.project import ROOT
from training.core.rundir import RunDir
from training.diagnose import result
from training.watchdog import rank_exit
from training.watchdog.hang_report import DESYNC
from training.watchdog.probes import flight_recorder
from training.watchdog.probes.flight_recorder import Call
from training.watchdog.rank_exit import RankExit

ABORT = -signal.SIGABRT


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("what():  CUDA error: uncorrectable ECC error encountered", "gpu_hardware"),
        ("what():  CUDA error: an illegal memory access was encountered", "cuda_device_assert"),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
            "Timeout(ms)=9000) ran for 9011 ms",
            "collective_timeout",
        ),
        ("free(): invalid pointer", "segfault"),
        ("malloc(): corrupted top size", "segfault"),
        ("closing files", "unknown"),
    ],
)
def test_the_log_explains_an_abort(run: RunDir, line: str, expected: str) -> None:
    earlier = "an earlier start: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    run.rank_log(1).write_text(f"{earlier}terminate called after …\n{line}\nframe #0: …\n")
    since = {run.rank_log(1): len(earlier)}
    record = failed(run, ABORT, log_from=since)
    assert record["cause"] == expected and "SIGABRT" in record["summary"]
    assert (line in record["summary"]) == (expected != "unknown")
    assert sum("PYTHONFAULTHANDLER" in sentence for sentence in record["advice"]) <= 1
    assert failed(run, -signal.SIGKILL, log_from=since)["cause"] == "killed", (
        "a killed rank does not explain itself"
    )


CPP = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  {what}\n"


@pytest.mark.parametrize(
    ("text", "cause", "what"),
    [
        (CPP.format(what="shape [3, 4] is invalid"), "exception", "shape [3, 4] is invalid"),
        (
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: shape\n",
            *("exception", "shape"),
        ),
        (CPP.format(what="CUDA error: an illegal memory access"), "cuda_device_assert", ""),
        (CPP.format(what="Connection closed by peer [127.0.0.1]:5006"), "peer_died", ""),
    ],
    ids=["libstdc++", "libc++", "known_message", "lost_peer"],
)
def test_an_abort_by_an_exception_of_cpp(run: RunDir, text: str, cause: str, what: str) -> None:
    log = run.rank_log(1)
    log.write_text(f"step 1 loss 0.5\n{text}")
    record = failed(run, ABORT)
    assert (record["cause"], record["status"]) == (cause, ABORT)
    by_log = result.diagnose([log])
    assert by_log["cause"] == cause
    if what:
        assert (record["kind"], record["rank"]) == ("died", 1)
        for summary in (record["summary"], by_log["summary"]):
            assert f"std::runtime_error: {what}" in summary
        assert "SIGABRT" in record["summary"] and by_log["evidence"].endswith(what)
        assert not any("pdb" in sentence for sentence in by_log["advice"])


def test_only_stacks_that_were_written_are_in_the_advice(run: RunDir) -> None:
    """Ranks of `duet watch` have none, and those that did not crash have empty ones."""
    for rank in (0, 1):
        (run.ranks / f"rank{rank}.stacks").touch()
    assert not any(".stacks" in one for one in failed(run, -11)["advice"])
    (run.ranks / "rank1.stacks").write_text("Fatal Python error: Segmentation fault\n")
    assert any(f"{run.ranks}/rank1.stacks" in one for one in failed(run, -11)["advice"])


def test_the_place_of_a_crash(run: RunDir) -> None:
    record = failed(run, -11, death=RankExit("died", 1, "model.py:12", "killed by SIGSEGV"))
    assert verdict(record) == ("segfault", "died", 1) and record["where"] == "model.py:12"


DUMP = """\
Fatal Python error: Segmentation fault

{first} 0x00007f2 (most recent call first):
  File "/data/prefetch.py", line 9 in decode
  File "/usr/lib/python3.11/threading.py", line 975 in run

{second} 0x00007f1 (most recent call first):
  File "/data/main.py", line 3 in step
"""


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ("Current thread", "Thread", "/data/prefetch.py:9"),
        ("Thread", "Current thread", "/data/main.py:3"),
        ("Thread", "Thread", "/data/main.py:3"),  # a thread without Python
    ],
    ids=["another_thread", "main_thread", "native_thread"],
)
def test_the_place_of_a_crash_is_that_of_the_thread_that_crashed(
    run: RunDir, first: str, second: str, where: str
) -> None:
    (run.ranks / "rank1.stacks").write_text(DUMP.format(first=first, second=second))
    assert rank_exit.explain(run, 1, -signal.SIGSEGV, [], {}).where == where


ABORTED = """\
Traceback (most recent call last):
  File "/data/model.py", line 12, in forward
    return self.table[tokens]
RuntimeError: CUDA error: an illegal memory access was encountered

[rank1]:[E1004 03:11:47 ProcessGroupNCCL.cpp:2093] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group \
watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an \
illegal memory access was encountered
"""


@pytest.mark.parametrize(
    "frame",
    ['error_file.py", line 46 in record', 'async_checkpoint.py", line 81 in __exit__'],
)
def test_nccl_aborts_a_rank_that_has_raised(run: RunDir, frame: str) -> None:
    """Its place is that of the exception, not that of its report or its wait for a checkpoint."""
    dump = DUMP.format(first="Thread", second="Thread").partition("  File")[0]
    here = f'  File "{ROOT}/training/trainer/{frame}\n  File "{ROOT}/training/cli/train.py", line 9 in main\n'
    (run.ranks / "rank1.stacks").write_text(dump + here)
    death = rank_exit.explain(run, 1, ABORT, [], {})
    assert death.where is None
    run.rank_log(1).write_text(ABORTED)
    record = failed(run, ABORT, death=death)
    assert (record["cause"], record["rank"]) == ("cuda_device_assert", 1)
    assert record["where"] == "/data/model.py:12"


def test_the_stacks_of_a_crash_may_be_in_the_log(run: RunDir) -> None:
    """A script that enables faulthandler itself."""
    dump = DUMP.format(first="Thread", second="Current thread")
    launcher = f'  File "{ROOT}/lib/main_program.py", line 44 in execute\n'
    log = run.rank_log(1)
    log.write_text(f"step 1\n{dump}step 2\n")
    since = {log: log.stat().st_size}
    assert rank_exit.explain(run, 1, -signal.SIGSEGV, [], since).where is None, "an earlier start"
    log.write_text(f"step 3\n{dump}{launcher}\nExtension modules: numpy (total: 1)\n")
    assert rank_exit.explain(run, 1, 1, [], {}).where is None
    death = rank_exit.explain(run, 1, -signal.SIGSEGV, [], {})
    assert death.where == "/data/main.py:3"
    record = failed(run, -signal.SIGSEGV, death=death)
    assert (record["cause"], record["where"]) == ("segfault", death.where)
    assert not any("main_program.py" in line for line in record["evidence"])
    assert not any("PYTHONFAULTHANDLER" in sentence for sentence in record["advice"])
    assert any(str(log) in sentence for sentence in record["advice"])


def test_an_abort_by_gloo_for_another_collective_is_a_desync(run: RunDir) -> None:
    how = "rank 1 got 8 bytes where its all_reduce expects 16"
    record = failed(run, ABORT, death=RankExit(DESYNC, None, None, how))
    assert verdict(record) == ("collective_timeout", "desync", None)
    assert record["summary"] == how
    assert record["advice"][0].startswith("every rank must call the same collectives")


@pytest.mark.parametrize("alive", [[0], []])
def test_the_number_of_the_collective_is_known_also_from_a_rank_that_has_exited(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, alive: list[int]
) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer")
    report = json.loads(run.rank_error(0).read_text())
    entry = {"process_group": ["0", ""], "collective_seq_id": 27, "profiling_name": "gloo:barrier"}
    run.rank_error(0).write_text(json.dumps(report | {"collective": entry}))
    run.rank_log(1).write_text("op.preamble.length <= op.nbytes. 16 vs 8\n")
    calls = [Call("0", 28, "all_reduce", "float [4]")]
    monkeypatch.setattr(flight_recorder, "read", lambda folder, rank: calls)
    death = rank_exit.explain(run, 1, ABORT, alive, {})
    asked = "28, all_reduce of float [4]" if alive else "27, barrier"
    assert death.kind == DESYNC and f"rank 0 is in collective {asked}" in death.how
