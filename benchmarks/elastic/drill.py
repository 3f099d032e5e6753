"""One case: start the machines, let it happen, wait for the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.elastic.cases import Case, Loss
from benchmarks.elastic.judge import judge, problems
from benchmarks.elastic.machine import RANK, Machine
from benchmarks.elastic.network import network
from benchmarks.elastic.programs import PROGRAMS, RUN, SAVE_EVERY, STEPS, Record, Start
from benchmarks.gpu.machine import commit

LIMIT_S = 200.0  # without a step
START_S = 300.0  # until the first one
END_S, STOP_S = 30.0, 60.0  # until everything has ended: after the last step, and after SIGTERM
TURN_S = 0.1
RETRY_S = 5.0  # a machine that is back starts its launcher again, as --hosts and clusters do


class Drill:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.program = PROGRAMS[case.program]
        self.moments: list[float] = []
        self.came_back = 0
        self.gave_up = False
        self._todo = list(case.losses)
        self._undo: list[tuple[float, Machine]] = []
        self._returned: dict[int, float] = {}  # machine → when its launcher may start again
        self._quiet_since, self._seen = time.monotonic(), 0
        self._due: float | None = None  # of the next loss

    def run(self) -> dict[str, Any]:
        """Raises SystemExit where network namespaces are not possible."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        case, load, begun = self.case, os.getloadavg()[0], time.time()
        with network(case.machines) as lan:
            starts = [
                Start(self.folder, case.machines, number, case.ranks, self.program.own_disks)
                for number in range(case.machines)
            ]
            machines = list[Machine]()
            try:
                machines += [Machine(self.program, start, lan) for start in starts]
                while not self._ended(machines):
                    self._turn(machines)
                    time.sleep(TURN_S)
                ended = time.time()
                exits = [machine.status for machine in machines]
                left = self._left(machines)
            finally:
                for machine in machines:
                    machine.kill()
        records = self.program.records(self.folder)
        return {
            "finished": 0 in exits and bool(records) and records[-1]["step"] == STEPS,
            "exits": exits,
            "gave_up": self.gave_up,
            "ended_s": round(ended - self.moments[-1], 1) if self.moments else None,
            "left": left,
            "start_s": round(records[0]["time"] - begun, 1) if records else None,
            "load": round((load + os.getloadavg()[0]) / 2, 1),
            "cores": os.cpu_count(),
            "times": [round(at, 2) for at in self.moments],
        }

    def _turn(self, machines: list[Machine]) -> None:
        now, records = time.monotonic(), self.program.records(self.folder)
        if len(records) > self._seen:
            self._seen, self._quiet_since = len(records), now
        for entry in [one for one in self._undo if one[0] <= now]:
            self._undo.remove(entry)
            entry[1].back()
            self._returned[entry[1].number] = now
            self._quiet_since = now
        finished = any(machine.status == 0 for machine in machines)
        for machine in machines:
            if finished or machine.number not in self._returned or machine.status is None:
                continue
            if now >= self._returned[machine.number]:
                machine.again()
                self.came_back += 1
                self._returned[machine.number] = now + RETRY_S
        step = records[-1]["step"] if records else 0
        if self._todo and not finished and self._is_due(step, now) and self._may_lose(records):
            self._lose(machines, self._todo.pop(0), now)

    def _is_due(self, step: int, now: float) -> bool:
        return step >= self.case.at_step if self._due is None else now >= self._due

    def _may_lose(self, records: Sequence[Record]) -> bool:
        """Can the run survive the next loss now? A machine that is back belongs to it only once the
        ranks are started with it. With their own disks, more than half of the machines must be
        left, and another one must have a copy of a checkpoint."""
        loss, last = self._todo[0], records[-1]
        if self.program.own_disks and self.case.machines > 1 and not self._has_copy():
            return False
        if not self.moments or loss.kind == RANK:
            return True
        known = zip(self.moments, self.case.losses, strict=False)
        gone = sum(at > last["time"] and before.kind != RANK for at, before in known)
        left = last["ranks"] // self.case.ranks - gone
        if not self.program.own_disks:
            return left > 1
        settled = sum(one["time"] > self.moments[-1] for one in records) >= 2 * SAVE_EVERY
        return settled and (left > 2 or (self.case.machines == 2 and left > 1))

    def _has_copy(self) -> bool:
        return any(self.folder.glob(f"disk*/{RUN}/**/replica.json"))

    def _lose(self, machines: list[Machine], loss: Loss, now: float) -> None:
        machine = machines[loss.machine]
        try:
            self.moments.append(machine.lose(loss.kind))
        except LookupError:  # between two starts: a moment later
            self._todo.insert(0, replace(loss, after_s=0.0))
            self._due = now + 1.0
            return
        self._returned.pop(machine.number, None)
        self._quiet_since = now
        if loss.back_s is not None:
            self._undo.append((now + loss.back_s, machine))
        self._due = now + self._todo[0].after_s if self._todo else None

    def _ended(self, machines: list[Machine]) -> bool:
        quiet = time.monotonic() - self._quiet_since
        if any(machine.status == 0 for machine in machines):
            running = [machine for machine in machines if machine.status is None]
            if quiet > END_S:  # back too late: a launcher that waits for a run that has ended
                for machine in running:
                    if machine.number in self._returned:
                        machine.launcher.terminate()
            return not running or quiet > END_S
        if all(machine.status is not None for machine in machines):
            return not self._undo and not self._returned
        if quiet > (LIMIT_S if self._seen else START_S):
            self.gave_up = True
            for machine in machines:
                if machine.status is None:
                    machine.launcher.send_signal(signal.SIGCONT)
                    machine.launcher.terminate()
            return True
        return False

    def _left(self, machines: list[Machine]) -> list[str]:
        """Commands of the processes that do not end."""
        end = time.monotonic() + (STOP_S if self.gave_up else END_S)
        while True:
            for machine in machines:
                machine.launcher.poll()
            left = [pid for machine in machines for pid in machine.processes()]
            if not left or time.monotonic() > end:
                return [command for pid in left if (command := _command(pid))]
            time.sleep(TURN_S)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return " ".join(words).replace(f"{ROOT}/", "")[:100]


def untouched(case: Case, out: Path) -> dict[int, Record]:
    """The records of its untouched run, made once. Raises SystemExit if it fails."""
    reference, kept = case.reference, out / "untouched" / f"{case.reference.name}.json"
    if not kept.exists():
        drill = Drill(reference, out / "runs" / reference.name)
        found = drill.run()
        records = drill.program.records(drill.folder)
        if not found["finished"] or found["left"] or len(records) != STEPS:
            raise SystemExit(f"the untouched run failed: {found}; see {drill.folder}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(records), encoding="utf-8")
        shutil.rmtree(drill.folder)
    return {one["step"]: one for one in json.loads(kept.read_text(encoding="utf-8"))}


def examine(case: Case, out: Path) -> dict[str, Any]:
    """The line to be kept. The files of a run with problems stay in `out`/runs."""
    whole = untouched(case, out)
    drill = Drill(case, out / "runs" / case.name)
    found = drill.run()
    records = drill.program.records(drill.folder)
    found |= judge(records, whole, drill.moments, drill.came_back)
    wrong = problems(found, may_end=case.may_end, exact=case.exact)
    if not wrong:
        shutil.rmtree(drill.folder)
    return case.facts() | found | {"problems": wrong, "commit": commit(), "time": time.time()}


def shown(line: Mapping[str, Any]) -> str:
    """One line for the console."""
    pauses = ", ".join("-" if one is None else f"{one:.1f} s" for one in line["pauses_s"])
    return f"{line['name']}: {'; '.join(line['problems']) or 'ok'}; first new step after {pauses}"
