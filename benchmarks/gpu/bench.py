"""What every stage gets: the machine, a folder, sizes, the time that is left; and how it starts
programs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import machine
from benchmarks.gpu.machine import ROOT, Machine
from training.host import process, topology
from training.host.gpu_choice import ORDER, PCI

POLL_S = 0.05
KILLED_S = 30.0  # until a killed program has ended, with gigabytes to give back
STAND_INS = Path(__file__).with_name("stand_ins")
PRIVATE = ("DUET_", "WANDB_")  # flags in the user's profile
SHOWN = 1500  # characters of a failed program's output


def stand_ins(missing: Iterable[str], folder: Path) -> Path | None:
    """A folder for PYTHONPATH with stand-ins for the modules that a Python lacks; None if there are
    none."""
    lacking = [name for name in missing if (STAND_INS / f"{name}.py").exists()]
    for name in lacking:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(STAND_INS / f"{name}.py", folder)
    return folder if lacking else None


class Skipped(Exception):
    """The stage cannot be measured here; the text is the reason."""


class Failed(Exception):
    """A program of the stage failed, with the end of its output. `found`: what the stage has
    measured before."""

    def __init__(self, text: str, found: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.found = dict(found or {})


@dataclass(frozen=True)
class Program:
    """A command with variables of its own and a file for its output."""

    argv: Sequence[str]
    console: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def end_of_output(self) -> str:
        return self.console.read_text(errors="replace")[-SHOWN:] if self.console.exists() else ""


@dataclass
class Bench:
    """`folder`: of this stage, empty at its start; `cache`: of compiled kernels, kept between
    stages; `limit_s`: of the stage."""

    machine: Machine
    folder: Path
    cache: Path
    smoke: bool  # tiny sizes: the stages run, their figures mean nothing
    nanochat: Path | None
    limit_s: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.begun)

    def size(self, real: Any, tiny: Any) -> Any:
        """A size for this run."""
        return tiny if self.smoke else real

    def environment(self, **more: str) -> dict[str, str]:
        """Without variables of an outer launch, and with the order of GPUs that Duet uses; modules
        that this Python lacks are replaced by stand-ins (stand_ins/README)."""
        outside = topology.clean(os.environ)
        env = {k: v for k, v in outside.items() if not k.startswith(PRIVATE)}
        if folder := stand_ins(self.machine.missing, self.cache / "stand_ins"):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(folder))))
        return (
            {ORDER: PCI}
            | env
            | {
                "DUET_LANG": "en",
                "WANDB_MODE": "disabled",
                "HF_HUB_OFFLINE": "1",
                **machine.kernels(self.cache),
                **more,
            }
        )

    def run(self, programs: Sequence[Program]) -> list[int]:
        """Exit statuses of programs that run at the same time. All are killed when one of them
        fails, and when the stage's time is over (raises Failed)."""
        started: list[subprocess.Popen[bytes]] = []
        if self.left_s <= 0:
            raise Failed(self._late(programs[0].console.stem))
        with ExitStack() as files:
            try:
                for program in programs:
                    output = files.enter_context(program.console.open("wb"))
                    started.append(_start(program, self.environment(**program.env), output))
                while None in (statuses := [p.poll() for p in started]):
                    if any(statuses):
                        _wait(started, 10.0)  # the others report the same failure
                        break
                    if self.left_s <= 0:
                        raise Failed(self._late(programs[0].console.stem, *programs))
                    time.sleep(POLL_S)
            finally:
                for popen in started:
                    process.end_group(popen.pid)
                    popen.kill()
                for popen in started:
                    _reap(popen)
        return [int(popen.returncode) for popen in started]

    def _late(self, name: str, *programs: Program) -> str:
        texts = [one.end_of_output() for one in programs]
        first = f"{name}: not done after {self.limit_s:.0f} s, the limit of a stage"
        return "\n".join([first, *texts])

    def result(self, module: str, name: str, job: Mapping[str, Any], **env: str) -> dict[str, Any]:
        """What `python -m benchmarks.gpu.MODULE JOB` prints as its last object in JSON.
        Raises Failed."""
        argv = [self.machine.executable, "-m", f"benchmarks.gpu.{module}", json.dumps(job)]
        program = Program(argv, self.folder / f"{name}.txt", env)
        (status,) = self.run([program])
        try:
            if status:
                raise ValueError
            lines = program.console.read_text(errors="replace").splitlines()
            found: dict[str, Any] = json.loads([n for n in lines if n.startswith("{")][-1])
        except (ValueError, IndexError):
            raise Failed(f"{name}: exit status {status}\n{program.end_of_output()}") from None
        return found


def _start(program: Program, env: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        program.argv,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509 – one thread
    )


def _reap(popen: subprocess.Popen[bytes]) -> None:
    """Raises Failed if the kernel cannot end a killed program."""
    try:
        popen.wait(timeout=KILLED_S)
    except subprocess.TimeoutExpired:
        text = f"PID {popen.pid} is killed and does not end: it waits in the driver"
        raise Failed(text) from None


def _wait(started: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(p.poll() is None for p in started) and time.monotonic() < end:
        time.sleep(POLL_S)


def check(name: str, ok: bool, text: str) -> dict[str, Any]:
    """A claim that a stage has tested."""
    return {"name": name, "ok": bool(ok), "text": text}
