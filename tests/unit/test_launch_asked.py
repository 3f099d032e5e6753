"""Which processes below a shell script get a signal."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from training.launcher.asked_processes import AskedProcesses, targets

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
# Reports its PID. A file descriptor that is closed at the end of the test ends it.
TRAIN = f"{shlex.quote(sys.executable)} -S -c 'import os, sys; print(os.getpid(), flush=True); sys.stdin.read()'"
FOREGROUND, BACKGROUND = f"{TRAIN}; true", f"{TRAIN} <&3 & wait $!; true"
Start = Callable[[str], tuple[int, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a shell script; returns its PID and that of its training."""
    started: list[subprocess.Popen[str]] = []

    def make(body: str) -> tuple[int, int]:
        shell = subprocess.Popen(
            ["bash", "-c", f"exec 3<&0; {body}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(shell)
        assert shell.stdout
        return shell.pid, int(shell.stdout.readline())

    yield make
    for shell in started:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


@pytest.mark.parametrize(
    ("body", "number", "script", "training"),
    [
        (FOREGROUND, TERM, False, True),
        (FOREGROUND, INT, True, True),
        (BACKGROUND, TERM, False, True),
        (f"trap true TERM; {BACKGROUND}", TERM, True, False),
        (f"trap true TERM; {BACKGROUND}", USR1, False, True),
        # it would be run after the end of the training
        (f"trap true TERM; {FOREGROUND}", TERM, False, True),
        # bash catches TERM and ends
        (f"trap true EXIT; {BACKGROUND}", TERM, False, True),
    ],
)
def test_a_signal_is_for_the_script_or_its_training(
    start: Start, body: str, number: int, script: bool, training: bool
) -> None:
    shell, python = start(body)
    wanted = ({shell} if script else set()) | ({python} if training else set())
    assert targets({0: shell}, number, alone=True) == {shell: wanted}


def test_a_script_gets_a_signal_again_with_the_next_program(start: Start) -> None:
    asked, (shell, python) = AskedProcesses(), start(FOREGROUND)
    assert asked.new({shell: {shell, python}}) == {shell: {shell, python}}
    assert asked.new({shell: {shell}}) == {}
    assert asked.new({shell: {shell, 1}}) == {shell: {shell, 1}}
    asked = AskedProcesses()
    assert asked.new({shell: {python}}) == {shell: {python}}
    assert asked.new({shell: {shell}}) == {}, "it copies what the training has saved"
    asked = AskedProcesses()
    assert asked.new({python: {1}}) == {python: {1}}
    assert asked.new({python: {2}}) == {python: {2}}, "a Python program that starts ranks"


def test_a_training_outlives_a_script_whose_trap_has_got_the_signal(start: Start) -> None:
    asked, (shell, python) = AskedProcesses(), start(BACKGROUND)
    asked.watch(shell, python)
    assert not asked.outlive(shell), "nothing has been asked to stop"
    asked.new({shell: {shell}})
    assert asked.outlive(shell)
