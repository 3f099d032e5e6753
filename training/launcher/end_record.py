"""failure.json of a run that has ended without the failure of a rank: between two starts it was
asked to stop, or its ranks could not be started."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from training.core import cause_ids, rundir
from training.core.errors import Exit
from training.diagnose.advice import of_end, values
from training.launcher import script_figures
from training.watchdog.rank_exit import ERROR

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord


def write(run: rundir.RunDir, plan: Plan, code: Exit, saved: int, text: str) -> None:
    """`code`: of a stop request, otherwise of an error. `saved`: step of the newest checkpoint."""
    record: FailureRecord = {
        "cause": cause_ids.STOPPED.get(code, cause_ids.UNKNOWN),
        "kind": rundir.ASKED if code in cause_ids.STOPPED else ERROR,
        "victim": False,
        "rank": None,
        "step": saved,
        "summary": text,
        "where": None,
        "phase": None,
        "phases": {},
        "since_s": None,
        "waiting": {},
        "stacks": None,
        "status": 0,
        "exit_code": int(code),
        "evidence": [],
        "log": plan.get("log_file") or str(run.ranks),
        "torn_down": False,
        "launch": plan["launch"],
        "time": time.time(),
    }
    if "elastic" in plan and plan["elastic"]["lost"]:
        record["lost"] = plan["elastic"]["lost"]
    script_figures.add(record, run, plan)
    rundir.discard(run.failure)  # of the failure before: also if this one cannot be written
    advice = of_end(record, None, {}, values(run, plan))
    rundir.keep_json(run.failure, {**record, "advice": advice})
