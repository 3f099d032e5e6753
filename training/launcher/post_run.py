"""After a run: its report, and the command that tells somebody (`--notify`). Neither changes how
the run has ended."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.errors import Exit
from training.core.project import ROOT, typed
from training.core.redact import masked
from training.launcher import hook_runner, notification, spawn
from training.launcher.stop_signals import StopSignals

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import NotificationRecord

REPORT_S, NOTIFY_S = 60.0, 30.0
PREEMPTED_S = 10.0  # for the report: who preempts does not wait long
NICE = 5
SHELL = "/bin/sh"


class PostRun:
    """Of one launch; for the process that has started the run: the supervisor of the first machine,
    or rank 0 without one."""

    def __init__(self, run: rundir.RunDir, plan: Plan) -> None:
        self.run, self.plan, self._wishes, self._reported = run, plan, StopSignals(), False
        self.begun = (
            False  # the data is accepted; before it the run directory knows nothing of this launch
        )

    def report(self, code: int) -> bool:
        """Make report.html, once: has this call made it? A warning when it does not work. That of
        an earlier start stays until then."""
        if self._reported or not os.access(self.run.path, os.W_OK):
            return False
        self._reported = True
        if not self.plan["config"].get("report") or self._empty():
            self._forget_old()
            return False
        command = [
            sys.executable,
            str(ROOT / "lib/run_module.py"),
            "training.cli.report",
            str(self.run.path),
        ]
        limit_s = PREEMPTED_S if code == Exit.PREEMPTED else REPORT_S
        wrong, said = hook_runner.run(
            [*command, "--quiet"],
            spawn.clean_environment(ours=True),
            b"",
            limit_s,
            self._wishes,
            nice=NICE,
        )
        if wrong:
            log.warning(
                f"no report was made: {_with_reason(wrong, said)}\n    try: "
                + typed(f"./duet report {shlex.quote(str(self.run.path))}")
            )
            self._forget_old()
        return not wrong

    def _empty(self) -> bool:
        """Was the run stopped before its first step? There is nothing to show."""
        asked = (rundir.read_json(self.run.failure) or {}).get("kind") == rundir.ASKED
        return asked and not self.plan.get("script") and not self.run.metrics.exists()

    def _forget_old(self) -> None:
        if not rundir.written_since(self.run.report, self.plan["created"]):
            self.run.report.unlink(missing_ok=True)

    def close(self, code: int, why: str = "") -> None:
        """The run has ended with this status, and the user has been told, except where the report
        is that the summary does not name. `why`: what he was told where no rank has ended the
        run."""
        with self._wishes:  # from here on nothing can change the status
            if self.begun and self.report(code):
                log.info(f"report: {self.run.report}")
            if command := self.plan["config"].get("notify"):
                self._notify(
                    command,
                    notification.payload(self.run, self.plan, code, begun=self.begun, why=why),
                )

    def _notify(self, command: str, facts: NotificationRecord) -> None:
        told = {
            "DUET_STATUS": facts["status"],
            "DUET_EXIT_CODE": str(facts["exit_code"]),
            "DUET_RUN_NAME": facts["name"],
            "DUET_RUN_DIR": facts["run_dir"] or "",
            "DUET_TITLE": facts["title"],
            "DUET_TEXT": facts["text"],
            "DUET_REPORT": facts["report"] or "",
        }
        given = (json.dumps(facts, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        # What happened comes as data only: nothing of it is ever part of a command line.
        wrong, said = hook_runner.run(
            [SHELL, "-c", command],
            spawn.clean_environment(ours=False) | told,
            given,
            NOTIFY_S,
            self._wishes,
        )
        for line in said.splitlines():
            log.to_log(f"notify: {masked(line)}\n")
        if wrong:
            log.warning(f"--notify has failed: {_with_reason(wrong, said)}")


def _with_reason(wrong: str, output: str) -> str:
    """The first problem that the program reports, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    problem = next((line.partition("[ERROR] ")[2] for line in lines if "[ERROR] " in line), "")
    problem = " ".join(problem.split()[2:])  # without date and time
    return f"{wrong}: {masked(problem or lines[-1])[:200]}" if lines else wrong
