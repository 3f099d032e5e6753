"""Stop signals to a script whose training is not the process that was started."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Script, wait_for_both
from training.launcher.local_ranks import free_port

# Saves for a second after each stop signal, and notes it.
TRAIN = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    with open(Path(sys.argv[1], f"asked{os.environ['RANK']}"), "a") as file:
        file.write(f"{number} of {sys.argv[2]}\\n")
    time.sleep(1)
    Path(sys.argv[1], f"saved{os.environ['RANK']}.{sys.argv[2]}").touch()
    sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, save)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
SPAWNS = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        dist.all_reduce(torch.ones(1))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"ready {rank}", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(1 if rank else 3)
        Path(folder, f"saved{rank}").touch()

if __name__ == "__main__":
    mp.spawn(main, tuple(sys.argv[1:]), nprocs=2)
    time.sleep(2)
    Path(sys.argv[1], "exported").touch()
"""
ONCE = "'{python}' '{train}' '{folder}' 1; echo ended with $?"
SEEDS = "for seed in 1 2 3; do '{python}' '{train}' '{folder}' $seed; done"
INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "code", "body"),
    [
        (TERM, 75, ONCE),
        pytest.param(INT, 130, ONCE, marks=pytest.mark.slow),
        pytest.param(USR1, 75, ONCE, marks=pytest.mark.soak),
        pytest.param(TERM, 75, SEEDS, marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_reaches_the_training_below_a_shell_script(
    script: Script, tmp_path: Path, number: int, code: int, body: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    program = tmp_path / "train.sh"
    line = body.format(python=sys.executable, train=tmp_path / "train.py", folder=tmp_path)
    program.write_text(f"#!/bin/bash\n{line}\n")
    program.chmod(0o755)
    run = script(program)
    wait_for_both(run, "ready")
    run.process.send_signal(number)
    assert run.wait() == code
    for rank in range(2):
        asked = (tmp_path / f"asked{rank}").read_text().splitlines()
        assert asked[0] == f"{int(number)} of 1"
        # the second seed and the script get it when that has started: it may have no handler yet
        assert asked[1:] in ([], [f"{int(number)} of 2"] if body == SEEDS else [])
        for line in asked:
            assert (tmp_path / f"saved{rank}.{line.split()[-1]}").exists()
        if body == ONCE:
            assert "ended with 0" in run.run.rank_log(rank).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(TERM, 75), (INT, 130)])
def test_a_stop_signal_reaches_the_ranks_that_the_script_has_started(
    script: Script, tmp_path: Path, number: int, code: int
) -> None:
    run = script(SPAWNS, str(tmp_path), str(free_port("127.0.0.1")), ranks=1)
    run.wait_for("ready 0")
    run.wait_for("ready 1")
    run.process.send_signal(signal.SIGUSR2)  # for which they have no handler
    wait_until((run.run.ranks / "rank0.stacks").read_text, what="the stacks of the script")
    run.process.send_signal(number)
    assert run.wait() == code
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert (tmp_path / "exported").exists() == (number == TERM)


@pytest.mark.slow
def test_a_program_below_a_shell_script_ends_after_the_ranks_that_it_has_started(
    script: Script, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    program = tmp_path / "train.sh"
    port = free_port("127.0.0.1")
    train = f"{shlex.quote(sys.executable)} '{tmp_path / 'train.py'}' '{tmp_path}' {port}"
    program.write_text(f"#!/bin/bash\n{train}\necho ended with $?\n")
    program.chmod(0o755)
    run = script(program, ranks=1)
    run.wait_for("ready 0")
    run.wait_for("ready 1")
    run.process.send_signal(TERM)
    assert run.wait() == 75
    assert "ended with 0" in run.output
    assert all((tmp_path / name).exists() for name in ("saved0", "saved1", "exported"))


@pytest.mark.slow
def test_a_shell_script_ends_with_the_training_that_ctrl_c_has_ended(
    script: Script, tmp_path: Path
) -> None:
    program, done = tmp_path / "train.sh", tmp_path / "done"
    train = "print('ready', flush=True); import time; time.sleep(600)"
    program.write_text(
        f"#!/bin/bash\n{shlex.quote(sys.executable)} -c \"{train}\"\ntouch '{done}'\nsleep 1\n"
    )
    program.chmod(0o755)
    run = script(program, ranks=1)
    run.wait_for("ready")
    run.process.send_signal(INT)
    assert run.wait() == 130
    assert not done.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        "wait $p",
        "wait $p; wait $p",
        "'{python}' -c 'import time; time.sleep(600)' & wait $p; wait $p",
    ],
)
def test_the_trap_of_a_shell_script_is_kept(script: Script, tmp_path: Path, then: str) -> None:
    """With one wait, which the trap interrupts, the script ends before its training has saved; a
    service in the background ends with the training."""
    (tmp_path / "train.py").write_text(TRAIN)
    program = tmp_path / "train.sh"
    train = f"{shlex.quote(sys.executable)} '{tmp_path / 'train.py'}' '{tmp_path}' 1"
    trap, then = "trap 'kill -USR1 $p' TERM", then.format(python=sys.executable)
    program.write_text(f"#!/bin/bash\n{trap}\n{train} & p=$!\n{then}\n")
    program.chmod(0o755)
    run = script(program, ranks=1)
    run.wait_for("ready")
    run.process.send_signal(signal.SIGUSR2)  # for which neither has a handler
    run.process.send_signal(TERM)
    assert run.wait() == 75
    assert (tmp_path / "asked0").read_text() == f"{int(USR1)} of 1\n"
    assert (tmp_path / "saved0.1").exists()


@pytest.mark.slow
def test_a_trap_cleans_up_with_a_python_program(script: Script, tmp_path: Path) -> None:
    """Such as `aws s3 sync`, which runs longer than the launcher waits for the next program."""
    (tmp_path / "train.py").write_text(TRAIN)
    program, copied = tmp_path / "train.sh", tmp_path / "copied"
    python = shlex.quote(sys.executable)
    sync = f"{python} -S -c 'import time; time.sleep(4)' && echo once >>'{copied}'"
    train = f"{python} '{tmp_path / 'train.py'}' '{tmp_path}' 1"
    trap = f'trap "kill \\$p; wait \\$p; {sync}; exit" TERM'
    program.write_text(f"#!/bin/bash\n{trap}\n{train} & p=$!\nwait $p\n")
    program.chmod(0o755)
    run = script(program, ranks=1)
    run.wait_for("ready")
    run.process.send_signal(TERM)
    assert run.wait() == 75
    assert copied.read_text() == "once\n"
    assert (tmp_path / "asked0").read_text() == f"{int(TERM)} of 1\n"


@pytest.mark.slow
def test_a_trap_that_waits_for_its_training_does_not_keep_a_signal_from_it(
    script: Script, tmp_path: Path
) -> None:
    """Also below a launcher that a shell has started in the background: it ignores SIGQUIT there."""
    (tmp_path / "train.py").write_text(TRAIN)
    program = tmp_path / "train.sh"
    train = f"{shlex.quote(sys.executable)} '{tmp_path / 'train.py'}' '{tmp_path}' 1"
    program.write_text(f"#!/bin/bash\ntrap 'echo asked' TERM\n{train}\n")
    program.chmod(0o755)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    run = script(program, ranks=1)
    run.wait_for("ready")
    run.process.send_signal(TERM)
    assert run.wait() == 75
    assert (tmp_path / "saved0.1").exists()
