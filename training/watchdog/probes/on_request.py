"""Stacks that ranks write themselves on SIGUSR2 (training.trainer.worker, lib/run_script.py), where
none can be read from outside: ptrace is forbidden, or py-spy is missing.

Only for ranks that would be ended otherwise: the signal may end a wait, and a script may have a
handler of its own for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from training.watchdog.probes import procfs, signal_masks, stacks
from training.watchdog.probes.stacks import Stack

WAIT_S, POLL_S = 1.5, 0.05  # for all of them together


def ask(folder: Path, pids: Mapping[int, int]) -> dict[int, Stack]:
    """`folder`: of the ranks' files; `pids`: rank → PID. Without a handler the signal would end a
    process, and a stopped one cannot answer: neither is asked."""
    files: dict[int, tuple[Path, int]] = {}
    for rank, pid in pids.items():
        file = stack_file(folder, rank)
        process = procfs.read_process(pid)
        if process is None or process.state not in "RS" or not _answers(pid, file):
            continue
        with contextlib.suppress(OSError):  # it has exited in the meantime
            files[rank] = file, file.stat().st_size
            os.kill(pid, signal.SIGUSR2)
    texts = _read(files)
    found = {rank: stacks.in_dump(text.splitlines()) for rank, text in texts.items()}
    return {rank: replace(stack, pid=pids[rank]) for rank, stack in found.items() if stack}


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def _answers(pid: int, file: Path) -> bool:
    """Does it catch the signal, and has it this file open?"""
    caught = signal_masks.catches(pid, signal.SIGUSR2)
    return caught and str(file.resolve()) in procfs.open_files(pid)


def _read(files: Mapping[int, tuple[Path, int]]) -> dict[int, str]:
    """What was added to the files, once they grow no longer."""
    end, texts = time.monotonic() + WAIT_S, dict.fromkeys(files, "")
    while time.monotonic() < end:
        time.sleep(POLL_S)
        before = dict(texts)
        for rank, (file, size) in files.items():
            with contextlib.suppress(OSError), file.open("rb") as opened:
                opened.seek(size)
                texts[rank] = opened.read().decode("utf-8", "replace")
        if all(texts.values()) and texts == before:
            break
    return texts
