"""The measurement: the same work per rank for each number of ranks, with the decisions of the plan
fixed."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.cli.scaling.options import COMMAND, ScalingOptions
from training.config import flags, loader, resolve
from training.config.schema import FIELDS, Config
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT, ROOT
from training.host import env_vars, gpus, visible_devices
from training.plan import builder
from training.plan import training_plan as planner
from training.plan.cli_args import QUICKSTART
from training.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from training.core.contracts.plan import DecisionName, Plan

WARM_UP_STEPS = 5  # at the start of each run, not counted
THREADS = "OMP_NUM_THREADS"
# Flags set by the measurement; they are refused on the command line, not silently overridden.
FIXED: dict[str, str] = {
    "num_iterations": "",
    "num_epochs": "0",
    "max_time": "0",
    "eval_every": "0",
    "sample_tokens": "0",
    "save_every": "0",
    "keep_checkpoints": "1",
    "max_total_batch_size": "0",  # the batch would grow with the ranks
    "notify": "",
    "tensorboard": "false",
    "report": "false",
    "use_dummy_wandb": "true",
    "resume": "",
    "run_name": "",
    "out_dir": "",
    "log_dir": "",
}
# Decisions that depend on free memory and GPUs: fixed for all numbers of ranks.
PINNED: tuple[DecisionName, ...] = (
    "device",
    "precision",
    "compile",
    "device_batch_size",
)


@dataclass(frozen=True)
class Experiment:
    """A checked measurement. `args`: config and flags of every run, without total_batch_size and
    `FIXED`."""

    config: str
    args: tuple[str, ...]
    ranks: tuple[int, ...]  # ascending, 1 first
    steps: int  # measured, per run
    rounds: int
    device: str  # cuda or cpu
    device_reason: str
    precision: str
    sequences: int  # or samples, per rank and micro-batch
    seq_len: int
    accumulation: int  # micro-batches per optimizer step
    gpus: tuple[str, ...] = ()  # of the ranks, as in CUDA_VISIBLE_DEVICES
    threads: int = 1  # per rank, on the CPU
    cores: int = 1
    unit: str = "tokens"  # of the task
    fixed: tuple[str, ...] = tuple(FIXED)  # limited to fields of the task
    warnings: tuple[str, ...] = ()  # of the plan: GPUs in use by others, for example

    @property
    def tokens_per_rank(self) -> int:
        """Tokens, or samples, of one rank and optimizer step."""
        return self.sequences * self.seq_len * self.accumulation

    def share_cores(self, ranks: int) -> bool:
        return self.device == "cpu" and ranks * self.threads > self.cores

    def command(self, ranks: int, folder: Path, name: str, more_steps: int = 0) -> list[str]:
        """The command of a run in `folder`."""
        own = {
            "num_iterations": self.steps + WARM_UP_STEPS + more_steps,
            "run_name": name,
            "out_dir": folder,
            "log_dir": folder / "logs",
        }
        values = {
            **{name: FIXED[name] for name in self.fixed},
            **own,
            "total_batch_size": self.tokens_per_rank * ranks,
        }
        return [
            str(ROOT / LAUNCH_SCRIPT),
            str(ranks),
            *self.args,
            *(f"--{k}={v}" for k, v in values.items()),
        ]


def prepare(options: ScalingOptions, environ: Mapping[str, str]) -> Experiment:
    """Check everything with a plan for the largest number of ranks. Raises UserError with all
    problems, including the launcher's."""
    problems = list(options.problems)
    line = flags.parse(options.rest, tasks.everything())
    args = list(options.rest)
    named = (
        line.flags["task"][0]
        if "task" in line.flags
        else environ.get(f"{resolve.PREFIX}TASK", tasks.DEFAULT.name)
    )
    for name, (_, typed) in line.flags.items():
        if name in FIXED:
            fixes = [f"--steps={options.steps}"] if name == "num_iterations" else []
            problems.append(
                Problem(
                    "scaling.fixed_flag",
                    msg("cli.scaling.fixed_flag", typed=typed),
                    msg("cli.scaling.left_out"),
                    fixes,
                )
            )
            args = flags.without(args, name)
    given = [line.flags["config"][0]] if "config" in line.flags else line.positional[:1]
    config = given[0] if given else named
    if not given and named == tasks.DEFAULT.name:
        config, given = QUICKSTART, [str(ROOT / QUICKSTART)]
        args.insert(0, given[0])
    if "dry_run" in line.flags:
        problems.append(
            Problem(
                "scaling.no_dry_run",
                msg("cli.scaling.no_dry_run"),
                msg("cli.scaling.left_out"),
                [f"./{LAUNCH_SCRIPT} 2 {shlex.join(given and [config])} --dry_run"],
            )
        )
        args = flags.without(args, "dry_run")
    spec, resolved = _configuration(options.rest, given, environ)
    ranks = options.ranks or default_ranks(resolved.config.device, environ)
    # As variables, so that commands suggested by the plan contain only flags that the user typed.
    fixed = _fixed(spec) | {
        "num_iterations": "1",
        "out_dir": tempfile.gettempdir(),
        "run_name": f"scaling-{os.getpid()}",
    }
    surroundings = {
        k: v
        for k, v in {**environ, **{resolve.PREFIX + n.upper(): v for n, v in fixed.items()}}.items()
        if v
    }
    typed_total = line.flags.get("total_batch_size", ("", ""))[0]
    if not any(p.field == "total_batch_size" for p in resolved.problems):
        total = weak_total(spec, resolved.config, resolved.origins, max(ranks))
        if total:
            args = flags.without(args, "total_batch_size")
            surroundings["DUET_TOTAL_BATCH_SIZE"] = str(total)
    try:
        _, plan, checks = planner.make(LAUNCH_SCRIPT, [str(max(ranks)), *args], surroundings)
    except UserError as error:
        found = [
            _translated(p, max(ranks), f" --total_batch_size={typed_total}" if typed_total else "")
            for p in error.problems
        ]
        raise UserError([*problems, *found], Exit.CONFIG if problems else error.code) from None
    if problems:
        raise UserError(problems)
    made = _experiment(options, plan, config, args, ranks, environ)
    return replace(made, warnings=tuple(builder.warnings(checks)))


def _experiment(
    options: ScalingOptions,
    plan: Plan,
    config: str,
    args: list[str],
    ranks: tuple[int, ...],
    environ: Mapping[str, str],
) -> Experiment:
    args = flags.without(args, "total_batch_size")
    decided = {name: plan[name]["value"] for name in PINNED if isinstance(plan.get(name), dict)}
    for name, value in (decided | tasks.spec_of(plan).memory_fields(plan)).items():
        args = [
            *flags.without(args, name),
            f"--{name}={int(value) if isinstance(value, bool) else value}",
        ]
    own_threads = environ.get(THREADS, "")
    return Experiment(
        config=config,
        args=tuple(args),
        ranks=ranks,
        steps=options.steps,
        rounds=options.rounds,
        device=plan["device"]["value"],
        device_reason=plan["device"]["reason"],
        precision=plan["precision"]["value"],
        sequences=plan["batch"]["device_sequences"],
        seq_len=plan["batch"]["seq_len"],
        accumulation=plan["batch"]["accumulation"],
        gpus=tuple(visible_devices.naming([(gpu["uuid"], gpu["index"]) for gpu in plan["gpus"]])),
        threads=int(own_threads) if own_threads.isdecimal() and int(own_threads) else 1,
        cores=env_vars.cpu_count(),
        unit=plan["task"]["unit"],
        fixed=tuple(_fixed(tasks.spec_of(plan))),
    )


def _configuration(
    rest: list[str], config: list[str], environ: Mapping[str, str]
) -> tuple[TaskSpec, resolve.Resolved]:
    """The task and its configuration; errors are left to the plan."""
    path = Path(os.path.expanduser(config[0])) if config else None  # noqa: PTH111 – as in training.plan.cli_args
    values = loader.read(path, tasks.CONFIG_READERS, 0).values if path else {}
    first = resolve.resolve(
        flags.parse(rest, tasks.everything()), values, environ, fields=tasks.everything()
    )
    spec, _ = tasks.find(first.config.task, first.origins["task"])
    return spec, resolve.resolve(
        flags.parse(rest, spec.fields), values, environ, fields=spec.fields
    )


def _fixed(spec: TaskSpec) -> dict[str, str]:
    """The part of FIXED that this task has; its own option may have the same name."""
    return {name: value for name, value in FIXED.items() if spec.fields.get(name) is FIELDS[name]}


def default_ranks(device: str, environ: Mapping[str, str]) -> tuple[int, ...]:
    visible = len(gpus.inventory_at_start(environ).gpus) if device != "cpu" else 0
    return (1, 2, *(n for n in (4, 8) if n <= visible))


def weak_total(
    spec: TaskSpec, config: Config, origins: Mapping[str, str], ranks: int
) -> int | None:
    """Tokens or samples per step for `ranks`, with the accumulation of the config's own total batch
    size at the largest number of ranks that divides it (otherwise 1). None if device_batch_size is
    auto: the plan decides both."""
    if isinstance(config.device_batch_size, str):
        return None
    own = (spec.split(config, origins, n) for n in range(ranks, 0, -1))
    accumulation = next((found.accumulation for found in own if found), 1)
    return int(config.device_batch_size * spec.seq_len(config) * ranks * accumulation)


def _translated(problem: Problem, ranks: int, total: str) -> Problem:
    """The launcher's problem with commands of this tool: `./launch_train.sh 2 …` becomes `./duet
    scaling --ranks=2 …`."""

    def own_command(match: re.Match[str]) -> str:
        number = int(match[1])
        own = "" if number == ranks else f" --ranks={number}"
        return f"{COMMAND}{own}{match[2]}{'' if '--total_batch_size=' in match[2] else total}"

    return Problem(
        problem.code,
        problem.what,
        problem.allowed,
        [re.sub(r"^\./launch_train\.sh (\d+)(.*)$", own_command, fix) for fix in problem.fixes],
    )
