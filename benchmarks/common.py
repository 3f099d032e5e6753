"""Shared by the training benchmarks: the prepared corpus, Duet's training command, a measured child
process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from training.core import log
from training.core.errors import UserError
from training.core.messages import msg
from training.data import corpus
from training.data.corpus import CorpusSource
from training.data.prepare import ensure
from training.data.prepared_corpus import PreparedCorpus
from training.host import decisions
from training.trainer.prepared_cache import CACHE

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".tools/peers"
# One thread, no GPU, no network: the comparison is of the loop around the same arithmetic.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def environment(**more: str) -> dict[str, str]:
    """Environment without DUET_ variables, which would be flags of the training."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | QUIET | more


def prepared(data: str = corpus.STDLIB) -> PreparedCorpus:
    """The corpus behind a value of --data (byte tokens), prepared as by train.py."""
    return ensure(found(data), "text", CACHE)


def found(data: str) -> CorpusSource:
    """The files behind a value of --data. Raises UserError."""
    source, problem = corpus.find(data)
    if source is None:
        assert problem
        raise UserError(problem)
    return source


def warn_of_emulation(precision: str) -> None:
    """A training that takes an hour takes a day then."""
    if precision == "bf16" and not decisions.cpu_bf16():
        log.warning(msg("plan.precision.bf16_cpu"))


def train_command(folder: Path, **flags: object) -> list[str]:
    """Command of train.py for one process, with its run in `folder`/run."""
    fixed = {
        "device": "cpu",
        "out_dir": folder,
        "log_dir": folder,
        "run_name": "run",
        "sample_tokens": 0,
        "report": "false",
    }
    return [
        sys.executable,
        "train.py",
        *(f"--{name}={value}" for name, value in (fixed | flags).items()),
    ]


def measured(argv: list[str], **more: str) -> tuple[str, float]:
    """(standard output, peak resident memory in MiB) of a command. Raises SystemExit if it
    fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment(**more), stdout=out, stderr=err)
        # the only call that returns the peak of a single child
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(argv)} failed ({process.returncode}):\n{err.read()[-3000:]}")
        return out.read(), used.ru_maxrss / 1024
