"""Measures the memory of a step in a separate process (training.tasks.fake_step), which imports
torch and runs the user's file; planning does neither."""

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

from training.core.messages import msg
from training.core.project import ROOT
from training.host import process
from training.tasks.sample_memory import SampleLoad, SampleStep

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import TaskRecord

# A dataset that loads longer than this is loaded only by the ranks. Below --rendezvous_timeout:
# those of another launcher wait for rank 0, which measures.
LIMIT_S = 240.0
STEP_S = 120.0  # once the data are loaded
SHOWN = 300  # maximum characters of a reason
MODULE = "training.tasks.measure_step"


@dataclass(frozen=True)
class Question:
    """`task`: its record in the plan; `sizes`: micro-batches to choose from, ascending, of which
    the largest that fits `room` bytes is chosen; None: powers of two, as the data allows. A single
    size is measured whether it fits or not."""

    task: TaskRecord
    config: FieldValues
    sizes: list[int] | None
    room: int | None
    ranks: int
    total: int  # samples per optimizer step; 0: one micro-batch per rank
    bf16: bool  # or fp16
    cuda: bool
    shared: bool = False  # the GPU has the memory of the host
    fp16: bool = False
    step_s: float = STEP_S


@dataclass(frozen=True)
class Answer:
    """`step`: None if it could not be measured, then `why` is the reason; `fits`: whether it fits
    the room, if known."""

    step: SampleStep | None
    why: str = ""
    fits: bool = True
    of: int = 1  # number of micro-batches to choose from


def ask(question: Question) -> Answer:
    """Measure; takes seconds: imports torch, makes the dataset, runs the model on fake tensors.
    Leaves no process behind."""
    # No GPU: the tensors are fake, and GPU memory is for the ranks. No __pycache__: a dry run
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
        output, complaint = child.communicate(json.dumps(asdict(question)), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Answer(None, msg("tasks.measure.data_too_long", limit=LIMIT_S))
    finally:
        _end(child)
    if child.returncode == -signal.SIGALRM:  # its own limit (training.tasks.fake_step)
        return Answer(None, msg("tasks.measure.too_long", limit=question.step_s))
    return _answer(output, complaint, child.returncode)


def _answer(output: str, complaint: str, status: int) -> Answer:
    try:
        found = json.loads(output)
    except ValueError:
        last = (complaint.strip().splitlines() or [""])[-1]
        why = (
            msg("tasks.measure.failed_with", status=status, last=last)
            if last
            else msg("tasks.measure.failed", status=status)
        )
        return Answer(None, _short(why))
    if "why" in found:
        return Answer(None, _short(found["why"]))
    return Answer(SampleStep(SampleLoad(**found["load"])), fits=found["fits"], of=found["of"])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the child and everything that the user's file started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe:
            pipe.close()
    child.wait()
