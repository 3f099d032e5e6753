"""A user's own program: where it belongs on the command line, and what --dry_run and --check show
of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, only
from training.cli import plan as plan_command
from training.config import program
from training.config.schema import FIELDS
from training.core import project
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.plan import cli_args, communication, script_plan, script_program, script_words
from training.plan import script_request as own_script

Write = Callable[..., str]
BODY = (
    "import argparse\n\nlr = 0.1\ndevice = 'cpu'\n\ndef main():\n    pass\n\nif __name__ == "
    "'__main__':\n    main()\n"
)


def problem(*words: str) -> Problem:
    with pytest.raises(UserError) as raised:
        if script_words.asked_for(list(words)):
            own_script.read(LAUNCH, list(words), {})
        else:
            cli_args.parse_args(LAUNCH, list(words), {})
    return only(raised.value.problems)


@each(
    ("text", "kind"),
    [
        (BODY, program.PROGRAM),
        ("import torch\nfor step in range(3):\n    print(step)\n", program.PROGRAM),
        ("from training.tasks.base import Task\nclass Mine(Task):\n    pass\n", program.TASK),
        ("depth = 12\nmax_seq_len = 2 * 64\n", program.CONFIG),
        ("import os\ndepth = 'twelve'\nmatrix_lr = -1.0\n", program.CONFIG),
        ("print('hello')\n", program.PROGRAM),
        ("depth == 12\n", program.CONFIG),
        ("'''words'''\n", program.CONFIG),
        ("def (", program.CONFIG),
        ("", program.CONFIG),
    ],
)
def test_programs_and_configs_are_distinguished(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "file.py").write_text(text)
    assert program.kind(tmp_path / "file.py", FIELDS) == kind


def test_duets_configs_are_not_programs() -> None:
    found = list(project.ROOT.glob("configs/*/*.py"))
    assert found and all(program.kind(path, FIELDS) == program.CONFIG for path in found)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["4", "main.py"], "./launch_train.sh 4 --script main.py   # its arguments after --"),
        (
            ["--config=main.py", "4"],
            "./launch_train.sh 4 --script main.py   # its arguments after --",
        ),
        (
            ["2", "main.py", "--lr", "3", "--device=cpu"],
            "./launch_train.sh 2 --device=cpu --script main.py -- --lr 3",
        ),
        (
            ["2", "--dry_run", "main.py", "--", "-x"],
            "./launch_train.sh 2 --dry_run --script main.py -- -x",
        ),
        (
            ["-n3", "--max-restarts=1", "--standalone", "./main.py", "--max-restarts=9"],
            "./launch_train.sh 3 --retries=1 --script main.py -- --max-restarts=9",
        ),
        (
            ["--no-python", "./main.sh", "-x"],
            "./launch_train.sh 2 --no-python --script main.sh -- -x",
        ),
    ],
)
def test_a_program_in_the_place_of_a_config_is_one_problem(
    home: Path, write: Write, words: list[str], command: str
) -> None:
    write("main.py", BODY)
    assert problem(*words).fixes == [command]


def test_duets_own_program_and_a_task_get_the_command_that_is_meant(
    home: Path, write: Write
) -> None:
    task = write("mine.py", "from training.tasks.base import Task\nclass Mine(Task):\n    pass\n")
    assert (
        problem("2", task, "--width=3").fixes[0] == "./launch_train.sh 2 --width=3 --task=mine.py"
    )
    own = cli_args.ROOT / project.ENTRYPOINT
    own.write_text(BODY)
    assert cli_args.QUICKSTART in problem("2", str(own)).fixes[0]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--config", "conf.yaml"], "-- --config conf.yaml"),
        (["--config=conf.yaml", "--", "--x"], "-- --config=conf.yaml --x"),
        (["--opt", "a.json", "--device=cpu"], "--device=cpu -- --opt a.json"),
    ],
)
def test_a_config_after_a_script_is_the_scripts(
    home: Path, write: Write, words: list[str], command: str
) -> None:
    script = write("main.py", BODY)
    assert problem("2", "--script", script, *words).fixes == [
        f"./launch_train.sh 2 --script main.py {command}"
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("#!\n", "has no #! line"),
        (
            "#!/no/such/shell -u\n",
            "names an interpreter that does not exist: #!/no/such/shell -u",
        ),
    ],
)
def test_a_program_that_the_kernel_would_refuse(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "tool").write_text(text)
    (tmp_path / "tool").chmod(0o755)
    found = problem("2", "--script", str(tmp_path / "tool"))
    assert (found.code, found.what) == (
        "script.interpreter",
        f"the script {str(tmp_path / 'tool')!r} {what}",
    )


@pytest.mark.parametrize("first", ["#!/bin/bash\r\n", "#!/usr/bin/env bash\r\n"])
def test_a_program_with_line_ends_of_windows(tmp_path: Path, first: str) -> None:
    """The interpreter exists, but its name ends with a carriage return for the kernel."""
    file = tmp_path / "my train.sh"
    file.write_bytes(f"{first}exit 7\r\n".encode())
    file.chmod(0o755)
    found = problem("2", "--script", str(file))
    assert found.code == "script.interpreter" and "#!" not in found.what
    subprocess.run(["bash", "-c", *found.fixes], check=True)
    assert subprocess.run([file], check=False).returncode == 7


@pytest.mark.parametrize(
    "words", [["2", "--script"], ["2", "--script="], ["2", "--script", "--", "--lr=1"]]
)
def test_a_script_without_a_name(home: Path, words: list[str]) -> None:
    found = problem(*words)
    assert (found.code, found.what) == (
        "flag.no_value",
        "--script has no value",
    ) and "--script main.py" in found.fixes[0]


def test_each_sentence_of_a_plan_is_shown_once(
    home: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(request: object, begun: dict[str, list[str]], *others: object) -> None:
        begun["headline"].append("communication: 11 GB/s")
        begun["text"].append(begun["headline"][-1])

    monkeypatch.setattr(communication, "settle", settle)
    words = ["1", "--device=cpu", "--script", write("main.py", BODY)]
    plan, _ = script_plan.build(own_script.read(LAUNCH, words, {}), {})
    assert len(set(plan["text"])) == len(plan["text"]) > len(plan["headline"]) > 1
    assert set(plan["headline"]) <= set(plan["text"])


def test_a_launcher_as_the_program_gets_a_hint(home: Path) -> None:
    args = ["--nproc_per_node=2", "my t.py", "--db_password", "hunter2x"]
    rest = "--nproc_per_node=2 'my t.py' --db_password …"
    torchrun = home / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text("#!/bin/sh\n")
    torchrun.chmod(0o755)
    environ = {"PATH": str(torchrun.parent)}
    for launched, command in (
        (["--script=torchrun"], f"./duet watch -- torchrun {rest}"),
        (["--script=bin/torchrun"], f"./duet watch -- bin/torchrun {rest}"),
        (
            ["--module", "--script=torch.distributed.run"],
            f"./duet watch -- python -m torch.distributed.run {rest}",
        ),
        (["--watch", "--script=torchrun"], ""),
        (["--module", "--script=my.torchrun"], ""),
    ):
        words = ["1", "--device=cpu", *launched, "--", *args]
        plan, _ = script_plan.build(own_script.read(LAUNCH, words, environ), environ)
        hints = [note for note in plan["notes"] if "duet watch" in note]
        assert [hint.partition(": ")[2] for hint in hints] == ([command] if command else [])


@pytest.mark.parametrize("action", ["--dry_run", "--explain", "--check"])
def test_dry_run_and_check_of_a_script(
    home: Path,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
) -> None:
    words = ["1", action, "--device=cpu", "--script", write("main.py", BODY), "--", "--epochs=3"]
    monkeypatch.setattr("sys.argv", ["plan", LAUNCH, *words])
    assert plan_command.main() == 0
    assert "script: main.py --epochs=3" in capsys.readouterr().out
    if action == "--check":
        monkeypatch.setattr("sys.argv", ["plan", LAUNCH, words[0], "--json", *words[1:]])
        assert (
            plan_command.main() == 0
            and json.loads(capsys.readouterr().out)["plan"]["launcher"] == "spawn"
        )


def test_the_python_of_a_script(tmp_path: Path) -> None:
    """The active environment's, else one on PATH with torch, else the launcher's."""
    for folder, status in (("without", 1), ("with", 0), ("env/bin", 1), ("conda/bin", 1)):
        python = tmp_path / folder / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nexit {status}\n")
        python.chmod(0o755)
    active = {"VIRTUAL_ENV": str(tmp_path / "env"), "CONDA_PREFIX": str(tmp_path / "conda")}
    active |= {"PATH": str(tmp_path / "with")}
    for name, variable in (("env", "VIRTUAL_ENV"), ("conda", "CONDA_PREFIX")):
        found = script_program.interpreter(active | {"DUET_ACTIVE": str(tmp_path / name)})
        assert found[0] == str(tmp_path / name / "bin/python"), "as the launch scripts have chosen"
        assert variable in found[1]
    assert script_program.interpreter(active)[0] == str(tmp_path / "with/python")
    assert script_program.interpreter({"PATH": active["PATH"]})[0] == str(tmp_path / "with/python")
    without = {"PATH": str(tmp_path / "without")}
    assert script_program.interpreter(without)[0] == sys.executable
    chosen = {"PATH": active["PATH"], "TORCH_LOCAL_PATH": str(tmp_path)}
    assert script_program.interpreter(chosen)[0] == sys.executable


def test_a_console_script_by_its_path_runs_with_the_python_beside_it(tmp_path: Path) -> None:
    """Its environment need not be active. A project's script may name any Python."""
    own = tmp_path / "env/bin/python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    for name in ("env/bin/tool", "main.py"):
        (tmp_path / name).write_text(f"#!{own}\n")
    found = {}
    for name in ("env/bin/tool", "main.py"):
        path = str(tmp_path / name)
        found[name] = script_program.find(path, [], {}, [], module=False, no_python=False)
    assert found["env/bin/tool"].python == str(own) and found["env/bin/tool"].installed
    assert found["main.py"].python == sys.executable and not found["main.py"].installed


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("no_such_program", "plan.script.no_program"),
        ("no_such.py", "plan.script.missing"),
        ("folder/no_such", "plan.script.missing"),
        ("/dev/null", "plan.script.not_a_file"),
    ],
)
def test_other_paths_are_named_for_what_they_are(tmp_path: Path, path: str, what: str) -> None:
    problems = list[Problem]()
    environ = {"PATH": str(tmp_path)}
    script_program.find(path, [], environ, problems, module=False, no_python=False)
    assert [problem.what for problem in problems] == [msg(what, path=path)]


def test_a_program_of_the_environment_that_is_not_on_path_is_suggested(tmp_path: Path) -> None:
    problems = list[Problem]()
    environ = {"PATH": str(tmp_path)}
    script_program.find("torchrun", [], environ, problems, module=False, no_python=False)
    (fix,) = problems[0].fixes
    assert Path(shlex.split(fix.removeprefix("--script="))[0]).is_file()
