"""Verdicts of the communication test, from synthetic outcomes; real ones: tests/e2e."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.unit.communication_outcomes import LARGE, ended, find, hung
from training.core import rundir
from training.host.kernel_quotes import KernelQuotes
from training.launcher.communication import analysis, stages
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.result import KILLS, CommunicationResult, p2p_may_help
from training.launcher.communication.runner import CommunicationOutcome
from training.plan.communication import command

TORCH = (
    'File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line '
    "3000 "
    "in all_reduce"
)
OWN = 'File "/home/a user/sitecustomize.py", line 7 in stuck'


def test_success() -> None:
    assert find(ended(0, 0)) == CommunicationFinding(analysis.OK, "data correct")


def test_every_stage_of_a_rank_is_known() -> None:
    assert stages.stages_for("cuda") == [
        *(
            "start of Python",
            "import of torch",
            "start of the GPU",
            "rendezvous",
            "warm-up",
            "all_reduce of 1 KiB",
            "broadcast of 1 KiB",
        ),
        *("all_reduce of 64 MiB", "broadcast of 64 MiB", "measurement", "end of the test", "exit"),
    ]


# Hangs


def test_a_rank_that_never_arrives() -> None:
    found = find(hung("rendezvous", "import of torch"))
    text = (
        "rank 1 never reached the rendezvous: after 20 s it was in the import of torch; rank 0 "
        "reached the rendezvous"
    )
    assert (found.kind, found.guilty, found.stage, found.text) == (
        "hang",
        [1],
        "import of torch",
        text,
    )


def test_a_rank_stuck_in_its_start_misses_the_rendezvous() -> None:
    found = find(hung("start of Python", "import of torch", "start of Python", "import of torch"))
    text = (
        "ranks 0 and 2 never reached the rendezvous: after 20 s they were in the start of "
        "Python; ranks 1 and 3 reached the import of torch"
    )
    assert (found.guilty, found.text) == ([0, 2], text)


def test_a_rank_that_is_late_to_a_collective() -> None:
    found = find(hung("all_reduce of 8 MiB", "all_reduce of 8 MiB", "broadcast of 1 KiB"))
    assert found.guilty == [2]
    assert found.text.startswith(
        "rank 2 never reached the all_reduce of 8 MiB: after 20 s it was in the broadcast of 1 "
        "KiB; ranks 0 and 1"
    )


def test_all_hang_in_a_collective() -> None:
    found = find(
        hung(
            LARGE, LARGE, stacks={0: [TORCH], 1: [TORCH]}, output={0: ["NCCL INFO waiting"], 1: []}
        )
    )
    assert (found.guilty, found.text) == (
        [0, 1],
        "after 20 s all ranks hang in the all_reduce of 8 MiB",
    )
    assert found.lines[1] == "NCCL INFO waiting"
    assert (
        "rank 1 at /env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3000 in "
        "all_reduce" in found.lines
    )


def test_a_rank_that_does_not_wait_in_torch_keeps_the_others_waiting() -> None:
    found = find(hung(LARGE, LARGE, LARGE, stacks={0: [TORCH], 1: [OWN, TORCH], 2: [TORCH]}))
    assert found.guilty == [1]
    assert (
        found.text
        == "after 20 s rank 1 hangs in the all_reduce of 8 MiB, outside of torch; ranks 0 and 2 "
        "wait for it"
    )
    assert found.lines == ["rank 1 at /home/a user/sitecustomize.py:7 in stuck"]


def test_a_frame_that_calls_torch_is_waiting() -> None:
    ours = f'File "{ROOT}/training/inspector/distributed.py", line 80 in setup'
    found = find(hung("rendezvous", "rendezvous", stacks={0: [ours], 1: [TORCH]}))
    assert found.text == "after 20 s all ranks hang in the rendezvous"


def test_no_verdict_while_all_ranks_import() -> None:
    found = find(hung("import of torch", "import of torch"))
    assert (
        found.text
        == "after 20 s all ranks were still in the import of torch: a slow or busy machine or "
        "disk, or a hang"
    )
    assert CommunicationResult(2, "cpu", "gloo", found).checks()[0].fixes == [
        f"{command(2, 'cpu')} --limit=60   # if the machine is only slow"
    ]


def test_a_gpu_that_does_not_start_is_not_a_hang_of_peer_to_peer_copies() -> None:
    found = analysis.analyze(hung(stages.GPU, stages.GPU), "cuda")
    assert found.text == "after 20 s no rank had started its GPU: the driver does not answer"
    assert not p2p_may_help(found)
    first, again = CommunicationResult(2, "cuda", "nccl", found).checks()[0].fixes
    assert first.startswith("nvidia-smi") and again == command(2, "cuda")
    found = analysis.analyze(hung(stages.GPU, stages.RENDEZVOUS), "cuda")
    assert found.text.startswith("rank 0 never reached the rendezvous: after 20 s it was in the ")
    assert "start of the GPU; rank 1" in found.text and not p2p_may_help(found)


def test_ranks_that_still_move_do_not_hang() -> None:
    found = find(hung("all_reduce of 1 KiB", LARGE, since_s={0: 1.9, 1: 0.1}))
    text = (
        "not finished after 20 s, but not a hang: rank 0 entered the all_reduce of 1 KiB 1.9 "
        "s earlier; a slow or busy machine"
    )
    assert (found.kind, found.text) == ("not finished", text)
    (check,) = CommunicationResult(2, "cuda", "nccl", found).checks()
    assert (check.status, check.fixes) == (
        "error",
        [f"{command(2, 'cuda')} --limit=60   # if the machine is only slow"],
    )
    assert not p2p_may_help(found)
    assert find(hung("import of torch", "rendezvous", since_s={0: 1.0, 1: 0.5})).kind == "hang", (
        "torch is imported for seconds anywhere"
    )


def test_ranks_that_ran_out_of_patience_while_moving_do_not_hang() -> None:
    outcome = hung(LARGE, LARGE, since_s={0: 14.0, 1: 14.0}, patient=True)
    outcome.limit_s = 120.0
    assert find(outcome).kind == analysis.SLOW
    outcome.since_s = {0: stages.STILL_S, 1: stages.STILL_S}
    assert find(outcome).kind == analysis.HANG


def test_a_rank_that_does_not_answer() -> None:
    found = find(hung(LARGE, LARGE, LARGE, stacks={0: [TORCH], 1: [], 2: [OWN]}))
    assert found.guilty == [1]
    assert found.text == (
        "after 20 s rank 1 hangs in the all_reduce of 8 MiB, unresponsive (stopped, or "
        "blocked in the kernel); "
        "ranks 0 and 2 wait for it"
    )


def test_a_rank_that_does_not_end_after_the_others_have() -> None:
    outcome = hung("end of the test", "end of the test")
    outcome.statuses[0], outcome.records[0] = 0, {"wrong": []}
    found = find(outcome)
    assert found.guilty == [1]
    assert (
        found.text
        == "rank 1 never reached the exit: after 20 s it was in the end of the test; rank 0 "
        "reached the exit"
    )


# Failures


def test_the_first_failure_is_reported_in_any_order_of_reaping() -> None:
    records = {
        0: {"error": "RuntimeError: Connection closed by peer", "time": 50.2},
        1: {"error": "ValueError: planted\nmore", "time": 50.1},
    }
    found = find(
        ended(
            1, 1, records=records, output={0: ["victim"], 1: ["Traceback", "ValueError: planted"]}
        )
    )
    assert (found.kind, found.guilty, found.text) == (
        "failed",
        [1],
        "rank 1 failed in the all_reduce of 8 MiB: ValueError: planted",
    )
    assert found.lines == ["Traceback", "ValueError: planted"]


def test_a_killed_rank_could_not_write_when_that_was() -> None:
    found = find(
        ended(
            1, -9, records={0: {"error": "RuntimeError: Connection closed by peer", "time": 50.0}}
        )
    )
    assert (found.guilty, found.text, found.killed) == (
        [1],
        "rank 1 was killed by SIGKILL in the all_reduce of 8 MiB",
        True,
    )
    unread = CommunicationResult(2, "cpu", "gloo", found, kernel=KernelQuotes(command=KILLS))
    assert (
        unread.checks()[0].fixes[0] == "sudo dmesg | tail   # 'Killed process': out of host memory"
    )


def test_a_rank_that_exits_silently_has_failed() -> None:
    outcome = ended(0, records={0: {}})
    outcome.ranks = 2
    assert find(outcome).text == "rank 0 exited with status 0 in the all_reduce of 8 MiB"


def test_a_victim_that_torch_aborts_is_not_the_first() -> None:
    found = find(ended(-6, 1, records={1: {"error": "ValueError: planted", "time": 99.0}}))
    assert found.text == "rank 1 failed in the all_reduce of 8 MiB: ValueError: planted"


def test_a_rank_that_cannot_be_killed() -> None:
    found = find(hung(LARGE, LARGE, stuck={1: 4711}))
    assert found.lines == [
        "rank 1 (pid 4711) cannot be killed: blocked in the kernel, most likely by a driver; "
        "only a reboot frees it"
    ]


def test_a_signal_without_a_name() -> None:
    assert find(ended(-40)).text == "rank 0 was killed by signal 40 in the all_reduce of 8 MiB"


def test_stopped() -> None:
    found = find(CommunicationOutcome(2, 20.0, signal=signal.SIGTERM))
    assert (found.kind, found.text) == ("stopped", "stopped by SIGTERM")


# Wrong data


def wrong(
    collective: str, element: int, got: float, expected: float, count: int = 1
) -> dict[str, Any]:
    return {
        "collective": collective,
        "bytes": 1024,
        "element": element,
        "got": got,
        "expected": expected,
        "count": count,
    }


def test_wrong_data_may_be_nan(tmp_path: Path) -> None:
    """JSON has no NaN: the record's file has a name for it."""
    files = stages.Files(tmp_path)
    rundir.write_json(files.record(1), {"wrong": [wrong("all_reduce", 3, math.nan, 12.0)]})
    found = find(ended(0, 0, records={1: files.read_record(1)}))
    assert (found.kind, found.guilty, found.stage) == ("wrong data", [1], "all_reduce of 1 KiB")


def test_wrong_data_names_rank_element_and_values() -> None:
    outcome = ended(
        0,
        0,
        records={
            1: {
                "wrong": [
                    wrong("all_reduce", 3, 13.0, 12.0, 200),
                    wrong("broadcast from rank 0", 0, -1.0, 1.0),
                ]
            }
        },
    )
    found = find(outcome)
    assert (found.kind, found.guilty, found.stage) == ("wrong data", [1], "all_reduce of 1 KiB")
    assert (
        found.text
        == "wrong data in the all_reduce of 1 KiB: rank 1 element 3 is 13, expected 12, and 199 "
        "more"
    )
    assert found.lines == ["broadcast from rank 0 of 1 KiB: rank 1 element 0 is -1, expected 1"]
