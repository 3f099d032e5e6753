"""What the monitor shows: every state at every size, damaged files included."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, check_size, look, text_of
from training.monitor import screen, state
from training.monitor.screen import View

# Damage, sizes


GARBAGE = [
    b"",
    b"{",
    b'{"ranks": "x", "created": [], "gpus": 3, "config": 7, "device": null',
    b"[1, 2]\n",
    b'{"step": "a"}\n',
    b"\xff\x00\xfe\n",
    b"[" * 5000,
]


@pytest.mark.parametrize(
    "garbage", [*GARBAGE, b'{"pid": -5, "started": 1e99, "ranks": [3, {"rank": 1e9, "pid": "x"}], "created": "now", "step": 1e400}\n']
)
def test_damaged_files_are_never_a_traceback(made: Made, garbage: bytes) -> None:
    made.supervisor(os.getpid()).steps(20).beats().summary().failure()
    made.run.event("warning", text="well")
    files = [p for p in made.run.path.rglob("*") if p.is_file()]
    for file in files:
        kept = file.read_bytes()
        file.write_bytes(garbage)
        seen = look(made.run)
        json.dumps(state.finite(seen), allow_nan=False)
        assert seen["run"]["state"] in {"starting", "running", *state.ENDED}
        check_size(seen, 80, 24)
        screen.one_line(seen)
        file.write_bytes(kept)
    for file in files:
        file.write_bytes(garbage)
    check_size(look(made.run), 80, 24)
    for file in files:
        file.unlink()
    check_size(look(made.run), 80, 24)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 4), (40, 10), (60, 16), (80, 24), (120, 40), (300, 90)])
def test_every_state_fits_every_size(tmp_path: Path, width: int, height: int) -> None:
    for count in (1, 2, 9):
        made = Made(tmp_path / f"{count}" / "a very long name of a run 训练运行 with wide letters", ranks=count)
        check_size(look(made.run), width, height)
        made.supervisor(os.getpid()).steps(60).beats()
        made.run.event("warning", text="w" * 500)
        check_size(look(made.run), width, height)
        check_size(look(made.summary().run), width, height)
        check_size(look(made.failure().run), width, height)


def test_80x24_holds_everything(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100).beats()
    made.run.event("warning", text="the disk is nearly full")
    shown = text_of(made.run)
    for word in (
        "small run",
        "RUNNING",
        "2 ranks · cpu · bf16",
        "step 100 of 400  25.0 %",
        "0:30 left",
        "loss 2.1070",
        "val 2.0000",
        "step 100)",
    ):
        assert word in shown
    for word in (
        "lr 0.002",
        "grad norm 0.5",
        "38,000 tokens/s",
        "step 104 ms",
        "▁",
        "RANK",
        "CPU",
        "RAM",
        "disk",
        "/dev/shm",
        "nearly full",
        "last words",
    ):
        assert word in shown
    assert made.run.path.name in shown.split("RUN  ")[1] and made.log.name in shown


def test_ascii_has_no_other_character(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100).beats("évaluation").summary()
    shown = "".join(screen.screen(look(made.run), View(80, 24, ascii_only=True)))
    assert shown.isascii() and "#" in shown and "->" not in shown
