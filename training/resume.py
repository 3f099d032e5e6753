"""Can this run be continued as it is asked for? Known from the newest checkpoint's manifest before anything is touched."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import rundir
from training.config.files import Values
from training.config.schema import Config
from training.data import tokenizer
from training.data.prepare import Prepared, content
from training.engine import manifest
from training.errors import Problem, UserError

if TYPE_CHECKING:
    from training.request import Request

# A change of these is said, since the run is then no longer what it would have been without the stop.
INEXACT = {"seed", "total_batch_size", "dropout", "precision"}
# What a resume is for, or what changes nothing in the training.
SILENT = {"num_iterations", "num_epochs", "device_batch_size", "resume", "run_name", "out_dir", "log_dir"}


def check_model(request: Request, shape: dict[str, int]) -> list[str]:
    """Notes for the plan; `shape` is that of the planned model (depth, vocab, max_seq_len).

    Raises UserError when the checkpoints are of another model or optimizer.
    """
    run = request.resume_from
    assert run
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return [] if manifest.all_in(run.checkpoints) else [f"{run.name} has no checkpoint yet: it begins again at step 0"]
    now, then = {**shape, "optimizer": request.config.optimizer}, {**saved["shape"], "optimizer": saved["optimizer"]}
    different = [name for name in now if then.get(name) != now[name]]
    if different:
        shown = ", ".join(f"{name} {then.get(name)} (now {now[name]})" for name in different)
        leave = " ".join("--tokenizer and --vocab_size" if name == "vocab" else f"--{name}" for name in different)
        what = f"{run.name} can not be resumed so: its checkpoint is of another model: {shown}"
        raise UserError(Problem(what, "the same model", [f"leave {leave} out: a resumed run keeps its own values"]))
    return changes(request.config, request.resumed)


def check_data(run: rundir.RunDir, data: Prepared) -> str:
    """A warning, or nothing. Raises UserError when the tokens do not mean what they meant."""
    saved = manifest.newest(run.checkpoints)
    if saved is None:
        return ""
    if saved["tokenizer"] != tokenizer.identity(data):
        own = Path(data.folder).parent / saved["data"]["folder"]
        kept = [f"--tokenizer={shlex.quote(str(own / name))}" for name in (tokenizer.JSON, tokenizer.TIKTOKEN) if (own / name).is_file()]
        fixes = [*kept, "leave --tokenizer, --vocab_size and --data out: a resumed run keeps its own values"]
        what = f"{run.name} can not be resumed so: its checkpoint was trained with another tokenizer, whose tokens mean something else"
        raise UserError(Problem(what, "the tokenizer of the checkpoint", fixes))
    if saved["data"]["tokens_sha256"] != content(data):
        return f"the data is not what {run.name} was trained on so far: its epoch begins anew, with other samples"
    return ""


def changes(config: Config, resumed: Values) -> list[str]:
    """A note on what the resumed run does from now on that it did not do before."""
    differ = {n: (v, getattr(config, n)) for n, (v, _) in resumed.items() if n not in SILENT and getattr(config, n) != v}
    if not differ:
        return []
    shown = ", ".join(f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in differ.items())
    end = "; not what the run would have been without the stop" if INEXACT & set(differ) else ""
    return [f"changed in the resumed run: {shown}{end}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"…{text[-39:]}"
