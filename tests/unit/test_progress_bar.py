"""Messages of a rank that draws a progress bar."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.core import log
from training.trainer.checkpoint import TrainProgress
from training.trainer.progress import Progress

ERASED = "\r\x1b[K"


def progress() -> Progress:
    session: Any = SimpleNamespace(
        peak=None,
        batches=SimpleNamespace(step_sequences=4),
        steps_to_train=lambda position: 300,
    )
    recorder: Any = SimpleNamespace()
    return Progress(session, recorder, TrainProgress())


def test_a_message_of_the_rank_replaces_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    monkeypatch.setenv("NO_COLOR", "1")
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress():
            log.info("first")
            log.info("second")
        log.info("third")
    shown = b""
    with os.fdopen(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(10000):  # OSError: the other side is closed
            shown += part
    bar, first, second, third = shown.decode().split("[INFO]")
    assert "0/300" in bar and bar.endswith(ERASED)
    assert first.endswith(ERASED) and second.endswith("\r") and third.endswith("third\r\n")

    # the launcher's log of these lines
    monkeypatch.setattr(log, "_log", None)
    log.open_log(tmp_path / "log")
    log.lines_to_log(shown)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:6] for line in lines] == ["[INFO]"] * 3
