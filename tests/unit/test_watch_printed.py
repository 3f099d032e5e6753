"""What the ranks of a script have printed: their last steps, and the exception at their end."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_watch_start import PLAN, SCRIPT
from tests.unit.verdicts import TRACEBACK, failed, finding, new_run, report_error
from training.core.contracts.kinds import HangKind
from training.core.rundir import RunDir
from training.core.tail import log_sizes
from training.watchdog import printed_steps, rank_exit
from training.watchdog.hang_report import DESYNC, HANG, UNEVEN, HangFinding
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.start import RanksWatch


def steps(run: RunDir, since: dict[Path, int] | None = None) -> list[tuple[int, int]]:
    found = re.findall(r"rank (\d+): (\d+)", printed_steps.shown(run, since or {}))
    return [(int(rank), int(step)) for rank, step in found]


def test_the_last_step_of_each_rank_of_this_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert printed_steps.shown(run, {}) == ""
    run.rank_log(0).write_text("step 18 loss 0.5\nstep 19 loss 0.4\nevaluating\n")
    run.rank_log(1).write_text("loading\n")
    (run.ranks / "torchrun.log").write_text("step 99 loss 0.5\n")
    assert steps(run) == [(0, 19)]
    earlier = log_sizes(run.ranks)
    with run.rank_log(1).open("a") as log:
        log.write("step 23 loss 0.4\n")
    assert steps(run) == [(0, 19), (1, 23)]
    assert steps(run, earlier) == [(1, 23)]


def test_a_rank_that_has_finished_early_is_reported_with_both_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.ranks / "rank0.ended").write_text('{"time": 1.0, "where": "", "status": 0}')
    report_error(run, 1, "RuntimeError", "Connection closed by peer")
    for rank, step in enumerate((19, 23)):
        run.rank_log(rank).write_text(f"step {step} loss 0.4\n")
    death = rank_exit.explain(run, 0, 0, [1], {}, victim=1)
    assert (death.kind, death.rank) == ("uneven", 0)
    assert "rank 0: 19" in death.how and "rank 1: 23" in death.how


WARNED = "[W1128 19:42:14.052472738 ProcessGroupNCCL.cpp:1496] Warning: it was not destroyed\n"


# further lines of torch's messages
CUDA = """\
Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in /env/libc10.so)
"""
NCCL = """\
ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
It can be also caused by unexpected exit of a remote peer.
Last error:
socketStartConnect: Connect to 10.0.0.2<41> failed : Software caused connection abort
"""


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (TRACEBACK, True),
        (TRACEBACK + WARNED + "\n", True),
        (TRACEBACK + CUDA + NCCL, True),
        (TRACEBACK + "".join(f"[rank1]: {line}\n" for line in CUDA.splitlines()), True),
        (TRACEBACK + "step 24 loss 0.4\n", False),
        (TRACEBACK + NCCL + "step 24 loss 0.4\n", False),
        ("ValueError: planted\n", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_an_exception_that_a_rank_has_printed_before_it_ended_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, printed: str, found: bool
) -> None:
    """It has caught it, and the others wait."""
    run = new_run(tmp_path)
    log = run.rank_log(1) if launcher == "spawn" else run.launcher_log("torchrun")
    log.write_text(TRACEBACK)
    plan = PLAN | SCRIPT | {"launcher": {"value": launcher, "reason": ""}}
    watch = RanksWatch(run, plan, range(2), 2)
    with log.open("a") as file:
        file.write(f"step 23 loss 0.4\n{printed}")
    uneven = HangFinding(UNEVEN, 1, None, "has finished (status 0)", {}, {}, 4.0)
    monkeypatch.setattr(ScriptWatch, "look", lambda *_: uneven)
    again = watch.look({0: os.getpid()}, {1: 0})
    assert again
    if found:
        assert again.death == rank_exit.RankExit("error", 1, "/prog:3", "ValueError: planted")
    elif launcher == "spawn" or not printed:
        assert again.death is None


def test_the_evidence_of_a_rank_that_has_ended_is_the_end_of_its_log(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.rank_log(1).write_text("caught: bad sample\n")
    uneven = replace(finding(UNEVEN), stacks={0: "no permission"})
    assert failed(run, 0, finding=uneven)["evidence"] == ["caught: bad sample"]
    assert failed(run, 0, None, finding=replace(uneven, rank=None))["evidence"] == []


@pytest.mark.parametrize(
    ("kind", "rank", "shown"), [(UNEVEN, None, True), (DESYNC, 0, True), (HANG, 0, False)]
)
def test_an_exception_that_a_rank_has_survived_is_evidence_where_ranks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: HangKind, rank: int | None, shown: bool
) -> None:
    run = new_run(tmp_path)
    run.rank_log(0).write_text(TRACEBACK)
    watch = RanksWatch(run, PLAN | SCRIPT, range(2), 2)
    run.rank_log(1).write_text(f"{TRACEBACK}step 24 loss 0.4\n")
    found = replace(finding(kind), rank=rank)
    monkeypatch.setattr(ScriptWatch, "look", lambda *_: found)
    again = watch.look(dict.fromkeys(range(2), os.getpid()), {})
    assert again
    line = "rank 1 has printed an exception that did not end it: ValueError: planted at /prog:3"
    assert again.evidence() == [*[line] * shown, *found.evidence()], "only of this attempt"
