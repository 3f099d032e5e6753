"""Runs the trainings of a sweep: as many side by side as there are slots, each through the
launcher."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli.sweep import config_files, launchers
from training.cli.sweep.board import Board, Event
from training.cli.sweep.launchers import Started
from training.cli.sweep.planned import GPU_CODE
from training.cli.sweep.prepare import OWN_VARIABLES, Sweep
from training.cli.sweep.usable import Usable
from training.config import flags
from training.core import cause_ids, log, run_reader, standing, sweep_dir
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import EXPERIMENTS
from training.core.jsonl import number
from training.core.messages import msg
from training.core.project import INSTALLED, LAUNCH_SCRIPT, PROBLEMS, WORK, script, typed
from training.core.rundir import RunDir, read_json
from training.host import env_vars, gpus, process
from training.launcher.stop_signals import StopSignals, code
from training.monitor.run_status import FAILED, FINISHED, STOPPED
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import WAITING

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRun

THREADS = "OMP_NUM_THREADS"
OUT_DIR = "DUET_OUT_DIR"  # a flag has the folder, or it is the default one


class Session:
    """`states`: of each run, as in training.monitor.runs.sweep."""

    def __init__(self, sweep: Sweep, board: Board, *, fail_fast: bool) -> None:
        self.sweep, self.board, self.fail_fast = sweep, board, fail_fast
        self.runs = sweep.record["runs"]
        self.states = [WAITING] * len(self.runs)
        self._codes: list[int] = []  # of failed runs
        self._stopped = 0  # stop signal
        self._closing = False  # starts no further run
        self._usable = Usable(sweep.slots)

    def begin(self) -> None:
        """Find out which runs are finished. Raises UserError for a run that another process
        trains, or whose config has changed, and if all that are left have lost their weights. On
        another machine its process cannot be checked; it has ended with the sweep that started it,
        whose lock is free."""
        problems = []
        for index, run in enumerate(self.runs):
            folder = RunDir(self.sweep.folder.experiments / run["name"])
            known = run_reader.read_supervisor(folder.supervisor)
            row = sweep_runs.row(self.sweep.folder, run["name"], run["values"])
            active = known and standing.is_here(known) and standing.is_active(folder, known)
            if known and active and row.state != FINISHED:
                what = msg("cli.sweep.run_alive", name=run["name"], pid=known["pid"])
                fixes = [f"./duet monitor --run={run['name']}", f"kill {known['pid']}"]
                problems.append(
                    Problem("sweep.running", what, msg("cli.sweep.one_at_a_time"), fixes)
                )
            if row.state == FINISHED:
                self.states[index] = FINISHED
            elif (found := self._changed(run)) and found not in problems:
                problems.append(found)
        lost = [problem for problem in problems if problem.code == "sweep.weights_lost"]
        sweep = self.sweep
        if lost != problems or (lost and config_files.all_lost(sweep.folder, sweep.record)):
            raise UserError(problems)
        for problem in lost:  # the other runs do not need them
            log.warning(problem.what)

    def go(self) -> int:
        """Train all runs that are not finished; the exit code. Leaves no process."""
        running: list[Started] = []
        todo = deque(i for i, state in enumerate(self.states) if state != FINISHED)
        with StopSignals() as signals:
            try:
                while True:
                    self._fill(running, todo)
                    if not running:
                        break
                    if (received := signals.wait(launchers.POLL_S)) is not None:
                        self._stop(running, received)
                    self._collect(running, todo)
                    self.board.refresh(self.states)
            finally:
                launchers.end(running)
        return self._code()

    def _fill(self, running: list[Started], todo: deque[int]) -> None:
        taken = {one.slot for one in running}
        for slot in [slot for slot in range(self.sweep.jobs) if slot not in taken]:
            while todo and not self._closing and slot in self._usable:
                index = todo.popleft()
                try:
                    running.append(self._start(index, slot))
                    break
                except UserError as error:
                    self._not_started(index, error.problems[0].what, running)
                except OSError as error:  # of this run alone, such as a file that it cannot write
                    file = f"{error.filename}: " if error.filename else ""
                    self._not_started(index, f"{file}{error.strerror}", running)

    def _not_started(self, index: int, why: str, running: list[Started]) -> None:
        self.states[index] = FAILED
        row = sweep_runs.row(self.sweep.folder, self.runs[index]["name"], {})
        self.board.event(Event.ENDED, index, self.states, row=row, why=why)
        self._has_failed(Exit.RESOURCES, running)

    def _has_failed(self, status: int, running: list[Started]) -> None:
        self._codes.append(status)
        if self.fail_fast and not self._closing:
            self._closing = True
            launchers.signal_all(running, signal.SIGTERM)

    def _start(self, index: int, slot: int) -> Started:
        run, record = self.runs[index], self.sweep.record
        place = self.sweep.slots[slot]
        launchers.remove_remains(RunDir(self.sweep.folder.experiments / run["name"]))
        if found := self._changed(run):
            raise UserError(found)
        private = (*OWN_VARIABLES, OUT_DIR)
        environ = {n: v for n, v in os.environ.items() if n not in private}
        environ |= {gpus.VISIBLE: place.visible} if place.visible else {}
        problems = self.sweep.folder.problems(run["name"])
        problems.unlink(missing_ok=True)  # of a sweep that was killed
        environ[PROBLEMS] = str(problems.absolute())
        if self.sweep.jobs > 1 and THREADS not in environ:
            shared = env_vars.cpu_count() // (self.sweep.jobs * record["ranks"])
            environ[THREADS] = str(max(1, shared))
        with self.sweep.folder.console(run["name"]).open("ab") as console:
            at, began = console.tell(), time.time()
            popen = subprocess.Popen(
                self.command(run),
                cwd=record["cwd"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
                # a run saves a checkpoint if this process is killed
                preexec_fn=functools.partial(  # noqa: PLW1509 – one thread
                    process.die_with_parent, os.getpid(), signal.SIGTERM
                ),
            )
        self.states[index] = "running"
        self.board.event(Event.STARTED, index, self.states, where=str(place))
        return Started(index, slot, popen, at, began)

    def _changed(self, run: SweepRun) -> Problem | None:
        folder = self.sweep.folder
        return config_files.changed(run, self.sweep.record["cwd"], folder.experiments)

    def command(self, run: SweepRun) -> list[str]:
        """Starts the run, or resumes it. One that was planned on GPUs by --device=auto must not
        train on the CPU after the driver is lost. All start from the weights that were planned:
        `latest` would be the run before in this sweep."""
        folder, ranks = self.sweep.folder, str(self.sweep.record["ranks"])
        words, args = [*script(LAUNCH_SCRIPT), ranks], run["args"]
        own = ["--device=cuda"] if run.get("device") == "cuda" else []
        args = flags.without(args, "device") if own else args
        given = flags.parse(args).flags
        default = (Path(self.sweep.record["cwd"]) if INSTALLED else WORK) / EXPERIMENTS
        if "out_dir" in given or folder.experiments != default:
            own.append(f"--out_dir={folder.experiments}")
        if not (folder.experiments / run["name"]).exists():
            if file := run.get("init_from"):
                args = [*flags.without(args, "init_from"), f"--init_from={file}"]
            # the sweep may have been moved since the flag was typed
            return [*words, *flags.without(args, "out_dir"), *own, f"--run_name={run['name']}"]
        # a resumed run keeps its configuration, but not its folders
        if logs := given.get("log_dir"):
            own.append(f"--log_dir={logs[0]}")
        return [*words, f"--resume={run['name']}", *own]

    def _stop(self, running: list[Started], received: int) -> None:
        self.board.stopping(received, again=bool(self._stopped))
        self._stopped, self._closing = received, True
        launchers.signal_all(running, received)

    def _collect(self, running: list[Started], todo: deque[int]) -> None:
        for one in list(running):
            status = one.popen.poll()
            if status is None:
                continue
            running.remove(one)
            row = sweep_runs.row(self.sweep.folder, self.runs[one.index]["name"], {})
            asked = status in (Exit.INTERRUPTED, Exit.PREEMPTED) or (status < 0 and self._closing)
            if status == 0:
                self.states[one.index] = FINISHED
            elif asked or (row.state == STOPPED and self._has_ended(one)):
                self.states[one.index] = STOPPED
            else:
                self.states[one.index] = FAILED
            self.board.event(
                Event.ENDED,
                one.index,
                self.states,
                row=row,
                why=self._why(one, row) if self.states[one.index] == FAILED else "",
            )
            if self.states[one.index] == FAILED:
                self._after_failure(one, status, running, todo)

    def _after_failure(
        self, one: Started, status: int, running: list[Started], todo: deque[int]
    ) -> None:
        """A run without a working, free GPU is trained on another one: its own would fail all runs
        that are left, one after the other. A start that fails for another reason, such as a full
        disk, has a problem of its own."""
        place, problems = self.sweep.slots[one.slot], self._problems(one)
        if place.indices and self._gpu_is_lost(one):
            self._usable.lose(one.slot)
            again = (
                msg("cli.sweep.last_gpu_lost", gpus=str(place))
                if self._usable.none
                else msg("cli.sweep.gpu_lost", gpus=str(place))
            )
        elif place.indices and GPU_CODE in problems and self._usable.refuse(one.index, one.slot):
            again = (
                msg("cli.sweep.last_gpu_taken", gpus=str(place))
                if self._usable.none
                else msg("cli.sweep.gpu_taken", gpus=str(place))
            )
        else:
            self._has_failed(status, running)
            return
        self.states[one.index] = WAITING
        todo.appendleft(one.index)
        log.warning(again)

    def _gpu_is_lost(self, one: Started) -> bool:
        card = read_json(self._run(one).failure) or {}
        if card.get("cause") == cause_ids.GPU_HARDWARE and card.get("time", 0.0) >= one.time:
            return True
        return self._usable.lacks_a_gpu(one.slot)

    def _problems(self, one: Started) -> list[str]:
        """The codes of a refused start; none after a launch."""
        file = self.sweep.folder.problems(self.runs[one.index]["name"])
        try:
            found = file.read_text().split()
        except FileNotFoundError:
            return []
        file.unlink()
        return found

    def _has_ended(self, one: Started) -> bool:
        """Whether the run has recorded its end in this start: a start that fails before the
        training leaves the end of an earlier one."""
        ends = standing.ends(self._run(one))
        return any((number(end.get("time")) or 0.0) >= one.time for end in ends if end)

    def _run(self, one: Started) -> RunDir:
        return RunDir(self.sweep.folder.experiments / self.runs[one.index]["name"])

    def _why(self, one: Started, row: sweep_runs.SweepRow) -> str:
        """The reason of a failure: of its card, or the first error on its console."""
        if row.state == FAILED and row.found and row.found.reason and self._has_ended(one):
            return row.found.reason
        try:
            with self.sweep.folder.console(self.runs[one.index]["name"]).open("rb") as file:
                file.seek(one.at)
                text = file.read().decode("utf-8", "replace")
        except OSError:
            text = ""
        errors = [line for line in text.splitlines() if line.startswith("[ERROR]")]
        # '[ERROR] 2024-10-21 16:00:00 text'
        return (
            errors[0].split(" ", 3)[-1]
            if errors
            else msg("cli.sweep.exit", status=one.popen.poll())
        )

    def _code(self) -> int:
        if set(self.states) == {FINISHED}:  # also if a stop signal came during the last run
            return int(Exit.DONE)
        if self._stopped:
            return int(code(self._stopped))
        if self._codes:
            return int(Exit.HANG if set(self._codes) == {Exit.HANG} else Exit.TRAINING)
        if WAITING in self.states and self._usable.fewer:
            return int(Exit.RESOURCES)
        return int(Exit.INTERRUPTED)


def again(sweep: Sweep) -> str:
    """The command that continues the sweep."""
    folder = sweep.folder
    return typed(sweep_dir.command("resume", folder.name, folder.experiments))
