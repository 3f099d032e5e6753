"""Shows where each rank of a running training is and which rank keeps the
others waiting. Works with any launcher.

Usage: ./duet attach --pid=PID | --run=RUN [--json]

  --pid=PID   any process of the training: a rank, one of its workers, torchrun
              or another launcher, a single Python process
  --run=RUN   a run directory, a run's name in experiments/, or latest
  --json      print one JSON object

The training needs no preparation and is not paused. Exit codes: 0 no hang, or
undetermined; 5 a hang; 2 wrong usage; 3 no permission to inspect the processes.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import args, find_run, heartbeat, log, run_reader, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import EXPERIMENTS, LATEST, RunSelector
from training.core.heartbeat import HeartbeatRecord
from training.core.messages import msg
from training.core.project import WORK, typed
from training.host import program
from training.monitor.process_states import process_word
from training.watchdog import discovery, gpu_waits, heartbeat_watchdog, stall_detector
from training.watchdog.hang_report import (
    BLIND,
    GPU_WORKS,
    PAUSED,
    UNDECIDED,
    HangFinding,
    NoFinding,
)
from training.watchdog.probes import procfs
from training.watchdog.probes.sampling import Sample, take
from training.watchdog.probes.stacks import Stack, own
from training.watchdog.probes.trace import RankTrace, courses
from training.watchdog.probes.waits import in_collective

if TYPE_CHECKING:
    from training.core.contracts.state import AttachedRank

LOOK_S, LOOKS = 1.0, 4
UNCERTAIN = UNDECIDED | {GPU_WORKS}
CONFIRM_S = 4.0  # of a longer look unless the ranks work: any of them may pause for a second
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked in I/O",
    "T": "stopped",
    "t": "held by a debugger",
}
EXAMPLE = f"{discovery.COMMAND} --run=experiments/RUN"
FLAGS = {
    "pid": args.process_id(),
    "run": args.Flag(str, msg("plan.resume.run_directory"), fixes=(EXAMPLE,)),
    "json": args.SWITCH,
    "help": args.SWITCH,
}
ASKER = RunSelector("--run", f"{discovery.COMMAND} --run=", f"{discovery.COMMAND} --run={LATEST}")


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(typed(__doc__.strip()) if __doc__ else "")
        return int(Exit.DONE)
    try:
        pid, folder, as_json = _parse(argv)
        found = discovery.of_process(pid) if pid is not None else discovery.of_run(folder or Path())
    except UserError as error:
        log.report(error, closing=msg("monitor.attach.nothing"))
        return int(error.code)
    try:
        samples = _looks(found, LOOK_S)
        verdict = _verdict(samples)
        if isinstance(verdict, HangFinding) or verdict.code in UNCERTAIN:
            again = _looks(found, CONFIRM_S)
            samples, verdict = again, _verdict([*samples, *again])
        if folder and (better := _by_heartbeat(rundir.RunDir(folder), found)):
            verdict = better
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    seen = courses(samples)
    if not seen:
        log.error(msg("monitor.attach.ended"))
        return int(Exit.CONFIG)
    beats = (
        {b.pid: b for b in heartbeat.read_all(rundir.RunDir(folder).heartbeats)} if folder else {}
    )
    facts = [_facts(course, beats.get(course.pid)) for course in seen.values()]
    code, text = _conclusion(verdict)
    if as_json:
        print(
            json.dumps(
                {
                    "ranks": facts,
                    "stuck": code == Exit.HANG,
                    "verdict": _record(verdict),
                    "reason": verdict.code if isinstance(verdict, NoFinding) else None,
                    "text": text,
                },
                indent=1,
            )
        )
    else:
        print("\n".join(line for fact in facts for line in _lines(fact)))
        print(text)
    return int(code)


def _parse(argv: list[str]) -> tuple[int | None, Path | None, bool]:
    """Raises UserError with all problems."""
    line = args.parse(argv, FLAGS, discovery.COMMAND, positional=False)
    given, problems = line.values, line.problems
    for word in line.words:
        fix = f"{discovery.COMMAND} --{'pid' if word.isdecimal() else 'run'}={shlex.quote(word)}"
        problems.append(
            Problem(
                "flag.positional",
                msg("monitor.attach.unknown_argument", word=word),
                msg("monitor.attach.arguments"),
                [fix],
            )
        )
    if not problems and ("pid" in given) == ("run" in given):
        text = (
            msg("monitor.attach.pid_and_run") if "pid" in given else msg("monitor.attach.no_target")
        )
        fixes = [EXAMPLE, f"{discovery.COMMAND} --pid=PID   # any process of it: pgrep -af python"]
        problems.append(Problem("attach.target", text, msg("monitor.option.one_of_them"), fixes))
    if problems:
        raise UserError(problems)
    run = _run(given["run"]) if "run" in given else None
    return given.get("pid"), run, "json" in given


def _run(wanted: str) -> Path:
    try:
        return find_run.find(None if wanted == LATEST else wanted, WORK / EXPERIMENTS, ASKER).path
    except UserError:
        if os.path.exists(
            wanted
        ):  # a folder of runs: discovery.of_run() names the newest one in it
            return Path(wanted)
        raise


def _looks(pids: dict[int, int], seconds: float) -> list[Sample]:
    """LOOKS samples, evenly spaced over `seconds`."""
    samples, begin = [take(pids)], time.monotonic()
    for number in range(1, LOOKS):
        time.sleep(max(0.0, begin + seconds * number / (LOOKS - 1) - time.monotonic()))
        samples.append(take(pids))
    return samples


def _verdict(samples: list[Sample]) -> HangFinding | NoFinding:
    # No burst: a few seconds cannot distinguish an endless loop from work.
    found = stall_detector.detect_stall(samples, {})
    looks = samples[-1].looks
    if isinstance(found, HangFinding) and found.waiting.keys() == looks.keys():
        for rank in gpu_waits.may_compute(found, [r for r, look in looks.items() if look.gpu]):
            may = msg("watchdog.script.gpu_may_compute", rank=rank)
            return NoFinding(GPU_WORKS, f"{may}{_others(found)}")
    return found


def _by_heartbeat(run: rundir.RunDir, pids: dict[int, int]) -> HangFinding | None:
    """Verdict from a run's heartbeats: which rank is overdue in which phase; None if no rank is."""
    plan = run_reader.read_plan(run.plan)
    if plan is None or "compile" not in plan or not heartbeat.read_all(run.heartbeats, pids):
        return None
    return heartbeat_watchdog.look_once(run, plan, pids, CONFIRM_S)


def _conclusion(verdict: HangFinding | NoFinding) -> tuple[Exit, str]:
    if isinstance(verdict, HangFinding):
        where = "\n    " + msg("monitor.attach.where", place=verdict.where) if verdict.where else ""
        return Exit.HANG, f"{verdict.sentence()}{where}{_others(verdict)}"
    text = str(verdict)
    if verdict.code == PAUSED:
        return Exit.HANG, text[0].upper() + text[1:]
    if verdict.code == BLIND:
        return Exit.RESOURCES, msg("monitor.attach.undetermined", verdict=verdict)
    if verdict.code in UNCERTAIN:
        return Exit.DONE, msg("monitor.attach.undetermined", verdict=verdict)
    return Exit.DONE, msg("monitor.attach.no_hang", verdict=verdict)


def _others(found: HangFinding) -> str:
    places = found.others() if found.waiting else ""
    return "\n    " + msg("monitor.attach.others", places=places) if places else ""


def _record(verdict: HangFinding | NoFinding) -> dict[str, object] | None:
    if isinstance(verdict, NoFinding):
        return None
    waiting = {str(rank): place for rank, place in verdict.waiting.items()}
    return {
        "kind": verdict.kind,
        "rank": verdict.rank,
        "where": verdict.where,
        "how": verdict.how,
        "waiting": waiting,
        "since_s": round(verdict.since_s, 1),
    }


def _facts(c: RankTrace, beat: HeartbeatRecord | None) -> AttachedRank:
    process, stack = c.last.process, c.last.stack
    main = c.last.main
    frame = own(main.frames) if main else None
    workers = [pid for pid in procfs.workers(c.pid) if pid in c.last.children]
    return {
        "rank": c.rank,
        "pid": c.pid,
        "state": STATES.get(process.state, process.state),
        "phase": str(beat) if beat else None,
        "epoch": beat.epoch if beat else None,
        "age_s": round(beat.age_s, 1) if beat else None,
        "where": f"{frame.file}:{frame.line}" if frame else None,
        "function": frame.function if frame else None,
        "waits_in": in_collective(main) if main else None,
        "moves": not c.same_place,
        "holds_gil": bool(main and main.holds_gil),
        "kernel": process.waits_in or None,
        "cpu": round(c.own_cpu, 2),
        "workers": [
            {
                "pid": pid,
                "state": STATES.get(c.last.children[pid].state, c.last.children[pid].state),
            }
            for pid in workers
        ],
        "workers_cpu": round(c.childrens_cpu, 2),
        "stack": [str(f) for f in main.frames] if main else [],
        "problem": None if isinstance(stack, Stack) else stack,
    }


def _lines(fact: AttachedRank) -> list[str]:
    head = msg(
        "monitor.attach.rank",
        rank=fact["rank"],
        pid=fact["pid"],
        state=process_word(fact["state"]),
        cpu=100 * fact["cpu"],
    )
    if fact["phase"]:
        head += msg(
            "monitor.attach.phase",
            epoch=fact["epoch"],
            phase=fact["phase"],
            seconds=fact["age_s"],
        )
    at = (
        msg("monitor.attach.at", place=fact["where"], function=fact["function"])
        if fact["where"]
        else fact["problem"] or msg("monitor.attach.no_python")
    )
    notes = [msg("monitor.attach.waits_in", name=fact["waits_in"])] if fact["waits_in"] else []
    notes += [msg("watchdog.stack.gil")] if fact["holds_gil"] else []
    notes += [msg("monitor.attach.moving")] if fact["moves"] and fact["where"] else []
    notes += [msg("monitor.attach.kernel", name=fact["kernel"])] if fact["kernel"] else []
    comma = msg("monitor.join.comma")
    lines = [head, "        " + comma.join([at, *notes])]
    if fact["workers"]:
        shown = comma.join(f"{w['pid']} {process_word(w['state'])}" for w in fact["workers"])
        children = msg("monitor.attach.children", workers=shown, cpu=100 * fact["workers_cpu"])
        lines.append(f"        {children}")
    return lines


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
