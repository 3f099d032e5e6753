"""`./duet sweep`: expansion, names, problems of all runs at once, resume; without training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit import trained_runs
from tests.unit.conftest import ROOT
from tests.unit.monitor_runs import Made
from tests.unit.own_task import LINE
from training.cli.sweep import __main__ as command
from training.cli.sweep import board, fixes, grid, options, prepare, session
from training.cli.sweep.prepare import Sweep
from training.core import rundir, sweep_dir
from training.core.contracts.run_files import SweepRecord, SweepRun
from training.core.errors import Exit, Problem, UserError
from training.core.project import LAUNCH_SCRIPT
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.monitor.report import sweep_page
from training.monitor.runs import facts
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import SweepRow
from training.plan import training_plan

TINY = [
    *("--depth=1", "--max_seq_len=32", "--device_batch_size=4", "--total_batch_size=128"),
    *("--num_iterations=4", "--device=cpu", "--tensorboard=false"),
]


def expanded(*words: str, listed: str = "") -> list[grid.Combination]:
    problems: list[Problem] = []
    found = grid.combinations(list(words), listed, {}, problems)
    assert not problems
    return found


def prepared(folder: Path, *words: str) -> Sweep:
    argv = [*TINY[1:], f"--out_dir={folder}", *words]
    return prepare.prepare(options.parse(argv), argv, {})


def codes(folder: Path, *words: str) -> list[str]:
    """The codes of all problems."""
    with pytest.raises(UserError) as raised:
        prepared(folder, *words)
    return [problem.code for problem in raised.value.problems]


def test_a_grid_has_every_combination_in_typed_order() -> None:
    found = expanded("a.py", "--depth=2,4", "--matrix_lr", "0.01,0.02", "--seed=1")
    assert [run.args for run in found] == [
        ["a.py", "--seed=1", f"--depth={depth}", f"--matrix_lr={lr}"]
        for depth in (2, 4)
        for lr in (0.01, 0.02)
    ]
    values = grid.differing(found)
    assert values[1] == {"depth": "2", "matrix_lr": "0.02"}
    assert grid.run_names("x", values)[1] == "x_depth-2_matrix_lr-0.02"


@each(
    "word, values",
    [
        ("--depth=2,4", ["2", "4"]),
        ("--data=a.txt,b.txt", ["a.txt", "b.txt"]),
        (r"--data=a\,b.txt,c.txt", ["a,b.txt", "c.txt"]),
        ("--rejoin=true,false", ["true", "false"]),
        ("--notify=mail a,b", []),
        ("--show_ranks=0,1", []),
    ],
)
def test_a_comma_separates_values_except_where_it_belongs_to_them(
    word: str, values: list[str]
) -> None:
    found = expanded(word)
    assert [value for run in found for value in run.values] == values
    assert values or found[0].args == [word]


def test_lines_of_a_list_replace_flags_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "my runs.txt"
    file.write_text('# a comment\n--depth=4\n\n{"seed": 2, "rejoin": true}\nb.py --seed=3,4\n')
    found = expanded("a.py", "--depth=2", listed=str(file))
    assert [run.args for run in found] == [
        ["a.py", "--depth=4"],
        ["a.py", "--depth=2", "--seed=2", "--rejoin=true"],
        ["--depth=2", "b.py", "--seed=3"],
        ["--depth=2", "b.py", "--seed=4"],
    ]


@each(
    "values, names",
    [
        ([{"data": "/x/my text.txt"}, {"data": "b.txt"}], ["n_data-my_text", "n_data-b"]),
        ([{"lr": "1e-05"}, {"lr": "auto"}], ["n_lr-1e_05", "n_lr-auto"]),
        ([{"a": "x/1"}, {"a": "y/1"}], ["n_1", "n_2"]),  # would be the same
        ([{"a": "x" * 200}, {"a": "y"}], ["n_1", "n_2"]),  # too long
    ],
)
def test_names_are_valid_and_different(values: list[dict[str, str]], names: list[str]) -> None:
    assert grid.run_names("n", values) == names


@each(
    "words, expected",
    [
        (["--depth=2"], ["sweep.one_run"]),
        (["--depth=1,,2"], ["sweep.empty_value"]),
        (["--depth="], ["sweep.empty_value"]),
        (["--depth=2,2"], ["sweep.duplicate"]),
        (["--matrix_lr=0.01,1e-2"], ["sweep.duplicate"]),
        (["--depth=1,2", "--seed=3", "--seed=4"], ["flag.twice"]),
        (["--depth=1,2", "--run_name=x"], ["sweep.refused_flag"]),
        (["--depth=1,2", "--script", "x.py"], ["sweep.refused_flag"]),
        (["--depth=1,2", "--jobs=two", "--gpus_per_run=0"], ["flag.value", "flag.value"]),
        (["--depth=1,2", "--name=a b"], ["sweep.name"]),
        (["--depth=1,2", "--list=/missing"], ["sweep.list"]),
        ([f"--seed={','.join(map(str, range(101)))}"], ["sweep.many"]),
        ([f"--seed={','.join(map(str, range(1001)))}"], ["sweep.too_many"]),
        (["--depth=1,2", "--master_port=5000", "--jobz=2"], ["flag.unknown", "sweep.refused_flag"]),
    ],
)
def test_bad_input_is_reported_by_code(
    words: list[str], expected: list[str], tmp_path: Path
) -> None:
    assert codes(tmp_path, *words) == expected
    assert list(tmp_path.iterdir()) == []


def test_a_space_after_a_comma_is_corrected() -> None:
    problems: list[Problem] = []
    runs = grid.combinations(["c.py", "--depth=2,", "4,", "6", "--seed=1"], "", {}, problems)
    (problem,) = problems
    assert (problem.code, problem.fixes) == (
        "sweep.empty_value", ["./duet sweep … --depth=2,4,6"]
    )  # fmt: skip
    assert runs[0].args == ["c.py", "--seed=1", "--depth=2"]


def test_the_same_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        prepared(tmp_path, "--depth=2,2")
    assert raised.value.problems[0].what.endswith("depth=2")


def test_problems_of_all_runs_are_reported_once_with_the_runs_concerned(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        prepared(tmp_path, "--depth=1,x", "--seed=1,2", "--matrix_lr=0.1,-1", "--log_every=0")
    found = {problem.field: problem for problem in raised.value.problems}
    assert len(raised.value.problems) == 3 and found.keys() == {"depth", "matrix_lr", "log_every"}
    assert "depth=x matrix_lr=0.1 seed=1" not in found["log_every"].what  # of every run
    assert "(4 runs: " in found["depth"].what and "seed=2" in found["depth"].what


def test_a_suggestion_keeps_the_options_of_the_sweep(tmp_path: Path) -> None:
    own = ["--jobs=2", "--fail_fast", "--ascii", "--dry_run"]
    with pytest.raises(UserError) as raised:
        prepared(tmp_path, *own, "--seed=1,2", "--depth=999")
    (fix,) = raised.value.problems[0].fixes
    assert fix.startswith(f"./duet sweep {' '.join(own)} ")
    with pytest.raises(UserError) as raised:
        prepared(tmp_path, *own, "--depth=2")
    (fix,) = raised.value.problems[0].fixes
    assert fix.startswith("./launch_train.sh 1 ") and fix.endswith(" --dry_run")


def test_a_fix_of_one_run_is_a_command_of_the_sweep() -> None:
    run = expanded("--depth=2,400", "--depht=1,2", "--seed=7")[2]
    assert (run.values, run.args[-2:]) == (["400", "1"], ["--depth=400", "--depht=1"])
    fix = "./launch_train.sh 1 --seed=7 --depth=256 --warmup=1"
    own = ["--jobs=2"]
    assert fixes.translated(fix, run, own) == (
        "./duet sweep --jobs=2 --seed=7 --depth=2,256 --warmup=1,2"
    )
    assert fixes.translated("pip install x", run, own) == "pip install x"


def test_the_same_command_continues_its_sweep(tmp_path: Path) -> None:
    first = prepared(tmp_path, "--depth=1,2")
    first.folder.create(first.record)
    written = json.loads(first.folder.record.read_text())
    assert written.keys() == SweepRecord.__annotations__.keys()
    assert written["runs"][0].keys() == SweepRun.__annotations__.keys()
    again, other = prepared(tmp_path, "--depth=1,2"), prepared(tmp_path, "--depth=1,3")
    assert (again.known, again.record) == (True, first.record)
    assert (other.known, other.folder.name) == (False, f"{first.folder.name}_2")
    assert codes(tmp_path, "--depth=1,3", f"--name={first.folder.name}") == ["sweep.name_taken"]
    (tmp_path / "lrs_depth-1").mkdir()
    assert codes(tmp_path, "--depth=1,3", "--name=lrs") == ["sweep.name_taken"]
    # the folder of the sweeps is not a run
    assert [run.name for run in facts.read_all(tmp_path)] == ["lrs_depth-1"]


@each(
    "own, differs, unit",
    [
        (TINY[1:], "--depth=1,2", "tokens"),
        (["--task=line.py", "--total_batch_size=128", *TINY[4:]], "--slope=1,2", "samples"),
    ],
)
def test_the_expected_time_follows_from_runs_of_the_same_size(
    own: list[str], differs: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(LINE)
    argv = [*own, f"--out_dir={tmp_path}/runs"]
    _, plan, _ = training_plan.make(LAUNCH_SCRIPT, ["1", *argv, differs.partition(",")[0]], {})
    run = RunDir(tmp_path / "runs" / "earlier")
    run.create()
    rundir.write_json(run.plan, plan)
    record = {"status": "done", "steps": 4, "loss_end": 2.0, unit: 512, f"{unit}_per_s": 64.0}
    rundir.write_json(run.summary, record)

    def expected(*words: str) -> list[float | None]:
        whole = [*argv, *words]
        return prepare.prepare(options.parse(whole), whole, {}).expected_s

    # 4 steps of 128 tokens; nothing is known of another size or number of ranks
    assert expected(differs) == [8.0, None]
    assert expected(differs, "--max_time=90") == [8.0, 90.0]


def ended(sweep: Sweep, index: int, status: str, **more: object) -> RunDir:
    run = RunDir(sweep.folder.experiments / sweep.record["runs"][index]["name"])
    run.create()
    rundir.write_json(run.plan, {"schema_version": 1, "created": 1.0, "config": {"depth": 1}})
    rundir.write_json(run.summary, {"status": status, "steps": 4, "time": 9.0, **more})
    return run


def test_a_resumed_sweep_skips_finished_runs(tmp_path: Path) -> None:
    sweep = prepared(tmp_path, "--depth=1,2,3")
    sweep.folder.create(sweep.record)
    ended(sweep, 0, "done")
    ended(sweep, 1, "stopped")
    found = prepare.resume(
        options.SweepOptions(resume=sweep.folder.name),
        {},
        options.experiments(options.parse([f"--out_dir={tmp_path}"]), {}),
    )
    todo = session.Session(found, board.Board(found, ascii_only=True), fail_fast=False)
    todo.begin()
    assert todo.states == ["finished", "waiting", "waiting"]
    second, third = (todo.command(run) for run in found.record["runs"][1:])
    assert second[2:4] == ["1", f"--resume={found.record['runs'][1]['name']}"]
    assert f"--out_dir={tmp_path}" in second and "--depth=2" not in second
    assert third[-1] == f"--run_name={found.record['runs'][2]['name']}" and "--depth=3" in third


@each("word", ["latest", "base"])
def test_all_runs_start_from_the_weights_of_the_plan(word: str, tmp_path: Path) -> None:
    model = trained_runs.gpt(1)
    base = trained_runs.made(tmp_path / "base", model)
    words = (f"--init_from={word}", "--matrix_lr=0.01,0.02")
    sweep = prepared(tmp_path, *words)
    sweep.folder.create(sweep.record)
    first, second = sweep.record["runs"]
    trained_runs.made(tmp_path / first["name"], model, step=4)
    trained_runs.checkpoint(base, model.state_dict(), asdict(model.shape), 8)
    todo = session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=False)
    _, plan, _ = training_plan.make(LAUNCH_SCRIPT, todo.command(second)[2:], {})
    assert plan["init_from"]["title"] == "base, step 7"
    assert prepared(tmp_path, *words).known  # whatever the word means by now


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path) -> None:
    sweep = prepared(tmp_path, "--depth=1,2")
    run = RunDir(tmp_path / sweep.record["runs"][0]["name"])
    run.create()
    rundir.write_json(run.plan, {"schema_version": 1, "created": 1.0})
    started = Path(f"/proc/{os.getpid()}").stat().st_ctime
    host = os.uname().nodename
    record = {"pid": os.getpid(), "started": started, "host": host, "ranks": []}
    rundir.write_json(run.supervisor, record)
    todo = session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=False)
    with pytest.raises(UserError) as raised:
        todo.begin()
    assert raised.value.problems[0].code == "sweep.running"


def test_without_any_sweep_the_help_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        sweep_dir.find("absent", tmp_path, str)
    assert raised.value.problems[0].fixes == ["./duet sweep --help"]


@each(
    "words, code",
    [
        (["--resume=absent"], "sweep.missing"),
        (["--show=absent"], "sweep.missing"),
        (["--show=damaged"], "sweep.damaged"),
        (["--resume=absent", "--depth=1,2"], "sweep.resume_with_grid"),
        (["--resume=absent", "a.py", "--list=x"], "sweep.resume_with_grid"),
        (["--show=absent", "--jobs=2"], "sweep.resume_with_grid"),
    ],
)
def test_bad_resumes(words: list[str], code: str, tmp_path: Path) -> None:
    damaged = SweepDir(tmp_path, "damaged")
    damaged.path.mkdir(parents=True)
    damaged.record.write_text('{"schema_version": 1, "runs": [1')
    chosen = options.parse([*words, f"--out_dir={tmp_path}"])
    found = [problem.code for problem in chosen.problems]
    if not found:
        with pytest.raises(UserError) as raised:
            sweep_dir.find(chosen.resume or chosen.show, tmp_path, str)
        found = [problem.code for problem in raised.value.problems]
    assert found == [code]
    assert command.main([*words, f"--out_dir={tmp_path}"]) == Exit.CONFIG


def test_suggestions_keep_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my runs"
    sweep = prepared(folder, "--depth=1,2")
    sweep.folder.create(sweep.record)
    name = sweep.folder.name
    for words, fix in (
        ([f"--show={name}x"], f"--show={name}"),
        ([f"--resume={name}x"], f"--resume={name}"),
        ([f"--show={name}", "--depth=1,2"], f"--show={name}"),
    ):
        assert command.main([*words, f"--out_dir={folder}"]) == Exit.CONFIG
        assert f"./duet sweep {fix} '--out_dir={folder}'\n" in capsys.readouterr().err
    (in_default,) = options.parse([f"--show={name}", "--depth=1,2"]).problems
    assert in_default.fixes == [f"./duet sweep --show={name}"]


def test_evaluations_are_ranked_before_training_losses() -> None:
    rows = [
        SweepRow("none", {"depth": 1}, "waiting"),
        SweepRow("training", {"depth": 2}, "failed", loss=0.5, loss_name="loss"),
        SweepRow("good", {"depth": 3}, "finished", loss=1.0, step=4, seconds=61.0),
        SweepRow("nan", {"depth": 4}, "failed", loss=float("nan")),
        SweepRow("better", {"depth": 5}, "finished", loss=0.9),
    ]
    ranked = sweep_runs.ranked(rows)
    assert [row.name for row in ranked] == ["better", "good", "training", "none", "nan"]
    assert (best := sweep_runs.best(rows)) and best.title == "depth=5"
    assert ">NaN<" in str(sweep_page._table(ranked, []))
    shown = ["".join(text for text, _ in line) for line in sweep_runs.lines(ranked, "TIME")]
    assert shown[0].split() == ["DEPTH", "STATE", "STEP", "LOSS", "SPEED/S", "TIME"]
    assert shown[2].split() == ["3", "finished", "4", "1.0000", "-", "1:01"]
    assert len({len(line) for line in shown}) == 1


def test_losses_have_one_unit_while_a_run_trains_and_afterwards(made: Made) -> None:
    rundir.write_json(made.run.data, {"bytes_per_token": 4.0})
    made.step(1, 4 * math.log(2), at=time.time() + 60)
    one: SweepRun = {"name": made.run.name, "values": {}, "args": []}
    assert board._Watch(made.run).row(one).loss == facts.read(made.run.path).loss == 1.0


def test_the_sweep_process_does_not_import_torch() -> None:
    code = "import training.cli.sweep.__main__, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "numpy", "psutil", "vl_convert"} & set(json.loads(done.stdout))
