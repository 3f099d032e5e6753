"""Terminal output, through a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import pytest

from tests.conftest import TOKEN, processes, wait_until
from tests.e2e.conftest import TINY, Launched
from training.core import manifest
from training.core.rundir import RunDir, read_json
from training.watchdog.probes import procfs


class Terminal:
    """A terminal with a program on it."""

    def __init__(
        self, argv: list[str], cwd: Path, env: dict[str, str], columns: int = 240, rows: int = 50
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.child = pexpect.spawn(
            argv[0], argv[1:], cwd=str(cwd), env=env, dimensions=(rows, columns), timeout=180
        )

    def until(self, text: str) -> None:
        """Reads until the screen shows `text`."""
        while text not in "\n".join(self.screen.display):
            self._feed(self.child.read_nonblocking(65536, timeout=180))

    def rest(self) -> int:
        """Reads to the end; returns the exit status."""
        while True:
            try:
                self._feed(self.child.read_nonblocking(65536, timeout=180))
            except pexpect.EOF:
                break
        self.child.close()
        return (
            self.child.exitstatus
            if self.child.exitstatus is not None
            else -(self.child.signalstatus or 0)
        )

    def _feed(self, data: bytes) -> None:
        self.raw += data
        self._stream.feed(data)


@pytest.fixture
def steps() -> int:
    return 2000


@pytest.fixture
def command(tmp_path: Path, steps: int) -> list[str]:
    flags = TINY | {
        "num_iterations": steps,
        "log_every": steps // 10,
        "out_dir": tmp_path / "experiments",
        "log_dir": tmp_path / "logs",
    }
    return [
        "./launch_train.sh",
        "2",
        "configs/dual_gpu/quickstart.py",
        *(f"--{k}={v}" for k, v in flags.items()),
    ]


def environment(token: str, **more: str) -> dict[str, str]:
    return {**os.environ, TOKEN: token, "TERM": "xterm-256color", **more}


def wait_until_trained(steps: int, runs: Path) -> None:
    """Until the only run in this folder has ended at this step."""
    (run,) = (RunDir(path) for path in runs.iterdir())
    wait_until(
        lambda: (read_json(run.summary) or {}).get("steps") == steps,
        120,
        "the run trains to the end",
    )


def test_progress_bar_colours_and_ctrl_c(
    project: Path, command: list[str], token: str, tmp_path: Path
) -> None:
    terminal = Terminal(command, project, environment(token))
    terminal.until("loss=")
    bar = next(line for line in terminal.screen.display if "/2000 [" in line)
    assert "loss=" in bar and ("step/s" in bar or "s/step" in bar)
    terminal.child.sendintr()
    assert terminal.rest() == 130
    assert b"\x1b[33m[WARNING]" in terminal.raw
    end = "\n".join(terminal.screen.display)
    assert "interrupted, checkpoint saved (exit 130)" in end and "--resume=" in end
    (log,) = (tmp_path / "logs").glob("*.log")
    text = log.read_text()
    assert "\x1b" not in text and "\r" not in text and "/2000 [" not in text, (
        "the log has lines, not a moving bar"
    )
    assert "[WARNING]" in text and "Iter: 1," in text


def test_no_color_is_respected(project: Path, command: list[str], token: str) -> None:
    terminal = Terminal([*command, "--num_iterations=5"], project, environment(token, NO_COLOR="1"))
    assert terminal.rest() == 2, "the flag is given twice"
    assert b"\x1b[3" not in terminal.raw and b"[ERROR]" in terminal.raw


@pytest.mark.slow
@pytest.mark.parametrize("steps", [500])
def test_a_lost_terminal_does_not_end_the_run(
    project: Path, command: list[str], token: str, tmp_path: Path, steps: int
) -> None:
    terminal = Terminal(command, project, environment(token))
    terminal.until("loss=")
    # as a broken ssh connection: SIGHUP, and no reader
    os.close(terminal.child.fileno())
    terminal.child.closed = True
    wait_until_trained(steps, tmp_path / "experiments")
    wait_until(lambda: not processes(token), what="everybody gone")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [500])
def test_a_stopped_terminal_does_not_stop_the_run(
    project: Path, command: list[str], token: str, tmp_path: Path, steps: int
) -> None:
    terminal = Terminal(command, project, environment(token))
    terminal.until("loss=")
    terminal.child.send("\x13")  # Ctrl-S
    wait_until_trained(steps, tmp_path / "experiments")
    with contextlib.suppress(pexpect.TIMEOUT):  # what had been shown before
        terminal._feed(terminal.child.read_nonblocking(65536, timeout=1))
    assert b"training finished" not in terminal.raw
    terminal.child.send("\x11")  # Ctrl-Q
    assert terminal.rest() == 0
    assert b"training finished" in terminal.raw and b"Iter: 450" in terminal.raw


@pytest.mark.soak
def test_nohup(launch: Callable[..., Launched]) -> None:
    """In a script, whose jobs in the background ignore Ctrl-C."""
    nohup = ("env", "--ignore-signal=INT", "nohup")
    run = launch(
        *nohup, "./launch_train.sh", "2", "configs/dual_gpu/quickstart.py", num_iterations=200
    )
    run.wait_for("Iter: 3,")
    for number in (signal.SIGHUP, signal.SIGINT):
        run.process.send_signal(number)
    assert run.wait() == 0 and run.summary["steps"] == 200


@pytest.mark.slow
def test_a_session_that_systemd_ends(launch: Callable[..., Launched]) -> None:
    """At a reboot, or a logout with KillUserProcesses: TERM and at once HUP to every process."""
    run = launch(
        "./launch_train.sh",
        "2",
        "configs/dual_gpu/quickstart.py",
        num_iterations=2000,
        num_workers=1,
    )
    run.wait_for("Iter: 3,")
    session = [run.process.pid, *procfs.family(run.process.pid)]
    assert len(session) == 6, "launcher, guardian, ranks and their workers"
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGHUP):
        for pid in session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    assert run.wait() == 75, run.output
    assert manifest.newest_step(run.run.checkpoints) >= 3


@pytest.mark.slow
def test_a_script_can_be_debugged_on_the_terminal(
    project: Path, tmp_path: Path, token: str
) -> None:
    (tmp_path / "main.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n"
        "    answer = 6 * 7\n"
        "    breakpoint()\n"
        "dist.barrier()\n"
        "print('both are here')\n"
        "dist.destroy_process_group()\n"
    )
    folders = [f"--out_dir={tmp_path / 'experiments'}", f"--log_dir={tmp_path / 'logs'}"]
    terminal = Terminal(
        [str(project / "duet"), "run", "-n", "2", *folders, "--hang_timeout=2", "main.py"],
        tmp_path,
        {k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | {TOKEN: token},
    )
    terminal.until("(Pdb)")
    terminal.until("rank 0 waits for input")  # which is not a hang
    terminal.child.sendline("p answer + 1")
    terminal.until("43")
    terminal.child.sendline("c")
    assert terminal.rest() == 0
    assert b"both are here" in terminal.raw
