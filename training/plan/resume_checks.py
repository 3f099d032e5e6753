"""Can this run be continued as it is asked for? Known from the newest checkpoint's manifest before
anything is touched."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training import tasks
from training.config.loader import Values
from training.core import manifest, rundir, standing
from training.core.errors import Problem, UserError
from training.data import tokenizer, tokenizer_base
from training.data.prepare import PreparedCorpus, content

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ManifestRecord
    from training.plan.request import Request

# What a resume is for, or what belongs to each start: not said.
SILENT = {"task", "num_iterations", "num_epochs", "resume", "run_name", "out_dir", "log_dir"}
# A change of these is said and changes nothing in what is learnt. Any other that is not in DECIDED
# makes the run another one.
HARMLESS = {
    *(
        "eval_every",
        "eval_tokens",
        "log_every",
        "sample_tokens",
        "save_every",
        "keep_checkpoints",
        "inspect_every",
        "debug_ddp",
    ),
    *("num_workers", "persistent_workers", "hang_timeout", "retries", "activation_checkpointing"),
    *(
        "use_dummy_wandb",
        "wandb_mode",
        "wandb_project",
        "wandb_run",
        "tensorboard",
        "report",
        "notify",
    ),
    # what counts is the tokens: check_data()
    *(
        "data",
        "text_field",
        "encoding",
        "tokenizer",
        "vocab_size",
    ),
}
# What the plan decides where the configuration says auto: not the word counts, but what became of
# it (decided_otherwise).
DECIDED = {"device", "precision", "compile", "loss_chunks", "device_batch_size"}


def check_model(request: Request, model: FieldValues) -> list[str]:
    """Notes for the plan; `model`: what is known of the planned one. What that does not tell is
    seen when the checkpoint is loaded.

    Raises UserError when the checkpoints are of another task or model.
    """
    run = request.resume_from
    assert run
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        plan = standing.read_plan(run)
        # a job's plan, which has never been started
        frozen = plan is not None and "config" in plan and "device" not in plan
        begins = (
            []
            if frozen or manifest.all_in(run.checkpoints)
            else [f"{run.name} has no checkpoint yet: it begins again at step 0"]
        )
    else:
        _same_task(request, saved)
        then, begins = request.kind.saved_model(saved), []
        _same_model(run, then, {name: value for name, value in model.items() if name in then})
    return begins + changes({**asdict(request.config), **request.options}, request.resumed)


def _same_task(request: Request, saved: ManifestRecord) -> None:
    """Checkpoints that say nothing are from before there were several: of the default one. Raises
    UserError."""
    then, now = saved.get("task", tasks.DEFAULT.name), request.kind.name
    if request.resume_from and then != now:
        what = f"{request.resume_from.name} can not be resumed so: its task is {then}, not {now}"
        raise UserError(
            Problem(
                "resume.other_task",
                what,
                "the same task",
                ["leave --task out: a resumed run keeps its own"],
            )
        )


def _same_model(run: rundir.RunDir, then: FieldValues, now: FieldValues) -> None:
    different = [name for name in now if str(then[name]) != str(now[name])]
    if different:
        shown = ", ".join(f"{name} {then[name]} (now {now[name]})" for name in different)
        leave = " ".join(
            "--tokenizer and --vocab_size" if name == "vocab" else f"--{name}" for name in different
        )
        what = f"{run.name} can not be resumed so: its checkpoint is of another model: {shown}"
        raise UserError(
            Problem(
                "resume.other_model",
                what,
                "the same model",
                [f"leave {leave} out: a resumed run keeps its own values"],
            )
        )


def check_data(run: rundir.RunDir, data: PreparedCorpus) -> str:
    """A warning, or nothing. Raises UserError when the tokens do not mean what they meant."""
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
        fixes = [
            *kept,
            "leave --tokenizer, --vocab_size and --data out: a resumed run keeps its own values",
        ]
        what = (
            f"{run.name} can not be resumed so: its checkpoint was trained with another "
            f"tokenizer, whose tokens mean something else"
        )
        raise UserError(
            Problem("resume.other_data", what, "the tokenizer of the checkpoint", fixes)
        )
    if saved["data"]["tokens_sha256"] != content(data):
        return (
            f"the data is not what {run.name} was trained on so far: its epoch begins anew, "
            f"with other samples"
        )
    return ""


def changes(values: FieldValues, resumed: Values) -> list[str]:
    """A note on what the resumed run does from now on that it did not do before."""
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
    end = (
        "; not what the run would have been without the stop"
        if set(differ) - HARMLESS - DECIDED
        else ""
    )
    return [f"changed in the resumed run: {shown}{end}"]


def decided_otherwise(run: rundir.RunDir | None, plan: Plan) -> list[str]:
    """A note when this plan of a resumed run (None: it is a new one) does not calculate as the one
    that it had before did: on another device, say, where the configuration says auto. Called while
    the old plan is still there."""
    before = standing.read_plan(run) if run else None
    if before is None:
        return []
    then, now = _arithmetic(before), _arithmetic(plan)
    differ = [
        f"{name} {then[name]} → {now[name]}"
        for name in now
        if then.get(name, now[name]) != now[name]
    ]
    return (
        [f"decided otherwise than before the stop: {', '.join(differ)}; not bit-exact"]
        if differ
        else []
    )


def _arithmetic(plan: Plan) -> FieldValues:
    """What the sums of a step depend on, beside the configuration. Checkpointed blocks do not: they
    are computed the same again."""
    names: tuple[Literal["device", "precision", "compile", "loss_chunks"], ...] = (
        "device",
        "precision",
        "compile",
        "loss_chunks",
    )
    values: FieldValues = {name: plan[name]["value"] for name in names if name in plan}
    return values | {
        "device_batch_size": plan["config"]["device_batch_size"],
        "torch": plan.get("torch"),
    }


def position(run: rundir.RunDir, data: PreparedCorpus) -> dict[str, int]:
    """Where a run goes on: step, epoch and used sequences of it
    (training.trainer.checkpoint.TrainProgress)."""
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return {"step": 0, "epoch": 0, "used": 0}
    same = saved["data"].get("tokens_sha256") == content(data)
    return {"step": saved["step"], "epoch": saved["epoch"], "used": saved["used"] if same else 0}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"…{text[-39:]}"
