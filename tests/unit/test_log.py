"""Console log: equal text on the console and in the log file, colours only on a terminal."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.core import log as console
from training.core.errors import Exit, Problem, UserError

LINE = r"\[{level}\] \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {text}\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test starts without a log file."""
    importlib.reload(console)
    yield
    importlib.reload(console)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("write", "level"),
    [
        (console.info, "INFO"),
        (console.success, "SUCCESS"),
        (console.warning, "WARNING"),
        (console.error, "ERROR"),
    ],
)
def test_the_format_on_standard_error_only(
    write: object, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("a message")  # type: ignore[operator]
    out, err = capsys.readouterr()
    assert re.fullmatch(LINE.format(level=level, text="a message"), err)
    assert out == ""


def test_the_log_matches_the_console_and_is_appended_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "x.log"
    log.write_text("logged by the shell\n")
    console.open_log(log)
    console.info("one\ntwo")
    console.raw("| a table |\n")
    assert log.read_text() == "logged by the shell\n" + capsys.readouterr().err


def test_colours_on_a_terminal_never_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console.open_log(tmp_path / "x.log")
    console.error("bad")
    console.raw("\x1b[1mbold\x1b[0m\n")
    assert terminal.getvalue().startswith("\x1b[31m[ERROR]\x1b[0m ")
    text = (tmp_path / "x.log").read_text()
    assert text.startswith("[ERROR] ")
    assert text.endswith("bold\n")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "variables", [{"NO_COLOR": "1", "TERM": "xterm"}, {"NO_COLOR": "", "TERM": "dumb"}]
)
def test_no_colours_with_no_color_or_a_dumb_terminal(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    console.info("plain")
    assert terminal.getvalue().startswith("[INFO] ")


def test_the_log_has_the_final_state_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console.open_log(tmp_path / "x.log")
    console.to_log(" 10 %\r 50 %\r100 %\nwindows\r\nlast\n")
    assert (tmp_path / "x.log").read_bytes() == b"100 %\nwindows\nlast\n"
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    console.open_log("/dev/full")
    for n in range(3):
        console.info(f"message {n}")
    err = capsys.readouterr().err
    assert err.count("/dev/full") == 1
    assert [f"message {n}\n" in err for n in range(3)] == [True] * 3


def test_the_log_continues_once_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, write, room = tmp_path / "x.log", os.write, [5]

    def full(fd: int, data: bytes) -> int:
        """A disk with room for some bytes."""
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(fd, data[: room[0]])
        room[0] -= count
        return count

    console.open_log(log)
    monkeypatch.setattr(os, "write", full)
    for n in range(3):
        console.raw(f"message {n}\n")
    assert log.read_text() == "messa"
    room[0] = 10_000
    console.raw("message 3\n")
    console.raw("message 4\n")
    cut, missing, *rest = log.read_text().splitlines()
    assert (cut, rest) == ("messa", ["message 3", "message 4"])
    assert re.fullmatch(LINE.format(level="WARNING", text=".+"), f"{missing}\n")
    room[0] = 0
    console.raw("message 5\n")
    assert capsys.readouterr().err.count("[WARNING]") == 1, "once"


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    console.open_log(tmp_path / "x.log")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    console.raw("a message\n")
    assert (tmp_path / "x.log").read_text() == "a message\n"


def test_the_log_continues_after_the_terminal_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    console.open_log(tmp_path / "x.log")
    console.info("still here")
    assert "still here" in (tmp_path / "x.log").read_text()


def test_text_with_invalid_unicode_is_logged(tmp_path: Path) -> None:
    console.open_log(tmp_path / "x.log")
    console.info("caf\udce9.txt")
    assert "caf?.txt" in (tmp_path / "x.log").read_text()


def test_an_unwritable_log_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        console.open_log(tmp_path / "missing" / "x.log")


def test_a_report_shows_every_problem_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    console.report(
        UserError(
            [
                Problem("a.first", "first is wrong", "right", ["./do this"]),
                Problem("a.second", "second is wrong"),
            ]
        )
    )
    err = capsys.readouterr().err
    assert re.search(
        r"\[ERROR\] \S+ \S+ first is wrong\n    allowed: right\n    try:     \./do this\n\[ERROR\]",
        err,
    )
    assert re.search(r"\[ERROR\] \S+ \S+ second is wrong\n", err)
    assert err.endswith("2 problems; nothing was launched (exit 2)\n")
    console.report(UserError(Problem("a.one", "one"), Exit.RESOURCES), "stopped")
    assert capsys.readouterr().err.endswith("1 problem; stopped (exit 3)\n")


def test_a_message_starts_on_a_new_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.left_open(b"Epoch: 1, Iter: 5")
    console.info("first")
    console.info("second")
    before, first, second = capsys.readouterr().err.split("\n")[:3]
    assert before == "" and first.endswith("first") and second.startswith("[INFO]")


def test_a_message_replaces_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        console.left_open("\r 35%|███      | 21/60".encode())
        console.info("message")
    shown = os.read(master, 1000).decode()
    os.close(master)
    assert shown.startswith("\r\x1b[K") and "message" in shown
