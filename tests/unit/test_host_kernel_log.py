"""The kernel's messages since a start, by /dev/kmsg or the journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import kernel_log_unread
from training.diagnose import kernel_lines
from training.host import kernel_log
from training.host.kernel_log import KernelLog

CRASH = "import ctypes, os; print(os.getpid(), flush=True); ctypes.string_at(0)"
BEFORE = "6,739,51172572246,-;an earlier message\n"


@pytest.fixture
def kmsg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "kmsg"
    file.write_text(BEFORE)
    monkeypatch.setattr(kernel_log, "KMSG", file)
    return file


def added(kmsg: Path, text: str) -> tuple[str, ...]:
    """What a log that was opened before shows of this."""
    log = KernelLog()
    with kmsg.open("a") as file:
        file.write(text)
    return log.read().lines


def test_a_real_crash_of_a_child_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := kernel_log_unread():
        pytest.skip(reason)
    monkeypatch.setattr(kernel_log, "FLOOD_S", 30.0)
    log = KernelLog()
    child = subprocess.run([sys.executable, "-c", CRASH], stdout=subprocess.PIPE, check=False)
    assert child.returncode == -signal.SIGSEGV
    began = time.monotonic()
    found = log.read()
    assert time.monotonic() - began < kernel_log.FLOOD_S
    assert found.source == str(kernel_log.KMSG)
    name = f"[{child.stdout.decode().strip()}]"
    lines = [line for line in found.lines if name in line and ": segfault at 0 " in line]
    assert len(lines) == 1 and "libc" in lines[0]
    again = log.read()  # another test's child may have crashed since
    assert again.source != found.source or not any(name in line for line in again.lines)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A new control group with 64 MiB of memory."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory") if (root / "memory").is_dir() else root
    limit = "memory.max" if first == root else "memory.limit_in_bytes"
    folder = first / f"duet_test_{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group here: {error}")
    try:
        try:
            (folder / limit).write_text(str(64 << 20))
        except OSError as error:
            pytest.skip(f"no control group for memory here: {error}")
        yield folder
    finally:
        folder.rmdir()


GROWS = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
print(os.getpid(), flush=True)
bytearray(300 << 20)
"""


def test_a_real_kill_for_lack_of_memory_is_in_the_log(limited: Path) -> None:
    if reason := kernel_log_unread():
        pytest.skip(reason)
    log = KernelLog()
    child = subprocess.run(
        [sys.executable, "-c", GROWS, str(limited)], stdout=subprocess.PIPE, check=False
    )
    if child.returncode == 0:
        pytest.skip("the memory of the control group is extended by swap")
    assert child.returncode == -signal.SIGKILL
    pid, found = int(child.stdout), log.read()
    assert pid in kernel_lines.killed(found.lines)
    lines = kernel_lines.about(found.lines, {pid: 1}, [])
    assert lines and all(line.rank == 1 for line in lines)
    assert {line.signature.cause for line in lines if line.signature} == {"host_oom_killed"}


def test_records_of_the_kernel_since_the_start(kmsg: Path) -> None:
    lines = added(
        kmsg,
        "4,740,1843308145,-;NVRM: The NVIDIA GPU 0000:b3:00.0\\x0a"
        "NVRM: fallen off the bus and is not responding to commands.\n"
        " SUBSYSTEM=pci\n DEVICE=+pci:0000:b3:00.0\n"
        "12,741,1843308146,-;NVRM: Xid (PCI:0000:b3:00): 79, written by a program\n"
        "3,742,1843308147,-,caller=T1;a b\\x09c; d\n"
        "no record\n",
    )
    assert lines == (
        "NVRM: The NVIDIA GPU 0000:b3:00.0 "
        "NVRM: fallen off the bus and is not responding to commands.",
        "a b\tc; d",
    )


def test_the_newest_of_many_messages_are_kept(kmsg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"4,{n},0,-;message {n}{'.' * 2000}\n" for n in range(300))
    lines = added(kmsg, text)
    assert lines[-1].startswith("message 299.") and len(lines[-1]) == kernel_log.LINE_CHARACTERS
    assert len(lines) == 300
    monkeypatch.setattr(kernel_log, "MOST_BYTES", 1 << 18)
    assert 0 < len(added(kmsg, text)) < 300
    monkeypatch.setattr(kernel_log, "MOST_LINES", 3)
    assert [line[:11] for line in added(kmsg, text)] == [f"message {n}" for n in (297, 298, 299)]


def journal(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "journalctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def refused(kmsg: Path) -> None:
    kmsg.unlink()


@pytest.mark.usefixtures("refused")
def test_the_journal_where_the_log_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    journal(
        tmp_path,
        monkeypatch,
        f"echo '{now - 60:.6f} gpu01 kernel: before'\n"
        f"echo '{now + 60:.6f} gpu01 kernel: NVRM: since then'\n"
        f"echo '{now + 60:.6f} gpu01 systemd[1]: Started.'\n",
    )
    found = KernelLog().read()
    assert (found.lines, found.source) == (("NVRM: since then",), "journalctl")
    log = KernelLog()
    log.hold()
    assert log.read().lines == ()


def test_a_held_log_has_nothing_newer(kmsg: Path) -> None:
    log = KernelLog()
    kmsg.write_text(f"{BEFORE}6,740,51172572247,-;since then\n")
    log.hold()
    kmsg.write_text(f"{kmsg.read_text()}6,741,51172572248,-;later\n")
    log.hold()
    assert log.read().lines == ("since then",)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("script", ["", "exit 1", "exec sleep 60"], ids=["empty", "fails", "hangs"])
def test_a_log_that_cannot_be_read_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    journal(tmp_path, monkeypatch, script)
    monkeypatch.setattr(kernel_log, "JOURNAL_S", 0.5)
    began = time.monotonic()
    found = KernelLog().read()
    assert time.monotonic() - began < 10, "the answer of journalctl was awaited"
    assert (found.lines, found.source) == ((), "") and str(kernel_log.KMSG) in found.reason


@pytest.mark.usefixtures("refused")
def test_a_machine_without_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = KernelLog().read()
    assert found.source == "" and "journalctl" in found.reason
