"""The last step that each rank of a script has printed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.verdicts import new_run, report_error
from training.core.rundir import RunDir
from training.watchdog import printed_steps, rank_exit


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
    earlier = printed_steps.sizes(run)
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
