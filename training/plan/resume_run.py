"""Resolves `--resume`: a run directory, a run's name, or `latest`, the newest unfinished run of
this user (of the config, where one is given)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training import tasks
from training.config import flags, loader, resolve
from training.config.schema import ENDLESS, FIELDS, Known, of_the_run
from training.core import find_run, manifest, owner, run_reader, rundir, standing, suggest, units
from training.core.errors import Problem, UserError
from training.core.find_run import LATEST
from training.core.jsonl import read_object
from training.core.messages import msg
from training.core.next_command import submit_command
from training.core.project import LAUNCH_SCRIPT, ROOT
from training.plan import finished, length, moved_paths

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import JobRecord

SHOWN = 6  # runs in a list


@dataclass(frozen=True)
class ResumeRequest:
    """A request to resume. `merged`: the configuration merged with that of the run; `fields`: those
    that may be set; `again`: the user's own command with these flags changed; `received`: the run
    as node 0 has sent it."""

    script: str
    ranks: int  # typed
    line: flags.CommandLine
    config_file: Path | None
    resolved: resolve.Resolved
    experiments: Path
    merged: Callable[[loader.Values, Known, rundir.RunDir], resolve.Resolved]
    fields: Known
    again: Callable[..., str]
    received: rundir.RunDir | None = None

    def command(self, run: rundir.RunDir, **changes: Any) -> str:
        """The command that resumes `run`, without a config: a resumed run keeps its own."""
        program = {
            LAUNCH_SCRIPT: f"./{LAUNCH_SCRIPT} {self.ranks or 2}",
            "train.py": "python train.py",
        }.get(self.script, f"./{self.script}")
        kept = {
            name: self.line.flags[name][0]
            for name in ("out_dir", "log_dir")
            if name in self.line.flags
        }
        words = (
            kept
            | {"resume": run.name if run.path.parent == self.experiments else str(run.path)}
            | changes
        )
        return " ".join(
            [program, *(f"--{name}={shlex.quote(str(value))}" for name, value in words.items())]
        )


@dataclass
class Found:
    """The result of the search. `answer`: why there is nothing to do; with neither `answer` nor
    `run`, problems were reported."""

    known: loader.Values = field(default_factory=dict)  # the configuration of the run
    run: rundir.RunDir | None = None
    resolved: resolve.Resolved | None = None
    answer: str = ""


def find(wish: ResumeRequest, problems: list[Problem]) -> Found:
    wanted, origin = wish.resolved.config.resume, wish.resolved.origins["resume"]
    if wish.received and wanted != LATEST and Path(wanted).name != wish.received.name:
        problems.append(other_run(wish.received.name, wanted, wish.again))
        return Found()
    if wanted == LATEST and not wish.received:
        return _latest(wish, origin, problems)
    run = wish.received or _named(wanted, wish.experiments)
    plan = standing.read_plan(run)
    if plan is None or not isinstance(plan.get("config"), dict):
        problems.append(_not_resumable(wish, run, wanted, origin))
        return Found()
    found = _merge(wish, run, plan)
    if end := _finished(wish, found):
        longer = dict(end.longer)
        if "num_iterations" in longer:  # of this command, which counts them before the growth
            longer["num_iterations"] *= length.growth(wish.resolved.config, found.known)
        found.answer = msg(
            "plan.resume.is_finished",
            name=run.name,
            sentence=end.sentence(),
            again=_again(wish, run, **longer),
        )
    return found


def _again(wish: ResumeRequest, run: rundir.RunDir, **changes: object) -> str:
    """The user's own command with these flags; in a SLURM job, whose code is frozen, that of its
    submission."""
    frozen = ROOT.parent == run.path.resolve()
    job = rundir.read_json(run.path / f"{ROOT.name}.json") if frozen else None
    return submit_command(cast("JobRecord", job), **changes) if job else wish.again(**changes)


def _named(wanted: str, experiments: Path) -> rundir.RunDir:
    """The one with a plan, since a folder of code may have the same name."""
    folders = [p for p in (Path(wanted), experiments / wanted) if os.path.isdir(p)]
    planned = (p for p in folders if os.path.exists(rundir.RunDir(p).plan))
    found = next(planned, (folders or [Path(wanted)])[0])
    return rundir.RunDir(find_run.with_name(found))


def _not_resumable(wish: ResumeRequest, run: rundir.RunDir, wanted: str, origin: str) -> Problem:
    """The problem with a run without a plan, or with a name of none."""
    allowed = msg("plan.resume.allowed")
    if find_run.is_run(run):
        what = msg("plan.resume.damaged", wanted=wanted, origin=origin, file=run.plan)
        return Problem("run.damaged", what, allowed)
    if closed := find_run.closed(wanted, wish.experiments):
        reason = closed.reason()
        what = msg("plan.resume.closed", wanted=wanted, origin=origin, reason=reason)
        return closed.problem(what)
    names = [run.name for run, _ in _runs(wish.experiments, _known_plan)]
    what = msg("plan.resume.missing", wanted=wanted, origin=origin)
    fixes = [wish.again(resume=name) for name in _meant(wanted, names)]
    return Problem("run.missing", what, allowed, fixes)


def other_run(of_node_0: str, wanted: str, again: Callable[..., str]) -> Problem:
    """Another machine is to resume another run than node 0."""
    what = msg("plan.nodes.other_run", run=of_node_0, resumed=wanted)
    return Problem(
        "nodes.common_run", what, msg("plan.nodes.same_run"), [again(resume=of_node_0)], "resume"
    )


def _latest(wish: ResumeRequest, origin: str, problems: list[Problem]) -> Found:
    wanted = wish.config_file.resolve() if wish.config_file else None
    every: list[tuple[rundir.RunDir, Plan]] = []
    of_it: list[tuple[rundir.RunDir, Plan]] = []
    ends: dict[Path, finished.Finished] = {}
    others = set[str]()
    waits: rundir.RunDir | None = None
    for run, plan in _runs(wish.experiments, _plan_meant):
        every.append((run, plan))
        if wanted is not None and finished.config_of(plan) != wanted:
            continue
        if user := owner.other(run.path):
            others.add(user)
            continue
        if standing.is_frozen(plan):
            waits = waits or run
            continue
        of_it.append((run, plan))
        found = _merge(wish, run, plan)
        end = _finished(wish, found)
        if end is None:
            return found
        ends[run.path] = end
    config, folder, users = wish.config_file, wish.experiments, ", ".join(sorted(others))
    if ends and not waits:
        shown = [_row(wish, run, plan, ends[run.path]) for run, plan in of_it[:SHOWN]]
        answer = (
            msg("plan.resume.all_of_config_finished", config=config, folder=folder)
            if config
            else msg("plan.resume.all_finished", folder=folder)
        )
        shown += [msg("plan.resume.left_alone", users=users)] if users else []
        return Found(answer="\n    ".join([answer, *shown]))
    rows = [
        _row(wish, run, plan, _finished(wish, _merge(wish, run, plan)))
        for run, plan in every[:SHOWN]
    ]
    if waits:
        what = msg("plan.resume.waits", origin=origin, name=waits.name)
    elif users:
        what = msg("plan.resume.of_others", origin=origin, users=users, folder=folder)
    elif config:
        what = msg("plan.resume.none_of_config", origin=origin, config=config, folder=folder)
    else:
        what = msg("plan.resume.none", origin=origin, folder=folder)
    problems.append(
        Problem(
            "resume.nothing_unfinished",
            what,
            msg("core.find_run.existing") if rows else msg("plan.resume.run_directory"),
            rows,
        )
    )
    return Found()


def _meant(wanted: str, names: list[str]) -> list[str]:
    """Suggestions for an invalid --resume: the run of a checkpoint's path, the newest for a yes;
    otherwise the last three."""
    from training.config import meant

    if inside := [name for name in names if name in Path(wanted).parts]:
        return inside[:1]
    if names and (near := meant.value("resume", wanted, FIELDS)[0]):
        return near
    return list(
        dict.fromkeys([*suggest.suggest(wanted.strip("/").rpartition("/")[2], names), *names])
    )[:3]


def _runs(
    experiments: Path, read: Callable[[rundir.RunDir], Plan | None] = standing.read_plan
) -> Iterator[tuple[rundir.RunDir, Plan]]:
    """Newest first, without user scripts, which cannot be resumed. Raises UserError on reaching a
    run of a later version, since it may be the one meant."""
    for _, folder in sorted(find_run.planned(experiments), reverse=True):
        run = rundir.RunDir(folder)
        plan = read(run)
        if plan and isinstance(plan.get("config"), dict) and not plan.get("script"):
            yield run, plan


def _known_plan(run: rundir.RunDir) -> Plan | None:
    """None for a run of a later version: it is not suggested."""
    try:
        return standing.read_plan(run)
    except UserError:
        return None


def _plan_meant(run: rundir.RunDir) -> Plan | None:
    """As standing.read_plan, but None for another user's run of a later version, which `latest`
    does not mean."""
    return _known_plan(run) if owner.other(run.path) else standing.read_plan(run)


def _merge(wish: ResumeRequest, run: rundir.RunDir, plan: Plan) -> Found:
    origin = msg("plan.resume.origin", name=run.name)
    moved = moved_paths.changes(run, plan, wish.experiments)
    config = {**plan["config"], **_length(plan["config"]), **moved}
    known = {n: (v, origin) for n, v in config.items() if n in FIELDS and of_the_run(n)}
    options = tasks.spec_of(plan).located(tasks.task_of(plan)["options"], plan)
    known |= {n: (v, origin) for n, v in options.items()}
    return Found(known, run, wish.merged(known, wish.fields, run))


def _length(config: Mapping[str, Any]) -> dict[str, int]:
    """The length of a run, which had no limit in earlier versions."""
    found = {name: config.get(name) for name in ("num_iterations", "num_epochs")}
    return {name: min(n, ENDLESS) for name, n in found.items() if isinstance(n, int)}


def _finished(wish: ResumeRequest, found: Found) -> finished.Finished | None:
    """Checked with the fields of the run's own task."""
    assert found.run
    kind, _ = tasks.find(*found.known.get("task", (tasks.DEFAULT.name, "")))
    resolved = wish.merged(found.known, kind.fields, found.run)
    before = {name: value for name, (value, _) in found.known.items()}
    return finished.find(found.run, before, resolved.config, resolved.options)


def _row(wish: ResumeRequest, run: rundir.RunDir, plan: Plan, end: finished.Finished | None) -> str:
    """The command that resumes a run, with its config and state."""
    config = finished.config_of(plan)
    if end:
        return (
            f"{wish.command(run, **end.longer)}   # "
            f"{config.name + ', ' if config else ''}{end.sentence()}"
        )
    return f"{wish.command(run)}   # {config.name + ', ' if config else ''}{_where(run, plan)}"


def _where(run: rundir.RunDir, plan: Plan) -> str:
    """State, step and time of an unfinished run."""
    summary, failure = standing.ends(run)
    ended = run.summary if summary else run.failure if failure else None
    supervisor = run_reader.read_supervisor(run.supervisor)
    copied = standing.is_copy(run, read_object(run.plan))
    lives = standing.is_active(run, supervisor) if supervisor else not copied
    if summary:
        state = msg("plan.state.done") if summary["status"] == "done" else msg("plan.state.stopped")
    elif failure:
        asked = failure.get("kind") == rundir.ASKED
        state = msg("plan.state.stopped") if asked else msg("plan.state.failed")
    else:
        state = msg("plan.state.running") if lives else msg("plan.state.died")
    saved = manifest.newest(run.checkpoints) or {"step": 0}
    step = summary.get("steps", saved["step"]) if summary else saved["step"]
    total = (run_reader.read_data(standing.data_file(run)) or {}).get("total_steps") or plan[
        "config"
    ].get("num_iterations")
    when = units.clock(
        ended.stat().st_mtime if ended else float(plan.get("created", 0.0)), "%Y-%m-%d %H:%M"
    )
    if total:
        return msg("plan.resume.where_of", state=state, step=step, total=total, when=when)
    return msg("plan.resume.where", state=state, step=step, when=when)
