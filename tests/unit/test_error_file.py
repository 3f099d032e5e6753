"""Error file of a rank: the place of an error, and the exception of torch where a data-loader
worker was killed, complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from training.core.rundir import RunDir
from training.trainer import error_file

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def handler(number: int, frame: FrameType | None) -> None:
    """The handler of torch.utils.data."""
    raise RuntimeError(KILLED)


@pytest.fixture
def torchs_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("torchs_handler")
def test_a_broken_connection_waits_for_the_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        os.kill(
            os.getpid(), signal.SIGCHLD
        )  # the death of the worker is noticed while the rank waits

    monkeypatch.setattr(error_file.time, "sleep", sleep)
    lost = ConnectionResetError(104, "Connection reset by peer")
    found = error_file._final(lost)
    assert (str(found), found.__context__, waited) == (KILLED, lost, [error_file.SIGCHLD_S])
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.usefixtures("torchs_handler")
def test_the_handler_is_removed_while_the_error_is_written() -> None:
    error = ValueError("planted")
    assert error_file._final(error) is error
    assert subprocess.run(["true"], check=False).returncode == 0
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.parametrize("imported", [False, True])
def test_the_place_is_the_last_one_outside_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    torch = ModuleType("torch")
    torch.__file__ = "/built/torch/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", torch if imported else None)
    places = ["/venv/site-packages/some.py", "<string>", *["/built/torch/nn.py"] * imported]
    for place in places:
        library: dict[str, Any] = {}
        exec(compile("def fail():\n    raise ValueError", place, "exec"), library)
        with pytest.raises(ValueError) as caught:
            library["fail"]()
        found = error_file._facts(RunDir(tmp_path), 0, caught.value)
        assert found["where"].startswith(f"{__file__}:") and found["code"] == 'library["fail"]()'
