"""After a run: the report and the notification command (`--notify`). Neither changes the exit
code."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from training.core import json_text, log, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.core.redact import masked
from training.launcher import hook_runner, notification, report_program, spawn
from training.launcher.stop_signals import StopSignals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from training.core.contracts.events import RestartFacts
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

REPORT_S, NOTIFY_S = 60.0, 30.0
PREEMPTED_S = 10.0  # for the report: a preempted job has little time
SHELL = "/bin/sh"


class PostRun:
    """For one launch, in the process that started the run: the supervisor of the first machine, or
    rank 0 without one."""

    def __init__(self, run: rundir.RunDir, plan: Plan) -> None:
        self.run, self.plan, self._signals, self._reported = run, plan, StopSignals(), False
        # of the launch, as time.monotonic(): the clock may be set during it
        self._launched = time.monotonic() - max(0.0, time.time() - plan["created"])
        self.begun = (
            # the data is accepted; before that the run directory has no records of this launch
            False
        )
        self.failure: FailureRecord | None = None  # of the last start of the ranks
        self.restarts: Sequence[RestartFacts] = ()  # of the ranks, so far
        self.left = False  # other machines continue the run, or may
        self._alone = ""  # why this machine must not continue it, if perhaps no other one does

    @property
    def seconds(self) -> float:
        """Since the launch."""
        return time.monotonic() - self._launched

    def report_unless_preempted(self, code: int) -> None:
        """Write the report before the message about the end, which has its path. After a preemption
        the report is last: the launcher may be killed within seconds (`docker stop`)."""
        if code != Exit.PREEMPTED:
            self.report(code)

    def report(self, code: int) -> bool:
        """Write report.html, once: has this call written it? A failure is a warning. The report of
        an earlier start is kept until then, also by a resume that was withdrawn."""
        if self._reported or self._withdrawn() or not os.access(self.run.path, os.W_OK):
            return False
        self._reported = True
        if not self.plan["config"].get("report") or self._empty():
            self._forget_old()
            return False
        limit_s = PREEMPTED_S if code == Exit.PREEMPTED else REPORT_S
        written = report_program.write(self.run.report, limit_s, self._signals)
        if not written:
            self._forget_old()
        return written

    def _withdrawn(self) -> bool:
        """Is the plan of the start before back?"""
        file, plan = self.run.plan, self.plan
        there = rundir.read_json(file)
        return there is not None and not rundir.is_of_start(there, plan, file, plan["created"])

    def _empty(self) -> bool:
        """Was the run stopped before its first step, with nothing to show?"""
        asked = (rundir.read_json(self.run.failure) or self.failure or {}).get(
            "kind"
        ) == rundir.ASKED
        return asked and not self.plan.get("script") and not self.run.metrics.exists()

    def _forget_old(self) -> None:
        if not rundir.written_since(self.run.report, self.plan["created"]):
            rundir.discard(self.run.report)

    def leave(self, alone: str = "") -> None:
        """This machine ends without ending the run. `alone`: the reason, if it is not known whether
        another machine continues."""
        self.left, self._alone = True, alone

    def close(self, code: int, why: str = "") -> None:
        """Write the report and send the notification, after the end of the run was logged.
        `why`: the text shown to the user where no rank has ended the run. Only on the machine that
        writes the run, or where perhaps none is left that does."""
        writes = not self.left and self.run.own == self.run.path
        if not writes and not self._alone:
            return
        preempted = code == Exit.PREEMPTED  # the report comes last then
        with self._signals:  # from here on nothing can change the status
            if preempted:
                self._notify(code, why)
            if writes and self.begun and self.report(code):
                log.info(msg("launcher.report.written", report=self.run.report))
            if not preempted:
                self._notify(code, why)

    def _notify(self, code: int, why: str) -> None:
        command = self.plan["config"].get("notify")
        if not command:
            return
        facts = notification.payload(
            self.run,
            self.plan,
            code,
            begun=self.begun,
            left=self.left,
            why=self._alone or why,
            known=self.failure,
            restarts=len(self.restarts),
            seconds=self.seconds,
        )
        variables = {
            "DUET_STATUS": facts["status"],
            "DUET_EXIT_CODE": str(facts["exit_code"]),
            "DUET_RUN_NAME": facts["name"],
            "DUET_RUN_DIR": facts["run_dir"] or "",
            "DUET_TITLE": facts["title"],
            "DUET_TEXT": facts["text"],
            "DUET_REPORT": facts["report"] or "",
        }
        text = json_text.answer(facts, indent=None, ensure_ascii=False)
        given = (text + "\n").encode("utf-8", "replace")
        # Facts are passed as data only: they are never part of a command line.
        error, output = hook_runner.run(
            [SHELL, "-c", command],
            spawn.clean_environment(ours=False) | variables,
            given,
            NOTIFY_S,
            self._signals,
        )
        for line in output.splitlines():
            log.to_log(f"notify: {masked(line)}\n")
        if error:
            log.warning(
                msg("launcher.notify.failed_command", reason=hook_runner.with_reason(error, output))
            )
