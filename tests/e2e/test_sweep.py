"""A sweep of real trainings on the CPU: stopped, continued, compared."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import TOKEN, wait_until
from tests.e2e.conftest import TINY
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json, read_records

Sweep = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def sweep(project: Path, tmp_path: Path, token: str) -> Iterator[Sweep]:
    def start(*words: str) -> subprocess.Popen[str]:
        argv = ["./duet", "sweep", *words, f"--out_dir={tmp_path}/runs"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_", "OMP_"))}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv,
            cwd=project,
            env=env | {TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    yield start


@pytest.mark.slow
def test_a_grid_is_stopped_continued_and_compared(sweep: Sweep, tmp_path: Path) -> None:
    values = [f"--{k}={v}" for k, v in TINY.items() if k not in ("depth", "eval_every")]
    words = ["configs/dual_gpu/quickstart.py", *values, "--eval_every=6"]
    words += ["--depth=1,2", "--matrix_lr=0.01,0.02", "--jobs=2", f"--log_dir={tmp_path}/logs"]
    runs = tmp_path / "runs"
    names = [
        f"quickstart_sweep_depth-{depth}_matrix_lr-{lr}" for depth in (1, 2) for lr in (0.01, 0.02)
    ]
    every = [RunDir(runs / name) for name in names]

    first = sweep(*words)
    wait_until(
        lambda: any(run.summary.exists() for run in every) or first.poll() is not None,
        what="the first run has finished",
    )
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == Exit.INTERRUPTED, err
    summaries = [read_json(run.summary) or {} for run in every]
    finished = [
        run for run, one in zip(every, summaries, strict=True) if one.get("status") == "done"
    ]
    assert 1 <= len(finished) < 4
    written = {run.name: run.summary.stat().st_mtime_ns for run in finished}

    again = sweep(*words)
    out, err = again.communicate(timeout=120)
    assert again.returncode == Exit.DONE, err
    assert written == {run.name: run.summary.stat().st_mtime_ns for run in finished}
    scores = {}
    for run in every:
        steps = [record["step"] for record in read_records(run.metrics) if "loss" in record]
        assert steps == list(range(1, TINY["num_iterations"] + 1)), run.name
        scores[run.name] = min(
            record["val_bpb"] for record in read_records(run.events) if record["event"] == "eval"
        )
    best = min(scores, key=lambda name: scores[name])
    ranked = [line.split()[:2] for line in out.splitlines()[1:5]]
    assert ranked == [
        [name.split("-")[1].split("_")[0], name.rsplit("-", 1)[1]]
        for name in sorted(scores, key=lambda name: scores[name])
    ]
    page = (runs / "sweeps/quickstart_sweep/report.html").read_text()
    assert f"--resume={best} --num_iterations={2 * TINY['num_iterations']}" in page
    assert [name for name in names if f">{name}</td>" not in page] == []
    listed = subprocess.run(
        ["./duet", "runs", "--json", f"--dir={runs}"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(run["name"] for run in json.loads(listed.stdout)["runs"]) == sorted(names)


@pytest.mark.slow
def test_a_sweep_survives_its_terminal(project: Path, tmp_path: Path, token: str) -> None:
    values = [f"--{k}={v}" for k, v in TINY.items()]
    words = ["configs/dual_gpu/quickstart.py", *values, "--seed=1,2", f"--log_dir={tmp_path}/logs"]
    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        ["./duet", "sweep", *words, f"--out_dir={tmp_path}/runs"],
        cwd=project,
        env={k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_", "OMP_"))}
        | {TOKEN: token, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
    )
    os.close(terminal)
    runs = tmp_path / "runs"
    try:
        wait_until(
            lambda: any(runs.glob("*/metrics.jsonl")) or process.poll() is not None,
            what="the first run trains",
        )
        shown = os.read(main, 1 << 16)
    finally:
        os.close(main)  # the kernel sends SIGHUP
    assert b"quickstart_sweep" in shown
    process.wait(timeout=240)
    ends = [RunDir(path).summary for path in runs.glob("quickstart_sweep*") if path.is_dir()]
    assert [(read_json(file) or {}).get("status") for file in ends] == ["done", "done"]
    assert process.returncode == Exit.DONE
