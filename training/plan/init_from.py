"""--init_from: the trained weights that a new run starts from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config import loader, origin, resolve
from training.config.schema import FIELDS
from training.core import find_run, log, manifest, next_command, rundir, standing
from training.core.errors import Problem, UserError
from training.core.find_run import RunSelector
from training.core.messages import msg
from training.plan.auto_resume import AUTO
from training.tasks import safetensors_file, weights
from training.tasks.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from training.core.contracts.plan import InitRecord, Plan
    from training.tasks.spec import TaskSpec

ASKER = RunSelector("--init_from", "--init_from=", "--init_from=latest")


def find(
    resolved: resolve.Resolved,
    experiments: Path,
    resumed: rundir.RunDir | None,
    problems: list[Problem],
    *,
    restarted: bool,
) -> Weights | None:
    """The weights; None without --init_from, with a problem, or if a run with a checkpoint is
    resumed. One without a checkpoint starts from the same file as before. `restarted`: by torchrun,
    with the flags of the first start, as with --resume=auto."""
    config, origins = resolved.config, resolved.origins
    if not config.init_from:
        return None
    begun = bool(resumed and manifest.newest(resumed.checkpoints))
    repeated = resumed and (restarted or config.resume == AUTO)
    asked = origin.asked_for(origins["init_from"]) and not repeated
    if config.resume not in ("", AUTO) and asked and (begun or not resumed):
        problems.append(
            Problem(
                "flag.contradiction",
                msg("plan.init.and_resume", init=config.init_from, resume=config.resume),
                msg("monitor.option.one_of_them"),
                field="init_from",
            )
        )
        return None
    if begun:
        return None
    word = config.init_from
    kind = None if config.init_weights == "auto" else config.init_weights
    plan = standing.read_plan(resumed) if resumed else None
    before = plan.get("init_from") if plan else None
    try:
        if resumed and before and not asked:
            return _again(before, resumed, experiments, kind)
        bare = find_run.path_of(word)
        if bare.suffix in weights.BARE and not weights.is_weights(bare):
            if find_run.is_file(bare):
                return weights.bare(bare, kind)
            if not find_run.exists(bare):
                what = msg("plan.init.no_file", word=word, origin=origins["init_from"])
                allowed = msg("plan.init.file_wanted")
                raise UserError(Problem("run.missing", what, allowed, field="init_from"))
        named = None if word == find_run.LATEST else word
        return _complete(weights.find(named, experiments, ASKER, kind, "init_weights"))
    except UserError as error:
        problems += [_with_all_kinds(problem) for problem in error.problems]
        if word == "resume":  # of nanoGPT
            problems[-1].fixes.insert(0, "--resume=latest")
        return None


def _with_all_kinds(problem: Problem) -> Problem:
    """A missing run may have been meant as any kind of weights. Comments would keep a suggestion
    from becoming the whole command."""
    if problem.code not in ("run.missing", "run.none"):
        return problem
    fixes = [fix.partition("   # ")[0] for fix in problem.fixes]
    return replace(problem, allowed=msg("plan.init.file_wanted"), fixes=fixes, field="init_from")


def _complete(start: Weights) -> Weights:
    """The newest checkpoint of a run whose file has its full size, with a warning for newer ones;
    rank 0 verifies its contents. Raises UserError."""
    if not start.earlier:
        return start
    wrong: list[str] = []
    for one in (start, *start.earlier):
        text = manifest.incomplete(one.file, one.facts["bytes"])
        if not text:
            return one
        wrong.append(f"{one.file.parent.name}: {text}")
        log.warning(msg("tasks.trained.skipped", text=wrong[-1]))
    raise weights.damaged(start.file.parent.parent, wrong)


def _again(
    before: InitRecord, resumed: rundir.RunDir, experiments: Path, kind: str | None
) -> Weights:
    """The weights of the first start: the word may mean other ones by now. Raises UserError if they
    no longer exist."""
    file = Path(before["file"])
    if weights.is_weights(file) and file.is_file():
        found = weights.find(str(file), experiments, ASKER, kind, "init_weights")
        if found.facts.get("sha256") == before["sha256"]:
            return found
    elif before["sha256"] is None and file.is_file():
        return weights.bare(file, kind)
    raise _gone(*(before, resumed, experiments), lambda name: f"--init_from={shlex.quote(name)}")


def check_file(plan: Plan, run: rundir.RunDir) -> None:
    """Raises UserError if the weights of the plan are lost by now: the data may have been prepared
    for hours, while their own run has replaced them."""
    before = plan["init_from"]
    if not os.path.exists(before["file"]):
        named = next_command.known_as(plan, run) == run.name
        again = partial(next_command.next_command, plan, run)
        experiments = run.path.parent if named else Path()
        raise _gone(before, run, experiments, lambda name: again(init_from=name))


def _gone(
    before: InitRecord, run: rundir.RunDir, experiments: Path, again: Callable[[str], str]
) -> UserError:
    """The weights of `run` no longer exist. `again`: the suggestion to start from the run with this
    name or path, which may have newer ones."""
    file = Path(before["file"])
    source = rundir.RunDir(file.parent.parent.parent)
    name = source.name if source.path.parent == experiments else str(source.path)
    fixes = [again(name)] if manifest.newest(source.checkpoints) else []
    what = msg("plan.init.gone", name=run.name, title=before["title"], file=file)
    allowed = msg("plan.init.other_weights")
    return UserError(Problem("weights.unreadable", what, allowed, fixes, field="init_from"))


def values(start: Weights, given: Iterable[str]) -> loader.Values:
    """Fields that follow from the weights where nothing else sets them: none if a given one is
    unknown to their task, since the run is then of another one."""
    if not start.plan or any(_unknown_to(start, name) for name in given):
        return {}
    spec = tasks.spec_of(start.plan)
    found = {"task": _task(start), **spec.fields_of(start)}
    return {
        name: (value, msg("plan.init.origin", title=start.title)) for name, value in found.items()
    }


def _task(start: Weights) -> str:
    """The task of the weights, as --task takes it."""
    task = tasks.task_of(start.plan)
    return str(task["file"] or task["name"])


def _unknown_to(start: Weights, name: str) -> bool:
    """Whether this is a field of the default task alone, and the weights are of another one."""
    known = (*tasks.spec_of(start.plan).fields, *tasks.task_of(start.plan)["options"])
    return name in FIELDS and name not in known


def differences(start: Weights, kind: TaskSpec, resolved: resolve.Resolved) -> list[Problem]:
    """Why the model of this run cannot have these weights, all reasons at once."""
    if not start.plan:
        return kind.unfit(start, _shapes(start.file), resolved.config, resolved.origins)
    theirs = tasks.spec_of(start.plan)
    if Path(theirs.name).stem != Path(kind.name).stem:
        origins, task = resolved.origins, _task(start)
        other = [n for n in kind.fields if _unknown_to(start, n) and origins[n] != origin.DEFAULT]
        by = f"{origins['task']}"
        if other and by == f"{origin.DEFAULT}":
            by = msg("plan.init.by_field", name=other[0], origin=origins[other[0]])
        now = str(kind.file or kind.name)
        what = msg("plan.init.other_task", title=start.title, theirs=task, task=now, origin=by)
        # --task alone would not help where fields of the present task are set.
        fixes = [] if other else [f"--task={shlex.quote(task)}"]
        return [Problem("init.differs", what, msg("plan.init.same_model"), fixes, "task")]
    return kind.differences(start, resolved.config, resolved.options, resolved.origins)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Those that can be read without torch: rank 0 compares the others, and reports damage."""
    try:
        return safetensors_file.shapes(file) if file.suffix == ".safetensors" else {}
    except ValueError:
        return {}


def record(start: Weights) -> InitRecord:
    return {
        "file": str(start.file),
        "title": start.title,
        "bytes": start.facts.get("bytes"),
        "sha256": start.facts.get("sha256"),
        "averaged": start.averaged,
    }
