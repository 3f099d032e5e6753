"""Asks for the memory of a step in a process of its own (training.tasks.fake_step): it imports
torch and runs the user's file, and a plan does neither."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from training.core.project import ROOT
from training.host import process
from training.tasks.sample_memory import SampleLoad, SampleStep

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import TaskRecord

LIMIT_S = 120.0  # a data set that is read for longer is read by the ranks alone
SHOWN = 300  # characters of a reason
MODULE = "training.tasks.measure_step"


@dataclass(frozen=True)
class Question:
    """`task`: its record in the plan; `sizes`: micro-batches to choose from, ascending, the largest
    that fits `room` bytes; None: powers of two, as the data allows. One size is measured whether it
    fits or not."""

    task: TaskRecord
    config: FieldValues
    sizes: list[int] | None
    room: int | None
    ranks: int
    total: int  # samples of an optimizer step; 0: one micro-batch of each rank
    bf16: bool
    cuda: bool


@dataclass(frozen=True)
class Answer:
    """`step` is None where nothing could be measured, and `why` says why; `fits`: in the room,
    where that is known."""

    step: SampleStep | None
    why: str = ""
    fits: bool = True
    of: int = 1  # micro-batches that there were to choose from


def ask(question: Question) -> Answer:
    """Seconds: torch is imported, the data set made, the model run on fake tensors. Leaves no
    process behind."""
    # No GPU: the tensors are fake, and its memory is for the ranks. No __pycache__: a dry run
    # writes nothing.
    own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "lib/run_module.py"), MODULE, "measure"],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509 – one thread
    )
    try:
        said, complaint = child.communicate(json.dumps(asdict(question)), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Answer(None, f"it took longer than {LIMIT_S:.0f} s")
    finally:
        _end(child)
    return _answer(said, complaint, child.returncode)


def _answer(said: str, complaint: str, status: int) -> Answer:
    try:
        found = json.loads(said)
    except ValueError:
        last = (complaint.strip().splitlines() or [""])[-1]
        return Answer(
            None, _short(f"the measurement ended with status {status}{': ' + last if last else ''}")
        )
    if "why" in found:
        return Answer(None, _short(found["why"]))
    return Answer(SampleStep(SampleLoad(**found["load"])), fits=found["fits"], of=found["of"])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _end(child: subprocess.Popen[str]) -> None:
    """With whatever the user's file has started, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe:
            pipe.close()
    child.wait()
