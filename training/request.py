"""What the user asks for: script, number of ranks, configuration. Pure: no host facts, no torch, standard library only,
so that a typing error is answered before anything is installed (`python lib/run_module.py training.request SCRIPT ARGS` checks only)."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training import console, rundir
from training.config import batch, files, flags, resolve
from training.config.schema import FIELDS, Config, of_the_run
from training.data import corpus, extras, tokenizer
from training.errors import Problem, UserError
from training.launch import mode
from training.launch.place import NODE, RANK, Asked, Place

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "configs/dual_gpu/quickstart.py"
ENTRYPOINT = "train.py"
# Ranks each script starts on a machine: a number, or None for 'the first argument says'.
SCRIPTS: dict[str, int | None] = {"train_dual_gpu.sh": 2, "train_dual_gpu_enhanced.sh": 2, "launch_train.sh": None, ENTRYPOINT: 1}
MAX_RANKS = 1024
NAME_CHARACTERS = "letters, digits, dot, dash and underscore"


@dataclass(kw_only=True)
class Launch(ABC):
    """A checked wish to start ranks. `origins` says for each field where its value came from."""

    script: str
    args: list[str]
    place: Place
    ranks: int
    local_ranks: int  # on this machine
    config: Config
    origins: dict[str, str]
    dry_run: bool
    check: bool  # dry run with every check and measurement
    json: bool = False  # the check as one JSON object
    experiments: Path
    logs: Path
    notes: list[str] = field(default_factory=list)
    resume_from: rundir.RunDir | None = None
    gpu_ranks: int = 0  # ranks that share the GPUs which this process sees

    def __post_init__(self) -> None:
        self.gpu_ranks = self.gpu_ranks or self.local_ranks

    @property
    @abstractmethod
    def base_name(self) -> str:
        """Of a run that the user gives no name."""

    def command(self, **changes: Any) -> str:
        return command(self.script, self.args, **changes)

    @abstractmethod
    def command_with(self, ranks: int) -> str:
        """The same with so many ranks."""


@dataclass(kw_only=True)
class Request(Launch):
    """Our own training."""

    config_file: Path | None
    source: corpus.Source
    resumed: files.Values  # its configuration

    @property
    def base_name(self) -> str:
        return self.config_file.stem if self.config_file else "run"

    def command_with(self, ranks: int) -> str:
        args = list(self.args)
        if self.script == "launch_train.sh":
            del args[next(i for i in range(len(args)) if flags.parse(args[: i + 1]).positional)]
        changes: dict[str, Any] = {}
        device, seq, total = self.config.device_batch_size, self.config.max_seq_len, self.config.total_batch_size
        size = 1 if isinstance(device, str) else device
        if not batch.split(size, seq, ranks, total):
            changes = dict(batch.repairs(size, seq, ranks, total)[:1])
        return command("launch_train.sh", [str(ranks), *args], **changes)


def command(script: str, args: list[str], **changes: Any) -> str:
    """The user's own command with these flags changed, to paste into a shell."""
    program = "python train.py" if script == ENTRYPOINT else f"./{script}"
    kept, skip = [], False
    for i, arg in enumerate(args):
        name, equals, _ = arg.removeprefix("--").partition("=")
        if skip:
            skip = False
        elif arg.startswith("--") and name.replace("-", "_") in changes:
            skip = not equals and i + 1 < len(args) and not args[i + 1].startswith("--")
        else:
            kept.append(arg)
    return " ".join([program, shlex.join(kept)] if kept else [program]) + "".join(f" --{k}={v}" for k, v in changes.items())


def read(
    script: str,
    args: list[str],
    environ: Mapping[str, str],
    installed: bool = True,
    gpus: int = 0,
) -> Request:
    """Check everything that can be checked without looking at the machine. `installed`: this interpreter is the run's, with
    its packages. `gpus`: visible ones, for train.py where it is given a whole node.

    Raises UserError with all problems at once.
    """
    line = flags.parse(args)
    problems = line.problems
    positional = list(line.positional)
    typed = SCRIPTS[script] or number_of_ranks(positional, problems)
    config_file = _config_file(script, line, positional, problems, environ)
    values, file_problems = files.load(config_file) if config_file else ({}, [])
    problems += file_problems

    first = resolve.resolve(line, values, environ)
    experiments = folder("out_dir", first)
    resumed, resume_from = _resumed(first, experiments, problems) if first.config.resume else ({}, None)
    resolved = resolve.resolve(line, values, environ, resumed) if resumed else first
    problems += resolved.problems
    config, origins = resolved.config, resolved.origins
    place = place_of(script, config, environ, problems, gpus)
    ranks, local_ranks, notes = count(place, typed, script, gpus) if place else (typed, typed, [])
    if resume_from and config_file:
        changed = [n for n in values if n in resumed and values[n][0] != resumed[n][0] and n not in line.flags]
        if changed:
            notes.append(f"resumed run wins over {config_file}: {', '.join(f'{n} stays {resumed[n][0]}' for n in changed)}")

    sizes = ("device_batch_size", "total_batch_size", "max_seq_len")
    unread = bool(file_problems and not values) or any(f": {n}: " in p.what for n in sizes for p in file_problems)
    bad = {name for name in sizes for p in resolved.problems if p.what.startswith(f"{name} ")}
    if not bad and not unread and ranks:
        problems += divides(config, origins, ranks, script, args)
    source, problem = corpus.find(config.data, origins["data"])
    if problem:
        problems.append(problem)
    problems += tokenizer.check(config.tokenizer, origins["tokenizer"])
    if installed:
        problems += extras.missing(source.files if source else (), config.tokenizer)
    problems += run_name(config, origins, experiments, resume_from, place)
    if config.inject:
        from training import inject

        problems += inject.check(config.inject, origins["inject"], ranks, config.num_workers)
        notes = [*notes, f"faults will happen on purpose: {config.inject} ({origins['inject']})"]
    if place and place.kind == RANK and rundir.VARIABLE in environ:
        text = f"this is rank {place.rank} of the run {environ[rundir.VARIABLE]}: a launcher in a rank would start every rank again"
        problems.append(
            Problem(text, "one launcher for one training", [f"{command(script, args)} --launcher=spawn   # a training of its own"])
        )
    if problems or source is None or place is None:
        raise UserError(problems, said_by_another=place is not None and place.kind == RANK and place.rank != 0)
    return Request(
        **common(script, args, line, resolved, place),
        ranks=ranks,
        local_ranks=local_ranks,
        config_file=config_file,
        source=source,
        resume_from=resume_from,
        resumed=resumed,
        notes=notes,
    )


def common(script: str, args: list[str], line: flags.CommandLine, resolved: resolve.Resolved, place: Place) -> dict[str, Any]:
    """What every Launch has of its command line."""
    return {
        "script": script,
        "args": args,
        "place": place,
        "config": resolved.config,
        "origins": resolved.origins,
        "dry_run": line.on("dry_run") or line.on("explain"),
        "check": line.on("check"),
        "json": line.on("json"),
        "experiments": folder("out_dir", resolved),
        "logs": folder("log_dir", resolved),
    }


def place_of(script: str, config: Config, environ: Mapping[str, str], problems: list[Problem], gpus: int) -> Place | None:
    asked = Asked(config.launcher, config.nnodes, config.node_rank, config.master_addr, config.master_port)
    try:
        return mode.find(environ, asked, starts_ranks=script != ENTRYPOINT, several_gpus=gpus > 1)
    except UserError as error:
        problems += error.problems
        return None


def count(place: Place, typed: int, script: str, gpus: int) -> tuple[int, int, list[str]]:
    """(ranks in all, ranks on this machine, what to say of it). A platform's numbers win over the one that was typed."""
    if place.kind == RANK:
        local = place.local_world_size or min(place.world_size, max(place.local_rank + 1, gpus))
        differs = script != ENTRYPOINT and typed not in (0, place.world_size, local)
        return (
            place.world_size,
            local,
            [f"{typed} processes were asked for, {place.world_size} ranks are started already"] if differs else [],
        )
    here = max(1, gpus) if place.kind == NODE and script == ENTRYPOINT else typed
    return here * place.nnodes, here, []


def number_of_ranks(positional: list[str], problems: list[Problem]) -> int:
    """The N of `./launch_train.sh N`; 0 when it is wrong."""
    allowed = f"a whole number from 1 to {MAX_RANKS}: how many processes to start"
    fixes = [f"./launch_train.sh 2 {QUICKSTART}"]
    if not positional:
        problems.append(Problem("the number of processes is missing", allowed, fixes))
        return 0
    word = positional.pop(0)
    if not word.isdecimal() or len(word) > 9 or not 1 <= int(word) <= MAX_RANKS:
        problems.append(Problem(f"the number of processes is {word!r} (first argument)", allowed, fixes))
        return 0
    return int(word)


def _config_file(
    script: str, line: flags.CommandLine, positional: list[str], problems: list[Problem], environ: Mapping[str, str]
) -> Path | None:
    given = [line.flags["config"][0]] if "config" in line.flags else []
    given += positional
    if not given:
        resumes = "resume" in line.flags or environ.get(f"{resolve.PREFIX}RESUME")
        if script == "train_dual_gpu.sh" and not resumes:
            names = sorted(p.stem for p in (ROOT / "configs/dual_gpu").glob("[a-z]*.py"))
            problems.append(Problem("no config given", f"a config file; ready ones: {', '.join(names)}", [f"./{script} {QUICKSTART}"]))
        return None
    for extra in given[1:]:
        problems.append(Problem(f"{extra!r} is one argument too many: the config is {given[0]!r}", "one config file"))
    return Path(os.path.expanduser(given[0]))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def folder(name: str, resolved: resolve.Resolved) -> Path:
    """Default folders stand in the project, wherever it is started from; a folder that the user names, where he is."""
    value = Path(os.path.expanduser(getattr(resolved.config, name)))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    return ROOT / value if resolved.origins[name] == "default" else value.absolute()


def _resumed(first: resolve.Resolved, experiments: Path, problems: list[Problem]) -> tuple[files.Values, rundir.RunDir | None]:
    """The configuration of the run to continue."""
    wanted, origin = first.config.resume, first.origins["resume"]
    if wanted == "latest":
        run = rundir.newest(experiments)
        if run is None:
            problems.append(Problem(f"resume is 'latest' ({origin}), but there is no run in {experiments}", "a run directory"))
            return {}, None
    else:
        run = rundir.RunDir(next((p for p in (Path(wanted), experiments / wanted) if os.path.isdir(p)), Path(wanted)).absolute())
    plan = rundir.read_json(run.plan)
    if plan is None or not isinstance(plan.get("config"), dict):
        names = sorted(p.parent.name for p in experiments.glob("*/plan.json"))[-3:]
        fixes = [f"--resume={shlex.quote(n)}" for n in reversed(names)]
        problems.append(Problem(f"resume is {wanted!r} ({origin}): no run there", "a run directory, a run's name, or latest", fixes))
        return {}, None
    origin = f"resumed run {run.name}"
    known = {n: (v, origin) for n, v in plan["config"].items() if n in FIELDS and of_the_run(n)}
    return known, run


def divides(config: Config, origins: Mapping[str, str], ranks: int, script: str, args: list[str]) -> list[Problem]:
    """The batch must divide; otherwise the nearest batches that do, as commands."""
    total, seq = config.total_batch_size, config.max_seq_len
    if isinstance(config.device_batch_size, str):
        if batch.device_choices(seq, ranks, total):
            return []
        device = 1
    else:
        device = config.device_batch_size
        if batch.split(device, seq, ranks, total):
            return []
    what = (
        f"total_batch_size {total} ({origins['total_batch_size']}) does not divide by device_batch_size {config.device_batch_size} "
        f"({origins['device_batch_size']}) × max_seq_len {seq} ({origins['max_seq_len']}) × {ranks} ranks = {device * seq * ranks}"
    )
    fixes = [command(script, args, **{name: value}) for name, value in batch.repairs(device, seq, ranks, total)]
    return [Problem(what, f"a multiple of {device * seq * ranks} tokens", fixes)]


def run_name(
    config: Config, origins: Mapping[str, str], experiments: Path, resume_from: rundir.RunDir | None, place: Place | None
) -> list[Problem]:
    name = config.run_name
    if not name or resume_from:
        return []
    said = f"run_name is {name!r} ({origins['run_name']})"
    if not all(c.isalnum() or c in "._-" for c in name) or name.startswith((".", "-")) or len(os.fsencode(name)) > 128:
        return [Problem(said, f"{NAME_CHARACTERS}, at most 128")]
    if place and not place.first_node:
        return []  # on a common disk node 0 has made it already
    if (experiments / name).exists():
        free = next(f"{name[:100]}_{n}" for n in itertools.count(2) if not (experiments / f"{name[:100]}_{n}").exists())
        fixes = [f"--resume={name}"] if rundir.read_json(rundir.RunDir(experiments / name).plan) else []
        return [Problem(f"{said}, but {experiments / name} is there already", "a new name", [*fixes, f"--run_name={free}"])]
    return []


def main() -> int:
    script, args = sys.argv[1], sys.argv[2:]
    from training import script as own_script

    try:
        if own_script.asked_for(args):
            own_script.read(script, args, os.environ)
        else:
            read(script, args, os.environ, installed=False)
    except UserError as error:
        console.report(error)
        return int(error.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
