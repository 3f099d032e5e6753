"""Nothing is left of a script, however it ends."""

from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Script
from training.watchdog.probes import procfs

CHILDREN = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["setsid", "sleep", "1001"])                                     # in its own session
subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; (sleep 1002 & ) ; sleep 1003"])   # ignores signals, and a grandchild
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
{}
"""


@pytest.mark.parametrize(
    "death",
    [
        "kill -9 launcher",
        "kill -9 rank",
        "end",
        "exception",
        pytest.param("ctrl-c twice", marks=pytest.mark.slow),
    ],
)
def test_no_orphans_after_any_kill(script: Script, token: str, death: str) -> None:
    body = {"end": "", "exception": "raise ValueError"}.get(death, "time.sleep(600)")
    run = script(CHILDREN.format(body))
    run.wait_for("ready")
    if death == "kill -9 launcher":
        wait_until(
            lambda: len([c for c in processes(token).values() if c.startswith("sleep 100")]) == 8
        )
        run.process.kill()
    elif death == "kill -9 rank":
        wait_until(lambda: run.pids.get(1))
        os.kill(run.pids[1], signal.SIGKILL)
    elif death == "ctrl-c twice":
        run.process.send_signal(signal.SIGINT)
        run.wait_for("asked the script to stop")
        run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == {"end": 0, "kill -9 launcher": -9, "ctrl-c twice": 130}.get(death, 4)
    wait_until(lambda: not processes(token), 8, "everybody gone")


BARE = """
import subprocess, time
own = [subprocess.Popen(["sleep", "1004"], env={{}}, start_new_session=own) for own in (False, True)]
code = "setsid sleep 1005 > /dev/null 2>&1 & echo $!"  # its parent is gone
orphan = subprocess.run(["sh", "-c", code], env={{}}, capture_output=True, text=True).stdout
print("ready", *(child.pid for child in own), orphan, flush=True)
{}
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param(None, 0, marks=pytest.mark.soak),
    ],
)
def test_no_orphans_with_a_cleared_environment(
    script: Script, number: signal.Signals | None, code: int
) -> None:
    run = script(BARE.format("time.sleep(600)" if number else ""))
    logs = [run.run.ranks / f"rank{rank}.log" for rank in range(2)]

    def pids() -> list[int]:
        words = [word for log in logs if log.exists() for word in log.read_text().split()]
        return [int(word) for word in words if word.isdecimal()]

    wait_until(lambda: len(pids()) == 6)
    try:
        if number:
            run.process.send_signal(number)
        assert run.wait(20) == code
        wait_until(lambda: not [pid for pid in pids() if procfs.command(pid)], 8, "everybody gone")
    finally:
        for pid in pids():
            if procfs.command(pid).startswith("sleep 100"):
                os.kill(pid, signal.SIGKILL)
    if not number:
        assert run.output.count("left behind by a rank") == 6
