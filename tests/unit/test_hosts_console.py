"""--hosts: what the machines show on the console of the first one."""

from __future__ import annotations

import contextlib
import os
import select

import pytest

from tests.conftest import wait_until
from training.launcher import post_run
from training.launcher.hosts import conductor
from training.launcher.hosts.console import ERROR_LINES, Console, Copy


def shown(*lines: str, name: str = "beta") -> Console:
    reader, writer = os.pipe()
    os.write(writer, "".join(f"{line}\n" for line in lines).encode())
    console = Console(name, os.fdopen(reader, "rb"), seen=SEEN)
    os.close(writer)
    console.join(10)
    return console


SEEN: set[str] = set()
TIME = "2024-10-21 16:00:00"


def test_other_nodes_show_what_matters(capfd: pytest.CaptureFixture[str]) -> None:
    lines = (
        f"[INFO] {TIME} run directory: x",
        "step 1 loss 2",
        f"[WARNING] {TIME} slow disk",
        "    try: another",
        "step 2 loss 1",
        "[rank3] NaN",
        f"[ERROR] {TIME} training failed",
        "  Cause   x",
        "step 3",
    )
    console = shown(*lines)
    assert capfd.readouterr().err.splitlines() == [
        f"[beta] [WARNING] {TIME} slow disk",
        "[beta]     try: another",
        "[beta] [rank3] NaN",
    ]
    console.errors()
    assert capfd.readouterr().err.splitlines() == [
        f"[beta] [ERROR] {TIME} training failed",
        "[beta]   Cause   x",
        "[beta] step 3",
    ]
    shown(f"[WARNING] {TIME} slow disk").errors()
    assert capfd.readouterr().err == "", "the same warning of another machine"
    console = shown("bash: no such file")
    console.errors()
    assert capfd.readouterr().err == ""
    shown("bash: no such file").errors(or_last=True)
    assert capfd.readouterr().err == "[beta] bash: no such file\n"


def test_the_same_errors_are_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Each machine has its own: one of two full disks is not the other one."""
    first = f"[ERROR] {TIME} full after 12 s"
    shown(first).errors()
    shown(first.replace("16:00", "16:01").replace("12 s", "13 s")).errors(once=True)
    shown(first, name="gamma").errors(once=True)
    shown(f"[ERROR] {TIME} no GPU", "  try: x").errors(once=True)
    assert capfd.readouterr().err.splitlines() == [
        f"[beta] {first}",
        f"[gamma] {first}",
        f"[beta] [ERROR] {TIME} no GPU",
        "[beta]   try: x",
    ]


def sent(writer: int, data: bytes) -> None:
    """Writes all of it; fails instead of blocking where it is not read."""
    os.set_blocking(writer, False)
    rest = [data]

    def go_on() -> bool:
        with contextlib.suppress(BlockingIOError):
            rest[0] = rest[0][os.write(writer, rest[0]) :]
        return not rest[0]

    wait_until(go_on, 10, "everything is read")
    os.close(writer)


def test_node_0_is_read_although_the_console_is_closed() -> None:
    (reader, writer), (end, console) = os.pipe(), os.pipe()
    os.close(end)  # as by `… | head`
    with os.fdopen(reader, "rb") as stream:
        copy = Copy(stream, console)
        sent(writer, b"x" * (1 << 20))
        copy.join(10)
    os.close(console)


def test_a_console_that_another_program_made_non_blocking_gets_everything() -> None:
    (reader, writer), (end, console), found = os.pipe(), os.pipe(), bytearray()
    os.set_blocking(console, False)
    os.set_blocking(end, False)
    with os.fdopen(reader, "rb") as stream:
        copy = Copy(stream, console)
        sent(writer, b"x" * 100000)  # more than a pipe holds

        def read() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.extend(os.read(end, 1 << 16))
            return len(found) == 100000

        wait_until(lambda: not select.select([], [console], [], 0)[1], 10, "the console is full")
        wait_until(read, 10, "all of it")
        copy.join(10)
    os.close(console)
    os.close(end)


def test_node_0_has_time_for_the_report_and_the_notification() -> None:
    assert conductor.TOGETHER_S > post_run.REPORT_S + post_run.NOTIFY_S


def test_endless_output_of_another_node_is_not_kept(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        console = Console("beta", stream, set())
        sent(writer, f"[ERROR] {TIME} failed\n".encode() + b"step\n" * 100000 + b"\r50%" * 100000)
        console.join(10)
    console.errors()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"[beta] [ERROR] {TIME} failed"
    assert len(lines) == ERROR_LINES
