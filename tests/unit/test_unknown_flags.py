"""Unknown arguments of all commands except training: user scripts, monitor, report, inspect,
diagnose, scaling."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, ROOT, SIMPLE, only
from tests.unit.monitor_runs import Made
from training.cli import diagnose
from training.cli.scaling import options as scaling
from training.core import project
from training.core.errors import Problem, UserError
from training.monitor import attach
from training.monitor import options as monitor
from training.monitor.health import options as inspect
from training.monitor.report import options as report
from training.plan import script_request


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "my train.py"
    path.write_text("print(1)\n")
    return str(path)


def refused(*args: str, program: str = LAUNCH) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        script_request.read(program, list(args), {})
    return caught.value.problems


def accepted(fix: str) -> script_request.ScriptLaunchRequest:
    """The request of a pasted command."""
    words = shlex.split(fix)
    assert words[0] == f"./{LAUNCH}"
    return script_request.read(LAUNCH, words[1:], {})


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (["--epochs=3"], ["--epochs=3"]),
        (["--epochs", "3"], ["--epochs", "3"]),
        (["--depth=3"], ["--depth=3"]),
        (["train", "--lr", "1e-3", "--fp16"], ["train", "--lr", "1e-3", "--fp16"]),
        (["--seed", "1", "--batch_size=4"], ["--seed", "1", "--batch_size=4"]),
    ],
)
def test_arguments_of_a_script_belong_after_the_dashes(
    own: list[str], theirs: list[str], train: str
) -> None:
    for problem in refused("2", "--script", train, *own, "--", "--more=1"):
        found = accepted(problem.fixes[-1])
        assert (found.runs.args, found.runs.path, found.ranks) == ([*theirs, "--more=1"], train, 2)


def test_one_flag_of_a_script_is_one_problem(train: str) -> None:
    problem = only(refused("2", "--script", train, "--epochs=3"))
    assert problem.fixes == [f"./{LAUNCH} 2 --script {shlex.quote(train)} -- --epochs=3"]


def test_torchruns_own_flags(train: str) -> None:
    fix = only(refused("--nproc_per_node=3", "--script", train)).fixes[0]
    assert fix == f"./{LAUNCH} 3 --script {shlex.quote(train)}"
    found = accepted(
        only(refused("2", "--rdzv_endpoint=127.0.0.1:29511", "--script", train)).fixes[0]
    )
    assert (found.config.master_addr, found.config.master_port) == ("127.0.0.1", 29511)
    assert accepted(only(refused("2", "--standalone", "--script", train)).fixes[0]).runs.args == []


def test_a_misspelt_flag_of_the_launcher(train: str) -> None:
    launcher, own = only(refused("2", "--script", train, "--master_prot=29500")).fixes
    assert accepted(launcher).config.master_port == 29500
    assert accepted(own).runs.args == ["--master_prot=29500"]


def test_the_number_of_processes_of_a_script(train: str) -> None:
    for args, program in (
        (["--script", train], LAUNCH),
        (["two", "--script", train], LAUNCH),
        (["--script", train], SIMPLE),
    ):
        assert accepted(only(refused(*args, program=program)).fixes[0]).ranks == 2


def test_ranks_to_show(train: str) -> None:
    problem = only(refused("2", "--script", train, "--show_ranks=first"))
    assert accepted(problem.fixes[0]).config.show_ranks == "all"
    problem = only(refused("2", "--script", train, "--show_ranks=0,2"))
    assert problem.code == "script.show_ranks"
    assert accepted(problem.fixes[0]).config.show_ranks == "all"
    last = ["2", "--nnodes=2", "--master_addr=h", "--script", train, "--show_ranks=1"]
    assert script_request.read(LAUNCH, last, {}).config.show_ranks == "1"


def test_an_empty_value_is_refused(train: str) -> None:
    for words in (["--hosts="], ["--hostfile", ""], ["--nnodes=2", "--master_addr="]):
        codes = {problem.code for problem in refused("2", *words, "--script", train)}
        assert "flag.no_value" in codes, words


def problem_of(parse: object, *argv: str) -> Problem:
    with pytest.raises(UserError) as caught:
        parse(list(argv))  # type: ignore[operator]
    return caught.value.problems[0]


def test_a_run_or_log_without_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path / "experiments" / "one run")
    monkeypatch.setattr(project, "WORK", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text("step 1\n")
    for word, fix in (
        ("one run", "./monitor_training.sh --run='one run'"),
        (str(made.run.path), f"./monitor_training.sh --run={shlex.quote(str(made.run.path))}"),
        ("train.log", "./monitor_training.sh --log=train.log"),
        ("one rnu", "./monitor_training.sh --run='one run'"),
    ):
        problem = problem_of(monitor.parse, word)
        assert problem.fixes[0] == fix
        monitor.find(monitor.parse(shlex.split(fix)[1:]), tmp_path)


@each(
    ("parse", "argv", "fix"),
    [
        (monitor.parse, "--lgo=a.log", "./monitor_training.sh --log=a.log"),
        (monitor.parse, "--interva 2", "./monitor_training.sh --interval=2"),
        (monitor.parse, "--watch", "./monitor_training.sh --help"),
        (report.parse, "--output=x.html RUN", "./duet report --help"),
        (inspect.parse, "--jsn", "./duet inspect --json"),
        (inspect.parse, "--wach=3", "./duet inspect --watch=3"),
        (inspect.parse, "--verbose", "./duet inspect --help"),
        (diagnose.options, "a.log --jsn", "./duet diagnose a.log --json"),
        (diagnose.options, "a.log --verbose", "./duet diagnose --help"),
        (attach._parse, "--pdi=3", "./duet attach --pid=3"),
    ],
)
def test_the_nearest_flag_or_help_is_suggested(parse: object, argv: str, fix: str) -> None:
    assert problem_of(parse, *argv.split(" ")).fixes[0] == fix


def test_flags_of_the_scaling_check() -> None:
    for typed, fix in (
        ("--max_steps=30", "--steps=30"),
        ("--gpus=2", "--ranks=2"),
        ("--rnaks=1,2", "--ranks=1,2"),
    ):
        assert only(scaling.parse([typed]).problems).fixes == [f"./duet scaling {fix}"]
    assert scaling.parse(["--batch_size=4"]).rest == ["--batch_size=4"], "checked by the launcher"


def test_a_large_config_without_gpus_is_not_sent_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from training.host import gpus
    from training.plan import training_plan

    monkeypatch.setattr(
        gpus, "inventory", lambda environ, **_: gpus.GpuInventory((), "0 on this machine")
    )
    monkeypatch.chdir(ROOT)
    environ = {"PATH": os.environ["PATH"]}

    def fixes(config: str, *flags: str) -> list[str]:
        checks = training_plan.make(
            SIMPLE, [f"configs/dual_gpu/{config}.py", "--dry_run", *flags], environ
        )[2]
        return next(c.fixes for c in checks if c.name == "GPUs")

    assert [fix.partition("   #")[0] for fix in fixes("balanced")] == [
        "./train_dual_gpu.sh configs/dual_gpu/quickstart.py"
    ]
    assert "--device=cpu" in fixes("quickstart", "--device=cuda")[0], "a minute"
