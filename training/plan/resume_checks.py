"""Checks of a resume against the manifest of the newest checkpoint, before anything is written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training import tasks
from training.config import origin, resolve
from training.config.batch import Batch
from training.config.loader import Values
from training.config.schema import Config
from training.core import manifest, rundir, standing
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import duration, tokenizer, tokenizer_base
from training.data.prepared_corpus import PreparedCorpus, content
from training.plan import exchange
from training.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ManifestRecord
    from training.plan.request import Request

# Changed on purpose by a resume, or specific to each start: not reported.
SILENT = {
    "task",
    "num_iterations",
    "num_epochs",
    "tokens_per_param",
    "max_time",
    "resume",
    "run_name",
    "out_dir",
    "log_dir",
}
# A change is reported but does not affect what is learnt. A change of any other field that is not
# in DECIDED makes it a different run.
HARMLESS = {
    *(
        "eval_every",
        "eval_tokens",
        "log_every",
        "sample_tokens",
        "save_every",
        "keep_checkpoints",
        "keep_best",
        "inspect_every",
        "debug_ddp",
    ),
    *("num_workers", "persistent_workers", "hang_timeout", "retries", "min_ranks", "rejoin"),
    "activation_checkpointing",
    "max_total_batch_size",  # of a new run
    *("ema", "init_weights"),  # notes() reports what becomes of the average
    *(
        "use_dummy_wandb",
        "wandb_mode",
        "wandb_project",
        "wandb_run",
        "tensorboard",
        "report",
        "notify",
    ),
    # the tokens count: check_data()
    *(
        "data",
        "text_field",
        "encoding",
        "tokenizer",
        "vocab_size",
    ),
}
# The tokens of a run follow from these: check_data().
OF_TOKENS = ("tokenizer", "vocab_size", "data")
# Decided by the plan where the value is auto: the decision counts, not the value
# (decided_otherwise).
DECIDED = {
    *("device", "precision", "compile", "loss_chunks", "device_batch_size"),
    "gradient_compression",
}


def problems(
    kind: TaskSpec, run: rundir.RunDir, resolved: resolve.Resolved, resumed: Values
) -> list[Problem]:
    """Why this configuration cannot continue from the checkpoints of a run with the values
    `resumed`: another task or model, or fewer steps than it has. What is not known of the
    model is checked when the checkpoint is loaded."""
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return []
    if found := _other_task(run, kind, saved):
        return found
    try:
        then = kind.saved_model(saved)
    except UserError as error:
        return error.problems
    invalid = {problem.field for problem in resolved.problems}
    now = {
        name: value
        for name, value in kind.model(resolved.config, resolved.options, saved, resumed).items()
        if name in then and not invalid.intersection(_set_by(name))
    }
    return [*_other_model(run, then, now, resolved.origins), *_fewer_steps(run, saved, resolved)]


def stays_on_gpus(request: Request) -> bool:
    """Has the resumed run used GPUs, and does this command not name the device?"""
    before = standing.plan_of_start(request.resume_from)
    on_gpus = before is not None and before["device"]["value"] == "cuda"
    return on_gpus and not origin.asked_for(request.origins["device"])


def notes(request: Request) -> list[str]:
    """Notes for the plan of a resumed run."""
    run = request.resume_from
    assert run
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        plan = standing.read_plan(run)
        # the plan of a SLURM job that has never started
        frozen = plan is not None and "config" in plan and "device" not in plan
        begins = (
            []
            if frozen or manifest.all_in(run.checkpoints)
            else [msg("plan.resume.no_checkpoint", name=run.name)]
        )
    else:
        begins = _average(request, saved)
    values = {**asdict(request.config), **request.options}
    return begins + changes(values, request.resumed, request.kind.harmless)


def _other_task(run: rundir.RunDir, kind: TaskSpec, saved: ManifestRecord) -> list[Problem]:
    """Old checkpoints do not name a task: theirs is the default."""
    then, now = saved.get("task", tasks.DEFAULT.name), kind.name
    if then == now:
        return []
    what = msg("plan.resume.other_task", name=run.name, then=then, now=now)
    fixes = [msg("plan.resume.omit_task")]
    return [Problem("resume.other_task", what, msg("plan.resume.same_task"), fixes)]


def _average(request: Request, saved: ManifestRecord) -> list[str]:
    """A note if this resume begins or drops the average of the weights (--ema)."""
    if bool(request.config.ema) == ("ema" in saved):
        return []
    step = saved["step"]
    return [
        msg("plan.resume.ema_begins", step=step)
        if request.config.ema
        else msg("plan.resume.ema_dropped", step=step)
    ]


def _set_by(name: str) -> tuple[str, ...]:
    """The fields that set a property of the model."""
    return OF_TOKENS if name == "vocab" else (name,)


def _other_model(
    run: rundir.RunDir, then: FieldValues, now: FieldValues, origins: Mapping[str, str]
) -> list[Problem]:
    different = [name for name in now if str(then[name]) != str(now[name])]
    if not different:
        return []
    shown = ", ".join(
        msg("plan.resume.then_now", name=name, then=then[name], now=now[name]) for name in different
    )
    given = origin.given(origins, [field for name in different for field in _set_by(name)])
    what = msg("plan.resume.other_model", name=run.name, shown=shown)
    fixes = [msg("plan.resume.omit_flags", flags=" ".join(given))] if given else []
    return [Problem("resume.other_model", what, msg("plan.resume.same_model"), fixes)]


def _fewer_steps(
    run: rundir.RunDir, saved: ManifestRecord, resolved: resolve.Resolved
) -> list[Problem]:
    """It would end at once, as a finished run, which stays one; rather a digit is missing."""
    asked, step = resolved.config.num_iterations, saved["step"]
    why, (summary, _) = resolved.origins["num_iterations"], standing.ends(run)
    if summary and summary.get("status") == "done":
        return []
    if not (origin.asked_for(why) and isinstance(asked, int) and 0 < asked < step):
        return []
    what = msg("plan.resume.fewer_steps", name=run.name, step=step, asked=asked, origin=why)
    allowed, fixes = f"> {step}", [f"--num_iterations={2 * step}"]
    return [Problem("resume.fewer_steps", what, allowed, fixes, "num_iterations")]


def check_data(run: rundir.RunDir, data: PreparedCorpus, given: Sequence[str] = ()) -> str:
    """A warning or ''. Raises UserError when the tokenizer differs from the checkpoint's. `given`:
    the flags and variables of this start that set one of OF_TOKENS."""
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return ""
    if saved["tokenizer"] != tokenizer.identity(data):
        own = Path(data.folder).parent / saved["data"]["folder"]
        kept = [
            f"--tokenizer={shlex.quote(str(own / name))}"
            for name in (tokenizer_base.JSON, tokenizer_base.TIKTOKEN)
            if (own / name).is_file()
        ]
        omit = [msg("plan.resume.omit_flags", flags=" ".join(given))] if given else []
        what = msg("plan.resume.other_tokenizer", name=run.name)
        raise UserError(
            Problem("resume.other_data", what, msg("plan.resume.same_tokenizer"), [*kept, *omit])
        )
    if saved["data"]["tokens_sha256"] != content(data):
        return msg("plan.resume.data_changed", name=run.name)
    return ""


def changes(
    values: FieldValues, resumed: Values, harmless: frozenset[str] = frozenset()
) -> list[str]:
    """A note on the fields that change with this resume. `harmless`: options of the task, as
    HARMLESS."""
    differ = {
        n: (v, values[n])
        for n, (v, _) in resumed.items()
        if n not in SILENT and n in values and values[n] != v
    }
    if not differ:
        return []
    shown = ", ".join(
        f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in differ.items()
    )
    if set(differ) - HARMLESS - harmless - DECIDED:
        return [msg("plan.resume.changed_result", shown=shown)]
    return [msg("plan.resume.changed", shown=shown)]


def decided_otherwise(run: rundir.RunDir | None, plan: Plan) -> list[str]:
    """A note when this plan of a resumed run (None: a new run) changes the arithmetic, for example
    the device where the value is auto. Must be called before the old plan is replaced."""
    before = standing.plan_of_start(run)
    if before is None:
        return []
    then, now = _arithmetic(before), _arithmetic(plan)
    differ = [
        f"{name} {then[name]} → {now[name]}"
        for name in now
        if then.get(name, now[name]) != now[name]
    ]
    return [msg("plan.resume.decided_otherwise", changes=", ".join(differ))] if differ else []


def _arithmetic(plan: Plan) -> FieldValues:
    """Decisions that affect the arithmetic of a step. Activation checkpointing does not: blocks are
    recomputed identically; but a block compiled with its selective recomputation is another
    program, which may round differently."""
    names: tuple[
        Literal["device", "precision", "compile", "loss_chunks", "gradient_compression"], ...
    ] = ("device", "precision", "compile", "loss_chunks", "gradient_compression")
    values: FieldValues = {name: plan[name]["value"] for name in names if name in plan}
    if plan.get("ranks", 0) > 2:  # the order in which they add gradients
        values["bucket_mib"] = (
            plan["bucket_mib"]["value"] if "bucket_mib" in plan else exchange.BUCKET_MIB
        )
    if values.get("compile") and "selective_checkpointing" in plan:
        values["selective_checkpointing"] = plan["selective_checkpointing"]["value"]
    if values.get("compile") and plan.get("ranks", 0) > 1:
        values["blocks_per_graph"] = (
            plan["blocks_per_graph"]["value"] if "blocks_per_graph" in plan else 1
        )
    return values | {
        "device_batch_size": plan["config"]["device_batch_size"],
        "torch": plan.get("torch"),
    }


def position(
    run: rundir.RunDir, data: PreparedCorpus, config: Config, batch: Batch
) -> dict[str, int]:
    """Where a run continues: step, epoch and sequences used in it
    (training.trainer.checkpoint.TrainProgress)."""
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return {"step": 0, "epoch": 0, "used": 0}
    used, count = saved["used"], duration.sequences(data, batch)
    same = saved["data"].get("tokens_sha256") == content(data)
    if not same or saved.get("seed", config.seed) != config.seed:
        used = count if duration.ended(saved, batch, count) else 0
    return {"step": saved["step"], "epoch": saved["epoch"], "used": used}


def _short(value: Any) -> str:
    """With both ends: of a command the program, of a path the file."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}…{text[-19:]}"
