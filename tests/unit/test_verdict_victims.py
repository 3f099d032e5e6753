"""Which exception is the cause where a rank has lost its peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.verdicts import TRACEBACK, failed, new_run, report_error, verdict
from training.core.rundir import RunDir
from training.watchdog import rank_exit

LOST = {"type": "RuntimeError", "message": "Connection reset by peer"}
BAD = {"type": "ValueError", "message": "bad sample"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def test_a_rank_that_lost_a_peer_is_the_victim_of_that_peer(run: RunDir) -> None:
    """The supervisor may see both exits at once, the victim's first."""
    report_error(run, 0, "RuntimeError", "Connection closed by peer [127.0.0.1]:5006", time=2.0)
    report_error(run, 1, "ValueError", "planted", time=1.0)
    record = failed(run, rank=0)
    assert verdict(record) == ("exception", "error", 1) and not record["victim"]


def test_an_error_after_the_loss_of_a_peer_is_not_its_cause(run: RunDir) -> None:
    report_error(run, 0, *LOST.values(), time=1.0)
    report_error(run, 1, "ValueError", "in a clean-up", time=2.0, before=[LOST])
    record = failed(run, rank=0)
    assert (record["cause"], record["rank"], record["victim"]) == ("peer_died", 0, True)


@each(
    ("kind", "message", "before", "rank"),
    [
        ("ValueError", "bad sample", [], 1),
        ("SystemExit", "1", [BAD], 1),
        ("SystemExit", "1", [LOST], 0),
        ("SystemExit", "143", [], 0),
        ("KeyboardInterrupt", "", [], 0),
        ("SignalException", "Process 41 got signal: 15", [], 0),
        ("RuntimeError", "DataLoader worker (pid 41) is killed by signal: Terminated. ", [], 0),
        ("RuntimeError", "DataLoader worker (pid 41) is killed by signal: Killed. ", [], 1),
    ],
)
def test_the_cause_may_be_reported_after_the_loss_that_it_causes(
    run: RunDir, kind: str, message: str, before: list[dict[str, str]], rank: int
) -> None:
    """`finally: destroy_process_group(); wandb.finish()`."""
    report_error(run, 0, *LOST.values(), time=1.0)
    report_error(run, 1, kind, message, time=2.0, before=before)
    assert failed(run, rank=0)["rank"] == rank


def test_an_exit_after_the_loss_of_a_peer_is_that_of_a_victim(run: RunDir) -> None:
    """Each rank catches its exception, prints it and calls sys.exit(1)."""
    report_error(run, 0, "SystemExit", "1", time=1.0, before=[LOST], where="main.py:9")
    alone = failed(run, rank=0)
    assert alone["victim"] and alone["rank"] == 0
    report_error(run, 1, "SystemExit", "1", time=1.0, before=[BAD], where="main.py:9")
    run.rank_log(1).write_text(TRACEBACK)
    record = failed(run, rank=0)
    assert verdict(record) == ("exception", "error", 1)
    assert not record["victim"] and "ranks" not in record
    assert record["where"] == "/prog:3", "not the line of sys.exit"


@each(
    ("elsewhere", "before", "victim"),
    [(True, LOST, True), (True, BAD, False), (False, LOST, False)],
)
def test_an_error_raised_from_a_loss_follows_from_the_failure_of_another_machine(
    elsewhere: bool, before: dict[str, str], victim: bool, run: RunDir
) -> None:
    """`raise RuntimeError("epoch 3 failed") from error`: the record of that machine counts."""
    report_error(run, 1, "RuntimeError", "epoch 3 failed", before=[before])
    record = failed(run, elsewhere=elsewhere)
    assert (record["rank"], record["victim"]) == (1, victim)


def test_a_program_that_lost_a_peer_is_a_victim(run: RunDir) -> None:
    run.rank_log(1).write_text(
        TRACEBACK.replace(
            "ValueError: planted", "RuntimeError: Connection closed by peer [127.0.0.1]:5006"
        )
    )
    record = failed(run)
    assert record["cause"] == "peer_died" and record["victim"]


UPLOAD = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    upload("model.pt")
  File "/usr/lib/python3.11/http/client.py", line 279, in _read_status
    line = str(self.fp.readline(_MAXLINE + 1), "iso-8859-1")
ConnectionResetError: [Errno 104] Connection reset by peer
"""


def test_a_lost_connection_of_an_upload_is_not_the_fault_of_a_finished_rank(run: RunDir) -> None:
    """Rank 0 exits after rank 1, and reports no exception: only its log shows one."""
    run.rank_log(0).write_text(UPLOAD)
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) is None
    log = run.launcher_log("torchrun")
    log.write_text(UPLOAD)
    assert not rank_exit.lost_peer(log, 1, {})
    record = failed(run, rank=None, watched="torchrun")
    assert verdict(record) == ("exception", "error", None) and not record["victim"]
    assert record["where"] == "/home/me/train.py:9"


def test_a_deleted_working_directory_is_not_a_lost_peer(run: RunDir) -> None:
    frames = ['  File "main.py", line 9, in <module>\n    os.getcwd()\n']
    gone = ("FileNotFoundError", "[Errno 2] No such file or directory")
    report_error(run, 0, *gone, traceback=frames)
    record = failed(run, rank=0)
    assert verdict(record) == ("exception", "error", 0) and not record["victim"]
