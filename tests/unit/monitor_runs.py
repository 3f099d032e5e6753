"""Made-up runs for the tests of the monitor, written with the code that writes real runs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

from training.core import rundir
from training.core.cells import cells
from training.core.contracts.state import RunState
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir
from training.monitor import screen, state, term_text
from training.monitor.screen import View

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(ROOT / "monitor_training.sh")
PATIENCE_S = 30.0  # limit for what takes a fraction of a second on an idle machine
GIB = 1 << 30
VIDEO: dict[str, Any] = {
    "name": "video_restoration",
    "unit": "samples",
    "file": None,
    "options": {"dataroot_gt": "data/moving", "embed_dim": 16, "gt_size": 64},
}
# unit → per step, per second
PER_STEP = {
    "tokens": (4096, 38000.0),
    "samples": (16, 3.27),
}


class Made:
    """A run directory, written with Duet's own writers. `at`: when it was planned, `age_s` seconds
    ago; its hundredth step was five seconds ago."""

    def __init__(self, path: Path, ranks: int = 2, age_s: float = 100.0, **plan: Any) -> None:
        self.run, self.at = RunDir(path), time.time() - age_s
        self.first_step = self.at + max(0.0, age_s - 15)
        self.log = path.parent.parent / "logs" / "train_dual_gpu_20261121_030000.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text(
            f"[INFO] 2026-11-21 03:00:00 hello\n[INFO] 2026-11-21 03:00:00 run directory: "
            f"{path}\nend of log\n"
        )
        self.run.create()
        self.plan = {
            "created": self.at,
            "run_name": path.name,
            "run_dir": str(path),
            "log_file": str(self.log),
            "command": {"script": "train_dual_gpu.sh", "args": [], "cwd": "/"},
            "config": {"num_iterations": 400},
            "ranks": ranks,
            "device": {"value": "cpu", "reason": "as asked"},
            "gpus": [],
            "precision": {"value": "bf16", "reason": "as asked"},
            **plan,
        }
        rundir.write_json(self.run.plan, self.plan)

    def supervisor(self, pid: int, rank_pid: int | None = None) -> Made:
        ranks = [{"rank": r, "pid": rank_pid or pid} for r in range(self.plan["ranks"])]
        rundir.write_json(self.run.supervisor, {"pid": pid, "started": self.at + 1, "ranks": ranks})
        return self

    def beats(
        self,
        phase: str = "forward",
        step: int = 7,
        ranks: list[int] | None = None,
        age_s: float = 0.0,
    ) -> Made:
        now, wall = time.monotonic_ns() - int(age_s * 1e9), time.time() - age_s
        with mock.patch.multiple(time, monotonic_ns=lambda: now, time=lambda: wall):
            for rank in range(self.plan["ranks"]) if ranks is None else ranks:
                pulse = Heartbeat(self.run.heartbeat(rank), rank)
                pulse.epoch, pulse.step = 1, step
                pulse.beat(phase)
        return self

    def step(self, step: int, loss: float, at: float | None = None, **other: Any) -> None:
        when = self.first_step + step * 0.1 if at is None else at
        unit = self.plan["task"]["unit"] if "task" in self.plan else "tokens"
        each, speed = PER_STEP[unit]
        facts = {
            "epoch": 1,
            "lr": 0.002,
            "grad_norm": 0.5,
            unit: step * each,
            f"{unit}_per_s": speed,
            "step_ms": 100.0 + step % 10,
        }
        rundir.append_json(
            self.run.metrics, {"time": when, "step": step, "loss": loss, **facts, **other}
        )

    def score(self, step: int, bpb: float) -> None:
        self.scores(step, val_loss=bpb * math.log(2), val_bpb=bpb)

    def scores(self, step: int, **values: float) -> None:
        record = {
            "time": self.first_step + step * 0.1,
            "step": step,
            "epoch": 1,
            **values,
            "eval_ms": 900.0,
        }
        rundir.append_json(self.run.metrics, record)

    def steps(self, count: int = 100) -> Made:
        rundir.write_json(
            self.run.data,
            {
                "total_steps": 400,
                "steps_per_epoch": 400,
                "epochs": 1,
                "train_tokens": 10**7,
                "val_tokens": 10**5,
            },
        )
        for step in range(1, count + 1):
            self.step(step, 2 + 3 * math.exp(-step / 30))
            if step % 50 == 0:
                self.score(step, 3.0 - step / 100)
        return self

    def restored(self, count: int = 100) -> Made:
        """Steps of a video task (`task=VIDEO`), without data.json and with four scores."""
        rundir.append_json(
            self.run.events,
            {"time": self.at + 1, "event": "start", "step": 0, "total_steps": 300, "world_size": 2},
        )
        for step in range(1, count + 1):
            self.step(step, 0.004 + 0.05 * math.exp(-step / 30))
            if step % 50 == 0:
                self.scores(
                    step,
                    val_psnr=27.0 + step / 50,
                    val_ssim=0.8 + step / 1000,
                    val_psnr_input=25.31,
                    val_ssim_input=0.77,
                )
        return self

    def summary(self, **other: Any) -> Made:
        facts = {
            "status": "done",
            "exit_code": 0,
            "steps": 400,
            "loss_first": 5.5,
            "loss_last": 2.1,
            "tokens": 1_638_400,
            "bytes_per_token": 1.0,
            "val_bpb_first": 3.5,
            "val_bpb_last": 1.87,
            "seconds": 41.0,
        }
        rundir.write_json(self.run.summary, facts | other)
        return self

    def failure(self, **other: Any) -> Made:
        facts = {
            "cause": "gpu_oom",
            "rank": 1,
            "summary": "CUDA out of memory",
            "exit_code": 4,
            "phase": "step 7: forward",
        }
        rundir.write_json(
            self.run.failure,
            facts | {"where": "model.py:12", "advice": ["--device_batch_size=8"]} | other,
        )
        return self


def dead_pid() -> int:
    """Pid of a process that has just ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def look(run: RunDir) -> RunState:
    return state.RunWatch(run).read()


def text_of(run: RunDir, width: int = 80, height: int = 24) -> str:
    return "\n".join(screen.screen(look(run), View(width, height)))


def old(path: Path, seconds: float = 200.0) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def check_size(seen: RunState, width: int, height: int) -> None:
    for colour in (False, True):
        lines = screen.screen(seen, View(width, height, colour, footer="q quit"))
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
        assert len(lines) == height and plain[-1] == term_text.cut("q quit", width)
        assert max(map(cells, plain)) <= width
        assert colour or plain == lines


def program(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    return subprocess.run(
        [COMMAND, *argv],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
