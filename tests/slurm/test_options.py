"""Command line of submit_job.sh: options of sbatch and of the training; what is frozen. No SLURM
needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.runs_to_clean import save
from training.cli import option_list
from training.config.flags import ACTIONS
from training.config.schema import FIELDS, Config
from training.core import rundir
from training.core.errors import UserError
from training.launcher.slurm import (
    code_snapshot,
    job,
    job_request,
    log_files,
    options,
    requested,
    submission,
)

SCRIPT = ROOT / options.SCRIPT


def test_both_parts_are_separated() -> None:
    typed = [
        "--nodes=2",
        "--time",
        "1-0",
        "config.py",
        "--depth",
        "3",
        "--mail_user=me",
        "--no-debug",
        "--exclusive",
        "--ranks-per-node",
        "4",
    ]
    line = options.split(typed)
    assert line.sbatch == ["--nodes=2", "--time=1-0", "--mail-user=me", "--exclusive"]
    assert line.training == ["config.py", "--depth", "3", "--no-debug"]
    assert (line.ranks, line.problems) == (4, [])


def test_no_option_is_both() -> None:
    ours = {n.replace("_", "-") for n in (*FIELDS, *ACTIONS)}
    assert not ours & {*options.VALUED, *options.BARE, options.RANKS, options.MORE}


def test_more_options_for_sbatch() -> None:
    line = options.split(
        ["--sbatch=--mem=1G --comment='a b'", "--sbatch", "--nodes=3 --core-spec=1"]
    )
    assert line.sbatch == ["--mem=1G", "--comment=a b", "--nodes=3", "--core-spec=1"]
    assert requested.nodes(line, SCRIPT) == 3


def test_options_of_sbatch_without_a_value_or_with_an_optional_one() -> None:
    line = options.split(["--nice", "c.py", "--exclusive", "--nice=100", "--no-kill=off"])
    assert line.sbatch == ["--nice", "--exclusive", "--nice=100", "--no-kill=off"]
    assert (line.training, line.problems) == (["c.py"], [])


def test_options_to_paste_are_accepted_again() -> None:
    typed = ["--sbatch=--wait --mem=1G --comment='a b' --wckey='c d' --nice", "--nodes=2"]
    line = options.split([*typed, "--ranks_per_node=2"])
    again = options.split(line.typed)
    assert line.typed[-2:] == ["--sbatch=--wait '--wckey=c d'", "--ranks_per_node=2"]
    assert (sorted(again.sbatch), again.ranks) == (sorted(line.sbatch), 2)
    assert not again.problems and not again.training


@each(
    ("word", "what"),
    [
        ("--sbatch=-N 2", "--sbatch contains '-N'"),
        ("--sbatch=--nodes 2", "--sbatch contains '2'"),
        ("--sbatch=--ntasks=2", "--sbatch contains --ntasks"),
        ("--sbatch=--arr=0-3", "--sbatch contains --arr"),  # sbatch accepts abbreviations
        ("--sbatch=--quiet", "--sbatch contains --quiet"),
        ("--sbatch=--comment='a", '--sbatch is "--comment=\'a": No closing quotation'),
        ("--ranks_per_node=0", "ranks_per_node is '0' (from --ranks_per_node on the command line)"),
        ("--gpus=8", "--gpus is not for submit_job.sh"),
        ("--nnodes=2", "--nnodes is not for submit_job.sh"),
        ("--array=0-3", "--array is not for submit_job.sh"),
        ("--script", "--script is not for submit_job.sh"),
        ("--module", "--module is not for submit_job.sh"),
        ("--check", "--check is not for submit_job.sh"),
        ("--json", "--json is not for submit_job.sh"),
        ("--time", "--time has no value"),
    ],
)
def test_refused_options(word: str, what: str) -> None:
    (problem,) = options.split([word]).problems
    assert problem.what == what and problem.allowed


def test_the_help_lists_no_refused_option() -> None:
    listed = "\n".join(option_list.of_script("submit_job.sh"))
    names = set(re.findall(r"^  --(\w+)", listed, re.MULTILINE))
    others = set(re.findall(r"^  --(\w+)", "\n".join(option_list.of_script("x")), re.MULTILINE))
    refused = {name.replace("-", "_") for name in options.REFUSED}
    assert others - names == others & refused
    assert {"check", "json", "watch", "nnodes"} <= others - names and "dry_run" in names


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--partitoin=a b", "'--partition=a b'"),
        ("--rank_per_node=2", "--ranks_per_node=2"),
        ("--num_nodes=2", "--nodes=2"),
    ],
)
def test_a_typing_error_gets_the_nearest_option_of_sbatch(word: str, fix: str) -> None:
    (problem,) = options.split(["--nodes=1", word, "c.py"]).problems
    assert problem.fixes == [f"./submit_job.sh --nodes=1 {fix} c.py"]


def test_a_typing_error_in_a_training_flag_is_reported_by_the_training() -> None:
    line = options.split(["--depht=3", "--max_steps", "5", "c.py"])
    assert (line.problems, line.training) == ([], ["--depht=3", "--max_steps", "5", "c.py"])


def test_the_short_options_of_sbatch() -> None:
    line = options.split(["-N", "2", "-H", "-pgpu", "c.py"])
    assert [p.fixes[0] for p in line.problems] == [
        "./submit_job.sh --nodes=2 -H -pgpu c.py",
        "./submit_job.sh -N 2 --hold -pgpu c.py",
        "./submit_job.sh -N 2 -H --partition=gpu c.py",
    ]
    assert line.training == ["c.py"]


def test_a_job_array_is_refused() -> None:
    """The last task has the number of the array, which scontrol takes for all tasks."""
    environ = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}
    args = ["--ranks_per_node=2", "configs/dual_gpu/quickstart.py", "--device=cpu"]
    assert job_request.inside(args, environ)[3] == 2
    with pytest.raises(UserError) as refused:
        job_request.inside(args, environ | {"SLURM_ARRAY_TASK_ID": "1"})
    (problem,) = refused.value.problems
    assert problem.what == "job 7 is an array (--array)"
    assert "its own --run_name" in problem.allowed and problem.code == "slurm.array"


def test_a_flag_of_the_submission_comes_before_a_variable_in_each_start_of_the_job() -> None:
    """A start is a resume without the flag, and has the variables of the submission."""
    environ = {"DUET_DEPTH": "2", "DUET_SEED": "3", "DUET_RETRIES": "1", "WANDB_MODE": "offline"}
    args = ["--depth=4", "--retries=0", "--wandb_mode=online", "--num_iterations=8"]
    given = ["--ranks_per_node=2", "--device=cpu", "configs/dual_gpu/quickstart.py", *args]
    request, line, _, _ = job_request.typed(given, environ)
    found = submission._flags(request, line, None, environ)
    assert found == ["--depth=4", "--retries=0", "--wandb_mode=online"]
    copy = Path("code/mine/line.py")
    variable = {"DUET_TASK": "mine/line.py"}
    assert submission._flags(request, line, copy, variable) == [f"--task={copy}"]
    assert submission._flags(request, line, copy, {}) == []


def test_the_weights_of_the_first_start_are_not_asked_for_again(tmp_path: Path) -> None:
    """A start with a checkpoint refuses them."""
    variable = {"DUET_INIT_FROM": "/other"}
    line = options.split(["--init_from=/weights", "c.py"])
    kind = SimpleNamespace(fields=FIELDS)
    new: Any = SimpleNamespace(resume_from=None, kind=kind, config=Config(), start=None)
    assert submission._flags(new, line, None, variable) == [], "the frozen plan has them"
    assert submission._environment(variable)["DUET_INIT_FROM"] == ""
    resumed: Any = SimpleNamespace(resume_from=True, kind=kind, start=None)
    assert submission._flags(resumed, line, None, variable) == ["--init_from=/weights"]
    flags = submission._flags(resumed, options.split(["--resume=r"]), None, variable)
    assert flags == ["--init_from=/other"]
    frozen = submission.FrozenJob(tmp_path / "code")
    folders = {"out_dir": "o", "log_dir": "l"}
    rundir.write_json(frozen.record, {"flags": flags, "ranks_per_node": 2, **folders})
    assert job.launch(frozen)[-1] == flags[0]
    save(frozen.run, 10)
    assert flags[0] not in job.launch(frozen)


def test_there_is_a_folder_for_the_log() -> None:
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", "-q", "logs/.gitkeep"], check=False
    ).returncode
    assert (ROOT / "logs/.gitkeep").is_file() and tracked == 1, (
        "a fresh clone has it, or SLURM fails without a message"
    )


def test_the_folder_of_a_chosen_log_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGNAME", "me")
    line = options.split(["--output=a/%u/10%%/%x_%j.log", "--sbatch=--error=b/%j.err"])
    assert log_files.problems(line) == []
    log_files.make_folders(line)
    assert (tmp_path / "a/me/10%").is_dir() and (tmp_path / "b").is_dir()
    line = options.split(["--output=d/out.log", "--sbatch=--error=/dev/null/x --chdir=c"])
    log_files.make_folders(line)  # on this machine, the other one cannot be made
    assert (tmp_path / "c/d").is_dir()


@pytest.mark.parametrize(
    ("version", "refused"),
    [("slurm-wlm 22.05.8", True), ("slurm 23.02.0", False), ("slurm 24.11.1", False), ("", False)],
)
def test_a_folder_that_is_known_only_in_the_job_is_refused_where_slurm_does_not_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo {version}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    line = options.split(["--output=logs/%x/%j/out.log", "--sbatch=--error=%j/err"])
    found = log_files.problems(line)
    assert {problem.code for problem in found} == ({"slurm.log_folder"} if refused else set())
    assert [problem.fixes for problem in found] == (
        [["--output=logs/%x_%j_out.log"], ["--sbatch=--error=%j_err"]] if refused else []
    )
    log_files.make_folders(line)
    assert not (tmp_path / "logs").exists()


def test_the_name_of_the_user_is_read_only_for_a_log_that_contains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user ID may have no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log_files.getpass, "getuser", lambda: {}["a name"])
    log_files.make_folders(options.split(["--output=%u/out.log", "--sbatch=--error=b/err"]))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("word", ["--signal=B:USR1@600", "--sbatch=--signal=b:USR1@600"])
def test_a_signal_for_the_batch_script_alone_is_refused(word: str) -> None:
    line = options.split([word])
    (problem,) = line.problems
    assert (problem.code, problem.fixes) == ("slurm.batch_signal", ["--signal=USR1@600"])
    assert not line.sbatch
    assert options.split(["--signal=R:USR1@600"]).sbatch == ["--signal=R:USR1@600"]
    assert options.split(["--signal=RB:10"]).problems[0].fixes == ["--signal=R:10"]


@each(
    ("text", "fixes"),
    [
        ("USR1", []),
        ("SIGUSR1@90", []),
        ("R:usr1@90", []),
        ("10@90", []),
        ("TERM@90", []),
        ("SIGTERM", []),
        ("15@90", []),
        ("USR2@90", ["--signal=USR1@90"]),
        ("R:SIGHUP@600", ["--signal=R:USR1@600"]),
        ("12@90", ["--signal=USR1@90"]),
        ("INT", ["--signal=USR1@120"]),
        ("KILL@", ["--signal=USR1@120"]),
        ("", ["--signal=USR1@120"]),
    ],
)
def test_a_signal_before_the_time_limit_is_one_that_saves(text: str, fixes: list[str]) -> None:
    for word in (f"--signal={text}", f"--sbatch=--signal={text}"):
        line = options.split([word])
        assert [(p.code, p.fixes) for p in line.problems] == (
            [("slurm.signal", fixes)] if fixes else []
        )
        assert line.sbatch == ([] if fixes else [f"--signal={text}"])


def test_code_without_version_control(tmp_path: Path) -> None:
    root, target = tmp_path / "project", tmp_path / "copy"
    for name in (
        "train.py",
        "lib/init.sh",
        "training/data/corpus.py",
        ".venv/bin/python",
        "experiments/a/plan.json",
        "lib/__pycache__/x.pyc",
        "runs/b/plan.json",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "data").symlink_to(tmp_path)
    code = code_snapshot.take(root, target, without=[root / "runs"])
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == [
        "lib/init.sh",
        "train.py",
        "training/data/corpus.py",
    ]
    assert (code.revision, code.changed, code.sentence()) == (
        None,
        None,
        "3 files, not under version control",
    )


def test_the_command_line_is_checked_before_anything_is_installed() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['', 'check', "
        f"'--depht=3']; "
        f"import runpy; "
    )
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            code + "runpy.run_module('training.cli.submit', run_name='__main__')",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "--depht is not a known flag" in done.stderr, (
        "the standard library suffices"
    )


def test_a_conda_environment_that_is_not_used_is_not_the_job_s() -> None:
    """It may come first on PATH, and the job would take it (python::active): also one that is
    active on the node alone, with --export=NONE."""
    used = {"CONDA_PREFIX": sys.prefix}
    assert submission._environment(used)["CONDA_PREFIX"] == sys.prefix
    assert submission._environment({})["CONDA_PREFIX"] == ""
    found = submission._environment({"CONDA_PREFIX": "/opt/conda"})
    assert (found["VIRTUAL_ENV"], found["CONDA_PREFIX"]) == (sys.prefix, "")
    assert found["PYTHON"] == sys.executable and "DUET_PYTHON" not in found
