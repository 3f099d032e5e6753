"""Nodes and ranks that the command line, variables and header of submit_job.sh request. No SLURM
needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from training.core.errors import UserError
from training.launcher.slurm import job_request, log_files, options, requested
from training.launcher.slurm.controller import Answer

SCRIPT, CONFIG = ROOT / options.SCRIPT, "configs/dual_gpu/quickstart.py"


@each(
    ("typed", "ranks"),
    [
        ([], 2),
        (["--gres=gpu:4"], 4),
        (["--gres=gpu:a100:4"], 4),
        (["--gres=gpu"], 1),
        (["--gres=gpu:a100:4(S:0-1)"], 4),
        (["--gres=lustre:1,gpu:3"], 3),
        (["--gres=shard:8"], 0),
        (["--gres=none"], 0),
        (["--gpus-per-node=8"], 8),
        (["--gpus-per-node=a100:8"], 8),
        (["--gres=gpu:4", "--ranks_per_node=1"], 1),
    ],
)
def test_ranks_on_a_node(typed: list[str], ranks: int) -> None:
    assert requested.ranks(options.split(typed), SCRIPT, {}) == ranks


@each(
    ("typed", "variables", "ranks"),
    [
        ([], {"SBATCH_GRES": "gpu:4"}, 4),
        ([], {"SBATCH_GPUS_PER_NODE": "a100:8"}, 8),
        (["--gres=gpu:1"], {"SBATCH_GRES": "gpu:4"}, 1),
        (["--gpus-per-node=1"], {"SBATCH_GPUS_PER_NODE": "8"}, 1),
        (["--ranks_per_node=3"], {"SBATCH_GRES": "gpu:4"}, 3),
    ],
)
def test_variables_of_sbatch_override_the_header(
    typed: list[str], variables: dict[str, str], ranks: int
) -> None:
    assert requested.ranks(options.split(typed), SCRIPT, variables) == ranks


@pytest.mark.parametrize("args", [[], ["--gres=gpu:2"]])
def test_a_job_without_a_word_about_its_training_is_refused(args: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        job_request.typed(args, {})
    (problem,) = caught.value.problems
    assert problem.code == "config.not_given"
    assert problem.fixes == [" ".join(["./submit_job.sh", *args, CONFIG])]


def test_a_job_on_cpus_has_the_gpus_of_a_variable_only() -> None:
    args = ["--ranks_per_node=2", CONFIG, "--device=cpu"]
    assert options.NO_GRES in job_request.typed(args, {})[1].sbatch
    assert not job_request.typed(args, {"SBATCH_GRES": "gpu:1"})[1].sbatch


def test_gpus_by_node_replace_those_of_the_header() -> None:
    """SLURM would allocate both."""
    line = job_request.typed(["--gpus-per-node=1", CONFIG], {})[1]
    assert line.sbatch == ["--gpus-per-node=1", options.NO_GRES]


@each(
    ("args", "fixes"),
    [
        (["--ranks_per_node=4"], ["--gres=gpu:4"]),
        (["--ranks_per_node=4", "--gres=gpu:a100:2"], ["--gres=gpu:4"]),
        (["--ranks_per_node=4", "--gpus-per-node=2"], ["--gpus-per-node=4"]),
        (["--ranks_per_node=1"], []),
        (["--ranks_per_node=4", "--gres=none"], []),
        (["--ranks_per_node=4", "--device=cpu"], []),
    ],
)
def test_more_ranks_than_gpus_are_refused(args: list[str], fixes: list[str]) -> None:
    found = []
    try:
        job_request.typed([*args, CONFIG, "--total_batch_size=8192"], {})
    except UserError as refused:
        (problem,) = refused.problems
        assert problem.code == "slurm.few_gpus"
        found = problem.fixes
    assert found[:1] == fixes


@each(
    ("shown", "variables", "gpus"),
    [
        ("TresPerNode=gres:gpu:2", {}, 2),  # until 23.02
        ("TresPerNode=gres/gpu:a100:4,gres/shard:1", {}, 4),  # later
        ("TresPerNode=gres/gpu=2", {}, 2),
        ("TresPerNode=gres:gpu:2", {"SLURM_GPUS_PER_NODE": "a100:1"}, 1),
        ("TresPerNode=gres:gpu:2", {"SLURM_GPUS_PER_NODE": "1"}, 1),  # srun takes the variable
        ("TresPerNode=gres:shard:1", {}, 0),
        ("TresPerJob=gres:gpu:2", {}, 8),
        ("", {}, 8),
    ],
)
def test_gpus_of_a_step_in_an_exclusive_job(
    shown: str,
    variables: dict[str, str],
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requested.controller, "ask", lambda *_: Answer(0, shown_job(shown), ""))
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8", **variables}
    assert requested.ranks_in_job(options.split([]), environ) == gpus
    again = requested.of_this_job(1, gpus or 3, environ)
    args = [*again, CONFIG, "--total_batch_size=49152"]
    assert job_request.typed(args, {})[3] == (gpus or 3), "as many ranks when it is pasted"


def shown_job(more: str) -> str:
    facts = f"TimeLimit=2-00:00:00 TimeMin=N/A {more} Features=(h100|a100)&ib Command=x"
    return f"JobId=7 JobState=RUNNING {facts}"


@each(
    ("shown", "variables", "nodes", "ranks", "again"),
    [
        ("", {"SLURM_GPUS_PER_NODE": "0"}, 1, 4, ["--gres=none", "--ranks_per_node=4"]),
        ("", {"SLURM_GPUS_PER_NODE": "a100:4"}, 2, 4, ["--gpus-per-node=a100:4"]),
        ("TresPerNode=gres/gpu:a100:4", {}, 2, 2, ["--gres=gpu:a100:4", "--ranks_per_node=2"]),
        ("TresPerNode=gres:shard:1", {}, 1, 3, ["--gres=shard:1", "--ranks_per_node=3"]),
    ],
)
def test_the_job_can_be_requested_again(
    shown: str,
    variables: dict[str, str],
    nodes: int,
    ranks: int,
    again: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requested.controller, "ask", lambda *_: Answer(0, shown_job(shown), ""))
    where = {"SLURM_JOB_PARTITION": "a100", "SLURM_JOB_ACCOUNT": "physics"}
    environ = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "16", **where, **variables}
    environ["SLURM_MEM_PER_NODE"] = "204800"
    own = ["--partition=a100", "--account=physics", "--cpus-per-task=16", "--mem=204800"]
    own += ["--constraint=(h100|a100)&ib", "--time=2-00:00:00"]
    expected = [f"--nodes={nodes}", again[0], *own, *again[1:]]
    assert requested.of_this_job(nodes, ranks, environ) == expected
    args = [*expected, CONFIG, "--total_batch_size=49152"]
    assert job_request.typed(args, {})[2:] == (nodes, ranks), "when it is pasted"


def test_a_variable_that_contradicts_the_one_task_on_a_node_is_refused() -> None:
    args = ["--ranks_per_node=2", CONFIG, "--device=cpu"]
    with pytest.raises(UserError) as refused:
        job_request.typed(args, {"SBATCH_ARRAY_INX": "0-3"})
    (problem,) = refused.value.problems
    assert problem.what == "SBATCH_ARRAY_INX is '0-3' in the environment"
    assert problem.fixes == ["unset SBATCH_ARRAY_INX"]


@pytest.mark.parametrize("text", ["two", "0", "1-4", ""])
def test_nodes_is_one_number(text: str) -> None:
    line = options.split([f"--nodes={text}"])
    assert requested.nodes(line, SCRIPT) == (0 if text else 1)
    assert [p.what for p in line.problems] == (
        [f"nodes is {text!r} (from --nodes)"] if text else []
    )


def test_the_header_has_every_option_once() -> None:
    text = SCRIPT.read_text()
    header = requested.header(SCRIPT)
    assert header == {
        "job-name": "duet",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gres": "gpu:2",
        "time": "24:00:00",
        "output": "logs/%x_%j.log",
        "open-mode": "append",
        "signal": "USR1@120",
    }
    assert "\n#SBATCH --requeue\n" in text
    # sbatch stops reading at the first command.
    commands = re.search(r"(?m)^[^#\n]", text)
    assert commands and text.rindex("#SBATCH") < commands.start()


@each(
    ("lines", "nodes", "ranks"),
    [
        ("#SBATCH --gpus-per-node=4", 1, 4),
        ("#SBATCH --gpus-per-node=a100:8\n#SBATCH --gres=gpu:2", 1, 8),
        ("#SBATCH --nodes 2\n#SBATCH --gres gpu:3", 2, 3),
        ("#SBATCH -N 2\n#SBATCH --exclusive\n#SBATCH --gres=gpu:1", 2, 1),
        ("#SBATCH -N2 --hold --gres=gpu:1  # of one line", 2, 1),
        ("# --nodes=3\n\n#SBATCH --time=1\ntrue\n#SBATCH --nodes=4", 1, 0),
        ("", 1, 0),
    ],
)
def test_the_header_may_be_edited(lines: str, nodes: int, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "submit_job.sh"
    script.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    line = options.split([])
    assert requested.nodes(line, script) == nodes and not line.problems
    assert requested.ranks(line, script, {}) == ranks
    assert requested.ranks(options.split(["--gres=gpu:5"]), script, {}) == 5
    assert requested.ranks(line, script, {"SBATCH_GPUS_PER_NODE": "6"}) == 6


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Add a line to the header, as a user does."""

    def edit(line: str) -> None:
        (tmp_path / SCRIPT.name).write_text(f"{line}\n{SCRIPT.read_text()}")
        monkeypatch.setattr(job_request, "ROOT", tmp_path)
        monkeypatch.chdir(tmp_path)

    return edit


@each(
    ("line", "variables", "what", "fixes"),
    [
        ("#SBATCH --array=0-1", {}, "submit_job.sh has #SBATCH --array=0-1", []),
        ("#SBATCH -a 0-1", {}, "submit_job.sh has #SBATCH --array=0-1", []),
        ("#SBATCH --comment=bob's", {}, "#SBATCH --comment=bob's: No closing quotation", []),
        ("", {"SBATCH_SIGNAL": "USR2@60"}, "SBATCH_SIGNAL=USR2@60: no job", ["--signal=USR1@60"]),
        ("", {"SBATCH_SIGNAL": "B:10"}, "SBATCH_SIGNAL=B:10 signals only", ["--signal=10"]),
    ],
)
def test_what_the_command_line_must_not_contain_is_refused_elsewhere_too(
    line: str,
    variables: dict[str, str],
    what: str,
    fixes: list[str],
    edited: Callable[[str], None],
) -> None:
    edited(line)
    args = ["--ranks_per_node=2", CONFIG, "--device=cpu"]
    with pytest.raises(UserError) as refused:
        job_request.typed(args, variables)
    (problem,) = refused.value.problems
    assert problem.what.startswith(what) and problem.fixes == fixes
    if "SBATCH_SIGNAL" in variables:
        job_request.typed([*fixes, *args], variables)


def test_the_signal_in_the_header_is_one_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.read_text().replace("--signal=USR1@120", "--signal=INT@60")
    (tmp_path / SCRIPT.name).write_text(text)
    monkeypatch.setattr(job_request, "ROOT", tmp_path)
    with pytest.raises(UserError) as refused:
        job_request.typed([CONFIG], {})
    (problem,) = refused.value.problems
    assert problem.what.startswith("#SBATCH --signal=INT@60: no job")
    assert problem.fixes == ["--signal=USR1@60"]


def test_log_and_name_of_the_header_and_of_variables_are_used(
    edited: Callable[[str], None], tmp_path: Path
) -> None:
    edited("#SBATCH --error=errs/%j.err")
    text = (tmp_path / SCRIPT.name).read_text().replace("logs/%x_%j.log", "there/%j.log")
    (tmp_path / SCRIPT.name).write_text(text)
    line = job_request.typed([CONFIG], {"SBATCH_JOB_NAME": "mine"})[1]
    log_files.make_folders(line)
    assert (tmp_path / "errs").is_dir() and (tmp_path / "there").is_dir()
    assert (line.used("job-name"), line.used("output")) == ("mine", "there/%j.log")
    unchosen = job_request.typed([CONFIG], {})[1]
    assert unchosen.used("job-name") is None, "a job has the name of its run"
    assert options.split(["--output=x"]).used("output") == "x"


@pytest.fixture
def header_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user has edited the header."""
    text = SCRIPT.read_text().replace("--gres=gpu:2", "--gpus-per-node=2")
    (tmp_path / SCRIPT.name).write_text(text)
    monkeypatch.setattr(job_request, "ROOT", tmp_path)


@each(
    ("args", "variables", "added"),
    [
        ([], {}, [options.NO_GRES]),
        (["--ranks_per_node=2", "--device=cpu"], {}, [options.NO_GRES, options.NO_GPUS_PER_NODE]),
        (["--gpus-per-node=2"], {}, [options.NO_GRES]),
        (["--gres=none", "--ranks_per_node=2"], {}, [options.NO_GPUS_PER_NODE]),
        ([], {"SBATCH_GPUS_PER_NODE": "2"}, [options.NO_GRES]),
        (["--gpus-per-node=2"], {"SBATCH_GRES": "gpu:2"}, [options.NO_GRES]),
        (["--gpus-per-node=2"], {"SBATCH_GRES": "shard:2"}, []),
    ],
)
def test_gpus_by_node_in_the_header(
    args: list[str],
    variables: dict[str, str],
    added: list[str],
    header_by_node: None,
) -> None:
    found = job_request.typed([*args, CONFIG], variables)
    assert found[1].sbatch == [word for word in args if word.startswith("--g")] + added
    assert found[3] == 2


def test_gres_beside_gpus_by_node_in_the_header_is_refused(header_by_node: None) -> None:
    """No step of the job could start."""
    with pytest.raises(UserError) as refused:
        job_request.typed(["--gres=gpu:a100:1", CONFIG], {})
    (problem,) = refused.value.problems
    assert (problem.code, problem.fixes) == ("slurm.gpus_twice", ["--gpus-per-node=a100:1"])


@pytest.mark.parametrize("gres", [[], ["--gres=gpu:2"]])
def test_more_gpus_are_requested_as_in_the_header(gres: list[str], header_by_node: None) -> None:
    args = [CONFIG, "--total_batch_size=8192", "--ranks_per_node=4"]
    with pytest.raises(UserError) as refused:
        job_request.typed([*gres, *args], {})
    (problem,) = refused.value.problems
    assert (problem.code, problem.fixes[0]) == ("slurm.few_gpus", "--gpus-per-node=4")
    for fix in problem.fixes:
        assert job_request.typed([fix.partition(" ")[0], *args], {})[3] == 4
