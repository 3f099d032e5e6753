"""An unchanged user script under the launcher: logs, exit statuses, failure card."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import kernel_log_unread
from tests.e2e.conftest import PEERS, SCRIPTS, Launched, Script
from training.core.rundir import read_records
from training.monitor import state

Launch = Callable[..., Launched]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("auto", "bare_ddp"),
        pytest.param("auto", "with_accelerate", marks=pytest.mark.slow),
        pytest.param("torchrun", "bare_ddp", marks=pytest.mark.slow),
        pytest.param("auto", "with_lightning", marks=pytest.mark.soak),
        pytest.param("torchrun", "with_accelerate", marks=pytest.mark.soak),
        pytest.param("torchrun", "with_lightning", marks=pytest.mark.soak),
    ],
)
def test_unchanged_scripts_train(script: Script, tmp_path: Path, name: str, launcher: str) -> None:
    if name != "bare_ddp" and not PEERS.is_dir():
        pytest.skip("accelerate and lightning are not there: make peers")
    flags = {"launcher": launcher, "report": name == "bare_ddp"}
    run = script(
        SCRIPTS / f"{name}.py", str(tmp_path / "end"), flags=flags, env={"PYTHONPATH": str(PEERS)}
    ).ok()
    ends = [(tmp_path / f"end{rank}").read_text().split() for rank in range(2)]
    assert [end[:2] for end in ends] == [["2", "0"], ["2", "1"]]
    assert ends[0][2] == ends[1][2], "trained together"
    assert "script finished: 2 ranks ended with status 0" in run.output
    assert run.summary["status"] == "finished" and run.summary["exit_code"] == 0
    if name == "bare_ddp":
        seen = state.RunWatch(run.run).read()
        assert (
            seen["run"]["state"],
            seen["progress"]["step"],
            len(seen["loss_curve"]["points"]),
        ) == ("finished", 10, 10)
        assert 'id="chart-loss"' in run.run.report.read_text(), (
            "what it prints is in its report too"
        )


def test_a_script_sees_the_same_environment_as_under_python(script: Script, tmp_path: Path) -> None:
    body = """
import json, os, pickle, sys
class Thing: pass
facts = {"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "stdin": sys.stdin.read(),
         "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing, "duet": sorted(k for k in os.environ if k.startswith("DUET_"))}
facts |= {k: os.environ.get(k) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
print("the result", json.dumps(facts))
"""
    args = ["--epochs=3", "two words", "--depth", "--", "-u"]
    run = script(body, *args).ok()
    path = tmp_path / "run0/my script.py"
    for rank in range(2):
        line = next(
            text
            for text in run.run.rank_log(rank).read_text().splitlines()
            if text.startswith("the result")
        )
        facts = json.loads(line.removeprefix("the result"))
        assert (facts["argv"], facts["name"], facts["file"], facts["path"]) == (
            [str(path), *args],
            "__main__",
            str(path),
            str(path.parent),
        )
        assert facts["pickled"] and facts["stdin"] == "" and facts["duet"] == ["DUET_TOKEN"]
        assert [
            facts[k]
            for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        ] == [
            *(str(rank),) * 2,
            *("2",) * 2,
            "127.0.0.1",
        ]
    assert "the result" in run.output and run.output.count("the result") == 1, (
        "the first rank's output is shown"
    )
    alone = script(
        "import os; assert os.environ['RANK'] == '0' and os.environ['WORLD_SIZE'] == '1'", ranks=1
    )
    alone.ok()


def test_an_exception_is_named_with_rank_file_and_line(script: Script, tmp_path: Path) -> None:
    run = script(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n"
        "    print('careful', file=sys.stderr); raise ValueError('planted')\ntime.sleep(600)\n"
    )
    assert run.wait() == 4
    assert "[rank1] careful\n" in run.output and "[rank1] ValueError" not in run.output
    assert (run.failure["rank"], run.failure["summary"]) == (1, "ValueError: planted")
    assert run.failure["where"] == f"{tmp_path}/run0/my script.py:3"
    log = run.run.rank_log(1).read_text()
    assert "run_script" not in log and log.rstrip().endswith("ValueError: planted"), (
        "the traceback is the script's own"
    )


CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize(
    ("ending", "cause", "summary", "placed"),
    [
        pytest.param(
            "sys.exit(7)", "exit_status", "exited with status 7", True, marks=pytest.mark.slow
        ),
        pytest.param(
            "os._exit(7)", "exit_status", "exited with status 7", False, marks=pytest.mark.slow
        ),
        ("os.kill(os.getpid(), 9)", "killed", "killed by SIGKILL", False),
        pytest.param(
            "os.kill(os.getpid(), 11)",
            *("segfault", "killed by SIGSEGV", True),
            marks=pytest.mark.slow,
        ),
        (CRASH, "segfault", "killed by SIGSEGV", True),
    ],
)
def test_how_a_rank_ended(
    script: Script, tmp_path: Path, ending: str, cause: str, summary: str, placed: bool
) -> None:
    run = script(
        f"import os, sys, time\nif os.environ['RANK'] == '0':\n    {ending}\ntime.sleep(600)\n"
    )
    assert run.wait() == 4
    assert (run.failure["cause"], run.failure["rank"], run.failure["summary"]) == (
        cause,
        0,
        summary,
    )
    assert run.failure["where"] == (f"{tmp_path}/run0/my script.py:3" if placed else None)
    if ending == CRASH:
        if reason := kernel_log_unread():
            pytest.skip(reason)
        (line,) = run.failure["kernel"]["lines"]
        assert " segfault at 0 " in line and "libc" in line
        assert line[:60] in run.output


LEAVES = """
import atexit, os, sys, time
from pathlib import Path
gone = Path(__file__).parent / "gone"
if os.environ["RANK"] == "1":
    atexit.register(lambda: (gone.touch(), time.sleep(float(sys.argv[1]))))
    sys.exit(int(sys.argv[2]))
while not gone.exists():
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer [127.0.0.1]:5006")
"""


# with 2 s of teardown its exit is seen after that of the victim
@pytest.mark.parametrize(
    ("teardown_s", "status"),
    [(2, 75), *(pytest.param(n, 0, marks=pytest.mark.soak) for n in (0, 2))],
)
def test_a_rank_that_leaves_early_without_an_error_is_named(
    script: Script, tmp_path: Path, teardown_s: int, status: int
) -> None:
    run = script(LEAVES, str(teardown_s), str(status))
    assert run.wait() == 4
    failure = run.failure
    assert (failure["cause"], failure["rank"], failure["status"]) == ("exit_status", 1, status)
    assert failure["where"] == f"{tmp_path}/run0/my script.py:7"


CLEANS_UP = """
import os, sys, time
from pathlib import Path
gone = Path(__file__).parent / "gone"
try:
    if os.environ["RANK"] == "1":
        raise ValueError("planted")
    while not gone.exists():
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:5006")
except Exception:
    %s
finally:
    gone.touch()
    time.sleep(float(os.environ["RANK"]))
"""


@pytest.mark.parametrize(
    "then",
    ["raise", pytest.param("sys.excepthook(*sys.exc_info()); sys.exit(1)", marks=pytest.mark.slow)],
)
def test_the_cause_counts_although_its_victim_is_first_to_report(
    script: Script, tmp_path: Path, then: str
) -> None:
    run = script(CLEANS_UP % then)
    assert run.wait() == 4
    assert (run.failure["rank"], run.failure["summary"]) == (1, "ValueError: planted")
    assert run.failure["where"] == f"{tmp_path}/run0/my script.py:7"


@pytest.mark.parametrize("status", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_scripts_own_status_is_not_mistaken_for_duets(script: Script, status: int) -> None:
    assert script(f"raise SystemExit({status})").wait() == 4


@pytest.mark.parametrize("status", [75, pytest.param(130, marks=pytest.mark.soak)])
def test_a_script_may_use_duets_statuses(script: Script, status: int) -> None:
    assert script(f"raise SystemExit({status})").wait() == status


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ("2.5 nan 2.0 nan inf nan", ["warning.loss_not_finite"]),
        pytest.param("2.5 nan 2.0", [], marks=pytest.mark.soak),
    ],
)
def test_a_script_that_ends_with_a_loss_of_nan(
    script: Script, losses: str, warned: list[str]
) -> None:
    body = "import sys\nfor n, loss in enumerate(sys.argv[1:]): print(f'step {n} loss {loss}')"
    run = script(body, *losses.split(), ranks=1).ok()
    events = [e for e in read_records(run.run.events) if e["event"] == "warning"]
    assert [e["code"] for e in events] == warned
    assert all("nan" in e["text"] and "step 3" in e["text"] for e in events)
    assert run.output.count("[WARNING]") == len(warned)


def test_a_syntax_error_is_named(script: Script, tmp_path: Path) -> None:
    run = script("x = 1\ndef broken(:\n")
    assert run.wait() == 4 and run.failure["where"] == f"{tmp_path}/run0/my script.py:2"


def test_an_abort_after_the_end_is_not_a_training_failure(script: Script) -> None:
    """As gloo sometimes does in a script that never destroys its group; always here."""
    run = script("import atexit, os\natexit.register(os.abort)\nprint('trained')\n")
    assert run.wait() == 134
    assert (
        "training finished, then a rank was killed by SIGABRT at its exit" in run.output
        and "destroy_process_group()" in run.output
    )
    early = script("import os\nos.abort()\n")
    assert early.wait() == 4 and early.failure["summary"] == "killed by SIGABRT"


def test_a_program_other_than_a_python_file(script: Script, tmp_path: Path) -> None:
    program = tmp_path / "tool.sh"
    program.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\n')
    program.chmod(0o755)
    assert "rank 0 of 2: x y" in script(program, "x y").ok().output
    program.write_text(
        "#!/usr/bin/env python3\nimport time\nprint('ready', flush=True)\nraise "
        "ValueError('planted')\n"
    )
    failed = script(program)
    assert (
        failed.wait() == 4
        and failed.failure["summary"] == "ValueError: planted"
        and failed.failure["where"] == f"{program}:4"
    )
    program.write_text("#!/bin/sh\n")
    program.chmod(0o644)
    refused = script(program)
    assert refused.wait() == 2 and "chmod +x" in refused.output


def test_a_program_that_the_kernel_refuses(script: Script, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF\0 for another processor")
    program.chmod(0o755)
    run = script(program)
    assert run.wait() == 3 and "Traceback" not in run.output
    assert (run.failure["kind"], run.failure["exit_code"]) == ("error", 3)
    assert state.RunWatch(run.run).read()["run"]["state"] == "failed"


def test_all_errors_of_a_command_line_are_reported_together(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("")
    run = launch(
        "./launch_train.sh",
        "x",
        "--script",
        str(tmp_path / "mian.py"),
        "--depth=3",
        "more",
        bare=True,
    )
    assert run.wait() == 2
    for text in (
        "the number of processes is 'x'",
        "--depth is a field of Duet's own training, not of --script",
        "'more' is one argument too many",
        "does not exist",
        f"--script={tmp_path / 'main.py'}",
        "4 problems",
    ):
        assert text in run.output
    other = launch("./train_dual_gpu.sh", "--script", str(tmp_path / "main.py"), bare=True)
    assert other.wait() == 2 and "--script is for launch_train.sh" in other.output


@pytest.mark.slow
def test_a_script_runs_in_the_active_environment(script: Script, tmp_path: Path) -> None:
    fake = tmp_path / "env/bin"
    fake.mkdir(parents=True)
    (fake / "python").symlink_to(sys.executable)
    run = script(
        "import sys; print('run by', sys.executable)", env={"VIRTUAL_ENV": str(tmp_path / "env")}
    )
    run.ok()
    assert "of the active environment (VIRTUAL_ENV)" in run.output
