"""The command line of the monitor, and which run it means."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from training import rundir
from training.errors import Problem, UserError
from training.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS, LOGS = "experiments", "logs"
COMMAND = "./monitor_training.sh"
FIRST_RUN = "./train_dual_gpu.sh configs/dual_gpu/quickstart.py"
TAKES_VALUE = {"log": True, "run": True, "interval": True, "once": False, "json": False, "ascii": False, "help": False}
INTERVAL_S = (0.2, 3600.0)
_RUN_LINE = re.compile(rb"\[INFO\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d run directory: (.+)")


@dataclass
class Options:
    """A checked command line; `run` and `log` as typed."""

    log: str | None = None
    run: str | None = None
    interval_s: float = 3.0
    once: bool = False
    json: bool = False
    ascii: bool = False
    help: bool = False
    problems: list[Problem] = field(default_factory=list)


def parse(argv: list[str]) -> Options:
    """Raises UserError with all problems at once."""
    options, rest = Options(), list(argv)
    while rest:
        word = rest.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("-"):
            flag = "run" if Path(word).is_dir() else "log"
            options.problems.append(Problem(f"{word!r} is no flag", "flags only", [f"{COMMAND} --{flag}={shlex.quote(word)}"]))
            continue
        typed, equals, value = word.lstrip("-").partition("=")
        name = typed.replace("-", "_")
        if name not in TAKES_VALUE or not word.startswith("--"):
            if not equals and rest and not rest[0].startswith("-"):
                equals, value = "=", rest.pop(0)
            options.problems.append(_unknown(word.partition("=")[0], typed, equals + value))
            continue
        if TAKES_VALUE[name] and not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if TAKES_VALUE[name] == bool(value):
            _set(options, name, value)
        elif value:
            options.problems.append(Problem(f"--{typed} has the value {value!r}", "no value", [f"{COMMAND} --{typed}"]))
        else:
            options.problems.append(Problem(f"--{typed} has no value", f"--{typed}=VALUE"))
    if options.log is not None and options.run is not None:
        fixes = [f"{COMMAND} --{n}={shlex.quote(v)}" for n, v in (("run", options.run), ("log", options.log))]
        options.problems.append(Problem("--log and --run are both given", "one of them", fixes))
    if options.problems:
        raise UserError(options.problems)
    return options


def _unknown(flag: str, typed: str, value: str) -> Problem:
    # Imported only when something is wrong: the first screen comes sooner.
    from training.config.flags import suggest

    near = suggest(typed, list(TAKES_VALUE))
    fixes = [f"{COMMAND} --{n}{value if TAKES_VALUE[n] else ''}" for n in near[:1]] or [f"{COMMAND} --help"]
    return Problem(f"{flag} is not a known flag", ", ".join(f"--{n}" for n in TAKES_VALUE), fixes)


def _set(options: Options, name: str, value: str) -> None:
    if name != "interval":
        setattr(options, name, value if TAKES_VALUE[name] else True)
        return
    try:
        seconds = float(value)
    except ValueError:
        seconds = float("nan")
    if INTERVAL_S[0] <= seconds <= INTERVAL_S[1]:
        options.interval_s = seconds
    else:
        nearest = INTERVAL_S[0] if seconds < INTERVAL_S[0] else INTERVAL_S[1] if seconds > INTERVAL_S[1] else 3
        allowed = f"seconds from {INTERVAL_S[0]:g} to {INTERVAL_S[1]:g}"
        options.problems.append(Problem(f"--interval is {value!r}", allowed, [f"{COMMAND} --interval={nearest:g}"]))


def find(options: Options, root: Path) -> tuple[RunDir, Path | None]:
    """The run that is meant, and the log to show when one was named. Raises UserError."""
    experiments = root / EXPERIMENTS
    if options.run is not None:
        return _by_name(options.run, experiments), None
    if options.log is not None:
        return _by_log(Path(options.log).expanduser(), experiments), Path(options.log).expanduser().absolute()
    run = _newest(experiments)
    if run is None:
        raise UserError(
            Problem(f"there is no run in {experiments} yet", "a run to look at", [FIRST_RUN, f"{COMMAND} --run=/another/folder/RUN"])
        )
    return run, None


def _newest(experiments: Path) -> RunDir | None:
    try:
        return rundir.newest(experiments)
    except OSError:  # removed while we looked
        return None


def _is_run(run: RunDir) -> bool:
    """Whether anything of a run is there: a run that lost its plan can still be looked at."""
    files = (run.plan, run.metrics, run.events, run.summary, run.failure, run.supervisor, run.heartbeats)
    return any(os.path.exists(file) for file in files)


def _by_name(wanted: str, experiments: Path) -> RunDir:
    if "\0" not in wanted:
        for path in (Path(wanted).expanduser(), experiments / wanted):
            if _is_run(RunDir(path)):
                return RunDir(path.absolute())
    from training.config.flags import suggest

    names = [plan.parent.name for plan in experiments.glob("*/plan.json")]
    fixes = [f"{COMMAND} --run={shlex.quote(name)}" for name in suggest(wanted.rstrip("/").rsplit("/", 1)[-1], names)[:1]]
    if _is_run(RunDir(Path(wanted).parent)):  # one of its files was named
        fixes.insert(0, f"{COMMAND} --run={shlex.quote(str(Path(wanted).parent))}")
    fixes.append(f"{COMMAND}   (the newest run)" if names else FIRST_RUN)
    there = "a folder, but without anything of a run" if Path(wanted).is_dir() else "no run directory there"
    raise UserError(Problem(f"--run is {wanted!r}: {there}", f"a run directory, or the name of a run in {experiments}", fixes))


def _by_log(log: Path, experiments: Path) -> RunDir:
    allowed = f"a log of our launchers: {LOGS}/<script>_<time>.log"
    newest = f"{COMMAND}   (the newest run)" if _newest(experiments) else FIRST_RUN
    said = f"--log is {str(log)!r}"
    if not log.exists():
        near = sorted(log.parent.glob("*.log"), key=os.path.getmtime)[-1:] if log.parent.is_dir() else []
        raise UserError(Problem(f"{said}: no such file", allowed, [*(f"{COMMAND} --log={shlex.quote(str(n))}" for n in near), newest]))
    if not log.is_file():
        raise UserError(Problem(f"{said}: not a file", allowed, [newest]))
    try:
        content = log.read_bytes()
    except OSError as error:
        raise UserError(Problem(f"{said}: {error.strerror}", allowed, [f"chmod u+r {shlex.quote(str(log))}"])) from None
    found = run_line(content)
    if found is None:
        why = "it is empty" if not content.strip() else "it has no line '[INFO] … run directory: …', so none of our launchers made it"
        raise UserError(Problem(f"{said}: {why}", allowed, [f"{COMMAND} --run=DIR   (if you know the run directory)", newest]))
    run = RunDir(log.parent / found)
    if not _is_run(run):
        moved = [f"{COMMAND} --run={run.name}"] if _is_run(RunDir(experiments / run.name)) else [newest]
        raise UserError(Problem(f"{said}: its run directory {found} is not there", "a log whose run still exists", moved))
    return run


def run_line(content: bytes) -> str | None:
    """The run directory that a log names last."""
    end = len(content)
    while (place := content.rfind(b"run directory: ", 0, end)) >= 0:
        start, stop = content.rfind(b"\n", 0, place) + 1, content.find(b"\n", place)
        line = content[start : stop if stop >= 0 else len(content)].rstrip()
        if match := _RUN_LINE.fullmatch(line):
            return os.fsdecode(match[1])
        end = start
    return None
