"""The monitor on made-up run directories of every state, and once through a real terminal as a person sees it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest

from training import heartbeat, rundir
from training.heartbeat import Heartbeat
from training.host import gpus
from training.monitor import __main__ as monitor
from training.monitor import draw, options, records, screen, state
from training.monitor.screen import View
from training.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(ROOT / "monitor_training.sh")
PATIENCE_S = 30.0  # for what takes a fraction of a second on an idle machine
GIB = 1 << 30


class Made:
    """A run directory, written with the project's own writers. `at` is when it was planned, `age_s` seconds ago."""

    def __init__(self, path: Path, ranks: int = 2, age_s: float = 100.0, **plan: Any) -> None:
        self.run, self.at = RunDir(path), time.time() - age_s
        self.log = path.parent.parent / "logs" / "train_dual_gpu_20261121_030000.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text(f"[INFO] 2026-11-21 03:00:00 hello\n[INFO] 2026-11-21 03:00:00 run directory: {path}\nlast words\n")
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

    def beats(self, phase: str = "forward", step: int = 7, ranks: list[int] | None = None) -> Made:
        for rank in range(self.plan["ranks"]) if ranks is None else ranks:
            pulse = Heartbeat(self.run.heartbeat(rank), rank)
            pulse.epoch, pulse.step = 1, step
            pulse.beat(phase)
        return self

    def step(self, step: int, loss: float, at: float | None = None, **other: Any) -> None:
        when = self.at + 2 + step * 0.1 if at is None else at
        facts = {"epoch": 1, "lr": 0.002, "grad_norm": 0.5, "tokens": step * 4096, "tokens_per_s": 38000.0, "step_ms": 100.0 + step % 10}
        rundir.append_json(self.run.metrics, {"time": when, "step": step, "loss": loss, **facts, **other})

    def score(self, step: int, bpb: float) -> None:
        record = {
            "time": self.at + 2 + step * 0.1,
            "step": step,
            "epoch": 1,
            "val_loss": bpb * math.log(2),
            "val_bpb": bpb,
            "eval_ms": 900.0,
        }
        rundir.append_json(self.run.metrics, record)

    def steps(self, count: int = 100) -> Made:
        rundir.write_json(
            self.run.data, {"total_steps": 400, "steps_per_epoch": 400, "epochs": 1, "train_tokens": 10**7, "val_tokens": 10**5}
        )
        for step in range(1, count + 1):
            self.step(step, 2 + 3 * math.exp(-step / 30))
            if step % 50 == 0:
                self.score(step, 3.0 - step / 100)
        return self

    def summary(self, **other: Any) -> Made:
        facts = {
            "status": "done",
            "steps": 400,
            "loss_first": 5.5,
            "loss_last": 2.1,
            "val_bpb_first": 3.5,
            "val_bpb_last": 1.87,
            "seconds": 41.0,
        }
        rundir.write_json(self.run.summary, facts | other)
        return self

    def failure(self) -> Made:
        facts = {"cause": "gpu_oom", "rank": 1, "summary": "CUDA out of memory", "exit_code": 4, "phase": "step 7: forward"}
        rundir.write_json(self.run.failure, facts | {"where": "model.py:12", "advice": ["--device_batch_size=8"]})
        return self


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "experiments" / "small run")


def dead_pid() -> int:
    """A process that has just ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def look(run: RunDir) -> dict[str, Any]:
    return state.Watch(run).read()


def text_of(run: RunDir, width: int = 80, height: int = 24) -> str:
    return "\n".join(screen.screen(look(run), View(width, height)))


def old(path: Path, seconds: float = 200.0) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


# States


def test_planned_only(made: Made) -> None:
    seen = look(made.run)
    assert (seen["run"]["state"], seen["progress"]["total_steps"], seen["progress"]["eta_s"]) == ("starting", 400, None)
    assert seen["run"]["reason"].startswith("no rank yet")  # planned a while ago
    assert [r["phase"] for r in seen["ranks"]] == [None, None]
    assert "nothing heard yet" in text_of(made.run)


def test_starting_shows_what_each_rank_is_doing(made: Made) -> None:
    made.supervisor(os.getpid()).beats("loading torch", step=0, ranks=[0])
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"]) == ("starting", None)
    shown = text_of(made.run)
    assert "loading torch" in shown and "nothing heard yet" in shown and "STARTING" in shown


def test_running(made: Made) -> None:
    seen = look(made.supervisor(os.getpid()).steps(100).beats("forward", step=101).run)
    assert seen["run"]["state"] == "running"
    progress, training = seen["progress"], seen["training"]
    assert (progress["step"], progress["total_steps"], progress["percent"], progress["epochs"]) == (100, 400, 25.0, 1)
    assert progress["eta_s"] == pytest.approx(300 * 0.1)
    assert progress["elapsed_s"] == pytest.approx(100, abs=5)
    assert training["loss_nats_per_token"] == pytest.approx(2 + 3 * math.exp(-100 / 30))
    assert (training["val_bpb_best"], training["val_bpb_best_step"], training["val_bpb_last"]) == (2.0, 100, 2.0)
    assert (training["step_ms_median"], training["step_ms_p95"], training["tokens_per_s"]) == (104.5, 109.0, 38000.0)
    assert [(r["doing"], r["alive"], r["late"]) for r in seen["ranks"]] == [("step 101: forward", True, False)] * 2


def test_finished(made: Made) -> None:
    made.supervisor(dead_pid()).steps().beats(heartbeat.FINISHED, 400).summary()
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["progress"]["eta_s"]) == ("finished", "done", None)
    shown = text_of(made.run)
    assert "FINISHED" in shown and "done: loss 5.5000 → 2.1000 · 3.5000 → 1.8700 bits/byte" in shown


def test_failed(made: Made) -> None:
    made.supervisor(dead_pid()).steps().beats().failure()
    seen = look(made.run)
    assert (seen["run"]["state"], seen["failure"]["cause"]) == ("failed", "gpu_oom")
    shown = text_of(made.run)
    assert (
        "gpu_oom on rank 1: CUDA out of memory" in shown
        and "step 7: forward in model.py:12" in shown
        and "try: --device_batch_size=8" in shown
    )


def test_died(made: Made) -> None:
    """Killed with -9, all of it: nothing says so but the missing processes."""
    writer = "import sys; from training.heartbeat import Heartbeat; h = Heartbeat(sys.argv[1], 0); h.step = 9; h.beat('forward')"
    subprocess.run([sys.executable, "-c", writer, str(made.run.heartbeat(0))], cwd=ROOT, check=True)
    made.supervisor(dead_pid()).steps()
    seen = look(made.run)
    assert seen["run"]["state"] == "died" and "gone" in seen["run"]["reason"]
    assert [r["alive"] for r in seen["ranks"]] == [False, False]
    assert seen["ranks"][0]["doing"] == "step 9: forward"


def test_a_rank_alone_keeps_the_run_alive(made: Made) -> None:
    """Started without our supervisor, or the supervisor was killed and the rank has not noticed yet."""
    made.supervisor(dead_pid(), rank_pid=os.getpid()).steps()
    assert look(made.run)["run"]["state"] == "running"


def test_torchrun_is_the_only_known_process(made: Made) -> None:
    rundir.write_json(made.run.supervisor, {"pid": dead_pid(), "started": made.at + 1, "ranks": [{"rank": None, "pid": os.getpid()}]})
    assert look(made.run)["run"]["state"] == "starting"


def test_zombie_is_not_alive(made: Made) -> None:
    process = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
        made.supervisor(process.pid)
        assert look(made.run)["run"]["state"] == "died"
    finally:
        process.wait()


def test_number_of_a_later_process_is_not_alive(made: Made) -> None:
    made.supervisor(os.getpid())
    old(made.run.supervisor, 10**6)  # written long before this process began
    assert look(made.run)["run"]["state"] == "died"


def test_resumed_run_is_not_over(made: Made) -> None:
    """summary.json, failure.json, supervisor.json and beats of the first part are older than the plan of the second."""
    made.steps(60).beats(heartbeat.FINISHED).summary().failure().supervisor(dead_pid())
    for file in (made.run.summary, made.run.failure):
        old(file)
    rundir.write_json(made.run.plan, made.plan | {"created": time.time() + 0.001})
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["progress"]["step"]) == ("starting", None, 60)
    assert [r["phase"] for r in seen["ranks"]] == [None, None]


def test_failure_before_a_restart_is_not_the_end(made: Made) -> None:
    made.supervisor(os.getpid()).steps(10).failure()
    old(made.run.failure, 50)
    made.run.event("restart", attempt=2, cause="unknown", step=10)
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["restarts"]) == ("starting", 1)
    assert seen["warnings"][0]["text"] == "restarted after unknown at step 10"


# Metrics


def test_the_last_record_of_a_step_wins(made: Made) -> None:
    made.steps(100)  # evaluations at 50 (2.5) and 100 (2.0)
    for step in range(81, 91):
        made.step(step, 9.0)
    seen = look(made.run)
    assert (seen["progress"]["step"], seen["training"]["loss_nats_per_token"]) == (90, 9.0)
    assert (seen["training"]["val_bpb_best"], seen["training"]["val_bpb_best_step"]) == (2.5, 50)
    curve = seen["loss_curve"]["points"]
    assert [p["step"] for p in curve] == list(range(1, 91)) and all(p["loss_nats_per_token"] == 9.0 for p in curve[80:])


def test_a_cut_line_waits_until_it_is_whole(made: Made) -> None:
    made.steps(10)
    watch = state.Watch(made.run)
    with made.run.metrics.open("a") as file:
        file.write('{"step": 11, "lo')
        file.flush()
        assert watch.read()["progress"]["step"] == 10
        file.write('ss": 1.5}\n')
    seen = watch.read()
    assert (seen["progress"]["step"], seen["training"]["loss_nats_per_token"]) == (11, 1.5)


def test_a_file_that_starts_again_is_read_again(made: Made) -> None:
    watch = state.Watch(made.steps(50).run)
    assert watch.read()["progress"]["step"] == 50
    made.run.metrics.write_text("")
    made.step(1, 5.0)
    assert [p["step"] for p in watch.read()["loss_curve"]["points"]] == [1]


def test_a_long_file_is_skimmed_without_losing_what_counts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for step in range(1, 20_001):
        lines.append(
            json.dumps({"time": made.at + step * 0.001, "step": step, "loss": 2 + 3 * math.exp(-step / 3000), "step_ms": step % 97})
        )
        if step % 500 == 0:
            lines.append(json.dumps({"step": step, "val_loss": 1.0, "val_bpb": 2 + abs(step - 7500) / 1e5}))
    made.run.metrics.write_text("\n".join(lines) + "\n")
    size = made.run.metrics.stat().st_size
    assert size > records.WHOLE
    skimmed = state.Watch(made.run)
    quick = skimmed.read()
    monkeypatch.setattr(records, "WHOLE", 10 * size)
    full = look(made.run)
    assert (quick["training"], quick["progress"]["step"]) == (full["training"], 20_000)
    assert quick["training"]["val_bpb_best_step"] == 7500
    assert quick["loss_curve"]["points"][0]["step"] < 200
    for part in ("loss_curve",):
        quick_values, full_values = ([p["loss_nats_per_token"] for p in s[part]["points"]] for s in (quick, full))
        assert len(quick_values) == len(full_values) == state.CURVE_POINTS
        assert quick_values == pytest.approx(full_values, rel=0.02)
    made.step(20_001, 1.0)  # and goes on line by line
    assert skimmed.read()["progress"]["step"] == 20_001


def test_nan_loss_is_shown_and_is_null_in_json(made: Made) -> None:
    made.supervisor(os.getpid()).steps(40)
    made.step(41, math.nan, grad_norm=math.inf)
    seen = look(made.run)
    assert "loss nan" in text_of(made.run) and "×" in text_of(made.run)
    strict = json.loads(json.dumps(state.finite(seen), allow_nan=False))
    assert (strict["training"]["loss_nats_per_token"], strict["training"]["loss_is_finite"]) == (None, False)


# Ranks, warnings, GPUs


def test_late_rank_is_marked_only_while_running(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.supervisor(os.getpid()).steps(10).beats(ranks=[0])
    with monkeypatch.context() as patched:
        now, wall = time.monotonic_ns(), time.time()
        patched.setattr(heartbeat.time, "monotonic_ns", lambda: now - 41_000_000_000)
        patched.setattr(heartbeat.time, "time", lambda: wall - 41)
        made.beats("barrier: before iteration", ranks=[1])
    assert [r["late"] for r in look(made.run)["ranks"]] == [False, True]
    line = next(row for row in text_of(made.run).splitlines() if "barrier" in row)
    assert "41." in line and "LATE" in line
    made.summary()
    assert "LATE" not in text_of(made.run)


def test_warnings_are_shown_and_cleaned(made: Made) -> None:
    made.supervisor(os.getpid()).steps(5)
    made.run.event("warning", text="the disk is \x1b[31mnearly\x1b[0m full\x07")
    made.log.write_text("one\rtwo\x1b[2J\n\x1b]0;title\x07three\tcolumns\n")
    shown = text_of(made.run)
    assert "the disk is nearly full" in shown and "two\nthree   columns" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def gpu(index: int, *processes: gpus.GpuProcess) -> gpus.Gpu:
    return gpus.Gpu(index, f"GPU-{index}", "NVIDIA GeForce RTX 5090", 32 * GIB, 4 * GIB, 97, 71, 431.2, (12, 0), processes)


def test_gpu_rows_mark_processes_of_this_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made.plan | {"device": {"value": "cuda", "reason": "-"}, "gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]}
    rundir.write_json(made.run.plan, plan)
    made.supervisor(os.getpid()).steps(5)
    worker = subprocess.Popen(["sleep", "60"])  # a child of a rank belongs to the run too
    try:
        found = (
            gpu(0, gpus.GpuProcess(1, 2 * GIB, "bob", "jupyter"), gpus.GpuProcess(os.getpid(), 21 * GIB, "ann", "python")),
            gpu(1, gpus.GpuProcess(worker.pid, None)),
            gpus.Gpu(2, "GPU-2", "NVIDIA A2", None, None, None, None, None),
        )
        monkeypatch.setattr(gpus, "look", lambda environ: gpus.Machine(found, "3"))
        seen = look(made.run)
        assert [[p["this_run"] for p in g["processes"]] for g in seen["gpus"]] == [[False, True], [True], []]
        shown = text_of(made.run)
    finally:
        worker.kill()
        worker.wait()
    assert re.search(rf"0\* RTX 5090 +97 % +28\.0 / 32\.0 +71 °C +431 W +\*{os.getpid()} 21\.0, bob 1", shown)
    assert re.search(r"2  A2 +- +- / - +- +-", shown)


def test_a_driver_that_hangs_or_breaks_does_not_stop_the_monitor(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.write_json(made.run.plan, made.plan | {"device": {"value": "cuda", "reason": "-"}})
    released = threading.Event()

    def hanging(environ: object) -> gpus.Machine:
        released.wait(PATIENCE_S)
        raise OSError("Xid 79")

    monkeypatch.setattr(gpus, "look", hanging)
    watch = state.Watch(made.run)
    seen = watch.read(0.01)
    assert "has not answered for" in seen["gpus_reason"]
    assert "has not answered for" in "\n".join(screen.screen(seen, View(80, 24)))
    released.set()
    assert "Xid 79" in watch.read(PATIENCE_S)["gpus_reason"]


def test_many_ranks_on_few_rows_show_the_worst_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path / "experiments" / "wide", ranks=64).supervisor(os.getpid()).steps(10).beats()
    seen = look(made.run)
    seen["ranks"][41] |= {"late": True, "beat_age_s": 99.0, "doing": "barrier: end of epoch"}
    shown = "\n".join(screen.screen(seen, View(80, 24)))
    assert re.search(r"\n +41 .* 99\.0 s LATE  barrier: end of epoch\n", shown) and re.search(r"the other (\d+) ranks, \1 alive", shown)


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


def check_size(seen: dict[str, Any], width: int, height: int) -> None:
    for colour in (False, True):
        lines = screen.screen(seen, View(width, height, colour, footer="q leaves"))
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
        assert len(lines) == height and plain[-1] == draw.cut("q leaves", width)
        assert max(map(draw.cells, plain)) <= width
        assert colour or plain == lines


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


# The command line


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a wrong command line answers: exit 2, all on standard error, no traceback."""
    assert monitor.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "nothing to show (exit 2)" in err
    return err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, without any run."""
    monkeypatch.setattr(options, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_unknown_flags_get_the_nearest_match(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--intervall", "5", "--jsn", "-x", "--frobnicate", "7", "--interval=0.01", "--once=yes")
    assert "--intervall is not a known flag" in text and "try:     ./monitor_training.sh --interval=5" in text
    assert "./monitor_training.sh --json\n" in text and "-x is not" in text and "--help" in text and "6 problems" in text
    assert (
        "--interval is '0.01'" in text and "from 0.2 to 3600" in text and "--interval=0.2" in text and "--once has the value 'yes'" in text
    )


@pytest.mark.parametrize("value", ["abc", "nan", "-1", "inf", "0"])
def test_wrong_interval(home: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert f"--interval is {value!r}" in said(capsys, f"--interval={value}")


def test_no_run_yet(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    assert f"there is no run in {home}/experiments yet" in text and "./train_dual_gpu.sh configs/dual_gpu/quickstart.py" in text


def test_logs_that_do_not_work(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(home / "experiments" / "one")
    empty, foreign, moved = home / "empty.log", home / "foreign.log", home / "moved.log"
    empty.touch()
    foreign.write_text("epoch 1\nthe run directory: is elsewhere\n")
    moved.write_text("[INFO] 2026-11-21 03:00:00 run directory: /gone/one\n")
    assert "no such file" in said(capsys, "--log=missing.log")
    assert "not a file" in said(capsys, f"--log={home}")
    assert "it is empty" in said(capsys, f"--log={empty}")
    assert "it has no line '[INFO] … run directory: …'" in said(capsys, "--log", str(foreign))
    text = said(capsys, f"--log={moved}")
    assert "its run directory /gone/one is not there" in text and "try:     ./monitor_training.sh --run=one" in text
    assert "both given" in said(capsys, f"--log={made.log}", "--run=one")
    assert f"try:     ./monitor_training.sh --log={made.log}" in said(capsys, str(made.log))
    assert "--run=one" in said(capsys, "--run=oen")
    assert "a folder, but without anything of a run" in said(capsys, f"--run={home}")
    assert f"--run={made.run.path}" in said(capsys, f"--run={made.run.plan}")


def test_the_last_run_that_a_log_names(home: Path) -> None:
    first, second = Made(home / "experiments" / "first"), Made(home / "experiments" / "second run")
    log = home / "both.log"
    line = "[INFO] 2026-11-21 03:00:00 run directory: {}\n"
    log.write_text(line.format(first.run.path) + line.format(second.run.path) + " run directory: nowhere\n" + "x" * 100_000)
    run, shown = options.find(options.parse([f"--log={log}"]), home)
    assert (run.path, shown) == (second.run.path, log)


def test_newest_run_and_run_by_name(home: Path) -> None:
    first, second = Made(home / "experiments" / "first"), Made(home / "experiments" / "second")
    old(first.run.plan)
    assert options.find(options.parse([]), home)[0].path == second.run.path
    assert options.find(options.parse(["--run", "first"]), home)[0].path == first.run.path


# The program


def program(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    return subprocess.run([COMMAND, *argv], env=clean | environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_once_and_json_write_nothing(made: Made) -> None:
    made.supervisor(os.getpid()).steps(50).beats().summary()

    def content() -> dict[Path, tuple[int, bytes]]:
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in made.run.path.parent.parent.rglob("*") if p.is_file()}

    before = content()
    once = program(f"--run={made.run.path}", "--once")
    assert (once.returncode, once.stderr) == (0, "") and "\x1b" not in once.stdout and "FINISHED" in once.stdout
    assert len(once.stdout.splitlines()) <= 24 and max(map(len, once.stdout.splitlines())) <= 80
    answer = program(f"--log={made.log}", "--json")
    value = json.loads(answer.stdout)
    assert (answer.returncode, value["schema_version"], value["run"]["state"]) == (0, state.SCHEMA_VERSION, "finished")
    assert content() == before


def test_output_that_is_not_utf8_gets_ascii(made: Made) -> None:
    made.steps(50).summary()
    assert program(f"--run={made.run.path}", "--once", PYTHONIOENCODING="latin-1", COLUMNS="100").stdout.isascii()


def test_errors_of_the_program(made: Made) -> None:
    answer = program("--run=/nowhere", "--once")
    assert (answer.returncode, answer.stdout) == (2, "") and "[ERROR]" in answer.stderr
    helped = program("--help", "--nonsense")
    assert helped.returncode == 0 and helped.stdout.startswith("Watch a training run") and "--interval=S" in helped.stdout


def test_not_a_terminal_gets_lines_until_the_run_has_ended(made: Made) -> None:
    supervisor = subprocess.Popen(["sleep", "600"])
    made.supervisor(supervisor.pid).steps(10)
    with subprocess.Popen([COMMAND, f"--run={made.run.path}", "--interval=0.2"], stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            first = watching.stdout.readline()
            assert "small run  running  step 10/400  loss 4.1496" in first and first.isprintable() is False and "\x1b" not in first
            made.summary()
            supervisor.kill()
            supervisor.wait()
            rest, _ = watching.communicate(timeout=PATIENCE_S)
            assert "finished" in rest.splitlines()[-1] and watching.returncode == 0
        finally:
            supervisor.kill()
            watching.kill()


def test_torch_is_never_imported() -> None:
    code = "import sys, training.monitor.__main__, training.monitor.terminal; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# A real terminal


class Person:
    """Sits at a terminal of 80 × 24 and sees what a person would see."""

    def __init__(self, *argv: str, rows: int = 24, columns: int = 80, **environ: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"} | environ
        self.child = pexpect.spawn(COMMAND, list(argv), dimensions=(rows, columns), env=clean)

    @property
    def sees(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, f"not seen in time:\n{self.sees}"
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(), f"ended before that was seen:\n{self.sees}"
                return
            self.raw += chunk
            self.stream.feed(chunk)

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def left(self) -> tuple[int | None, int | None]:
        """(exit status, signal) after the end of all output."""
        while True:
            try:
                chunk = self.child.read_nonblocking(1 << 16, timeout=PATIENCE_S)
            except pexpect.EOF:
                break
            self.raw += chunk
            self.stream.feed(chunk)
        self.child.close()
        return self.child.exitstatus, self.child.signalstatus


@pytest.fixture
def sit(made: Made) -> Iterator[Callable[..., Person]]:
    """Watches a running run; nobody is left sitting there at the end."""
    made.supervisor(os.getpid()).steps(100).beats()
    people: list[Person] = []

    def begin(*argv: str, **environ: str) -> Person:
        people.append(Person(f"--run={made.run.path}", "--interval=0.2", *argv, **environ))
        return people[-1]

    yield begin
    for person in people:
        person.child.close(force=True)
        assert not person.child.isalive()


def test_live_view_as_a_person_sees_it(made: Made, sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    assert person.screen.cursor.hidden
    rows = person.screen.display
    assert rows[0].startswith("Duet  small run") and re.search(r"RUNNING  \d\d:\d\d:\d\d$", rows[0])
    assert "step 100 of 400  25.0 %" in rows[2] and rows[2].startswith("█")
    assert re.match(r" +0 +\d+ +7 +[\d.]+ s  step 7: forward", next(r for r in rows if "forward" in r))
    assert rows[23].startswith("q leaves")
    assert person.screen.buffer[0][len("Duet  ")].bold and any(cell.fg != "default" for cell in person.screen.buffer[0].values())

    made.step(101, 1.2345)  # news appear by themselves
    person.until(lambda: "loss 1.2345" in person.sees and "step 101 of 400" in person.sees)
    person.until(lambda: "CPU load" not in person.sees)  # and CPU use from the second look on

    person.resize(40, 120)
    person.until(lambda: person.screen.display[39].startswith("q leaves"))
    assert re.search(r"RUNNING  \d\d:\d\d:\d\d$", person.screen.display[0]) and len(person.screen.display[0]) == 120
    assert person.sees.count("q leaves") == 1 and "(ends " in person.sees

    person.resize(12, 50)
    person.until(lambda: person.screen.display[0].startswith("Duet  ") and person.screen.display[11].startswith("q leaves"))
    assert "RUNNING" in person.screen.display[0] and person.sees.count("Duet  ") == 1

    person.child.send("x")  # any other key does nothing
    person.child.send("q")
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert person.raw.index(b"\x1b[?1049h") < person.raw.index(b"\x1b[?1049l")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_give_the_terminal_back(sit: Callable[..., Person], number: int, status: int) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    before = person.screen.cursor.hidden
    person.child.kill(number)
    assert person.left() == (status, None)
    assert before and not person.screen.cursor.hidden and b"Traceback" not in person.raw


def test_ctrl_c_and_ctrl_z_on_the_keyboard(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q leaves" in person.sees)
    person.child.sendcontrol("z")
    person.until(lambda: not person.screen.cursor.hidden)  # the shell would have its terminal again
    person.child.kill(signal.SIGCONT)
    person.until(lambda: person.screen.cursor.hidden and person.screen.display[23].startswith("q leaves"))
    person.child.sendcontrol("c")
    assert person.left() == (130, None)
    assert not person.screen.cursor.hidden


def test_ends_by_itself_with_a_last_screen(made: Made, sit: Callable[..., Person]) -> None:
    rank = subprocess.Popen(["sleep", "600"])
    try:
        made.supervisor(rank.pid)
        person = sit("--ascii")
        person.until(lambda: "RUNNING" in person.sees)
        made.summary()
    finally:
        rank.kill()
        rank.wait()
    assert person.left() == (0, None)
    assert not person.screen.cursor.hidden
    assert "FINISHED" in person.screen.display[0] and "done: loss" in person.sees and person.sees.isascii()


def test_no_color(sit: Callable[..., Person]) -> None:
    person = sit(NO_COLOR="1")
    person.until(lambda: "q leaves" in person.sees)
    assert not re.search(rb"\x1b\[[0-9;]*m", person.raw)
