"""`--check`: the output of `--dry_run` plus further checks, the memory of a step measured with fake
tensors, and a block for a bug report.

Launches no training; writes nothing but the result of the communication test. Imports torch in this
process, whose interpreter is that of the run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from training import tasks
from training.config.batch import Batch
from training.core import log, metric_units, project, units
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.host.placement import RANK
from training.plan import preflight
from training.plan.preflight import bug_report, torch_import, versions
from training.plan.request import LaunchRequest
from training.tasks.memory import (
    SAVINGS,
    Measured,
    StepNeeds,
    Unavailable,
    gib,
    with_ample_margin,
    with_margin,
)
from training.watchdog.probes import procfs

if TYPE_CHECKING:
    from training.core.contracts.kinds import CheckStatus
    from training.core.contracts.plan import DecisionName, Plan
    from training.launcher.communication.result import CommunicationResult

SCHEMA_VERSION = 1
FITS, TIGHT, TOO_LARGE, UNKNOWN = "fits", "tight", "does not fit", "unknown"


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step. `measured`: None if the estimate is a measurement itself, or if this
    torch cannot measure (reason in `why`)."""

    step: StepNeeds
    room: int | None
    measured: Measured | None
    why: str = ""

    @property
    def total(self) -> int:
        """The estimate, corrected upwards by the error of the formula for the measured step."""
        return int(
            self.step.estimate.total * max(1.0, self.measured.ratio if self.measured else 1.0)
        )

    @property
    def verdict(self) -> str:
        return verdict(self.total, self.room)

    @property
    def sentence(self) -> str:
        return sentence(self.total, self.room, on_gpu=self.step.on_gpu)

    def check(self, request: LaunchRequest) -> preflight.Check:
        by_verdict: dict[str, CheckStatus] = {TIGHT: preflight.WARNING, TOO_LARGE: preflight.ERROR}
        status = by_verdict.get(self.verdict, preflight.OK)
        fixes = []
        # suggestions use the formula, so scale the room by its error
        if self.verdict == TOO_LARGE and self.room:
            room = int(self.room * self.step.estimate.total / self.total)
            fixes = preflight.smaller_runs(request, self.step, room)
        return preflight.Check("memory of a step", status, self.sentence, fixes)

    def lines(self) -> list[str]:
        lines = [f"{self.step.source}   {gib(self.step.estimate.total)}"]
        if self.why:
            lines.append(msg("cli.doctor.not_measured", why=self.why))
        elif (seen := self.measured) is None:
            lines.append(msg("cli.doctor.not_included"))
        else:
            lines += [
                msg("cli.doctor.formula", formula=gib(seen.formula)),
                msg(
                    "cli.doctor.fake_tensors",
                    fake=gib(seen.fake),
                    ratio=seen.ratio,
                    seconds=seen.seconds,
                ),
                msg("cli.doctor.not_included_depth"),
            ]
        return [*lines, msg("cli.doctor.verdict", sentence=self.sentence)]

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


def sentence(total: int, room: int | None, *, on_gpu: bool) -> str:
    least, found = gib(with_margin(total)), verdict(total, room)
    if found == UNKNOWN:
        return msg("cli.doctor.unknown", least=least, memory=metric_units.memory_word(on_gpu))
    if found == TIGHT:
        ample = gib(with_ample_margin(total))
        return msg("cli.doctor.tight", least=least, ample=ample, room=gib(room))
    if found == TOO_LARGE:
        return msg("cli.doctor.too_large", least=least, room=gib(room))
    return msg("cli.doctor.fits", least=least, room=gib(room))


def communication(
    request: LaunchRequest, plan: Plan, checks: list[preflight.Check]
) -> list[preflight.Check]:
    """The communication test between the ranks of this machine. Skipped if it has none, if `checks`
    found unusable GPUs, and for ranks of another launcher or another Python."""
    from training.launcher.communication.run import run

    if (
        not _trains_with_this_python(request, plan)
        or preflight.unusable(checks)
        or plan["config"]["communication_test"] == "0"
        or plan["place"]["kind"] == RANK
    ):
        return []
    if plan["local_ranks"] > 1:
        log.info(
            msg("launcher.communication.check", ranks=units.plural(plan["local_ranks"], "rank"))
        )
    return run(plan).checks()


def _trains_with_this_python(request: LaunchRequest, plan: Plan) -> bool:
    python = plan.get("script", {}).get("python", sys.executable)
    return request.trains_here and python == sys.executable


@dataclass(frozen=True)
class DoctorReport:
    """The result of `--check`."""

    plan: Plan
    checks: list[preflight.Check]
    step: StepMemory | None  # None: unknown to the plan
    seconds: float  # of the checks, from process start, without measuring
    total_s: float  # with it, and with what needs torch

    @property
    def code(self) -> Exit:
        return Exit.RESOURCES if preflight.worst(self.checks) == preflight.ERROR else Exit.DONE

    @property
    def versions(self) -> dict[str, str | None]:
        return next((c.facts for c in self.checks if c.name == versions.NAME), {})

    def text(self) -> str:
        """The text after the plan and the table of checks."""
        lines = ["", msg("cli.doctor.checked", seconds=self.total_s)]
        known = ""
        if self.step:
            word = metric_units.memory_word(self.step.step.on_gpu).capitalize()
            title = msg("cli.doctor.memory_title", memory=word)
            lines += ["", title, *(f"  {line}" for line in self.step.lines())]
            # the others are warnings and errors, which the block has
            known = self.step.sentence if self.step.verdict in (FITS, UNKNOWN) else ""
        block = bug_report.block(self.plan, self.checks, self.versions, known)
        return "\n".join([*lines, "", msg("cli.doctor.bug_report"), "", block])

    def json(self) -> str:
        """One JSON object; units are in the keys, unknown values are null."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "status": preflight.worst(self.checks),
                "exit_code": int(self.code),
                "problems": [],
                "checks": [c.record() for c in self.checks],
                "versions": self.versions,
                "plan": essentials(self.plan),
                "memory": self.step.record() if self.step else None,
                "checking_s": round(self.seconds, 3),
            },
            indent=1,
        )


def refused(error: UserError) -> str:
    """The JSON object where the problems leave no plan to check."""
    problems = [
        {
            "code": one.code,
            "field": one.field or None,
            "text": one.what,
            "allowed": one.allowed or None,
            "fixes": [project.typed(fix) for fix in one.fixes],
        }
        for one in error.problems
    ]
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "status": preflight.ERROR,
            "exit_code": int(error.code),
            "problems": problems,
            "checks": [],
            **dict.fromkeys(("versions", "plan", "memory", "checking_s")),
        },
        indent=1,
    )


def essentials(plan: Plan) -> dict[str, object]:
    """The main values of a plan, for programs; a run has the whole plan in plan.json."""
    split = Batch(**plan["batch"]) if "batch" in plan else None
    decided: tuple[DecisionName, ...] = (
        "launcher",
        "device",
        "precision",
        "compile",
        *SAVINGS,
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
        "communication": plan.get("communication"),
        "gradient_compression": plan["gradient_compression"]["value"]
        if "gradient_compression" in plan
        else None,
        "exchange": plan.get("exchange"),
        "gpus": [{name: one[name] for name in gpu} for one in plan["gpus"]],
        "notes": plan["notes"],
    }


def since_start() -> float:
    """Age of this process in seconds; psutil's start times are only exact to the second."""
    began = procfs.began(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def run(
    request: LaunchRequest,
    plan: Plan,
    checks: list[preflight.Check],
    tested: CommunicationResult | None = None,
) -> DoctorReport:
    """Run the checks that need torch. `tested`: communication that the plan has tested."""
    seconds = since_start()
    # first: it forks, and importing torch starts threads
    talk = tested.checks() if tested else communication(request, plan, checks)
    needs = tasks.step_of(plan)
    room = plan["memory"]["free_bytes"] if needs and request.trains_here else None
    broken = torch_import.failure(request) if _trains_with_this_python(request, plan) else None
    step = None
    if needs:
        step = StepMemory(needs, room, None, broken.text) if broken else memory(needs, room)
    if broken:
        checks = [
            check for check in checks if (check.name, check.status) != (broken.name, preflight.OK)
        ]
        checks = [*checks, broken]
    found = [*checks, *talk, *([step.check(request)] if step else [])]
    return DoctorReport(plan, found, step, seconds, since_start())
