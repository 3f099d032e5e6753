"""Shared by all tests: a copy of the project in a folder with a space, and the check that no process
is left behind."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # noqa: F401 – used by tests

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests/gpu"
# in the environment of every process that a test starts, and of all its children
TOKEN = "PROJECT_TEST_TOKEN"
GONE_WITHIN_S = 30.0  # only ends a failed test

# Tests that measure time would disturb each other: with several workers they share one, and
# `make soak` runs them alone.
TIMED = (
    "tests/faults/",
    "tests/e2e/test_fewer_machines.py",
    "tests/e2e/test_machines.py",
    "tests/e2e/test_machines_network.py",
    "tests/e2e/test_machines_script.py",
    "tests/e2e/test_script_hangs.py",
    "tests/unit/test_watch_scripts.py",
)


@pytest.hookimpl(optionalhook=True)  # does not exist without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` with one exception. (xdist 3.8 does not group by its own `xdist_group` with
    pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "timed" if nodeid.startswith(TIMED) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports only tests/gpu: other tests need packages that a machine with a GPU may
    lack."""
    if config.option.markexpr != "gpu" or collection_path in (GPU_TESTS, *GPU_TESTS.parents):
        return None
    return None if GPU_TESTS in collection_path.parents else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(TIMED):
            item.add_marker(pytest.mark.timed)


# Tests compare English output on any machine; those of another language select it.
os.environ["DUET_LANG"] = "en"

# Threads of torch that wait for each other make small steps many times slower where tests use all
# cores, and their number decides how sums are rounded.
os.environ["OMP_NUM_THREADS"] = "1"

# A test run in the background ignores SIGINT, and every program under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def processes(token: str) -> dict[int, str]:
    """Living processes with this token, without zombies: pid → command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue
    return found


def kernel_log_unread() -> str:
    """Why the kernel's log does not show here that a program has crashed; "" if it does."""
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        logged = Path("/proc/sys/debug/exception-trace").read_text().strip() != "0"
    except OSError as error:
        return f"the kernel's log cannot be read here: {error}"
    return "" if logged else "this kernel logs no crashes: debug.exception-trace is 0"


def wait_until(
    condition: Callable[[], object],
    seconds: float = 180.0,
    what: str = "condition",
    every_s: float = 0.02,
) -> None:
    """Waits for a condition; the limit only ends a failed test. `every_s`: polling interval, longer
    for an expensive condition."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(every_s)


def nobody_left(token: str) -> None:
    """Asserts that soon no process with this token is left; kills leftovers."""
    end = time.monotonic() + GONE_WITHIN_S
    while (left := processes(token)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


# Programs inherit ignored signals: Ctrl-C would not reach those of later tests.
SIGNALS = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """The code under test changes them. A job in the background begins with two of them ignored."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def token() -> Iterator[str]:
    """A new token for the processes of one test; at its end none of them may be left."""
    value = uuid.uuid4().hex
    yield value
    nobody_left(value)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a path with a space and a quote, with the tested environment linked
    in."""
    copy = tmp_path_factory.mktemp("a user's folder") / "du et"
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, names.decode().split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    # As after a user's first run; also if the environment forbids writing bytecode, as many
    # containers do.
    for part in ("training", "lib", "benchmarks"):
        compileall.compile_dir(copy / part, quiet=1)
    # Its parts are links, the folder is not: changes of the copy's environment cannot reach the
    # real one.
    (copy / ".venv").mkdir()
    for entry in (ROOT / ".venv").iterdir():
        if entry.name == "duet.stamp":
            shutil.copy2(entry, copy / ".venv")
        else:
            (copy / ".venv" / entry.name).symlink_to(entry)
    return copy
