"""Fixtures for real runs: the scripts as programs, two CPU ranks, a few seconds each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, TOKEN, nobody_left, processes, wait_until
from training.core.rundir import RunDir, read_json, read_records

TINY = {
    "depth": 1,
    "max_seq_len": 32,
    "device_batch_size": 4,
    "total_batch_size": 256,
    "num_iterations": 12,
    "eval_every": 0,
    "eval_tokens": 2048,
    "sample_tokens": 16,
    "log_every": 1,
    "device": "cpu",
    "use_dummy_wandb": True,
    "tensorboard": False,
    "report": False,
}
# Code that a test injects into every Python process of a run: sitecustomize is imported at
# interpreter start.
HOOK = "sitecustomize.py"
SCRIPTS = Path(__file__).parent / "scripts"
PEERS = ROOT / ".tools/peers"  # `make peers`


@dataclass
class Launched:
    """A started script. `output`: text on its console."""

    process: subprocess.Popen[bytes]
    console: Path
    run: RunDir
    logs: Path

    @property
    def output(self) -> str:
        return self.console.read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s:\n{self.output[-3000:]}"
            ) from None

    def wait_for(self, text: str, seconds: float = 180.0) -> None:
        wait_until(
            lambda: text in self.output or self.process.poll() is not None, seconds, repr(text)
        )
        assert text in self.output, self.output[-3000:]

    def ok(self) -> Launched:
        assert self.wait() == 0, self.output[-4000:]
        return self

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        return {r["step"]: r for r in read_records(self.run.metrics) if "loss" in r}

    @property
    def losses(self) -> list[float]:
        return [r["loss"] for _, r in sorted(self.steps.items())]

    @property
    def summary(self) -> dict[str, Any]:
        return read_json(self.run.summary) or {}

    @property
    def failure(self) -> dict[str, Any]:
        return read_json(self.run.failure) or {}

    @property
    def pids(self) -> dict[int, int]:
        """rank → pid; waits until the supervisor has started them."""
        return {
            r["rank"]: r["pid"] for r in (read_json(self.run.supervisor) or {"ranks": []})["ranks"]
        }


@dataclass
class Launcher:
    project: Path
    folder: Path
    token: str
    count: int = 0
    started: list[Launched] = field(default_factory=list)

    def __call__(
        self,
        *command: str,
        name: str = "",
        env: dict[str, str] | None = None,
        hook: str = "",
        tiny: bool = True,
        cwd: Path | None = None,
        bare: bool = False,
        **flags: object,
    ) -> Launched:
        """Starts `command` (a script of the project, or a program) with TINY and `flags` as
        --key=value; `bare`: without them."""
        self.count += 1
        name = name or f"run{self.count}"
        values = (
            (TINY if tiny else {})
            | {"out_dir": self.folder / "experiments", "log_dir": self.folder / "logs"}
            | flags
        )
        if "resume" not in values:
            values["run_name"] = name
        argv = [
            *command,
            *(() if bare else (f"--{k}={v}" for k, v in values.items() if v is not None)),
        ]
        if "--script" in argv and not any(word.startswith("--report") for word in argv):
            # as in TINY: a second of both cores
            argv.insert(argv.index("--script"), "--report=false")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_"))}
        variables |= {TOKEN: self.token, **(env or {})}
        if hook:
            site = self.folder / f"hook{self.count}"
            site.mkdir()
            (site / HOOK).write_text(hook)
            variables["PYTHONPATH"] = str(site)
        console = self.folder / f"console{self.count}.txt"
        with console.open("wb") as out:
            process = subprocess.Popen(
                argv,
                cwd=cwd or self.project,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        run = RunDir(self.folder / "experiments" / str(values.get("resume", name)))
        launched = Launched(process, console, run, self.folder / "logs")
        self.started.append(launched)
        return launched


@pytest.fixture
def launch(project: Path, tmp_path: Path, token: str) -> Callable[..., Launched]:
    return Launcher(project, tmp_path, token)


@pytest.fixture(scope="session")
def once(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Launched]]:
    """An undisturbed run to compare others with: made for the first test that needs it, and only
    read."""
    token = uuid.uuid4().hex
    start, done = (
        Launcher(project, tmp_path_factory.mktemp("untouched runs"), token),
        dict[tuple[object, ...], Launched](),
    )

    def make(*command: str, **flags: object) -> Launched:
        key = (*command, *sorted((name, str(value)) for name, value in flags.items()))
        if key not in done:
            done[key] = start(*command, **flags).ok()  # type: ignore[arg-type]  # flags of the program only
        return done[key]

    yield make
    nobody_left(token)


Script = Callable[..., Launched]


@pytest.fixture
def script(launch: Callable[..., Launched], tmp_path: Path) -> Script:
    """Starts text as a script (or an existing file) on `ranks` ranks; further arguments are the
    script's."""

    def start(
        body: str | Path,
        *args: str,
        ranks: int = 2,
        flags: dict[str, object] | None = None,
        **more: object,
    ) -> Launched:
        name = f"run{len(list(tmp_path.glob('console*')))}"
        path = body if isinstance(body, Path) else tmp_path / name / "my script.py"
        if isinstance(body, str):
            path.parent.mkdir()
            path.write_text(body)
        own = {
            "run_name": name,
            "out_dir": tmp_path / "experiments",
            "log_dir": tmp_path / "logs",
        } | (flags or {})
        words = [
            "./launch_train.sh",
            str(ranks),
            *(f"--{k}={v}" for k, v in own.items()),
            "--script",
            str(path),
            "--",
            *args,
        ]
        return launch(*words, name=name, bare=True, **more)

    return start


def wait_for_both(run: Launched, text: str) -> None:
    """Waits for text of both ranks: the console shows only the first one, the other may be
    slower."""
    logs = [run.run.rank_log(rank) for rank in range(2)]
    wait_until(
        lambda: all(log.exists() and text in log.read_text() for log in logs),
        what=f"{text!r} of both ranks",
    )


Torchrun = Callable[..., tuple[int, Path]]


@pytest.fixture
def torchrun(tmp_path: Path, token: str) -> Iterator[Torchrun]:
    """Starts a script under plain torchrun on two ranks and waits for its first output (for
    faulty.py, its fault); returns torchrun's PID and the script's output."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: Path, *args: str, until: str = "FAULT") -> tuple[int, Path]:
        console = tmp_path / f"console{len(started)}.txt"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            "2",
        ]
        with console.open("wb") as out:
            env = os.environ | {TOKEN: token}
            started.append(
                subprocess.Popen(
                    [*command, str(script), *args],
                    stdout=out,
                    stderr=out,
                    env=env,
                    start_new_session=True,
                )
            )
        wait_until(lambda: until in console.read_text(), what=f"{until!r} in {console}")
        return started[-1].pid, console

    yield start
    for process in started:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)
        process.wait()
