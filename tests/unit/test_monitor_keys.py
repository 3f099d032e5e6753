"""Keys of the live view, pressed on a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

import psutil
import pytest

from tests.conftest import wait_until
from tests.unit.monitor_person import Person
from tests.unit.monitor_runs import Made, dead_pid, look
from training.host.gpus import SLOWDOWNS
from training.monitor import pages, terminal

PAGE_UP, UP, DOWN, HOME, END = "\x1b[5~", "\x1b[A", "\x1bOB", "\x1b[H", "\x1b[F"


def test_key_names() -> None:
    assert terminal.names_of(b"qQ\x1b[A\x1bOB\x1b[5~\r+\x1b") == [
        "q",
        "q",
        "up",
        "down",
        "page up",
        "return",
        "+",
        "escape",
    ]
    assert terminal.names_of(b"\x1b[200;5~\xff") == ["\x1b[200;5~", "ÿ"]  # unknown key
    assert terminal.names_of(b"\x1b[[A") == ["\x1b[[a"]  # F1 of the Linux console, not `a`
    for cut in (b"\x1b", b"\x1b[", b"\x1b[5", b"\x1bO", b"l\x1b[1;"):
        assert terminal.unfinished(cut)
    for whole in (b"\x1b[A", b"\x1b[5~", b"\x1bOA", b"l", b"\x1bx", b""):
        assert not terminal.unfinished(whole)


def test_arrow_sequences_in_pieces(made: Made, sit: Callable[..., Person]) -> None:
    made.log.write_text("".join(f"line {n} of the log\n" for n in range(1, 501)))
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    person.child.send("l")
    person.until(lambda: "line 500 of the log" in person.sees)
    person.child.send(UP * 400)  # far more than one read
    person.until(lambda: "lines 80-100 of 500" in person.sees)
    for piece in ("\x1b", "[", "B"):
        person.child.send(piece)
        time.sleep(0.02)  # a slow line
    person.until(lambda: "lines 81-101 of 500" in person.sees)
    assert "Diagnosis" not in person.sees


def test_help_and_back(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    person.child.send("?")
    person.until(lambda: "diagnose: root cause" in person.sees and "Esc back" in person.sees)
    assert "RUNNING" not in person.sees
    person.child.send("?")
    person.until(lambda: "RUNNING" in person.sees and "Esc back" not in person.sees)
    person.child.send("?")
    person.until(lambda: "diagnose:" in person.sees)
    person.child.send("\x1b")
    person.until(lambda: "RUNNING" in person.sees)


def test_pause_stops_reading_but_not_the_keys(made: Made, sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "step 100 of 400" in person.sees)
    person.child.send("p")
    person.until(lambda: "PAUSED since" in person.sees)
    made.step(101, 1.2345)
    person.child.send("g")  # other pages show the paused state too
    person.until(lambda: "Esc back" in person.sees)
    person.child.send("g")
    person.until(lambda: "step 100 of 400" in person.sees)
    person.child.send("p")
    person.until(lambda: "step 101 of 400" in person.sees and "PAUSED" not in person.sees)


def test_interval_by_plus_and_minus(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "every 0.2 s" in person.sees)
    for shown in ("0.5", "1", "2"):
        person.child.send("-")
        person.until(lambda shown=shown: f"every {shown} s" in person.sees)  # type: ignore[misc]
    person.child.send("+")
    person.until(lambda: "every 1 s" in person.sees)


def test_log_scrolls_and_follows(made: Made, sit: Callable[..., Person]) -> None:
    made.log.write_text("".join(f"line {n} of the log\n" for n in range(1, 501)))
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    person.child.send("l")
    person.until(lambda: "line 500 of the log" in person.sees and "of 500" in person.sees)
    person.child.send(PAGE_UP + UP)
    person.until(lambda: "line 478 of the log" in person.sees and "line 479 " not in person.sees)
    person.child.send(HOME)
    person.until(lambda: re.search(r"line 1 of the log", person.sees) is not None)
    with made.log.open("a") as file:
        file.write("line 501 of the log\n")
    person.child.send(END)
    person.until(lambda: "line 501 of the log" in person.sees)
    with made.log.open("a") as file:
        file.write("line 502 \x1b[31mof\x1b[2J the log\n")
    # at its end the log follows; escape sequences in it have no effect
    person.until(lambda: "line 502 of the log" in person.sees)


def test_diagnosis_of_a_failed_run(made: Made, sit: Callable[..., Person]) -> None:
    made.supervisor(dead_pid())
    made.run.rank_log(0).write_text("step 7\n")
    made.run.rank_log(1).write_text(
        "step 7\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has "
        "a total\n"
    )
    person = sit(rows=40, columns=120)
    person.until(lambda: "q quit" in person.sees)
    person.child.send("a")
    person.until(lambda: "Diagnosis" in person.sees and "gpu_oom" in person.sees)
    person.child.send("a")
    person.until(lambda: "DIED" in person.sees)


def test_diagnosis_on_a_full_disk_or_without_processes(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(page: pages.Diagnosis) -> str:
        return "\n".join(text for line in page.text(state) for text, _ in line)

    made.supervisor(dead_pid())
    made.run.rank_log(1).write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    state = look(made.run)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    page = pages.Diagnosis(state)
    wait_until(lambda: "gpu_oom" in shown(page))
    page.close()

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    page = pages.Diagnosis(state)
    assert "cannot be started: Resource temporarily unavailable" in shown(page) and not page.waits
    page.close()


def test_closed_diagnosis_is_killed(made: Made, sit: Callable[..., Person]) -> None:
    made.log.write_text("nothing\n" * 3_000_000)  # takes a moment
    made.run.rank_log(0).write_text("nothing\n" * 3_000_000)
    person = sit()
    person.until(lambda: "q quit" in person.sees)

    def diagnoses() -> list[psutil.Process]:
        try:
            below = psutil.Process(person.child.pid).children(recursive=True)
        except psutil.Error:
            return []
        return [p for p in below if any("training.cli.diagnose" in word for word in p.cmdline())]

    person.child.send("a")
    person.until(lambda: bool(diagnoses()))
    (process,) = diagnoses()
    person.child.send("q")
    assert person.left() == (0, None)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_gpu_details(
    made: Made, sit: Callable[..., Person], nvidia: Callable[..., dict[str, str]]
) -> None:
    facts = {
        "USE": "97,100",
        "POWER": "431,70",
        "POWER_LIMIT": 575,
        "TEMPERATURE": "71,93",
        "FAN": 40,
        "REASONS": "1,64",
    }
    processes = f"{os.getpid()}:21.5;{os.getppid()}:2"
    environ = nvidia(COUNT=2, NAME="NVIDIA GeForce RTX 5090", PROCESSES=processes, **facts)
    person = sit(rows=40, columns=120, **environ)
    person.until(lambda: "RTX 5090" in person.sees)
    person.child.send("g")
    person.until(lambda: "431 W of 575 W" in person.sees)
    assert (
        "70 W of 575 W" in person.sees
        and "fan 40 %" in person.sees
        and SLOWDOWNS[0x40] in person.sees
    )
    assert re.search(rf"process +{os.getpid()} +21\.5 GiB +rank \d", person.sees)
    assert re.search(rf"process +{os.getppid()} +2\.0 GiB +user ", person.sees)


def test_stop_signals_while_a_page_is_open(sit: Callable[..., Person]) -> None:
    person = sit()
    person.until(lambda: "q quit" in person.sees)
    person.child.send("l")
    person.until(lambda: "Esc back" in person.sees)
    person.child.kill(signal.SIGTERM)
    assert person.left() == (143, None)
    assert not person.screen.cursor.hidden
