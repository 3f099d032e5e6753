"""What a cleaning would delete, and what it leaves alone and why."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.cli.cleaning import queued
from training.cli.cleaning.options import CHECKPOINTS, LOGS, RUNS, TRACES, CleanOptions
from training.core import evaluations, find_run, manifest, owner, run_reader, standing, sweep_dir
from training.core.jsonl import Record, dig, number, read_object, text
from training.core.messages import msg
from training.core.project import typed
from training.core.rundir import RunDir
from training.core.units import duration
from training.monitor.run_status import DIED
from training.monitor.runs import facts
from training.monitor.runs.facts import DAMAGED, EMPTY, FOREIGN, LIVE, RunFacts, size_on_disk

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord

TRASH = ".trash-"  # prefix of what is being deleted
# A run whose processes are not found, though its machine is this one, is over once it has written
# nothing for this time: /proc with hidepid hides those of other users, and early runs have not
# recorded their PID namespace.
HIDDEN_S = 600.0
MEMORY = re.compile(r"rank\d+\.memory\.pickle")


@dataclass(frozen=True)
class Item:
    """One folder or file to delete. `verified`: checkpoints of which one must be intact, newest
    first; () for no condition."""

    run: RunDir
    kind: str  # runs, checkpoints, logs, traces, or trash of an interrupted cleaning
    path: Path
    bytes: int
    verified: tuple[Path, ...] = ()


@dataclass
class Selection:
    items: list[Item] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)  # (run, reason)
    missing: list[str] = field(default_factory=list)  # names that no run has
    runs: list[str] = field(default_factory=list)  # in the folder
    chosen: int = 0  # how many of them the conditions select

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


def select(options: CleanOptions) -> Selection:
    """Raises OSError if the folder cannot be read."""
    found = Selection()
    for path in sorted(options.dir.glob(f"{TRASH}*")):
        if user := owner.other(path):
            found.left.append((path.name, msg("cli.clean.other_user", user=user)))
        elif not path.is_symlink():
            found.items.append(Item(RunDir(path), "trash", path, size_on_disk(path)))
    runs, needed = facts.read_all(options.dir), _needed(options.dir)
    found.runs = [run.name for run in runs]
    found.missing = [
        name.value for name in options.names if not any(name.holds(run) for run in runs)
    ]
    for run in runs:
        if not _chosen(run, options):
            continue
        found.chosen += 1
        if reason := untouchable(run):
            found.left.append((run.name, reason))
            continue
        for item in _items(run, options):
            if reason := _kept(item, options, needed):
                name = f"{run.name}/{item.path.name}" if item.kind != RUNS else run.name
                found.left.append((name, reason))
            else:
                found.items.append(item)
    return found


def _kept(item: Item, options: CleanOptions, needed: Mapping[Path, str]) -> str:
    """Why this part of a run stays; "" if it goes."""
    if not inside(item.path, options.dir):
        return msg("cli.clean.link")
    real = Path(os.path.realpath(item.path))
    return next((why for folder, why in needed.items() if folder.is_relative_to(real)), "")


def _needed(experiments: Path) -> dict[Path, str]:
    """The folders of weights that a run starts from (--init_from), and why they stay: it may be
    running, or wait in a queue or for its turn in a sweep, and has no checkpoint of its own."""
    found = {}
    for name in sweep_dir.names(experiments):
        sweep = sweep_dir.SweepDir(experiments, name)
        record = sweep_dir.read(sweep)
        if record is None or not _continues(record, experiments):
            continue
        command = typed(sweep_dir.command("resume", name, experiments))
        why = msg("cli.clean.sweep_starts_from", name=name, command=command, folder=sweep.path)
        for planned in record["runs"]:
            if weights := sweep_dir.needed_weights(planned, experiments):
                found[Path(os.path.realpath(weights)).parent] = why
    for run in map(RunDir, find_run.folders(experiments)):
        file = text(dig(read_object(run.plan), "init_from", "file"))
        if file and not manifest.newest(run.checkpoints) and _may_run(facts.read(run.path)):
            why = msg("cli.clean.starts_from", name=run.name)
            found[Path(os.path.realpath(file)).parent] = why
    return found


def _continues(sweep: SweepRecord, experiments: Path) -> bool:
    """Whether a sweep has runs, or may not have made any yet: its first start may be slow, or was
    refused and is tried again later."""
    age = time.time() - (number(sweep.get("created")) or 0.0)
    return age < standing.ELSEWHERE_S or any(
        (experiments / run["name"]).exists() for run in sweep["runs"]
    )


def untouchable(run: RunFacts) -> str:
    """Why nothing of this run may be deleted now; "" if it may."""
    if run.run.path.is_symlink():
        return msg("cli.clean.link")
    if user := owner.other(run.run.path):
        return msg("cli.clean.other_user", user=user)
    return _may_run(run)


def _may_run(run: RunFacts) -> str:
    """Why a run may be running, or wait in a queue; "" if it does not."""
    if run.state in LIVE:
        return msg("cli.clean.live", state=facts.word(run.state))
    if run.state == FOREIGN:
        return msg("cli.clean.foreign")
    # its plan is written within milliseconds
    if run.state in (DAMAGED, EMPTY) and (run.age_s or 0.0) < standing.STARTED_WITHIN_S:
        return msg("cli.clean.live", state=facts.word("starting"))
    supervisor = run_reader.read_supervisor(run.run.supervisor)
    plan = read_object(run.run.plan)
    elsewhere = standing.other_host(plan, cast("Record", supervisor or {}))
    # its processes, and the times of its files, are those of the original
    if standing.is_copy(run.run, plan) and not elsewhere:
        return queued.reason(run)
    here = supervisor is not None and standing.is_here(supervisor)
    # finished, but the supervisor still writes its report
    if supervisor and here and standing.lives(supervisor):
        return msg("cli.clean.live", state=facts.word("running"))
    # Its supervisor shows that it is over, if that is of its last start; ranks that another
    # launcher started have none, and their processes may be those of another machine.
    began = number(supervisor.get("started")) or 0.0 if supervisor else 0.0
    here = here and began >= (run.started or 0.0)
    quiet = standing.quiet_s(run.run) if run.state == DIED else math.inf
    if here and quiet < HIDDEN_S:
        return msg("cli.clean.hidden", age=duration(quiet))
    if not here and quiet < standing.ELSEWHERE_S:
        return msg("cli.clean.elsewhere", age=duration(quiet))
    return queued.reason(run)


def inside(path: Path, experiments: Path) -> bool:
    """Whether no part of the path below `experiments` is a link, so that what is deleted is where
    it seems to be."""
    real = os.path.realpath(experiments)
    return os.path.realpath(path) == os.path.join(real, path.relative_to(experiments))


def _chosen(run: RunFacts, options: CleanOptions) -> bool:
    return (
        (not options.names or any(name.holds(run) for name in options.names))
        and all(term.holds(run) for term in options.terms)
        and (not options.states or run.state in options.states)
        and (options.older_s is None or (run.age_s or 0.0) > options.older_s)
    )


def _items(run: RunFacts, options: CleanOptions) -> list[Item]:
    """What goes of one run."""
    at = run.run
    if RUNS in options.what:
        return [Item(at, RUNS, at.path, run.bytes)]
    rests = [*at.path.glob(f"{TRASH}*"), *at.checkpoints.glob(f"{manifest.TEMPORARY}*")]
    paths: list[tuple[str, Path]] = [("trash", path) for path in rests]
    if LOGS in options.what:
        paths += [(LOGS, path) for path in (at.ranks, at.hangs)]
    if TRACES in options.what:
        paths.append((TRACES, at.profile))
        if LOGS not in options.what:
            memory = (p for p in at.ranks.glob("*.pickle") if MEMORY.fullmatch(p.name))
            paths += [(TRACES, path) for path in memory]
    items = [
        Item(at, kind, path, size_on_disk(path) if path.is_dir() else _bytes(path))
        for kind, path in paths
        if path.exists() or path.is_symlink()
    ]
    if CHECKPOINTS in options.what:
        items += _checkpoints(run, options)
    return items


def _checkpoints(run: RunFacts, options: CleanOptions) -> list[Item]:
    """All but those to keep. A checkpoint whose manifest is damaged is never the last one."""
    there = manifest.all_in(run.run.checkpoints)
    valid = [path for path in there if _looks_intact(path)]
    keep = set(valid[-options.last :]) if options.last else set()
    if options.best and (best := evaluations.best_checkpoint(valid)):
        keep.add(best[0])
    if options.last and not keep:
        return []  # nothing to fall back on
    verified = tuple(reversed(valid)) if options.last else ()
    return [
        Item(run.run, CHECKPOINTS, path, size_on_disk(path), verified)
        for path in there
        if path not in keep
    ]


def _looks_intact(path: Path) -> bool:
    """Manifest and size only: fast."""
    found = manifest.read(path)[0]
    return found is not None and _bytes(path / manifest.STATE, on_disk=False) == found["bytes"]


def is_intact(path: Path) -> bool:
    """Reads all weights."""
    found = manifest.read(path)[0]
    if found is None:
        return False
    return not manifest.damage(path / manifest.STATE, found["bytes"], found["sha256"])


def _bytes(path: Path, *, on_disk: bool = True) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_blocks * 512 if on_disk else found.st_size
