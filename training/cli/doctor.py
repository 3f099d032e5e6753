"""`--check`: the plan and the resource report as `--dry_run` shows them, with every check, the
memory of a step measured by fake tensors, and a block for a bug report.

Writes and launches nothing. Imports torch, in this process: the interpreter is the run's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from training import tasks
from training.config.batch import Batch
from training.core import log, units
from training.core.errors import Exit
from training.host.placement import RANK
from training.plan import preflight
from training.plan.preflight import bug_report, versions
from training.plan.request import LaunchRequest
from training.tasks.memory import (
    Measured,
    StepNeeds,
    Unavailable,
    gib,
    with_ample_margin,
    with_margin,
)

if TYPE_CHECKING:
    from training.core.contracts.kinds import CheckStatus
    from training.core.contracts.plan import DecisionName, Plan

SCHEMA_VERSION = 1
FITS, TIGHT, TOO_LARGE, UNKNOWN = "fits", "tight", "does not fit", "unknown"


@dataclass(frozen=True)
class StepMemory:
    """What is known of the memory of a step; `measured` is None where the estimate is a measurement
    itself, and where this torch can not measure: `why` says so then."""

    step: StepNeeds
    room: int | None
    measured: Measured | None
    why: str = ""

    @property
    def total(self) -> int:
        """Where the formula is low for the step that can be measured, it is low for the planned one
        too."""
        return int(
            self.step.estimate.total * max(1.0, self.measured.ratio if self.measured else 1.0)
        )

    @property
    def verdict(self) -> str:
        return verdict(self.total, self.room)

    def check(self, request: LaunchRequest) -> preflight.Check:
        by_verdict: dict[str, CheckStatus] = {TIGHT: preflight.WARNING, TOO_LARGE: preflight.ERROR}
        status = by_verdict.get(self.verdict, preflight.OK)
        fixes = []
        # by the formula these fit a room that is smaller by what it is wrong by
        if self.verdict == TOO_LARGE and self.room:
            room = int(self.room * self.step.estimate.total / self.total)
            fixes = [
                request.command(**c)
                for c in self.step.suggestions(request.config, request.ranks, room)
            ]
        return preflight.Check("memory of a step", status, sentence(self.total, self.room), fixes)

    def lines(self) -> list[str]:
        lines = [f"{self.step.source}   {gib(self.step.estimate.total)}"]
        if self.why:
            lines.append(f"fake tensors: not measured. {self.why}")
        elif (seen := self.measured) is None:
            lines.append("fake tensors see neither torch.compile nor a GPU's own kernels")
        else:
            lines += [
                f"formula (eager, CPU autocast, no GPU context)   {gib(seen.formula)}",
                f"fake tensors (the same step)   {gib(seen.fake)}: {seen.ratio:.2f} × the formula, "
                f"in {seen.seconds:.1f} s",
                "fake tensors see neither torch.compile nor a GPU's own kernels; depth is "
                "extrapolated from one to three blocks",
            ]
        return [*lines, f"verdict: {sentence(self.total, self.room)}"]

    def record(self) -> dict[str, object]:
        record, seen = self.step.record(), self.measured
        return {name: value for name, value in record.items() if name != "load"} | {
            "free_bytes": self.room,
            "measured_bytes": seen.fake if seen else None,
            "measured_formula_bytes": seen.formula if seen else None,
            "measuring_s": round(seen.seconds, 3) if seen else None,
            "not_measured_because": self.why or None,
            "verdict": self.verdict,
        }


def memory(step: StepNeeds, room: int | None) -> StepMemory:
    try:
        return StepMemory(step, room, step.measure())
    except Unavailable as error:
        return StepMemory(step, room, None, str(error))


def verdict(total: int, room: int | None) -> str:
    if room is None:
        return UNKNOWN
    return (
        TOO_LARGE
        if with_margin(total) > room
        else TIGHT
        if with_ample_margin(total) > room
        else FITS
    )


def sentence(total: int, room: int | None) -> str:
    least, said = gib(with_margin(total)), verdict(total, room)
    if said == UNKNOWN:
        return f"unknown, {least} needed, the free memory is not known"
    needed = f"{least} to {gib(with_ample_margin(total))}" if said == TIGHT else least
    return f"{said}, {needed} needed, {gib(room)} free"


def communication(
    request: LaunchRequest, plan: Plan, checks: list[preflight.Check]
) -> list[preflight.Check]:
    """The lines of the communication test between the ranks of this machine; `checks`: what was
    found before it, for it need not be tried where GPUs are missing. Ranks that something else has
    started, or that another Python runs, are not ours to start."""
    from training.launcher.communication.run import run

    unusable = any(c.status == preflight.ERROR and c.name in ("GPUs", "torch") for c in checks)
    if (
        unusable
        or plan["place"]["kind"] == RANK
        or plan.get("script", {}).get("python", sys.executable) != sys.executable
    ):
        return []
    if plan["local_ranks"] > 1:
        log.info(f"communication test between {units.plural(plan['local_ranks'], 'rank')}")
    return run(plan).checks()


@dataclass(frozen=True)
class DoctorReport:
    """All that `--check` found."""

    plan: Plan
    checks: list[preflight.Check]
    step: StepMemory | None  # None where the plan does not know it
    seconds: float  # from the start of this process until all was checked; measuring comes after

    @property
    def code(self) -> Exit:
        return Exit.RESOURCES if preflight.worst(self.checks) == preflight.ERROR else Exit.DONE

    @property
    def versions(self) -> dict[str, str | None]:
        return next((c.facts for c in self.checks if c.name == versions.NAME), {})

    def text(self) -> str:
        """What comes after the plan and the table of checks."""
        lines = ["", f"checked in {self.seconds:.2f} s"]
        lines += (
            ["", "Memory of a step, per rank", *(f"  {line}" for line in self.step.lines())]
            if self.step
            else []
        )
        block = bug_report.block(
            self.plan, self.checks, self.versions, self.step.verdict if self.step else ""
        )
        return "\n".join(
            [*lines, "", "To paste into an issue (no names, no keys in it):", "", block]
        )

    def json(self) -> str:
        """One object; units stand in the keys, what is not known is null."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "status": preflight.worst(self.checks),
                "exit_code": int(self.code),
                "checks": [c.record() for c in self.checks],
                "versions": self.versions,
                "plan": essentials(self.plan),
                "memory": self.step.record() if self.step else None,
                "checking_s": round(self.seconds, 3),
            },
            indent=1,
        )


def essentials(plan: Plan) -> dict[str, object]:
    """What a program wants to know of a plan; the whole of it stands in plan.json of a run."""
    split = Batch(**plan["batch"]) if "batch" in plan else None
    decided: tuple[DecisionName, ...] = (
        "launcher",
        "device",
        "precision",
        "compile",
        "activation_checkpointing",
        "loss_chunks",
    )
    gpu: tuple[Literal["index", "name", "total_bytes", "free_bytes"], ...] = (
        "index",
        "name",
        "total_bytes",
        "free_bytes",
    )
    return {
        "config_file": plan["config_file"],
        "ranks": plan["ranks"],
        "local_ranks": plan["local_ranks"],
        **{name: plan[name]["value"] if name in plan else None for name in decided},
        "device_batch_sequences": split.device_sequences if split else None,
        "max_seq_len_tokens": split.seq_len if split else None,
        "accumulation_steps": split.accumulation if split else None,
        "total_batch_tokens": split.total_tokens if split else None,
        "data": plan.get("data"),
        "gpus": [{name: one[name] for name in gpu} for one in plan["gpus"]],
        "notes": plan["notes"],
    }


def since_start() -> float:
    """Seconds of this process. Not by psutil, whose start times are as exact as the kernel's boot
    time: to the second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return max(
        0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    )


def run(request: LaunchRequest, plan: Plan, checks: list[preflight.Check]) -> DoctorReport:
    """Measure what the plan could only estimate."""
    seconds = since_start()
    # first: it forks, and importing torch below starts threads
    talk = communication(request, plan, checks)
    needs = tasks.step_of(plan)
    step = memory(needs, plan["memory"]["free_bytes"]) if needs else None
    found = [*checks, *talk, *([step.check(request)] if step else [])]
    return DoctorReport(plan, found, step, seconds)
