"""Time of `./duet runs` for many finished runs, with and without the start of Python.

python -m benchmarks.runs_table [RUNS]
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training.core import rundir
from training.core.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 7
STEPS, EVALUATIONS, CHECKPOINTS, FILES = 2000, 40, 3, 20


def make(path: Path, number: int) -> None:
    """A finished run of two ranks: its records and folders as a real one has them."""
    run, now = RunDir(path), time.time() - 60 * number
    run.create()
    config = {f"field_{n}": n for n in range(100)} | {"depth": 2 + number % 4, "task": "gpt"}
    rundir.write_json(
        run.plan,
        {
            "schema_version": 1,
            "created": now - 1000,
            "config": config,
            "origins": dict.fromkeys(config, "default"),
            "ranks": 2,
            "text": ["a line of the plan " * 4] * 60,
            "task": {"name": "gpt", "unit": "tokens", "file": None, "options": {}},
        },
    )
    for step in range(1, EVALUATIONS + 1):
        run.event("eval", step=step * 50, val_bpb=3 - step / 50, val_loss=2.0)
        run.event("checkpoint", step=step * 50, path=str(run.checkpoints))
    line = b'{"time": 1.0, "step": 1, "loss": 2.5, "lr": 0.01, "tokens_per_s": 38000.0}\n'
    run.metrics.write_bytes(line * STEPS)
    for checkpoint in range(CHECKPOINTS):
        folder = run.checkpoints / f"step_{checkpoint:08d}"
        folder.mkdir()
        for file in ("state.pt", "manifest.json"):
            (folder / file).write_bytes(bytes(1000))
    for other in range(FILES):
        (run.ranks / f"file{other}").write_bytes(bytes(100))
    rundir.write_json(
        run.summary,
        {
            "status": "done",
            "exit_code": 0,
            "time": now,
            "seconds": 1000.0,
            "steps": STEPS,
            "loss_end": 2.5,
            "tokens": 1000,
            "tokens_per_s": 38000.0,
            "bytes_per_token": 3.9,
        },
    )


def best(action: object) -> float:
    """The fastest of several calls, ms."""
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()  # type: ignore[operator]
        taken.append(1000 * (time.perf_counter() - started))
    return min(taken)


def main(argv: list[str]) -> int:
    from training.cli import runs

    count = int(argv[0]) if argv else 200
    folder = Path(tempfile.mkdtemp())
    try:
        for number in range(count):
            make(folder / f"run_{number:04d}", number)
        arguments = [f"--dir={folder}"]

        def listed() -> None:
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
                runs.main(arguments)

        command = [str(ROOT / "duet"), "runs", *arguments]

        def typed() -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        def empty() -> None:
            subprocess.run([str(ROOT / "duet"), "help"], check=True, stdout=subprocess.DEVNULL)

        print(f"{count} runs: {best(listed):.0f} ms to read and print")
        print(f"./duet runs: {best(typed):.0f} ms in all; ./duet help: {best(empty):.0f} ms")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
