"""Trained weights on disk: in a run, one of its checkpoints, an exported folder, or a bare file. No
torch: training.tasks.trained reads the tensors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import evaluations, find_run, log, manifest, run_reader, rundir
from training.core.errors import Problem, UserError
from training.core.find_run import RunSelector
from training.core.jsonl import Record, items, mtime, text
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.suggest import suggest

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ExportRecord, ManifestRecord

EXPORT, EXPORT_FORMAT = "duet.json", 2  # 1: before --key_offset
SAFETENSORS, TORCH = "model.safetensors", "model.pt"
TORCH_FORM, HUB = "torch", "hf"
FORMATS = ("safetensors", TORCH_FORM, HUB)  # of an export
BEST = "best"  # RUN/best: the checkpoint with the best evaluation
EMA, RAW = "ema", "raw"
KINDS = (EMA, RAW)  # of weights: their moving average, or as trained
PARTS: dict[str, type | tuple[type, ...]] = {  # of EXPORT, with their types
    "task": dict,
    "config": dict,
    "shape": dict,
    "tokenizer": (str, type(None)),
    "run": str,
    "step": int,
    "weights": str,
    "bytes": int,
    "sha256": str,
}
BARE = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Weights:
    """`plan`: of the run, or as much of it as an exported folder has; `folders`: may contain the
    tokenizer; `earlier`: checkpoints to use instead if this one is damaged; `again`: finds those of
    the run once more, since its training replaces them meanwhile."""

    file: Path
    name: str  # of the run
    plan: Plan
    facts: ManifestRecord  # shape, tokenizer, step, ema; bytes and sha256 of the file
    folders: tuple[Path, ...] = ()
    run: RunDir | None = None  # None: exported
    earlier: tuple[Weights, ...] = ()
    averaged: bool = False  # read the moving average; where the file has one, if that is unknown
    again: Callable[[], Weights] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return EMA if self.averaged else RAW

    @property
    def task_file(self) -> Path | None:
        """The file of a user's task; None: a built-in one, or unknown."""
        task = self.plan.get("task")
        return Path(task["file"]) if task and task["file"] else None

    @property
    def step(self) -> int:
        return self.facts["step"]

    @property
    def title(self) -> str:
        """'RUN, step 200', or the name of a file."""
        if "step" not in self.facts:
            return self.name
        return title(self.name, self.step, self.kind)

    def planned(self, plan: Plan) -> Weights:
        """The same with another plan, the earlier ones too."""
        earlier = tuple(replace(one, plan=plan) for one in self.earlier)
        return replace(self, plan=plan, earlier=earlier)

    def damage(self) -> str:
        """What is wrong with the file, or "". Reads all of it."""
        return manifest.damage(self.file, self.facts["bytes"], self.facts["sha256"])


def title(name: str, step: int, kind: str) -> str:
    """'RUN, step 200'."""
    if kind == EMA:
        return msg("tasks.weights.title_averaged", name=name, step=step)
    return msg("tasks.weights.title", name=name, step=step)


def find(
    word: str | None,
    experiments: Path,
    asker: RunSelector,
    kind: str | None = None,
    flag: str = "weights",
    of_kind: RunSelector | None = None,
) -> Weights:
    """The weights of a run (its newest checkpoint; RUN/best: the one with the best evaluation), a
    checkpoint, an exported folder or a file in one of these; None: the newest run with
    weights. `kind`: one of KINDS, given by `flag`; None: the moving average if there is one.
    `of_kind`: `asker` without `flag`, where it has that. Reads manifests only, not the weights.
    Raises UserError."""
    if kind not in (None, *KINDS):  # of load_model(); the commands check theirs before
        near = next(iter(suggest(str(kind).lower(), list(KINDS), most=1)), EMA)
        what, fixes = msg("tasks.weights.kind", kind=kind), [f'kind="{near}"']
        raise UserError(Problem("flag.value", what, f"{EMA}, {RAW}, None", fixes))
    found = None
    if word is not None:
        found = _at(find_run.path_of(word)) or _at(experiments / word)
    if found is None:
        best = word is not None and _asks_for_best(word, experiments)
        name = os.path.dirname(word.rstrip("/")) if best and word else word
        newest = name is None or (best and name == find_run.LATEST)
        trained = _newest_trained(experiments) if newest else None
        run = trained or find_run.find(None if newest else name, experiments, asker)
        found = _best(run) if best else _of_run(run, experiments, asker)
        same = f"{run.path}/{BEST}" if best else str(run.path)
        again = partial(find, same, experiments, asker, kind, flag, of_kind)
        found = replace(found, again=again)
    of_kind = of_kind or asker
    command = of_kind.newest if word is None else of_kind.command(word)
    # An exported folder is not its run, which may have both kinds.
    shown = found.title if found.run or word is None else word
    return _of_kind(found, kind, f"{command} --{flag}=", shown)


def _newest_trained(experiments: Path) -> RunDir | None:
    """The most recently planned run with a checkpoint: a newer one may wait in a queue, or be that
    of a user script."""
    runs = (RunDir(folder) for _, folder in sorted(find_run.planned(experiments), reverse=True))
    return next((run for run in runs if manifest.all_in(run.checkpoints)), None)


def bare(file: Path, kind: str | None = None) -> Weights:
    """A file of tensors of another program: nothing else is known of it."""
    return Weights(file.absolute(), file.name, cast("Plan", {}), {}, averaged=kind != RAW)


def _of_kind(found: Weights, kind: str | None, again: str, shown: str) -> Weights:
    """`again`: the words that select another kind, without it; `shown`: the weights as named in a
    problem. Raises UserError if weights of this kind are missing."""
    has = "ema" in found.facts
    if kind == EMA and not has:
        what = (
            msg("tasks.weights.no_average", title=shown)
            if found.run
            else msg("tasks.weights.no_average_exported", title=shown)
        )
        raise UserError(
            Problem(
                "weights.other_kind",
                what,
                RAW,
                [f"{again}{RAW}"],
            )
        )
    if kind == RAW and has and found.run is None:  # exported: one kind only
        raise UserError(
            Problem(
                "weights.other_kind",
                msg("tasks.weights.only_average", title=shown),
                EMA,
                [f"{again}{EMA}"],
            )
        )
    earlier = tuple(
        _of_kind(one, None if kind == EMA else kind, again, one.title)
        for one in found.earlier
        if kind != EMA or "ema" in one.facts
    )
    return replace(found, averaged=has and kind != RAW, earlier=earlier)


def is_weights(path: Path) -> bool:
    """Whether this is a checkpoint in its run, an exported folder or a file in one of them."""
    return any(
        find_run.is_file(place / EXPORT)
        or (find_run.is_file(place / manifest.NAME) and find_run.is_run(_run_of(place.absolute())))
        for place in _places(path)
    )


def _run_of(checkpoint: Path) -> RunDir:
    return RunDir(checkpoint.parent.parent)


def _places(path: Path) -> list[Path]:
    return [path, *([path.parent] if find_run.is_file(path) else [])]


def _at(path: Path) -> Weights | None:
    for place in _places(path):
        if find_run.is_file(place / EXPORT):
            return _exported(place.absolute())
        if find_run.is_file(place / manifest.NAME):
            return _checkpoint(place.absolute())
    return None


def _exported(folder: Path) -> Weights:
    file = folder / EXPORT
    read = rundir.read_json(file) or {}
    form = read.get("format")
    if not (isinstance(form, int) and 0 < form <= EXPORT_FORMAT and _is_export(read)):
        what = (
            msg("tasks.weights.later_format", file=file, form=form, readable=EXPORT_FORMAT)
            if isinstance(form, int) and form > EXPORT_FORMAT
            else msg("core.manifest.damaged", file=file)
        )
        raise UserError(Problem("weights.unreadable", what, msg("tasks.weights.allowed")))
    found = cast("ExportRecord", read)
    task = dict(found["task"])
    if task["file"]:
        task["file"] = str(folder / str(task["file"]))
    task["options"] = _at_home(found["task"]["options"])
    plan = cast("Plan", {"task": task, "config": found["config"]})
    if isinstance(precision := found.get("precision"), str):
        plan["precision"] = {"value": precision, "reason": ""}
    if isinstance(fast := found.get("tf32"), bool):
        plan["tf32"] = {"value": fast, "reason": ""}
    facts: ManifestRecord = {
        "step": found["step"],
        "shape": _at_home(found["shape"]),
        "tokenizer": found["tokenizer"],
        "bytes": found["bytes"],
        "sha256": found["sha256"],
    }
    if "ema" in found:
        facts["ema"] = found["ema"]
    return Weights(folder / found["weights"], found["run"], plan, facts, (folder,))


def _at_home(values: FieldValues) -> FieldValues:
    """Paths in the home folder are stored with `~`."""
    return {
        name: os.path.expanduser(value)  # noqa: PTH111 – Path.expanduser raises without a home
        if isinstance(value, str) and value.startswith("~/")
        else value
        for name, value in values.items()
    }


def _is_export(record: Record) -> bool:
    """Whether all parts are there, with their types."""
    right = all(isinstance(record.get(name, ...), kind) for name, kind in PARTS.items())
    return right and _is_task(record["task"])


def _is_task(record: object) -> bool:
    """Whether this is the task of a plan; None: of plans from before there were several."""
    return record is None or (
        isinstance(record, dict)
        and {"name", "file"} <= record.keys()
        and isinstance(record.get("options"), dict)
    )


def _checkpoint(folder: Path) -> Weights:
    """A checkpoint that was named itself: no other one replaces it."""
    run = _run_of(folder)
    if not find_run.is_run(run):  # copied alone
        what = msg("tasks.weights.no_run", path=folder, file=run.plan.name)
        raise UserError(Problem("run.damaged", what, msg("tasks.weights.with_run")))
    facts, wrong = manifest.read(folder)
    if facts is None:
        raise UserError(
            Problem(
                "checkpoint.damaged",
                msg("tasks.weights.damaged", path=folder, wrong=wrong),
                msg("tasks.weights.allowed"),
            )
        )
    return _from(run, folder, facts, _plan(run))


def _asks_for_best(word: str, experiments: Path) -> bool:
    """Whether this is RUN/best, and not a run with that name."""
    run, _, name = word.rstrip("/").rpartition("/")
    places = (find_run.path_of(word), experiments / word)
    return bool(run) and name == BEST and not any(find_run.is_run(RunDir(p)) for p in places)


def _best(run: RunDir) -> Weights:
    """The checkpoint with the best evaluation at its step. Raises UserError if there is none."""
    _not_archived(run)
    found = evaluations.best_checkpoint(manifest.all_in(run.checkpoints))
    if found is None:
        what = msg("tasks.weights.no_best", name=run.name)
        raise UserError(Problem("weights.no_best", what, msg("tasks.weights.allowed"), []))
    return _checkpoint(found[0])


def _not_archived(run: RunDir) -> None:
    """Raises UserError for an archived run."""
    if run.is_archived:
        record = rundir.read_json(run.archived) or {}
        what = msg("tasks.weights.archived", name=run.name)
        fix = f"tar -xf {shlex.quote(text(record.get('file')) or '')}"
        if any(str(name).endswith(f"/{manifest.STATE}") for name in items(record.get("left_out"))):
            what = msg("tasks.weights.archived_without", name=run.name)
            fix = f"./duet archive {shlex.quote(run.name)}"  # where the run is
        raise UserError(Problem("run.archived", what, msg("tasks.weights.allowed"), [fix]))


def _of_run(run: RunDir, experiments: Path, asker: RunSelector) -> Weights:
    _not_archived(run)
    plan, found, skipped = _plan(run), [], []
    for folder in reversed(manifest.all_in(run.checkpoints)):
        facts, wrong = manifest.read(folder)
        if facts:
            found.append(_from(run, folder, facts, plan))
        elif folder.exists():  # not replaced by the training since it was listed
            skipped.append(f"{folder.name}: {wrong}")
    if found:
        for text in skipped:
            log.warning(msg("tasks.trained.skipped", text=text))
        return replace(found[0], earlier=tuple(found[1:]))
    if skipped:
        raise damaged(run.checkpoints, skipped)
    others = [
        one
        for one in sorted(
            experiments.glob("*/checkpoints"), key=lambda p: mtime(p) or 0.0, reverse=True
        )
        if manifest.newest(one)
    ]
    what = (
        msg("tasks.weights.script", name=run.name)
        if plan.get("script")
        else msg("tasks.weights.none", name=run.name)
    )
    fixes = [asker.command(one.parent.name) for one in others[:1]]
    raise UserError(Problem("weights.none", what, msg("tasks.weights.allowed"), fixes))


def damaged(checkpoints: Path, wrong: list[str]) -> UserError:
    return UserError(
        Problem(
            "checkpoint.damaged",
            msg("tasks.weights.all_damaged", folder=checkpoints, skipped="; ".join(wrong)),
            msg("tasks.weights.allowed"),
        )
    )


def _plan(run: RunDir) -> Plan:
    plan = run_reader.read_plan(run.plan)
    if plan is None or not isinstance(plan.get("config"), dict) or not _is_task(plan.get("task")):
        if plan and plan.get("script"):
            return plan
        raise UserError(
            Problem(
                "run.damaged",
                msg("core.manifest.damaged", file=run.plan),
                msg("tasks.weights.allowed"),
            )
        )
    return plan


def _from(run: RunDir, folder: Path, facts: ManifestRecord, plan: Plan) -> Weights:
    data = run_reader.read_data(run.data) or {}
    folders = [run.tokenizer, *([Path(data["folder"])] if "folder" in data else [])]
    return Weights(folder / manifest.STATE, run.name, plan, facts, tuple(folders), run)
