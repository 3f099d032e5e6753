"""Console log: `[INFO] 2024-10-21 16:00:00 message`, identical in the log file of the run.

Messages go to standard error; standard output is reserved for data. Colours appear only on a
terminal and not if NO_COLOR is set (https://no-color.org). lib/log.sh prints the same format
before Python runs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from training.core import console
from training.core.errors import UserError
from training.core.messages import msg
from training.core.plain_text import plain, without_escapes
from training.core.project import typed
from training.core.units import plural

COLOURS = {"INFO": "34", "SUCCESS": "32", "WARNING": "33", "ERROR": "31"}
LOG_VARIABLE = "DUET_LOG_FILE"
TIME = "%Y-%m-%d %H:%M:%S"  # of a message

_log: int | None = None
_log_name = ""
_missing = _warned = False  # the last lines are not in the file; the console has a warning
_open_line = b""  # a rank's unfinished line on the console
_bar = False  # this process draws a progress bar on the console
_of_launcher = False


def open_log(path: str | os.PathLike[str]) -> None:
    """Append all further messages to `path` too. Raises OSError."""
    global _log, _log_name, _missing, _warned
    _missing = _warned = False
    # Unbuffered: a killed process loses nothing.
    _log, _log_name = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), os.fspath(path)


def of_launcher() -> None:
    """From now on a terminal that shows nothing does not hold back this process."""
    global _of_launcher
    _of_launcher = True


def colourful(stream: TextIO) -> bool:
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def to_log(text: str) -> None:
    """Append text to the log file as a terminal would show it: without colours and overwritten
    text."""
    lines = without_escapes(text.replace("\r\n", "\n")).split("\n")
    lines = [line.rsplit("\r", 1)[-1] for line in lines]
    _write("\n".join(lines).encode("utf-8", "replace"))


def lines_to_log(raw: bytes) -> None:
    """The same for complete lines of a rank; an erased progress bar is dropped. Binary data is
    appended as it is."""
    if _log is None:
        return
    plain = raw.isascii() and b"\r" not in raw and b"\x1b" not in raw
    if plain or b"\0" in raw:
        _write(raw)
        return
    text = raw.decode("utf-8", "replace")
    if "\r" in text:
        lines = text.replace("\r\n", "\n").split("\n")
        text = "\n".join(
            line for line in lines if "\r" not in line or line.rsplit("\r", 1)[-1].strip()
        )
    to_log(text)


def _write(data: bytes) -> None:
    global _missing, _warned
    if _log is None:
        return
    try:
        if _missing:  # after a line that may be cut
            _write_all(f"\n[WARNING] {_now()} {msg('core.log.lines_missing')}\n".encode())
            _missing = False
        _write_all(data)
    except OSError as error:
        # A full disk must not stop the training, and may have space again at the next line.
        _missing = True
        if not _warned:
            _warned = True
            warning(msg("core.log.file_lost", name=_log_name, strerror=error.strerror))


def _write_all(data: bytes) -> None:
    assert _log is not None
    while data:  # a disk that becomes full takes a part
        data = data[os.write(_log, data) :]


def left_open(line: bytes) -> None:
    """Record the unfinished line that a rank has left on the console; b'' for none."""
    global _open_line
    _open_line = line


def below_bar(drawn: bool) -> None:
    """Whether this process has a progress bar in the last line of the console from now on."""
    global _bar
    _bar = drawn


def _end_line() -> str:
    """What to print before a message: erases a progress bar on a terminal (it is redrawn below the
    message) and ends any other unfinished line."""
    global _open_line
    line, _open_line = _open_line or (b"\r" if _bar else b""), b""
    if not line:
        return ""
    return "\r\x1b[K" if b"\r" in line and sys.stderr.isatty() else "\n"


def raw(text: str) -> None:
    """Print text without a level (tables, output of a rank) to the console and the log."""
    _console(text)
    to_log(text)


def _console(text: str) -> None:
    try:
        if _of_launcher:
            console.of(2).write(text.encode(sys.stderr.encoding, sys.stderr.errors or "strict"))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()
    except OSError:  # the terminal is gone (closed ssh); the log file is still written
        pass


def _now() -> str:
    return time.strftime(TIME)


def say(level: str, message: str, *, shown: bool = True) -> None:
    """Log one message; only its first line has a prefix. `shown`: False for the log file only."""
    stamp, message = _now(), plain(message)  # it may quote the output of a rank
    tag = f"\x1b[{COLOURS[level]}m[{level}]\x1b[0m" if colourful(sys.stderr) else f"[{level}]"
    if shown:
        _console(f"{_end_line()}{tag} {stamp} {message}\n")
    to_log(f"[{level}] {stamp} {message}\n")


def info(message: str) -> None:
    say("INFO", message)


def success(message: str) -> None:
    say("SUCCESS", message)


def warning(message: str) -> None:
    say("WARNING", message)


def error(message: str, *, shown: bool = True) -> None:
    say("ERROR", message, shown=shown)


def report(problem: UserError, closing: str = "", *, shown: bool = True) -> None:
    """Log all problems of a UserError with their fixes, and one closing line (default: nothing was
    launched). `shown`: False for the log file only."""
    if problem.said_by_another:
        return
    for one in problem.problems:
        error(typed("\n".join(one.lines())), shown=shown)
    count = len(problem.problems)
    error(
        msg(
            "core.log.closing",
            problems=plural(count, "problem"),
            closing=closing or msg("core.log.nothing_launched"),
            code=int(problem.code),
        ),
        shown=shown,
    )
