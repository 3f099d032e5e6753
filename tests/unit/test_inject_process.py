"""What each injected fault does to a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.conftest import TOKEN, processes, wait_until
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.own_task import SIZED
from training.core.rundir import RunDir, read_records
from training.trainer.faults import stuck

RANK = """
import faulthandler, signal, sys, threading, time
from training.core import heartbeat
from training.trainer import inject
from training.core.rundir import RunDir
run = RunDir(sys.argv[1])
run.create()
stacks = (run.path / "stacks").open("w")
faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))  # like ranks: a request to stop
heartbeat.start(run.heartbeat(1), 1)
inject.arm({"config": {"inject": sys.argv[2]}, "ranks": 2, "device": {"value": "cpu"}}, run, 1, {})
def tick():
    while True:
        print("tick", flush=True)
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
heartbeat.current.step = 5
heartbeat.current.beat("forward")
print("continued", flush=True)
"""


class Process:
    """A process with a second thread, in which the fault happens."""

    def __init__(self, folder: Path, text: str, token: str) -> None:
        self.run, self.output = RunDir(folder / "run"), folder / "output"
        with self.output.open("wb") as out:
            argv = [sys.executable, "-c", RANK, str(self.run.path), text]
            self.popen = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=clean_environment(**{TOKEN: token}),
                stdout=out,
                start_new_session=True,
            )
        wait_until(lambda: any(True for _ in read_records(self.run.events)), 20, "injected")

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()[0]

    @property
    def cpu(self) -> float:
        return sum(
            map(
                int,
                Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()[11:13],
            )
        )

    def kill(self) -> None:
        self.popen.kill()
        assert self.popen.wait(10) == -signal.SIGKILL


@pytest.fixture
def process(tmp_path: Path, token: str) -> Callable[[str], Process]:
    return lambda text: Process(tmp_path, text, token)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("kill", -signal.SIGKILL),
        ("segv", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("exit", 0),
        ("exit@code=7", 7),
        ("raise", 1),
    ],
)
def test_ends(process: Callable[[str], Process], text: str, status: int) -> None:
    one = process(text)
    assert one.popen.wait(20) == status
    assert "continued" not in one.output.read_text()
    assert not list(one.run.path.parent.rglob("core*"))


def test_stopped(process: Callable[[str], Process]) -> None:
    one = process("stop")
    wait_until(lambda: one.state == "T", 5, "stopped")
    one.popen.send_signal(signal.SIGCONT)
    assert one.popen.wait(10) == 0 and "continued" in one.output.read_text()


def test_uninterruptible_without_leftover_processes(
    process: Callable[[str], Process], token: str
) -> None:
    one = process("io")
    wait_until(lambda: one.state == "D", 5, "in state D")
    one.popen.send_signal(signal.SIGTERM)
    size = one.output.stat().st_size
    one.popen.send_signal(signal.SIGUSR2)
    assert one.state == "D" and one.output.stat().st_size == size, "no signal reaches it"
    one.kill()  # only this process, as torchrun does, not the whole group
    wait_until(lambda: not processes(token), 5, "its children gone")
    assert not list(one.run.ranks.iterdir())


def test_the_gil_is_held(process: Callable[[str], Process]) -> None:
    one = process("gil")
    locked = next(
        n
        for n, line in reversed(list(enumerate(Path(stuck.__file__).read_text().splitlines(), 1)))
        if "mutex_lock" in line
    )
    stacks = one.run.path / "stacks"

    def asked() -> str:
        """The stacks again, written in C without the GIL. The signal interrupts many blocking
        calls, but not this one."""
        have = stacks.stat().st_size
        one.popen.send_signal(signal.SIGUSR2)
        wait_until(lambda: stacks.stat().st_size > have, 5, "stacks")
        return stacks.read_text()

    wait_until(lambda: f"line {locked} in gil" in asked(), 5, "in the second lock")
    # time for about thirty writes of the other thread
    before, end = (
        one.output.stat().st_size,
        time.monotonic() + 0.3,
    )
    while time.monotonic() < end:
        asked()
    assert one.output.stat().st_size == before
    one.kill()


def test_the_loop_uses_the_cpu(process: Callable[[str], Process]) -> None:
    one = process("loop")
    before = one.cpu
    wait_until(lambda: one.cpu > before + 10, 10, "a tenth of a second of CPU")
    one.kill()


def test_the_lock_blocks_only_the_main_thread(process: Callable[[str], Process]) -> None:
    one = process("sleep")
    size = one.output.stat().st_size
    wait_until(lambda: one.output.stat().st_size > size + 20, 5, "the other thread continues")
    one.kill()
    assert "continued" not in one.output.read_text()


def test_slow_continues(process: Callable[[str], Process]) -> None:
    assert process("slow@seconds=0.2").popen.wait(10) == 0


def test_nan_replaces_the_next_loss_of_any_task(
    home: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that returns no tensor; everything is unchanged after that loss."""
    from training import tasks
    from training.config.schema import Config
    from training.tasks import custom
    from training.trainer.faults.data import nan

    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write("nan_task.py", SIZED)
    options = {name: field.default for name, field in tasks.find(path, "")[0].own.items()}
    task = custom.load(home / path, options, Config(), torch.device("cpu"))
    model, rows = task.model(), task.rows("train")
    assert rows is not None
    own = type(task).loss
    batch = rows.rows([0, 1])
    nan(cast(Any, None))
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.isnan() and all(weight.grad.isnan().any() for weight in model.parameters())
    assert type(task).loss is own and task.loss(model, batch).isfinite()
    sys.modules.pop("nan_task")


def test_data_faults_affect_every_kind_of_dataset() -> None:
    from training.data.batch_dataset import BatchDataset
    from training.data.token_dataset import TokenDataset
    from training.tasks.base import Samples
    from training.trainer.faults.context import subclasses

    class Own(Samples):
        pass

    assert {TokenDataset, Samples, Own} <= subclasses(BatchDataset)
