"""Made-up runs for the tests of the report, and a reader of its pages."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.unit.monitor_runs import VIDEO, Made
from training.core import heartbeat, rundir
from training.core.heartbeat import Heartbeat
from training.monitor.report import compare_page, run, run_page

VOID = {"meta", "img", "br", "hr", "input", "link"}
CONFIG = {
    "depth": 3,
    "num_iterations": 400,
    "matrix_lr": "auto",
    "embedding_lr": 0.2,
    "wandb_run": "",
    "tensorboard": True,
}
ORIGINS = dict.fromkeys(CONFIG, "default") | {
    "depth": "from configs/quick.py:4",
    "num_iterations": "from --num_iterations on the command line",
}


def planned(path: Path, **more: Any) -> Made:
    """A run of two ranks with a complete plan."""
    facts: dict[str, Any] = {
        "config": CONFIG,
        "origins": ORIGINS,
        "torch": "2.13.0+cpu",
        "batch": {"device_sequences": 16, "seq_len": 128, "world_size": 2, "accumulation": 1},
        "data": {"name": "stdlib", "files": 653, "bytes": 11291288},
        "variables": [
            {
                "name": "OMP_NUM_THREADS",
                "value": "1",
                "why": "2 cores shared by 2 ranks",
                "origin": "set here",
            }
        ],
        "notes": [],
    }
    made = Made(path, **{**facts, **more})
    rundir.write_json(
        made.run.data,
        {
            "total_steps": 400,
            "steps_per_epoch": 400,
            "epochs": 1,
            "train_tokens": 10**7,
            "val_tokens": 10**5,
        },
    )
    checks = [{"name": "host memory", "status": "ok", "text": "11.5 GiB free", "fixes": []}]
    rundir.write_json(made.run.preflight, {"checks": checks})
    return made


def trained(made: Made, count: int = 120, pace: float = 1.0) -> Made:
    """Steps, evaluations and events of a complete run; rank 1 takes `pace` times as long as
    rank 0."""
    made.first_step = made.at + 2
    event(made, "start", 1.0, step=0, total_steps=400, world_size=2)
    for step in range(1, count + 1):
        own, memory = [40.0, 40.0 * pace], [500 << 20, 520 << 20]
        made.step(step, 2 + 3 * math.exp(-step / 30), compute_ms=own, memory_bytes=memory, mfu=None)
        if step % 40 == 0:
            made.score(step, 3.0 - step / 100)
            event(made, "eval", 2 + step * 0.1, step=step, val_bpb=3.0 - step / 100)
            event(made, "checkpoint", 2.1 + step * 0.1, step=step, path="somewhere")
    for rank in range(2):
        pulse = Heartbeat(made.run.heartbeat(rank), rank)
        for phase in ("fetch", "forward", "backward", "barrier: end", heartbeat.FINISHED):
            pulse.beat(phase)
    event(made, "end", 2.5 + count * 0.1, step=count, exit_code=0)
    return made


def restoring(path: Path, **more: Any) -> Made:
    """A trained run of the video task, as the planner and the trainer write it: no text, no
    data.json, no memory estimate."""
    config = {"task": "video_restoration", "num_iterations": 300, "device_batch_size": 8}
    origins = {
        "task": "from --task on the command line",
        "num_iterations": "default",
        "device_batch_size": "default",
    }
    origins |= {
        "dataroot_gt": "from --dataroot_gt on the command line",
        "embed_dim": "from quick.py:3",
        "gt_size": "default",
    }
    batch = {"device_sequences": 8, "seq_len": 1, "world_size": 2, "accumulation": 1}
    facts: dict[str, Any] = {
        "task": VIDEO,
        "config": config,
        "origins": origins,
        "batch": batch,
        "notes": [],
    }
    return Made(path, **{**facts, **more}).restored()


def event(made: Made, kind: str, after_s: float, /, **facts: Any) -> None:
    rundir.append_json(made.run.events, {"time": made.at + after_s, "event": kind, **facts})


def page_of(made: Made) -> str:
    return run_page.page(run.read_run(made.run)).html()


def comparison(*several: Made) -> str:
    return compare_page.page([run.read_run(made.run) for made in several]).html()


class Reader(HTMLParser):
    """A parsed page: its elements with their attributes, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (
            f"</{tag}> closes <{self.open[-1] if self.open else None}>"
        )
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.parts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [facts for name, facts in self.elements if name == tag]


def read(page: str) -> Reader:
    reader = Reader(page)
    assert not reader.open, f"unclosed: {reader.open}"
    return reader
