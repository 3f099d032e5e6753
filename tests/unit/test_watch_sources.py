"""What a rank does is read from the source as it was when the rank started; and from the workers of a
multiprocessing forkserver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from training.watchdog.probes import procfs, stacks, waits
from training.watchdog.probes.stacks import Frame, Stack, Thread
from training.watchdog.script_watchdog import ScriptWatch

WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(1000)  # work.wait()\n"


def waits_in(script: Path) -> str | None:
    frame = Frame(str(script), 3, "<module>")
    return waits.in_collective(Thread("MainThread", True, False, False, (frame,)))


def test_a_script_that_is_edited_while_it_runs(tmp_path: Path) -> None:
    beside = tmp_path / "helper.py"
    beside.write_text(WAITS)
    with targets.running(tmp_path, WAITS) as (pid, script, _):
        assert ScriptWatch(60.0).look({0: pid}) is None
        for file in (script, beside):
            file.write_text("# two\n# lines\n" + WAITS)
            assert waits_in(file) == "wait"
        assert ScriptWatch(60.0).look({0: pid}) is None
        assert waits_in(script) is None, "another attempt reads it again"


@pytest.mark.parametrize("typed", ["./train.py", "../own/train.py", "link.py"])
def test_a_script_is_known_by_the_name_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    """Python names the script so in a stack, but the files beside it by their real folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    script, beside = folder / "train.py", folder / "helper.py"
    for file in (script, beside):
        file.write_text(WAITS)
    (tmp_path / "link.py").symlink_to(script)
    monkeypatch.chdir(tmp_path if typed == "link.py" else folder)
    starts = f"import os, sys; os.execv(sys.executable, [sys.executable, '-u', {typed!r}])"
    with targets.running(tmp_path, starts) as (pid, _, _):
        assert ScriptWatch(60.0).look({0: pid}) is None
        stack = stacks.dump([pid])[pid]
        assert isinstance(stack, Stack) and stack.main
        for file in (script, beside):
            file.write_text("# two\n# lines\n" + WAITS)
        assert waits.in_collective(stack.main) == "wait"
        assert waits_in(beside) == "wait"


@pytest.mark.parametrize(
    ("module", "file"), [("own.program", "own/program.py"), ("own", "own/__main__.py")]
)
def test_a_module_that_is_edited_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str
) -> None:
    script = tmp_path / file
    script.parent.mkdir()
    script.write_text(WAITS)
    monkeypatch.chdir(tmp_path)
    starts = f"import os, sys; os.execv(sys.executable, [sys.executable, '-u', '-m', {module!r}])"
    with targets.running(tmp_path, starts) as (pid, _, _):
        assert ScriptWatch(60.0).look({0: pid}) is None
        script.write_text("# two\n# lines\n" + WAITS)
        assert waits_in(script) == "wait"


FORKSERVER = """
import multiprocessing, os, time

def work():
    time.sleep(1000)

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=work, daemon=True)
    process.start()
    print("ready", process.pid, flush=True)
    process.join()
"""


def test_a_worker_of_a_forkserver_is_a_worker(tmp_path: Path) -> None:
    with targets.running(tmp_path, FORKSERVER) as (pid, _, (_, worker)):
        wait_until(lambda: procfs.workers(pid) == [int(worker)], 20, "the worker")
        server = procfs.read_process(int(worker))
        assert server and not procfs.is_python(server.parent)
        assert os.getpid() not in procfs.workers(pid)
