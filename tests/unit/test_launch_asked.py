"""Which processes below a shell script get a signal."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import wait_until
from training.launcher.asked_processes import AskedProcesses, targets
from training.watchdog import discovery
from training.watchdog.probes import procfs

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
# Reports its PID. A file descriptor that is closed at the end of the test ends it.
TRAIN = f"{shlex.quote(sys.executable)} -S -c 'import os, sys; print(os.getpid(), flush=True); sys.stdin.read()'"
FOREGROUND, BACKGROUND = f"{TRAIN}; true", f"{TRAIN} <&3 & wait $!; true"
BOTH = f"{TRAIN} <&3 & {shlex.quote(sys.executable)} -S -c 'import sys; sys.stdin.read()' <&3 & wait; true"
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


def test_a_launcher_passes_signals_on_to_ranks_in_groups_of_their_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun, also at a signal that it does not know itself: see understood."""
    run = "import subprocess; subprocess.run({train!r}, shell=True, start_new_session={alone})"
    for alone in (True, False):
        code = run.format(train=TRAIN, alone=alone)
        shell, rank = start(f"{shlex.quote(sys.executable)} -S -c {shlex.quote(code)}; true")
        launcher, ranks = discovery.python_of(shell), discovery.Started({0: rank})
        monkeypatch.setattr(discovery, "own_ranks", lambda *_, found=ranks, **__: found)
        wanted = {launcher if alone else rank}
        assert targets({0: shell}, USR1, alone=True) == {shell: wanted}


def test_a_launcher_below_a_script_passes_signals_on_without_python(start: Start) -> None:
    """As mpirun: its ranks are in sessions of their own, and nothing else in the group has Python."""
    launcher = f"setsid {TRAIN} <&3 & wait; true"
    shell, rank = start(f"bash -c {shlex.quote(launcher)}; true")
    process = procfs.read_process(rank)
    assert process and process.parent != shell
    asked = AskedProcesses()
    for number, script in ((TERM, False), (INT, True)):
        wanted = {process.parent} | ({shell} if script else set())
        assert targets({0: shell}, number, alone=True) == {shell: wanted}
    assert asked.new({shell: {process.parent}}) == {shell: {process.parent}}
    assert asked.outlive(shell), "it waits for its ranks"


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


def test_a_trap_is_alone_responsible_for_what_runs_after_the_signal(start: Start) -> None:
    """Also if it resets itself, as before a clean-up, and for the programs of that."""
    asked, (shell, python) = AskedProcesses(), start(BACKGROUND)
    asked.watch({0: shell}, alone=True)
    assert asked.new({shell: {shell}}) == {shell: {shell}}
    assert asked.new({shell: {python}}) == {}
    assert asked.new({shell: {1}}) == {}


def test_a_shell_that_becomes_the_next_program_gets_the_signal(start: Start) -> None:
    asked, (shell, python) = AskedProcesses(), start(f"({TRAIN}; exec {TRAIN}); true")
    asked.watch({0: shell}, alone=True)
    asked.new(targets({0: shell}, TERM, alone=True))
    os.kill(python, signal.SIGKILL)
    wait_until(lambda: discovery.python_of(shell) not in (shell, python))
    following = discovery.python_of(shell)
    assert asked.new({shell: {following}}) == {shell: {shell, following}}


def test_a_program_that_only_starts_ranks_ends_after_them(start: Start) -> None:
    start_rank = f"import subprocess; subprocess.run({TRAIN!r}, shell=True)"
    asked, (shell, rank) = (
        AskedProcesses(),
        start(f"{shlex.quote(sys.executable)} -S -c {shlex.quote(start_rank)}; true"),
    )
    starter = discovery.python_of(shell)
    assert starter not in (shell, rank)
    assert asked.new({shell: {rank}}) == {shell: {rank}}
    assert asked.new({shell: {starter, rank}}) == {}, "the other ranks have ended"
    assert asked.new({shell: {starter}}) == {}, "it exports what they have saved"


def test_a_service_beside_a_training_is_not_the_next_program(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, (shell, python) = AskedProcesses(), start(BOTH)
    wait_until(lambda: len(procfs.workers(shell)) == 2)
    service = max(procfs.workers(shell))
    with_torch = {python}
    monkeypatch.setattr(procfs, "maps", lambda pid, text: pid in with_torch)
    asked.watch({0: shell}, alone=True)
    assert asked.new({shell: {python}}) == {shell: {python}}
    assert asked.new({shell: {service}}) == {}
    with_torch.add(service)
    assert asked.new({shell: {service}}) == {shell: {service}}, "a training, but no new program"


def test_a_training_outlives_a_script_whose_trap_has_got_the_signal(start: Start) -> None:
    asked, (shell, python) = AskedProcesses(), start(BOTH)
    asked.watch({0: shell}, alone=True)
    assert not asked.outlive(shell), "nothing has been asked to stop"
    asked.new({shell: {shell}})
    assert asked.outlive(shell)
    os.kill(python, signal.SIGKILL)
    wait_until(lambda: discovery.python_of(shell) not in (shell, python))
    asked.watch({0: shell}, alone=True)
    assert not asked.outlive(shell), "the service beside it has not got the signal"
