"""Screens of the monitor: every state at every size, including damaged files."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.monitor_person import Person
from tests.unit.monitor_runs import GIB, Made, check_size, dead_pid, look, text_of
from training.core import json_text, rundir
from training.core.cells import cells
from training.core.messages import LANGUAGES
from training.host.gpus import SLOWDOWNS
from training.monitor import run_status, screen, sections, term_text
from training.monitor.screen import View

# The uuids of the stand-in driver
UUID_0, UUID_1 = (f"GPU-000000a{n}-0000-4000-8000-000000000000" for n in (0, 1))

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
    "garbage",
    [
        *GARBAGE,
        b'{"pid": -5, "started": 1e99, "ranks": [3, {"rank": 1e9, "pid": "x"}], "created": "now", '
        b'"step": 1e400}\n',
    ],
)
def test_damaged_files_cause_no_traceback(made: Made, garbage: bytes) -> None:
    made.supervisor(os.getpid()).steps(20).beats().summary().failure()
    made.run.event("warning", text="well")
    files = [p for p in made.run.path.rglob("*") if p.is_file()]
    for file in files:
        kept = file.read_bytes()
        file.write_bytes(garbage)
        seen = look(made.run)
        json.dumps(json_text.finite(seen), allow_nan=False)
        assert seen["run"]["state"] in {"starting", "running", *run_status.ENDED}
        check_size(seen, 80, 24)
        screen.one_line(seen)
        file.write_bytes(kept)
    for file in files:
        file.write_bytes(garbage)
    check_size(look(made.run), 80, 24)
    for file in files:
        file.unlink()
    check_size(look(made.run), 80, 24)


@pytest.mark.parametrize(
    ("width", "height", "language"),
    [
        *((w, h, "en") for w, h in ((1, 1), (20, 4), (40, 10), (60, 16), (120, 40), (300, 90))),
        *((80, 24, language) for language in LANGUAGES),
    ],
)
def test_every_state_fits_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int, language: str
) -> None:
    monkeypatch.setenv("DUET_LANG", language)
    for count in (1, 2, 9):
        made = Made(
            tmp_path / f"{count}" / "a very long name of a run 训练运行 with wide letters",
            ranks=count,
        )
        check_size(look(made.run), width, height)
        made.supervisor(os.getpid()).steps(60).beats()
        made.run.event("warning", text="w" * 500)
        check_size(look(made.run), width, height)
        check_size(look(made.summary().run), width, height)
        check_size(look(made.failure().run), width, height)


def test_80x24_shows_everything(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100).beats()
    made.run.event("warning", text="the disk is nearly full")
    shown = text_of(made.run)
    for word in (
        "small run",
        "RUNNING",
        "2 ranks · cpu · bf16",
        "step 100 of 400  25.0 %",
        " left",
        "loss 2.1070",
        "val 2.0000",
        "step 100)",
    ):
        assert word in shown
    for word in (
        "lr 0.002",
        "grad norm 0.5",
        "38,000 tokens/s",
        "step 105 ms",
        "▁",
        "RANK",
        "CPU",
        "RAM",
        "disk",
        "/dev/shm",
        "nearly full",
        "end of log",
    ):
        assert word in shown
    assert made.run.path.name in shown.split("RUN  ")[1] and made.log.name in shown


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (200, 50)])
@pytest.mark.parametrize("plain", [False, True])
def test_two_gpus_on_a_terminal(
    made: Made,
    sit: Callable[..., Person],
    nvidia: Callable[..., dict[str, str]],
    columns: int,
    rows: int,
    plain: bool,
) -> None:
    rundir.write_json(
        made.run.plan,
        made.plan
        | {
            "device": {"value": "cuda", "reason": "-"},
            "gpus": [{"uuid": UUID_0}, {"uuid": UUID_1}],
        },
    )
    for step in range(101, 160):
        made.step(step, 2.0, mfu=0.412, compute_ms=[40.0, 41.0], memory_bytes=[21 * GIB, 21 * GIB])
    (made.run.checkpoints / "step_00000100").mkdir()
    processes = f"{os.getpid()}:21.5;{os.getppid()}:2"  # another process is on GPU 1
    facts = {
        "USE": "97,100",
        "POWER": "431,70",
        "POWER_LIMIT": 575,
        "TEMPERATURE": "71,93",
        "REASONS": "1,64",
    }
    environ = nvidia(COUNT=2, NAME="NVIDIA GeForce RTX 5090", PROCESSES=processes, **facts)
    more = {"NO_COLOR": "1"} if plain else {}
    person = sit(*(["--ascii"] if plain else []), rows=rows, columns=columns, **environ, **more)
    other = re.compile(r"1\* RTX 5090 +100 % .* 70 W +\S+ \d+ 2\.0")
    parts = ("CHECKPOINT", "end of log", "/dev/shm")  # of a complete screen
    person.until(
        lambda: (
            bool(other.search(person.sees))
            and "CPU load" not in person.sees
            and all(p in person.sees for p in parts)
        )
    )
    seen = [line.rstrip() for line in person.screen.display]
    assert seen[0].startswith("Duet  small run") and re.search(r"RUNNING  \d\d:\d\d:\d\d$", seen[0])
    assert any(
        re.search(r"0\* RTX 5090 +97 % .* 431 W +\*(rank \d )?\d+ 21\.5", line) for line in seen
    )
    shown = "\n".join(seen)
    assert f"! GPU 1: {SLOWDOWNS[0x40]}, 93" in shown and re.search(
        r"! GPU 1: another process of user \S+, pid \d+ with 2\.0 GiB", shown
    )
    for word in (
        "step 159 of 400",
        "loss 2.0000",
        "bits/byte",
        "lr 0.002",
        "grad norm 0.5",
        "38,000 tokens/s",
        "p95",
        "left",
        "MFU 41.2 %",
        "forward",
    ):
        assert word in shown, word
    assert (
        "CHECKPOINT" in shown
        and "step_00000100" in shown
        and "end of log" in shown
        and "/dev/shm" in shown
    )
    assert all(len(line) <= columns for line in seen) and seen[rows - 1].startswith("q quit")
    if columns == 200:
        assert "tok/s" in shown and "COMPUTE" in shown and "21.0 GiB" in shown
    coloured = re.search(rb"\x1b\[[0-9;]*m", person.raw) is not None
    assert (shown.isascii(), coloured) == (plain, not plain)


def test_ascii_output_is_ascii(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100).beats("évaluation").summary()
    shown = "".join(screen.screen(look(made.run), View(80, 24, ascii_only=True)))
    assert shown.isascii() and "#" in shown and "->" not in shown


def test_advice_is_complete_at_any_width(made: Made) -> None:
    """Users copy it."""
    advice = (
        "./duet diagnose 'experiments/a run with a long name of many words' --lang=en   # "
        "asks for the cause again"
    )
    rundir.write_json(
        made.run.failure,
        {"cause": "unknown", "rank": 1, "summary": "s " * 60, "exit_code": 4, "advice": [advice]},
    )
    for width in (60, 80, 120, 160):
        shown = screen.screen(look(made.run), View(width, 40))
        assert max(map(cells, shown)) <= width
        assert " ".join(f"try: {advice}".split()) in " ".join(" ".join(shown).split())


def test_advice_is_complete_on_a_small_terminal(made: Made) -> None:
    """Beside a long cause, a curve, ranks and a log; also with more advice than usual."""
    made.supervisor(dead_pid()).steps(100).beats().failure()
    steps = [f"device_batch_size is {n}: try {n - 1}, the same 256 tokens per step" for n in (9, 7)]
    command = "./launch_train.sh 2 --resume=oomz --device_batch_size=1 --out_dir=elsewhere"
    for advice in ([*steps[:1], command], [*steps, *steps, *steps, command]):
        known = json.loads(made.run.failure.read_text())
        known |= {"summary": "CUDA out of memory " * 20, "advice": advice}
        rundir.write_json(made.run.failure, known)
        shown = [line.strip() for line in screen.screen(look(made.run), View(80, 24))]
        assert " ".join(f"try: {line}" for line in advice) in " ".join(shown)
        assert len(shown) == 24 and any(line.endswith("…") for line in shown[3:9])


def test_wrap_keeps_all_text() -> None:
    line = [("! ", "bad"), ("a word  and", ""), (" " + "x" * 50, "good"), (" 训练运行 end", "")]
    for width in (1, 2, 5, 9, 10, 20, 80):
        rows = term_text.wrap(line, width, 2)
        assert all(term_text.width_of(row) <= max(width, 2) for row in rows), width
        letters = "".join(text for row in rows for text, _ in row).replace(" ", "")
        assert letters == "!awordand" + "x" * 50 + "训练运行end"


def test_labels_of_a_diverged_loss_leave_room_for_its_curve() -> None:
    for high in (1e9, 1.2e14, 1e38, 1e308):
        points = [(step, 2.0 if step < 30 else high) for step in range(60)]
        for rows in (1, 4):
            lines = sections.curve(points, "loss", 60, rows)
            labels = "".join(text for line in lines for text, style in line if style == "dim")
            assert max(map(term_text.width_of, lines)) <= 60
            assert {f"{high:.4g}", "2.000"} <= {*re.findall(r"[-+.e\d]+", labels)}
            assert all(
                cells(text) > 30 for line in lines for text, style in line if style == "info"
            )


def test_a_copy_of_a_checkpoint_is_not_the_newest_one(made: Made) -> None:
    for name in ("step_00000100", "step_00000090_old", "step_best"):
        (made.run.checkpoints / name).mkdir()
    seen = look(made.run)["checkpoint"]
    assert seen and (seen["step"], Path(seen["path"]).name) == (100, "step_00000100")


def test_removed_checkpoint_has_no_age(made: Made) -> None:
    (made.run.checkpoints / "step_00000100").mkdir()
    made.steps(3).supervisor(os.getpid())
    seen = look(made.run)
    assert seen["checkpoint"] and seen["checkpoint"]["time_unix_s"]
    shown = [line for line in screen.screen(seen, View(120, 40)) if "CHECKPOINT" in line]
    seen["checkpoint"]["time_unix_s"] = None  # as after the folder was removed
    without = [line for line in screen.screen(seen, View(120, 40)) if "CHECKPOINT" in line]
    assert len(shown) == len(without) == 1
    assert " ago " in shown[0] and " ago " not in without[0] and "step_00000100" in without[0]


def test_an_ended_run_shows_its_end_instead_of_the_present_time(made: Made) -> None:
    at = time.time() - 3 * 86400
    made.supervisor(dead_pid()).steps().summary(time=at)
    ended = time.strftime("%a %H:%M", time.localtime(at))
    assert text_of(made.run).splitlines()[0].endswith(f"FINISHED  {ended}, 3 d ago")


def test_warnings_are_those_of_the_last_launch_with_their_day(made: Made) -> None:
    now = time.time()
    launched = now - 3 * 86400
    rundir.write_json(made.run.plan, made.plan | {"created": launched})
    for at, text in ((launched - 9, "FAILED rank 1"), (launched + 9, "slow disk"), (now, "full")):
        rundir.append_json(made.run.events, {"time": at, "event": "warning", "text": text})
    assert look(made.run)["run"]["warnings"] == 3
    lines = [line for line in text_of(made.run, 80, 50).splitlines() if line.startswith("warning")]
    assert lines == [
        f"warning {time.strftime('%m-%d %H:%M', time.localtime(launched + 9))} slow disk",
        f"warning {time.strftime('%H:%M:%S', time.localtime(now))} full",
    ]
