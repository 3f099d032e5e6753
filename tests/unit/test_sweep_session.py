"""Runs of a sweep side by side: GPUs, failures and stop signals; launchers are shell programs."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT, clean_environment, python
from tests.unit.test_sweep import TINY, prepared
from training.cli.sweep import board, config_files, session, usable
from training.cli.sweep.slots import Slot
from training.core import rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.core.rundir import RunDir
from training.host import env_vars
from training.host.gpu_processes import GpuProcess
from training.host.gpus import Gpu, GpuInventory


def gpu(visible: str, free_gib: float = 31, pids: tuple[int, ...] = ()) -> Gpu:
    on_it = tuple(GpuProcess(pid, 1 << 30) for pid in pids)
    free = int(free_gib * (1 << 30))
    return Gpu(int(visible[4:]), visible, "a card", 32 << 30, free, 0, 40, 50.0, processes=on_it)


class Driver:
    """The GPUs by CUDA_VISIBLE_DEVICES; idle ones unless set."""

    def __init__(self) -> None:
        self.gpus: dict[str, Gpu] = {}
        self.answers = True

    def inventory(self, environ: dict[str, str]) -> GpuInventory:
        if not self.answers:
            return GpuInventory((), "the driver does not answer")
        visible = environ["CUDA_VISIBLE_DEVICES"]
        return GpuInventory((self.gpus.get(visible) or gpu(visible),), "selected", "580.65")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(usable.gpus, "inventory", made.inventory)
    return made


@pytest.fixture
def acted(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., session.Session]:
    """A sweep whose launchers are these shell programs, on these GPUs. `$1`: name of the run."""

    def make(*programs: str, slots: list[str], fail_fast: bool = False) -> session.Session:
        sweep = prepared(tmp_path, f"--seed={','.join(map(str, range(len(programs))))}")
        sweep.folder.create(sweep.record)
        sweep.slots = [
            Slot(visible, (number,) if visible else ()) for number, visible in enumerate(slots)
        ]
        by_name = {
            run["name"]: text for run, text in zip(sweep.record["runs"], programs, strict=True)
        }
        monkeypatch.setattr(
            session.Session,
            "command",
            lambda self, run: ["bash", "-c", by_name[run["name"]], "bash", run["name"]],
        )
        (tmp_path / "here").mkdir()
        sweep.record["cwd"] = str(tmp_path / "here")
        return session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=fail_fast)

    return make


@pytest.mark.usefixtures("handlers")
def test_a_failed_run_does_not_stop_the_others_and_gpus_are_reused(
    acted: Callable[..., session.Session],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    note = 'echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" >"$1"'
    fails = f"{note}; echo '[ERROR] 2024-10-21 16:00:00 no such card' >&2; exit 4"
    waits = f"{note}; until [[ -e done ]]; do sleep 0.02; done"
    todo = acted(fails, waits, note, f"{note}; touch done", slots=["GPU-7", "GPU-8"])
    assert todo.go() == Exit.TRAINING
    assert todo.states == ["failed", "finished", "finished", "finished"]
    names = [run["name"] for run in todo.runs]
    seen = [(tmp_path / "here" / name).read_text().split() for name in names]
    assert [gpus for gpus, _ in seen] == ["GPU-7", "GPU-8", "GPU-7", "GPU-7"]
    assert {int(threads) for _, threads in seen} == {max(1, env_vars.cpu_count() // 2)}
    assert "no such card" in capsys.readouterr().err
    assert "no such card" in todo.sweep.folder.console(names[0]).read_text()


@pytest.mark.usefixtures("handlers")
def test_a_lost_gpu_gets_no_further_run(
    acted: Callable[..., session.Session], tmp_path: Path
) -> None:
    """The run is trained on the other GPU. There its card is old: other failures are its own."""
    note = 'echo "$CUDA_VISIBLE_DEVICES" >>"$1"'
    breaks = f"""{note}; [[ -e $1.again ]] && exit 4; touch "$1.again"; mkdir "{tmp_path}/$1"
        printf '{{"cause": "gpu_hardware", "time": %s}}' "$(date +%s.%N)" \
            >"{tmp_path}/$1/failure.json"
        exit 4"""
    todo = acted(note, breaks, note, note, slots=["GPU-7", "GPU-8"])
    assert todo.go() == Exit.TRAINING
    assert todo.states == ["finished", "failed", "finished", "finished"]
    seen = [(tmp_path / "here" / run["name"]).read_text().split() for run in todo.runs]
    assert seen == [["GPU-7"], ["GPU-8", "GPU-7"], ["GPU-7"], ["GPU-7"]]


@pytest.mark.usefixtures("handlers")
def test_without_a_gpu_the_rest_waits(
    acted: Callable[..., session.Session], tmp_path: Path
) -> None:
    breaks = f"""mkdir "{tmp_path}/$1"
        printf '{{"cause": "gpu_hardware", "time": %s}}' "$(date +%s.%N)" \
            >"{tmp_path}/$1/failure.json"
        exit 4"""
    todo = acted(breaks, "touch never", slots=["GPU-7"])
    assert todo.go() == Exit.RESOURCES
    assert todo.states == ["waiting", "waiting"]


@pytest.mark.usefixtures("handlers")
def test_a_driver_that_does_not_answer_has_lost_its_gpus(
    acted: Callable[..., session.Session], driver: Driver
) -> None:
    driver.answers = False
    todo = acted("exit 3", "touch never", slots=["GPU-7"])
    assert todo.go() == Exit.RESOURCES
    assert todo.states == ["waiting", "waiting"]


REFUSED = 'echo preflight.gpu >"$DUET_PROBLEMS"; exit 3'
NOTE = 'echo "$CUDA_VISIBLE_DEVICES" >>"$1"'
REFUSED_ON_7 = f"{NOTE}; [[ $CUDA_VISIBLE_DEVICES = GPU-8 ]] || {{ {REFUSED}; }}"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("taken", [gpu("GPU-7", 2), gpu("GPU-7", 20, (9,))])
def test_a_gpu_in_use_by_others_gets_no_run(
    acted: Callable[..., session.Session], driver: Driver, tmp_path: Path, taken: Gpu
) -> None:
    driver.gpus["GPU-7"] = taken
    todo = acted(*[REFUSED_ON_7] * 4, slots=["GPU-7", "GPU-8"])
    assert todo.go() == Exit.DONE
    seen = [(tmp_path / "here" / run["name"]).read_text().split() for run in todo.runs]
    assert seen == [["GPU-7", "GPU-8"], ["GPU-8"], ["GPU-8"], ["GPU-8"]]


@pytest.mark.usefixtures("handlers")
def test_a_gpu_that_is_free_again_gets_runs(
    acted: Callable[..., session.Session],
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usable, "LOOK_S", 0.1)
    wait = f"{NOTE}; until [[ -e done ]]; do sleep 0.02; done"
    first = f"{NOTE}; [[ -e tried ]] || {{ touch tried; {REFUSED}; }}; touch done"
    todo = acted(first, wait, slots=["GPU-7", "GPU-8"])
    look, seen = driver.inventory, [gpu("GPU-7", 2, (9,))] * 2  # after the refusal

    def later(environ: dict[str, str]) -> GpuInventory:
        driver.gpus["GPU-7"] = seen.pop() if seen else gpu("GPU-7")
        return look(environ)

    monkeypatch.setattr(usable.gpus, "inventory", later)
    assert todo.go() == Exit.DONE
    used = [(tmp_path / "here" / run["name"]).read_text().split() for run in todo.runs]
    assert used == [["GPU-7", "GPU-7"], ["GPU-8"]]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("used", "code", "states"),
    [
        (gpu("GPU-8"), Exit.TRAINING, ["failed", "finished", "finished"]),
        (gpu("GPU-8", 20, (9,)), Exit.TRAINING, ["failed", "finished", "finished"]),
        (gpu("GPU-8", 2, (9,)), Exit.RESOURCES, ["waiting", "waiting", "waiting"]),
    ],
)
def test_a_run_that_two_gpus_refuse_has_failed_unless_both_are_full(
    acted: Callable[..., session.Session],
    driver: Driver,
    used: Gpu,
    code: Exit,
    states: list[str],
) -> None:
    driver.gpus = {"GPU-7": gpu("GPU-7", 20, (9,)), "GPU-8": used}
    other = REFUSED if code == Exit.RESOURCES else "true"
    todo = acted(REFUSED, other, other, slots=["GPU-7", "GPU-8"])
    assert todo.go() == code
    assert todo.states == states


@pytest.mark.usefixtures("handlers")
def test_another_problem_of_a_start_is_the_run_s_own(
    acted: Callable[..., session.Session], driver: Driver
) -> None:
    driver.gpus["GPU-7"] = gpu("GPU-7", 2, (9,))
    other = 'echo preflight.disk >"$DUET_PROBLEMS"; exit 3'
    todo = acted(other, "exit 3", "true", slots=["GPU-7"])
    assert (todo.go(), todo.states) == (Exit.TRAINING, ["failed", "failed", "finished"])


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("fail_fast", [False, True])
def test_a_run_that_cannot_be_started_stops_no_other(
    acted: Callable[..., session.Session], capsys: pytest.CaptureFixture[str], fail_fast: bool
) -> None:
    todo = acted("true", "touch never", "true", slots=[""], fail_fast=fail_fast)
    console = todo.sweep.folder.console(todo.runs[1]["name"])
    console.mkdir()
    assert todo.go() == Exit.TRAINING
    assert todo.states == ["finished", "failed", "waiting" if fail_fast else "finished"]
    assert f"{console}: {os.strerror(errno.EISDIR)}" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_a_config_that_changes_during_a_sweep_is_not_trained(
    acted: Callable[..., session.Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = acted("echo depth = 2 >my.py", "touch never", slots=[""])
    config = tmp_path / "here" / "my.py"
    config.write_text("depth = 1\n")
    for run in todo.runs:
        run["args"], run["config_sha256"] = ["my.py"], config_files.digest(config)
    assert (todo.go(), todo.states) == (Exit.TRAINING, ["finished", "failed"])
    assert msg("cli.sweep.config_changed", file=config) in capsys.readouterr().err
    assert not config.with_name("never").exists()


@pytest.mark.usefixtures("handlers")
def test_a_failure_without_its_console_has_its_exit_status(
    acted: Callable[..., session.Session],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    todo = acted('rm "$CONSOLE"; exit 4', "true", slots=[""])
    monkeypatch.setenv("CONSOLE", str(todo.sweep.folder.console(todo.runs[0]["name"])))
    assert (todo.go(), todo.states) == (Exit.TRAINING, ["failed", "finished"])
    assert msg("cli.sweep.exit", status=4) in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("slots", [["GPU-7"], ["GPU-7", "GPU-8"]])
def test_the_last_gpu_that_is_set_aside_ends_the_sweep(
    acted: Callable[..., session.Session],
    driver: Driver,
    capsys: pytest.CaptureFixture[str],
    slots: list[str],
) -> None:
    driver.gpus = {name: gpu(name, 2, (9,)) for name in slots}
    todo = acted(REFUSED, REFUSED, slots=slots)
    assert (todo.go(), todo.states) == (Exit.RESOURCES, ["waiting", "waiting"])
    assert capsys.readouterr().err.count("--resume") == 1
    assert not todo.sweep.folder.problems(todo.runs[0]["name"]).exists()


UNREAD = """
import sys
from training.cli.sweep import __main__ as sweep, results, session
from training.host import program
fails = 'echo >"$0/metrics.jsonl"; read -rt 0.5 <> <(:); exit 4'
def command(self, run):
    folder = self.sweep.folder.experiments / run["name"]
    folder.mkdir()
    return ["bash", "-c", fails, str(folder)]
def write(page, *_):
    sys.stdin.readline()
    page.touch()
    return True
session.Session.command, results.report_program.write = command, write
sys.exit(program.run(sweep.main, sweep.__doc__))
"""


@pytest.mark.parametrize("until", ["start", "table"])
def test_a_sweep_outlives_the_reader_of_its_output(tmp_path: Path, until: str) -> None:
    """The exit status is its own: of `duet sweep … 2>&1 | tee log` with pipefail, for example."""
    words = [*TINY, "--seed=1,2", f"--out_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD, *words],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if until == "start" else subprocess.DEVNULL,  # only the table
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == Exit.TRAINING
    (folder,) = tmp_path.glob("sweeps/*")
    assert (len(list(folder.glob("*.log"))), len(list(folder.glob("*.html")))) == (2, 1)
    shown = subprocess.run(
        f"{shlex.quote(sys.executable)} lib/run_module.py training.cli.sweep --show=run_sweep "
        f"--out_dir={shlex.quote(str(tmp_path))} | head -c1",
        cwd=ROOT,
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (len(shown.stdout), shown.stderr) == (1, "")


def test_a_refused_start_leaves_its_codes(tmp_path: Path) -> None:
    file = tmp_path / "problems"
    argv = ("training.cli.plan", "launch_train.sh", "1", "--depth=0", "--device=cpu")
    ended = python("-m", *argv, cwd=tmp_path, DUET_PROBLEMS=str(file))
    assert (ended.returncode, file.read_text().split()) == (Exit.CONFIG, ["field.value"])


@pytest.mark.usefixtures("handlers")
def test_a_failure_after_the_launch_is_the_run_s_own(
    acted: Callable[..., session.Session], driver: Driver, tmp_path: Path
) -> None:
    launched = f"""mkdir "{tmp_path}/$1"
        printf '{{"created": %s}}' "$(date +%s.%N)" >"{tmp_path}/$1/plan.json"; exit 3"""
    driver.gpus["GPU-7"] = gpu("GPU-7", 2, (9,))
    todo = acted(launched, "true", slots=["GPU-7"])
    assert (todo.go(), todo.states) == (Exit.TRAINING, ["failed", "finished"])


@pytest.mark.usefixtures("handlers")
def test_a_variable_does_not_move_the_runs_of_a_resumed_sweep(
    acted: Callable[..., session.Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_OUT_DIR", "/elsewhere")
    todo = acted('echo "${DUET_OUT_DIR-none}" >"$1"', "true", slots=[""])
    assert todo.go() == Exit.DONE
    assert (tmp_path / "here" / todo.runs[0]["name"]).read_text() == "none\n"


@pytest.mark.usefixtures("handlers")
def test_fail_fast_stops_the_others(acted: Callable[..., session.Session]) -> None:
    waits = "trap 'exit 75' TERM; touch ready; while :; do sleep 0.02; done"
    fails = "until [[ -e ready ]]; do sleep 0.02; done; exit 4"
    todo = acted(waits, fails, "touch never", slots=["", ""], fail_fast=True)
    assert todo.go() == Exit.TRAINING
    assert todo.states == ["stopped", "failed", "waiting"]


@pytest.mark.usefixtures("handlers")
def test_a_stop_signal_is_passed_on_each_time(acted: Callable[..., session.Session]) -> None:
    """The second one reaches the launcher too, which then kills its ranks."""
    program = (
        "import os, signal; asked = {signal.SIGINT}; signal.pthread_sigmask(signal.SIG_BLOCK, asked)",
        f"for _ in range(2): os.kill({os.getpid()}, signal.SIGINT); signal.sigwait(asked)",
        "os._exit(130)",
    )
    text = shlex.join(["exec", sys.executable, "-c", "\n".join(program)])
    todo = acted(text, "touch never", slots=[""])
    assert todo.go() == Exit.INTERRUPTED
    assert todo.states == ["stopped", "waiting"]


@pytest.mark.usefixtures("handlers")
def test_a_stop_signal_during_the_end_of_the_last_run_stops_nothing(
    acted: Callable[..., session.Session],
) -> None:
    ends = f"trap 'exit 0' TERM; kill -TERM {os.getpid()}; while :; do sleep 0.02; done"
    todo = acted("true", ends, slots=[""])
    assert (todo.go(), todo.states) == (Exit.DONE, ["finished", "finished"])


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("kind", ["asked", "rank_failed"])
def test_the_end_of_an_earlier_start_is_not_that_of_this_one(
    acted: Callable[..., session.Session],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    fails = "echo '[ERROR] 2024-10-21 16:00:00 no such card' >&2; exit 2"
    todo = acted(fails, "true", slots=[""])
    run = RunDir(tmp_path / todo.runs[0]["name"])
    run.create()
    before = time.time() - 100
    rundir.write_json(run.plan, {"schema_version": 2, "created": before, "launch": "a"})
    card = {"kind": kind, "summary": "of yesterday", "cause": "oom", "launch": "a"}
    rundir.write_json(run.failure, {**card, "time": before + 50})
    assert todo.go() == Exit.TRAINING
    assert todo.states == ["failed", "finished"]
    said = capsys.readouterr().err
    assert "no such card" in said and "of yesterday" not in said
