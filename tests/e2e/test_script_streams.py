"""Signals, streams and restarts of an unchanged user script under the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.conftest import TOKEN, wait_until
from tests.e2e.conftest import Script, wait_for_both
from tests.unit.conftest import clean_environment


def test_signals_reach_the_script(script: Script) -> None:
    body = """
import os, signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
    run = script(body)
    wait_for_both(run, "ready")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 75 and all("saved" in run.run.rank_log(r).read_text() for r in range(2))


def test_ctrl_c_once_twice_and_three_times(script: Script) -> None:
    # A handler, not `except KeyboardInterrupt`: the signal may come before the `try` is entered.
    stay = "signal.signal(signal.SIGINT, lambda *_: os.write(1, b'I stay\\n'))"
    deaf_to_term = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    ready = "import os, signal, time\n{}\nprint('ready', flush=True)\nwhile True: time.sleep(600)\n"
    polite, deaf = script(ready.format("")), script(ready.format(stay))
    rude = script(ready.format(f"{stay}; {deaf_to_term}"))
    for run in (polite, deaf, rude):
        wait_for_both(run, "ready")
        run.process.send_signal(signal.SIGINT)
    assert polite.wait(20) == 130
    for run in (deaf, rude):
        wait_for_both(run, "I stay")
        run.process.send_signal(signal.SIGINT)
    assert deaf.wait(20) == 130
    rude.wait_for("stopping the ranks now")
    rude.process.send_signal(signal.SIGINT)
    assert rude.wait(20) == 130 and "killing the ranks" in rude.output


def test_streams_signals_and_lines_of_other_ranks(
    project: Path, tmp_path: Path, token: str
) -> None:
    (tmp_path / "main.py").write_text(
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "signal.signal(signal.SIGUSR2, lambda *_: (print('got USR2'), os._exit(0)))\n"
        "while rank == '1' and not os.path.exists('first'): time.sleep(0.01)\n"
        "print(f'rank {rank} of 2', file=sys.stderr)\n"
        "open('first', 'w').close()\n"
        "if rank == '1':\n"
        "    print('only rank 1: careful', file=sys.stderr)\n"
        "else:\n"
        "    print('read', sys.stdin.readline().strip())\n"
        "time.sleep(600)\n"
    )
    folders = [f"--out_dir={tmp_path / 'experiments'}", f"--log_dir={tmp_path / 'logs'}"]
    process = subprocess.Popen(
        [project / "duet", "run", "-n2", *folders, "--report=false", "--run_name=one", "main.py"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | {TOKEN: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write("typed\n")
    process.stdin.flush()
    assert process.stdout.readline() == "read typed\n"
    log = tmp_path / "experiments/one/ranks/rank1.log"
    wait_until(lambda: "careful" in log.read_text(), what="rank 1's line")
    process.send_signal(signal.SIGUSR2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "got USR2\n")
    assert "rank 0 of 2\n" in err and "[rank1] only rank 1: careful\n" in err
    assert "[rank1] rank 1 of 2" not in err, "the first rank prints it too"


def test_a_killed_script_is_started_again_and_loads_its_snapshot(
    script: Script, tmp_path: Path
) -> None:
    run = script(
        "import json, os, pathlib, signal\n"
        "rank, count = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "saved = pathlib.Path(__file__).with_name('count')\n"
        "print('restart', count, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "if rank == '1' and count == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == '1' and count == '1':\n"
        "    raise ValueError('planted')\n",
        flags={"retries": 2},
    ).ok()
    assert "restart 2 of 2" in run.output
    restarts = json.loads(run.run.summary.read_text())["restarts"]
    assert [(r["attempt"], r["cause"], r["rank"]) for r in restarts] == [
        (2, "killed", 1),
        (3, "exception", 1),
    ]
    twice = script("raise ValueError('always')\n", flags={"retries": 3})
    assert twice.wait() == 4
    events = [json.loads(line) for line in twice.run.events.read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] in ("restart", "given_up")] == [
        "restart",
        "given_up",
    ]


def test_a_launcher_without_any_standard_stream(tmp_path: Path, project: Path, token: str) -> None:
    """As a daemon starts it: the next file would get the number of a closed descriptor."""
    script, done = tmp_path / "train.py", tmp_path / "done"
    script.write_text(f"print('step 1 loss 2.0')\nopen({str(done)!r}, 'w').close()\n")
    folders = f"--out_dir={tmp_path}/runs --log_dir={tmp_path}/logs"
    line = f"exec ./duet run -n 1 {folders} {script} <&- >&- 2>&-"
    ended = subprocess.run(
        ["bash", "-c", line],
        cwd=project,
        env={**clean_environment(), TOKEN: token},
        timeout=180,
        check=False,
    )
    (log,) = (tmp_path / "logs").glob("*.log")
    assert (ended.returncode, done.exists()) == (0, True), log.read_text()
