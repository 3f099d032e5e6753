"""The launch request: script, number of ranks, configuration. Standard library only and no host
facts, so typos are reported before anything is installed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from training import tasks
from training.config import batch, flags, loader, origin, resolve, saved
from training.config.schema import Config
from training.core import log, rundir, standing
from training.core.errors import NothingToDo, Problem, UserError
from training.core.find_run import path_of
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.data import corpus
from training.host import hosts, packages
from training.host.decisions import AS_ASKED, BY_DEFAULT
from training.host.placement import RANK, Topology
from training.plan import auto_resume, elastic, field_checks, finished, run_name, task_checks
from training.plan import cli_args as reading
from training.plan.cli_args import command, folder
from training.plan.roles import count, launcher_options, not_bindable, place_of, role
from training.tasks.spec import TaskSpec
from training.tasks.weights import Weights

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues


@dataclass(kw_only=True)
class LaunchRequest(ABC):
    """A checked request to start ranks. `origins`: field → where its value came from."""

    script: str
    args: list[str]
    place: Topology
    ranks: int
    local_ranks: int  # on this machine
    config: Config
    origins: dict[str, str]
    dry_run: bool
    check: bool  # a dry run with every check and measurement
    json: bool = False  # the check as one JSON object
    save_config: Path | None = None
    experiments: Path
    logs: Path
    notes: list[str] = field(default_factory=list)
    resume_from: rundir.RunDir | None = None
    launch_before: str = ""  # of its newest start, when this request was made
    installed: bool = True  # this interpreter has the packages of the run
    gpu_ranks: int = 0  # ranks that share the GPUs visible to this process
    starter: int = 0  # PID of the process that becomes the supervisor; 0: nothing is started

    def __post_init__(self) -> None:
        self.gpu_ranks = self.gpu_ranks or self.local_ranks
        if self.resume_from and not self.launch_before:
            self.launch_before = standing.launch_of(self.resume_from)

    @cached_property
    def trains_here(self) -> bool:
        """False if --hosts names other machines only: this one starts them and has no ranks."""
        return self.place.source != hosts.HEAD or hosts.include_this(launcher_options(self.config))

    @property
    @abstractmethod
    def base_name(self) -> str:
        """Base name of a run without --run_name."""

    def reason(self, name: str) -> str:
        """Why a field has the value it has, unless a plan decides it."""
        return BY_DEFAULT if self.origins[name] == origin.DEFAULT else AS_ASKED

    def command(self, **changes: Any) -> str:
        return command(self.script, self.args, **changes)

    @abstractmethod
    def command_with(self, ranks: int) -> str:
        """The same command with this number of ranks."""


@dataclass(kw_only=True)
class Request(LaunchRequest):
    """A request for Duet's own training."""

    kind: TaskSpec
    options: FieldValues  # the task's own fields
    config_file: Path | None
    title: str  # from the config file
    gpu_ids: list[int]  # from the config file
    source: corpus.CorpusSource | None  # None: the task reads no text
    resumed: loader.Values  # configuration of the resumed run
    start: Weights | None = None  # of --init_from

    @property
    def base_name(self) -> str:
        return self.title or (self.config_file.stem if self.config_file else self.kind.run_name)

    def reason(self, name: str) -> str:
        if name in self.resumed and not origin.asked_for(self.origins[name]):
            return self.resumed[name][1]  # which may have been its default
        return super().reason(name)

    @property
    def seq_len(self) -> int:
        """Units of one sample."""
        return self.kind.seq_len(self.config)

    @property
    def batch(self) -> batch.Batch | None:
        """None where it depends on the machine."""
        return self.kind.split(self.config, self.origins, self.ranks)

    @property
    def chosen_gpu(self) -> str | None:
        """The GPU that the config file names; single-process runs only."""
        alone = self.ranks == 1 and self.config.device != "cpu"
        return str(self.gpu_ids[0]) if self.gpu_ids and alone else None

    def config_name(self) -> str | None:
        """The config file for a plan; a resumed run keeps the one of its first start."""
        if self.config_file or not self.resume_from:
            return str(self.config_file) if self.config_file else None
        before = finished.config_of(standing.read_plan(self.resume_from))
        return str(before) if before else None

    def save(self) -> None:
        """`--save_config`. Raises UserError."""
        assert self.save_config
        values = saved.chosen(self.values() | self.options, self.origins)
        if problems := saved.write(self.save_config, values, self.origins):
            raise UserError(problems)
        log.success(msg("plan.config.saved", path=self.save_config))

    def login_file(self) -> str | None:
        """The option file with a W&B key: read again where W&B starts, so the key is never written
        to the run directory."""
        if self.config_file and tasks.login_key(self.config_file):
            return str(self.config_file.absolute())
        before = standing.read_plan(self.resume_from) if self.resume_from else None
        return before.get("login_file") if before else None

    def tracked(self) -> list[str]:
        """The packages of the enabled trackers."""
        return trackers(self.config, tasks.login_key(self.config_file))

    def values(self) -> FieldValues:
        """The configuration for a plan, limited to the fields of the task."""
        found = {n: v for n, v in asdict(self.config).items() if n in self.kind.fields}
        if self.batch:  # for tasks that count samples, the default follows from the ranks
            found["total_batch_size"] = self.batch.total_tokens
        elif self.kind.total_follows and self.origins["total_batch_size"] == "default":
            del found["total_batch_size"]  # depends on a micro-batch that is not decided yet
        return found | ({"task": str(self.kind.file)} if self.kind.file else {})

    def command_with(self, ranks: int) -> str:
        args = list(self.args)
        if self.script == LAUNCH_SCRIPT:
            del args[next(i for i in range(len(args)) if flags.parse(args[: i + 1]).positional)]
        changes: FieldValues = {}
        if self.origins["total_batch_size"] == "default" and self.kind.total_follows:
            return command(LAUNCH_SCRIPT, [str(ranks), *args])
        device, seq, total = (
            self.config.device_batch_size,
            self.seq_len,
            self.config.total_batch_size,
        )
        size = 1 if isinstance(device, str) else device
        if not batch.split(size, seq, ranks, total):
            changes = dict(batch.repairs(size, seq, ranks, total)[:1])
        return command(LAUNCH_SCRIPT, [str(ranks), *args], **changes)


# role, configuration, folder of the runs → the run to resume as node 0 has sent it; None: it is
# here (training.launcher.resumed_run)
Received = Callable[[Topology, Config, Path], rundir.RunDir | None]


def nothing(place: Topology, config: Config, experiments: Path) -> None:
    """A Received without other machines."""


def read(
    script: str,
    args: list[str],
    environ: Mapping[str, str],
    installed: bool = True,
    gpus: int = 0,
    received: Received = nothing,
    *,
    here: bool = True,
) -> Request:
    """Check everything that does not depend on the state of the machine. `installed`: this
    interpreter has the packages of the run. `gpus`: number of visible GPUs, for train.py on a whole
    node and for ranks whose launcher gives no number. `received`: gets the run to resume from
    node 0. `here`: the ranks run on this machine.

    Raises UserError with all problems at once.
    """

    def of_node_0(config: Config, experiments: Path) -> rundir.RunDir | None:
        try:
            place = role(script, config, environ, gpus)
        except UserError:  # reported with all other problems
            return None
        return received(place, config, experiments)

    asked = reading.parse_args(script, args, environ, of_node_0)
    problems, resolved, kind = asked.problems, asked.resolved, asked.kind
    config, origins, resume_from, notes = (
        resolved.config,
        resolved.origins,
        asked.resume_from,
        list(asked.file.notes),
    )
    place = place_of(script, config, environ, problems, gpus, asked.typed)
    ranks, local_ranks, more = (
        count(place, asked.typed, script, gpus) if place else (asked.typed, asked.typed, [])
    )
    notes += more + asked.overruled()
    source, wrong = task_checks.check(asked, ranks, installed=installed)
    problems += wrong + field_checks.problems(config, origins)
    problems += elastic.problems(config, origins, ranks, place) if place and ranks else []
    problems += not_bindable(script, config, origins, place, ranks) if place and here else []
    problems += not_trackable(config, origins) if installed else []
    again = partial(command, script, args)
    problems += run_name.problems(config, origins, asked.experiments, resume_from, place, again)
    problems += auto_resume.problems(config, origins, place, again)
    if "save_config" in asked.line.flags:
        problems += saved.problems(path_of(asked.line.flags["save_config"][0]))
    if config.inject:
        from training.config import fault_spec

        problems += fault_spec.check(config.inject, origins["inject"], ranks, config.num_workers)
        notes = [*notes, msg("plan.note.inject", faults=config.inject, origin=origins["inject"])]
    if place and place.kind == RANK and rundir.VARIABLE in environ:
        text = msg("plan.nested.rank", rank=place.rank, run=environ[rundir.VARIABLE])
        separate = msg("plan.nested.separate")
        problems.append(
            Problem(
                "launch.nested",
                text,
                msg("plan.nested.one_per_training"),
                [f"{command(script, args)} --launcher=spawn   # {separate}"],
            )
        )
    if problems or asked.line.unknown or place is None:
        from training.plan import corrections

        nnodes = place.nnodes if place else 0
        each = ranks // nnodes if nnodes else asked.typed
        problems = corrections.problems(asked, script, args, problems, each, nnodes)
        said = place is not None and place.local_rank != 0  # machines may have other files
        raise UserError(problems, said_by_another=said)
    if asked.answer and not asked.line.on("check") and "save_config" not in asked.line.flags:
        raise NothingToDo(asked.answer if place.kind != RANK or place.rank == 0 else "")
    return Request(
        **common(script, args, asked.line, resolved, place),
        ranks=ranks,
        local_ranks=local_ranks,
        kind=kind,
        options=resolved.options,
        config_file=asked.config_file,
        title=asked.file.title,
        gpu_ids=asked.file.gpu_ids,
        source=source,
        resume_from=resume_from,
        resumed=asked.resumed,
        start=asked.start,
        notes=notes + login_note(config, asked.config_file, environ),
        installed=installed,
    )


def trackers(config: Config, key: str | None = None) -> list[str]:
    from training.host.wandb_login import wandb_mode

    wandb = ["wandb"] if wandb_mode(config, key)[0] != "disabled" else []
    return [*(["tensorboard"] if config.tensorboard else []), *wandb]


def login_note(config: Config, file: Path | None, environ: Mapping[str, str]) -> list[str]:
    """A note if this run logs in to W&B with the key in its option file."""
    from training.host.wandb_login import wandb_mode

    key = tasks.login_key(file)
    if not key or environ.get("WANDB_API_KEY") or wandb_mode(config, key)[0] != "online":
        return []
    return [msg("plan.note.login_key", file=file)]


def not_trackable(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Trackers that are requested explicitly but not installed; one that is on by default is just
    disabled."""
    fields = {
        "tensorboard": ("tensorboard", "--tensorboard=false"),
        "wandb": ("wandb_mode", "--wandb_mode=disabled"),
    }
    problems = []
    for package in packages.lacking(trackers(config)):
        field, without = fields[package]
        if origin.asked_for(origins[field]):
            text = msg(
                "plan.tracker.missing",
                field=field,
                value=getattr(config, field),
                origin=origins[field],
                package=package,
            )
            problems.append(
                Problem(
                    "tracker.not_installed", text, "", [packages.install([package]), without], field
                )
            )
    return problems


class _FromCommandLine(TypedDict):
    """Fields of a LaunchRequest that follow from the command line."""

    script: str
    args: list[str]
    place: Topology
    config: Config
    origins: dict[str, str]
    dry_run: bool
    check: bool
    json: bool
    save_config: Path | None
    experiments: Path
    logs: Path


def common(
    script: str,
    args: list[str],
    line: flags.CommandLine,
    resolved: resolve.Resolved,
    place: Topology,
) -> _FromCommandLine:
    """Fields of every LaunchRequest."""
    return {
        "script": script,
        "args": args,
        "place": place,
        "config": resolved.config,
        "origins": resolved.origins,
        "dry_run": line.on("dry_run") or line.on("explain"),
        "check": line.on("check"),
        "json": line.on("json"),
        "save_config": path_of(line.flags["save_config"][0])
        if "save_config" in line.flags
        else None,
        "experiments": folder("out_dir", resolved),
        "logs": folder("log_dir", resolved),
    }
