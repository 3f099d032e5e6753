"""Time to stop a run: from SIGTERM and Ctrl-C to the exit with a saved checkpoint, and from SIGKILL
until no process is left.

    python -m benchmarks.stopping [--rounds=5] [--ranks=2]

The model of the quickstart on two CPU ranks, stopped during training.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import ROOT, environment
from training.core import heartbeat
from training.core.rundir import RunDir, read_json
from training.host import process

LIMIT_S = 60.0
STOPPED_AT = 20  # steps
WAYS = {
    "TERM": signal.SIGTERM,
    "USR1": signal.SIGUSR1,
    "Ctrl-C": signal.SIGINT,
    "kill -9 of the launcher": signal.SIGKILL,
}


def once(number: signal.Signals, ranks: int) -> float:
    """Seconds from the signal until the launcher and all its processes have exited."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        flags = {
            "out_dir": folder,
            "log_dir": folder,
            "run_name": "run",
            "device": "cpu",
            "eval_every": 0,
            "use_dummy_wandb": "true",
            "report": "false",
        }
        command = [
            "./launch_train.sh",
            str(ranks),
            "configs/dual_gpu/quickstart.py",
            *(f"--{k}={v}" for k, v in flags.items()),
        ]
        launcher = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(
                lambda: (
                    (beat := heartbeat.read(run.heartbeat(0))) is not None
                    and beat.step >= STOPPED_AT
                )
            )
            pids = [entry["pid"] for entry in (read_json(run.supervisor) or {})["ranks"]]
            token = _token(pids[0])
            started = time.monotonic()
            launcher.send_signal(number)
            launcher.wait(LIMIT_S)
            _wait(lambda: not process.marked(token))
            seconds = time.monotonic() - started
        finally:
            launcher.kill()
            launcher.wait()
        if number != signal.SIGKILL and not list(run.checkpoints.glob("step_*/manifest.json")):
            raise SystemExit(f"{number.name}: no checkpoint")
        return seconds


def _token(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return (
        next(word for word in words if word.startswith(process.TOKEN.encode()))
        .partition(b"=")[2]
        .decode()
    )


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {LIMIT_S:g} s")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    wanted = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in tqdm(range(wanted.rounds), unit="round", disable=None):
        for way, number in WAYS.items():
            found[way].append(once(number, wanted.ranks))
    for way, seconds in found.items():
        print(
            f"{way:<26}{statistics.median(seconds):6.2f} s   "
            f"({min(seconds):.2f}–{max(seconds):.2f})"
        )


if __name__ == "__main__":
    main()
