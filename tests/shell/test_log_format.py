"""lib/log.sh and training/core/log.py write the same log format."""

from __future__ import annotations

import datetime
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

LINE = re.compile(r"(?P<tag>\S+) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?P<message>.*)", re.DOTALL)
COLOURS = {"INFO": 34, "SUCCESS": 32, "WARNING": 33, "ERROR": 31}
OF_SHELL = {"INFO", "ERROR"}
MESSAGES = ["plain", "50 % of C:\\new 'quoted' \"$HOME\" `id` – 数据", "two\n    lines"]


def commands(project: Path, level: str, message: str) -> list[list[str]]:
    """The same message from the shell, which has some of the levels, and from Python."""
    shell = [
        "bash",
        "-c",
        f'source "$0/lib/init.sh"; log::{level.lower()} "$1"',
        str(project),
        message,
    ]
    python = (
        f"import sys; sys.path.insert(0, sys.argv[1]); from training.core import log; "
        f"log.{level.lower()}(sys.argv[2])"
    )
    own = [sys.executable, "-c", python, str(project), message]
    return [shell, own] if level in OF_SHELL else [own]


def environment(**changes: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | changes


def in_a_pipe(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "", "standard output stays free for data"
    return done.stderr


def on_a_terminal(command: list[str], env: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, env=env, stderr=theirs, check=True)
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the other end is closed: all is read
            pass
        return text.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)


def parsed(text: str) -> tuple[str, str]:
    """(tag, message) of one message."""
    assert text.endswith("\n")
    found = LINE.fullmatch(text.removesuffix("\n"))
    assert found, repr(text)
    return found["tag"], found["message"]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_format_in_a_pipe(project: Path, message: str) -> None:
    for command in commands(project, "ERROR", message):
        assert parsed(in_a_pipe(command, environment())) == ("[ERROR]", message)


@pytest.mark.parametrize("level", COLOURS)
def test_the_colours_on_a_terminal(project: Path, level: str) -> None:
    for command in commands(project, level, "message"):
        assert parsed(on_a_terminal(command, environment())) == (
            f"\x1b[{COLOURS[level]}m[{level}]\x1b[0m",
            "message",
        )


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),  # no-color.org: when it is not empty
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-256color"}, True),
    ],
)
def test_when_a_terminal_gets_colours(
    project: Path, variables: dict[str, str], coloured: bool
) -> None:
    for command in commands(project, "INFO", "message"):
        assert ("\x1b" in on_a_terminal(command, environment(**variables))) is coloured, command


def test_the_time_is_local_and_the_same(project: Path) -> None:
    for zone in ("XXX-14", "UTC0", "XXX+11"):
        said = [
            in_a_pipe(command, environment(TZ=zone))
            for command in commands(project, "INFO", "message")
        ]
        times = [datetime.datetime.strptime(text[7:26], "%Y-%m-%d %H:%M:%S") for text in said]
        assert abs(times[1] - times[0]) < datetime.timedelta(minutes=1), zone


def test_the_shell_writes_its_messages_to_the_log_file(project: Path, tmp_path: Path) -> None:
    log = tmp_path / "a log.txt"
    log.write_text("before\n")
    code = 'source "$0/lib/init.sh"; log::info "one"; log::error "two"; log::open "$1"'
    command = ["bash", "-c", code, str(project), str(log)]
    said = on_a_terminal(command, environment())
    assert log.read_text() == "before\n" + re.sub(r"\x1b\[\d+m", "", said)


def test_no_log_file_without_messages(project: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    subprocess.run(
        ["bash", "-c", 'source "$0/lib/init.sh"; log::open "$1"', str(project), str(log)],
        check=True,
    )
    assert not log.exists()
