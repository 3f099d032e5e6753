"""The plan of Duet's own training: request + this machine → every decision of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.config import batch, origin
from training.core import log, units
from training.core.errors import NothingToDo
from training.core.messages import msg
from training.host import decisions, env_vars, gpus, mpi_env, toolchain, torch_build
from training.host.placement import LOCAL, NODE, RANK
from training.plan import (
    batch_text,
    builder,
    communication,
    elastic,
    gpu_use,
    gradients,
    init_from,
    larger_batch,
    length,
    preflight,
    resume_checks,
)
from training.plan.request import Received, Request, nothing, read
from training.tasks.memory import StepNeeds
from training.tasks.planning import Decided, Situation

if TYPE_CHECKING:
    from pathlib import Path

    from training.core.contracts.plan import CorpusRecord, Plan


def build(
    request: Request, environ: Mapping[str, str], test: communication.Test | None = None
) -> tuple[Plan, list[preflight.Check]]:
    """Make all decisions; reads the machine, changes nothing. `test`: of the communication between
    GPUs, if its result is not known. Raises UserError (exit 3) for failed checks."""
    config, local = request.config, request.local_ranks
    gpu_choice = gpu_use.choose(request, environ, msg("plan.device.not_asked"))
    machine, environ = gpu_choice.machine, gpu_choice.environ(environ)
    torch = torch_build.installed()
    if len(machine.gpus) == 1 and _may_own_a_gpu(request, environ):
        request.gpu_ranks = 1
    device = decisions.device(
        *(config, request.gpu_ranks, machine, torch),
        reason=request.reason("device"),
        resumed=resume_checks.stays_on_gpus(request),
    )
    precision = decisions.precision(config, device.value, request.gpu_ranks, machine)
    used = machine.gpus[: request.gpu_ranks] if device.value == "cuda" else ()
    missing = (
        toolchain.missing(device.value, environ, used, torch)
        if decisions.may_compile(config, device.value)
        else {}
    )
    no_bf16_on = decisions.without_bf16(precision.value, used)
    compiled = decisions.compiled(config, device.value, missing, no_bf16_on)
    room = decisions.budget(
        device.value, request.gpu_ranks if device.value == "cuda" else local, machine
    )
    shared = decisions.shares_host_memory(device.value, request.gpu_ranks, machine)
    situation = Situation(device.value, precision, compiled, room, shared)
    decided = request.kind.decide(request, situation)
    resumed = resume_checks.notes(request) if request.resume_from else []
    begun, checks = builder.start(request, machine, torch, device, environ)
    checks += _checks(request, machine, torch, device.value, room, decided.step)
    checks += preflight.precision_works(precision.value, machine, device.value, torch, request)
    checks += (
        preflight.compile_works(torch, device.value, missing, request, no_bf16_on)
        if compiled.value
        else preflight.compile_left_out(config, device.value, missing, no_bf16_on)
    )
    checks = preflight.of_ranks(request, checks)
    builder.refuse_errors(request, checks)

    gpu_use.use(request, begun, gpu_choice)
    communication.settle(request, begun, checks, environ, test)
    decided, grown = larger_batch.grow(request, begun, decided, situation)
    split, config = decided.batch, request.config
    static_graph = decisions.static_graph(config, split.accumulation)
    cards = machine.gpus[: request.gpu_ranks]
    exchanged = gradients.decide(request, cards, begun, decided, situation)
    plan: Plan = {
        **begun,
        "config_file": request.config_name(),
        "login_file": request.login_file(),
        "task": request.kind.record(request.options),
        "config": request.values()
        | {"device_batch_size": split.device_sequences, "total_batch_size": split.total_tokens},
        "precision": precision.record(),
        "tf32": decisions.tf32(
            precision, device.value, request.gpu_ranks, machine, environ
        ).record(),
        "cudnn_benchmark": decisions.cudnn_benchmark(device.value).record(),
        "compile": compiled.record(),
        "static_graph": static_graph.record(),
        "batch": split.record(),
        **exchanged.fields,
        **decided.fields,
    }
    if request.start:
        plan["init_from"] = init_from.record(request.start)
    begins = _weights(request)
    plan["headline"] += begins + grown
    plan["text"] += begins
    plan["notes"] += [
        *decided.notes,
        *exchanged.notes,
        *resumed,
        *_warnings(request, checks, static_graph),
        *resume_checks.decided_otherwise(request.resume_from, plan),
    ]
    if may_lose := elastic.record(plan):
        plan["elastic"] = may_lose
    plan["notes"] += elastic.note(plan)
    plan["headline"] += [_device(plan), *_average(plan), *_recovery(plan), *elastic.sentence(plan)]
    chosen = isinstance(config.device_batch_size, str)  # auto
    done = length.done(request.resume_from, split.total_tokens)
    plan["text"] += sentences(plan, split, decided, chosen, done) + grown + exchanged.text
    return plan, checks


def _may_own_a_gpu(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether each rank may see a GPU of its own (srun --gpus-per-task=1). torchrun and mpirun
    start all ranks with the same environment."""
    alike = request.place.source in ("torchrun", mpi_env.SOURCE) and gpus.VISIBLE not in environ
    return request.place.kind == RANK and not alike


def _checks(
    request: Request,
    machine: gpus.GpuInventory,
    torch: torch_build.TorchBuild | None,
    device: str,
    room: int | None,
    step: StepNeeds | None,
) -> list[preflight.Check]:
    facts = preflight.PreflightContext(request, machine, torch, device, room, step)
    return preflight.at_every_start(facts) + (
        preflight.only_in_check(facts) if request.check else []
    )


def _warnings(
    request: Request, checks: list[preflight.Check], static_graph: decisions.Decision
) -> list[str]:
    notes = builder.warnings(checks)
    if request.config.use_static_graph and not static_graph.value:
        notes.append(msg("plan.note.static_graph", reason=static_graph.reason))
    return notes


def _amount(data: CorpusRecord) -> str:
    return msg("plan.word.comma").join(
        [units.plural(data["files"], "file"), units.size(data["bytes"])]
    )


def _length(plan: Plan, split: batch.Batch, done: tuple[int, int]) -> str:
    config, (step, amount_done) = plan["config"], done
    steps = config["num_iterations"]
    limits = []
    if steps:
        unit = plan["task"]["unit"]
        amount = units.count(amount_done + max(0, steps - step) * split.total_tokens)
        shown = units.plural(steps, "step")
        limits.append(msg("plan.length.steps", steps=shown, amount=amount, unit=unit))
    if config["num_epochs"] or not (steps or config["max_time"]):
        limits.append(units.plural(config["num_epochs"] or 1, "epoch"))
    if config["max_time"]:
        limits.append(units.duration(config["max_time"]))
    if len(limits) > 1:
        return msg("plan.length.either", limits=msg("plan.length.or").join(limits))
    return msg("plan.length.one", length=limits[0])


def sentences(
    plan: Plan, split: batch.Batch, decided: Decided, chosen: bool, done: tuple[int, int]
) -> list[str]:
    """The plan as sentences, each decision with its reason. `chosen`: device_batch_size is not the
    user's; `done`: steps and tokens or samples of the checkpoint that a resume continues."""
    data = (
        msg("plan.length.data", name=plan["data"]["name"], amount=_amount(plan["data"]))
        if "data" in plan
        else ""
    )
    lines = [
        _device(plan),
        msg(
            "plan.text.precision",
            precision=plan["precision"]["value"],
            precision_reason=plan["precision"]["reason"],
            compiled=_switch(plan["compile"]["value"]),
            compile_reason=plan["compile"]["reason"],
        ),
        *_math(plan),
        *_deterministic(plan),
        batch_text.split(plan),
        _length(plan, split, done) + data,
        *_average(plan),
        *decided.text,
        *_recovery(plan),
        *elastic.sentence(plan),
    ]
    if chosen and "device_batch_size" in plan:
        lines.append(batch_text.size(plan))
    return lines


def _math(plan: Plan) -> list[str]:
    """The settings of fp32 products, which only a GPU has."""
    if plan["device"]["value"] == "cpu":
        return []
    tf32, benchmark = plan["tf32"], plan["cudnn_benchmark"]
    text = msg(
        "plan.text.math",
        tf32=_switch(tf32["value"]),
        tf32_reason=tf32["reason"],
        benchmark=_switch(benchmark["value"]),
        benchmark_reason=benchmark["reason"],
    )
    return [text]


def _switch(value: bool) -> str:
    return msg("plan.word.on") if value else msg("plan.word.off")


def _device(plan: Plan) -> str:
    return msg("plan.text.device", value=plan["device"]["value"], reason=plan["device"]["reason"])


def _deterministic(plan: Plan) -> list[str]:
    if not plan["config"]["deterministic"]:
        return []
    on_gpu = plan["device"]["value"] == "cuda"
    return [msg("plan.text.deterministic") if on_gpu else msg("plan.text.deterministic_cpu")]


def _average(plan: Plan) -> list[str]:
    decay = plan["config"]["ema"]
    return [msg("plan.text.ema", decay=decay)] if decay else []


def _weights(request: Request) -> list[str]:
    start = request.start
    return [msg("plan.init.text", title=start.title, file=start.file)] if start else []


def _recovery(plan: Plan) -> list[str]:
    count = plan["retries"]["value"]
    if not count:
        return []
    restarts, reason = units.plural(count, "restart"), plan["retries"]["reason"]
    return [msg("plan.text.recovery", restarts=restarts, reason=reason)]


def describe(
    plan: Plan,
    checks: list[preflight.Check],
    *,
    checked: bool = False,
    saved: Path | None = None,
) -> str:
    """The whole plan as text: of `--dry_run`, or of `--check`, which keeps the result of its test
    of the communication. `saved`: the file of `--save_config`."""
    title = msg("plan.dry_run.saved", path=saved) if saved else msg("plan.dry_run.title")
    # a script has no task
    values = plan["config"] | (plan["task"]["options"] if "task" in plan else {})
    width = max(map(len, values))
    lines = [
        msg("plan.dry_run.checked") if checked else title,
        "",
        *(f"  {s}" for s in plan["text"]),
        "",
    ]
    lines += [msg("plan.dry_run.configuration")]
    for name, value in values.items():
        lines.append(f"  {name:<{width}}  {value!r:<14}  {origin.shown(plan['origins'][name])}")
    lines += ["", msg("plan.dry_run.variables")]
    lines += [
        f"  {v.line()}" for v in (env_vars.Variable(**record) for record in plan["variables"])
    ]
    lines += [
        "",
        msg("plan.dry_run.resources", checks=preflight.count(checks)),
        preflight.table([c.record() for c in checks]).rstrip("\n"),
    ]
    notes = [n for n in plan["notes"] if n not in {c.line for c in checks}]
    lines += ["", *(msg("plan.dry_run.note", note=n) for n in notes)] if notes else []
    return "\n".join(lines)


def announce(plan: Plan) -> None:
    """Write the whole plan to the log file. The console shows all of it with --debug and outside
    local runs, otherwise the headline and the notes. The monitor searches logs for `run
    directory:`."""
    mode, *sentences = plan["text"]
    whole = plan["place"]["kind"] != LOCAL or bool(plan["config"].get("debug"))
    log.say("INFO", mode, shown=whole)
    log.say("INFO", f"run directory: {plan['run_dir']}")
    for line in sentences:
        log.say("INFO", line, shown=whole or line in plan["headline"])
    for v in plan["variables"]:
        if v["origin"] == "set here":
            log.say(
                "INFO",
                msg("plan.text.variable", name=v["name"], value=v["value"], why=v["why"]),
                shown=whole,
            )
    for note in plan["notes"]:
        log.warning(note)


def make(
    script: str,
    args: list[str],
    environ: Mapping[str, str],
    received: Received = nothing,
    test: communication.Test | None = None,
) -> tuple[Request, Plan, list[preflight.Check]]:
    """`test`: for a node, whose launcher this process becomes."""
    count = len(gpus.inventory_at_start(environ).gpus)
    request = read(script, args, environ, gpus=count, received=received)
    if request.save_config:
        if request.place.kind != RANK or request.place.rank == 0:
            request.save()
        if not (request.dry_run or request.check):
            raise NothingToDo
    of_node = test if request.place.kind == NODE else None
    if of_node and not (request.dry_run or request.check):
        request.starter = os.getpid()
    plan, checks = build(request, environ, of_node)
    return request, plan, checks
