"""Crashes of a process that writes its stacks, which the kernel is to log as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import kernel_log_unread
from tests.unit.conftest import ROOT
from training.host.kernel_log import KernelLog

PROGRAM = """
import ctypes, os, resource, signal, sys, time
from training.core import crash_stacks
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
crash_stacks.write_to(open(sys.argv[1], "w"))
def crash():
    {crash}
    time.sleep(60)
crash()
"""
FAULT, SENT = "ctypes.string_at(0)", "os.kill(os.getpid(), signal.SIGSEGV)"


def crashed(folder: Path, crash: str, **env: str) -> tuple[str, list[str]]:
    """(stacks, lines of the kernel about this process)"""
    log, stacks = KernelLog(), folder / "stacks"
    words = [sys.executable, "-c", PROGRAM.format(crash=crash), str(stacks)]
    child = subprocess.Popen(words, cwd=ROOT, env=os.environ | env)
    assert child.wait(60) == -signal.SIGSEGV
    lines = [line for line in log.read().lines if f"[{child.pid}]: segfault at" in line]
    return stacks.read_text(), lines


def test_a_crash_has_its_stacks_and_a_line_of_the_kernel(tmp_path: Path) -> None:
    stacks, lines = crashed(tmp_path, FAULT)
    assert "in crash" in stacks and stacks.count("Fatal Python error") == 1
    if reason := kernel_log_unread():
        pytest.skip(reason)
    (line,) = lines
    assert " segfault at 0 " in line and "libc" in line


def test_stacks_where_the_handler_was_enabled_before(tmp_path: Path) -> None:
    stacks, _ = crashed(tmp_path, FAULT, PYTHONFAULTHANDLER="1")
    assert "in crash" in stacks


def test_a_signal_of_a_process_ends_this_one_as_before(tmp_path: Path) -> None:
    stacks, lines = crashed(tmp_path, SENT)
    assert "in crash" in stacks and lines == []
