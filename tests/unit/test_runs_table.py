"""`./duet runs`: facts, filters, order, text; whatever is in the folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT
from tests.unit.monitor_runs import Made
from training.cli import runs
from training.cli.cleaning import options as clean_options
from training.core import rundir, units
from training.core.cells import cells
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.monitor.runs import facts, table, terms


def ended(made: Made, steps: int = 100, **config: object) -> Made:
    """A run with a summary, evaluations and this configuration."""
    made.plan["config"] |= config
    made.plan["task"] = {"name": "gpt", "unit": "tokens", "file": None, "options": {}}
    rundir.write_json(made.run.plan, made.plan)
    summary = {"status": "done", "time": made.at + 60, "steps": steps, "loss_end": 2.0}
    rundir.write_json(made.run.summary, {**summary, "tokens_per_s": 38000.0, "tokens": 7})
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Finished, failed and running runs, and folders without a run."""
    place = tmp_path / "some runs"
    old = ended(Made(place / "old", age_s=5000), depth=12, matrix_lr=0.02)
    for step, bpb in ((50, 1.5), (100, 1.2), (150, 1.4)):
        old.run.event("eval", step=step, val_loss=bpb, val_bpb=bpb)
    ended(Made(place / "new", age_s=500), depth=16, matrix_lr=0.02)
    failed = Made(place / "broken", age_s=900).steps(7)
    rundir.write_json(failed.run.failure, {"cause": "oom", "summary": "x", "time": failed.at + 9})
    Made(place / "alive", age_s=90).steps(5).supervisor(os.getpid())
    (place / "nothing").mkdir()
    (place / "pictures").mkdir()
    (place / "pictures" / "cat.png").write_bytes(b"x")
    (place / "damaged").mkdir()
    (place / "damaged" / "plan.json").write_text('{"created": ')
    (place / "later").mkdir()
    rundir.write_json(place / "later" / "plan.json", {"schema_version": 99, "created": "soon"})
    (place / "odd").mkdir()
    (place / "odd" / "plan.json").write_text('{"created": null, "config": [1], "ranks": "two"}')
    (place / "odd" / "plan.before.json").write_text('{"created": {}}')
    (place / "odd" / "events.jsonl").write_bytes(b'{"event": "eval", "step": 1}\n{"event": "eval"')
    (place / "comparison.html").write_text("")
    (place / ".hidden").mkdir()
    return place


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Names of the listed runs."""
    assert runs.main([f"--dir={folder}", "--json", *argv]) == Exit.DONE
    return [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]]


def test_states_of_all_kinds_of_folders(folder: Path) -> None:
    found = {run.name: run for run in facts.read_all(folder)}
    states = {name: run.state for name, run in found.items()}
    # what a plan without readable contents may be is not the point here: only that it is listed
    assert {states.pop("later"), states.pop("odd")} <= set(facts.STATES)
    assert states == {
        "old": "finished",
        "new": "finished",
        "broken": "failed",
        "alive": "running",
        "nothing": "empty",
        "pictures": "foreign",
        "damaged": "damaged",
    }
    old = found["old"]
    assert (old.loss, old.loss_name, old.best_step, old.step) == (1.2, "val_bpb", 100, 100)
    assert (old.speed, old.unit, old.task) == (38000.0, "tokens", "gpt")
    assert old.seconds == pytest.approx(60, abs=1)
    assert found["new"].loss_name == "loss"
    assert found["broken"].step == 7
    assert old.bytes >= old.run.plan.stat().st_size


def test_a_resume_from_an_older_checkpoint_discards_later_evaluations(tmp_path: Path) -> None:
    run = ended(Made(tmp_path / "run")).run
    run.event("eval", step=50, val_bpb=1.5)
    run.event("eval", step=100, val_bpb=0.1)
    run.event("resume", step=50, path="")
    run.event("eval", step=60, val_bpb=1.3)
    found = facts.read(run.path)
    assert (found.loss, found.best_step) == (1.3, 60)


def test_filters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, names in (
        (["--filter=state=finished"], ["new", "old"]),
        (["--state=running,failed"], ["alive", "broken"]),
        (["--state=finished", "--filter=depth=12"], ["old"]),
        (["--filter=depth>12,state!=failed"], ["new"]),
        (["--filter=loss<1.3"], ["old"]),
        (["--filter=age>1h", "o*"], ["old"]),
        (["new", "old"], ["new", "old"]),
        (["state=f*ed", "--filter=age<20m"], ["new", "broken"]),
        (["--filter=matrix_lr=0.020", "--sort=depth"], ["old", "new"]),
        (["--filter=state=finished", "--sort=-loss"], ["new", "old"]),
        (["--filter=depth<0"], []),
    ):
        assert listed(folder, capsys, *argv) == names, argv


def test_numbers_that_are_none_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = "9" * 400
    for name, plan in (
        ("huge", f'{{"created": {huge}, "config": {{"depth": {huge}}}}}'),
        ("nan", '{"created": -Infinity, "config": {"depth": NaN}, "ranks": [1]}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(plan)
    (tmp_path / "huge" / "plan.before.json").write_text(f'{{"created": {huge}}}')
    assert listed(tmp_path, capsys, "--sort=depth") == ["huge", "nan"]
    assert listed(tmp_path, capsys, "--filter=depth>3") == ["huge"]
    assert runs.main([f"--dir={tmp_path}", "--json"]) == Exit.DONE
    assert "NaN" not in capsys.readouterr().out
    assert runs.main([f"--dir={tmp_path}"]) == Exit.DONE


def test_unknown_values_are_sorted_last(folder: Path) -> None:
    found = terms.sort(facts.read_all(folder), "-loss")
    assert [run.name for run in found][-1] not in ("old", "new")
    assert found[0].loss is not None


def test_a_loss_that_is_not_a_number_is_sorted_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Made(folder / "diverged", age_s=10).step(5, math.nan)
    for column in ("loss", "-loss"):
        names = listed(folder, capsys, "--filter=loss!=0", f"--sort={column}")
        assert len(names) == 5 and names[-1] == "diverged", column


def test_bad_input_is_answered_at_once(tmp_path: Path) -> None:
    argv = [
        "--filter=los<3,state=failedd,loss<abc,name>x",
        "--sort=dpth",
        "--dir=nowhere",
        "--state=failedd",
    ]
    with pytest.raises(UserError) as error:
        runs.options(argv, tmp_path)
    codes = [problem.code for problem in error.value.problems]
    assert codes == ["flag.value", "flag.value", *["runs.filter"] * 4, "runs.no_folder"]
    right = ["--filter='loss<3,state=failed,loss<abc,name=x'", "--sort=depth", "--state=failed"]
    for problem in error.value.problems[:4]:
        assert sorted(problem.fixes[0].split()[2:]) == ["--dir=nowhere", *right]
    assert error.value.problems[-1].fixes == [" ".join(["./duet runs", *right])]
    for compare in ("<", "<=", ">", ">="):
        with pytest.raises(UserError) as error:
            runs.options([f"--filter=matrix_lr{compare}abc"], tmp_path)
        (problem,) = error.value.problems
        assert f"'abc' in the filter 'matrix_lr{compare}abc' cannot be compared" == problem.what
        assert problem.allowed == "a number"
    runs.options(["--filter=matrix_lr=auto,matrix_lr!=abc,depth<1e3"], tmp_path)


def test_no_runs_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path, capsys) == []
    assert runs.main([f"--dir={tmp_path}"]) == Exit.DONE
    assert "quickstart" in capsys.readouterr().out


def test_the_table_fits_its_terminal(folder: Path) -> None:
    ended(Made(folder / ("a_very_long_name_" * 5)), depth=2, data="中文" * 30)
    ended(Made(folder / "short"), data="text")
    found = facts.read_all(folder)
    for width in (80, 100, 200):
        for line in table.lines(found, width):
            assert sum(cells(text) for text, _ in line) <= width, width
    whole = "\n".join("".join(text for text, _ in line) for line in table.lines(found, None))
    assert "a_very_long_name_" * 5 in whole
    assert "中文" * 30 in whole


def test_differences_are_those_of_the_listed_runs(folder: Path) -> None:
    found = [run for run in facts.read_all(folder) if run.state == "finished"]
    assert table.differences(found) == ["depth"]


def test_a_missing_task_is_a_difference_but_another_missing_field_is_not(tmp_path: Path) -> None:
    ended(Made(tmp_path / "a"), task="gpt", depth=12)
    for name, lr in (("b", 1), ("c", 2)):
        made = Made(tmp_path / name)
        made.plan["script"] = {"path": "main.py", "args": [f"--lr={lr}"]}
        rundir.write_json(made.run.plan, made.plan)
    found = {run.name: run for run in facts.read_all(tmp_path)}
    assert table.differences([found["a"], found["b"]]) == ["task"]
    assert set(table.differences([*found.values()])) == {"task", "args"}
    made.plan["script"]["path"] = "other.py"
    rundir.write_json(made.run.plan, made.plan)
    assert table.differences([found["b"], facts.read(made.run.path)]) == ["script", "args"]


def test_options_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two video runs that differed only in a field of their task were shown as equal."""
    for name, dim in (("small", 8), ("large", 16)):
        made = ended(Made(tmp_path / name))
        options = {"embed_dim": dim, "G_optimizer_lr": 2e-3 * dim}
        made.plan["task"] = {"name": "video_restoration", "unit": "samples", "file": None}
        made.plan["task"]["options"] = options
        rundir.write_json(made.run.plan, made.plan)
    assert table.differences(facts.read_all(tmp_path)) == ["embed_dim", "G_optimizer_lr"]
    assert listed(tmp_path, capsys, "embed_dim=8") == ["small"]
    assert listed(tmp_path, capsys, "--filter=G_optimizer_lr=1.6e-2") == ["small"]
    assert listed(tmp_path, capsys, "--sort=-embed_dim") == ["large", "small"]


def test_a_score_that_is_not_a_loss_is_not_titled_loss(tmp_path: Path) -> None:
    made = Made(tmp_path / "run").steps(5)
    made.run.event("eval", step=5, val_accuracy=0.75)
    Made(tmp_path / "other").steps(5)
    found = facts.read_all(tmp_path)
    title = table.lines(found, 100)[0][0][0]
    assert "EVAL" in title and "LOSS" not in title
    foot = table.footer(found, 2)
    assert foot.endswith("  (EVAL: best accuracy)  (* training loss: no evaluation)")
    for name in ("val_bpb", "val_loss"):
        Made(tmp_path / name).steps(5).run.event("eval", step=5, **{name: 1.0})
    mixed = sorted(facts.read_all(tmp_path), key=lambda run: run.name)
    scores = msg("monitor.runs.scores_mixed", highest="accuracy", lowest="bpb, loss")
    assert scores in table.footer(mixed, 4)
    title = table.lines([run for run in found if run.name == "other"], 100)[0][0][0]
    assert "LOSS" in title


def test_empty_values_are_not_listed(tmp_path: Path) -> None:
    for name, inject in (("a", ""), ("b", "kill@step=3")):
        ended(Made(tmp_path / name), inject=inject)
    whole = "\n".join(
        "".join(t for t, _ in line) for line in table.lines(facts.read_all(tmp_path), None)
    )
    assert "inject=kill@step=3" in whole and whole.count("inject=") == 1


def test_the_speed_of_an_unfinished_run_is_that_of_several_steps(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step, speed in enumerate((100.0, 110.0, 120.0, 5.0), start=1):
        made.step(step, 2.0, tokens_per_s=speed)
    assert facts.read(made.run.path).speed == 105.0


def test_options_of_a_task_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the plans of the runs have them; the file may have changed since."""
    for name, scale in (("gentle", 0.1), ("strong", 1.0)):
        made = ended(Made(tmp_path / name))
        made.plan["task"] = {"name": "own", "unit": "samples", "file": "/own.py"}
        made.plan["task"]["options"] = {"lr_scale": scale, "use_mixup": scale < 1}
        rundir.write_json(made.run.plan, made.plan)
    assert listed(tmp_path, capsys, "--filter=lr_scale=0.1") == ["gentle"]
    assert listed(tmp_path, capsys, "lr_scale>0.5") == ["strong"]
    assert listed(tmp_path, capsys, "use_mixup=true") == ["gentle"]
    assert listed(tmp_path, capsys, "--sort=-lr_scale") == ["strong", "gentle"]
    with pytest.raises(UserError) as error:
        runs.options([f"--dir={tmp_path}", "lr_scael=0.1", "--sort=-use_mixpu"], tmp_path)
    by_filter, by_sort = error.value.problems
    command = f"./duet runs lr_scale=0.1 --dir={tmp_path} --sort=-use_mixup"
    assert by_sort.fixes == by_filter.fixes == [command]
    chosen = clean_options.parse([f"--dir={tmp_path}", "--what=logs", "lr_scale=0.1"], tmp_path)
    assert [term.key for term in chosen.terms] == ["lr_scale"]


def test_arguments_of_scripts_are_sorted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, args in (("b", ["--lr=2"]), ("a", ["--lr=1"])):
        made = Made(tmp_path / name)
        made.plan["script"] = {"path": "a.py", "args": args}
        rundir.write_json(made.run.plan, made.plan)
    assert listed(tmp_path, capsys, "--sort=args") == ["a", "b"]


def test_secrets_of_a_user_script_are_not_shown(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    made.plan["script"] = {"path": "a.py", "args": ["--hf_token", "hidden", "--api_key=hidden2"]}
    rundir.write_json(made.run.plan, made.plan)
    assert facts.read(made.run.path).config["args"] == "--hf_token … --api_key=…"


def test_a_piped_table_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from training.cli import runs; runs.main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, f"--dir={folder}", "--filter=state=finished,depth>1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["new", "old"]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", ["runs", "diagnose"])
def test_json_has_the_whole_path_where_the_output_is_not_utf_8(
    tmp_path: Path, command: str
) -> None:
    made = ended(Made(tmp_path / "名é" / "one"))
    argv = [sys.executable, "-m", f"training.cli.{command}", "--json"]
    argv += [f"--dir={tmp_path / '名é'}"] if command == "runs" else [str(made.run.path)]
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False, env=environ)
    assert str(made.run.path) in json.dumps(json.loads(done.stdout), ensure_ascii=False)


@pytest.mark.parametrize(
    ("command", "encoding", "chinese"),
    [
        ("runs", "latin-1", False),
        ("runs", "euc_kr", False),
        ("runs", "big5", False),
        ("runs", "gbk", True),
        ("runs", "gb18030", True),
        ("monitor", "gb18030", True),
        ("monitor", "gbk", False),  # it has no bars
        ("diagnose", "latin-1", False),
        ("report", "latin-1", True),  # of the page
    ],
)
def test_no_question_marks_instead_of_chinese(
    tmp_path: Path, command: str, encoding: str, chinese: bool
) -> None:
    made, page = ended(Made(tmp_path / ("one" * 40))), tmp_path / "page.html"
    words = {"runs": [f"--dir={tmp_path}"], "report": [str(made.run.path), f"--out={page}"]}
    words["monitor"] = [f"--run={made.run.path}", "--once"]
    argv = [sys.executable, "-m", f"training.cli.{command}"]
    argv += words.get(command, [str(made.run.path)])
    environ = {**os.environ, "PYTHONIOENCODING": encoding, "DUET_LANG": "zh", "COLUMNS": "80"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False, env=environ)
    shown = page.read_text("utf-8") if command == "report" else done.stdout.decode(encoding)
    assert any("\u4e00" <= c <= "\u9fff" for c in shown) == chinese, shown
    assert command == "report" or "?" not in shown


def test_names_of_any_width_keep_the_columns_in_ascii(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "图像恢复", "cafe\u0301"):  # two columns each, a combining accent
        ended(Made(tmp_path / name))
    runs.main([f"--dir={tmp_path}", "--ascii"])
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if " finished " in line]
    assert shown.isascii() and len({row.index(" finished ") for row in rows}) == 1


def test_durations_and_sizes_are_read() -> None:
    for text, seconds in (
        ("90s", 90),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1.5h", 5400),
        ("7", 7),
        ("1:00:30", 3630),
    ):
        assert units.read_duration(text) == seconds, text
    for text, size in (("10GB", 1e10), ("1.5 GiB", 1.5 * 2**30), ("300mb", 3e8), ("12", 12)):
        assert units.read_size(text) == size, text
    for bad in ("", "x", "-1", "1h x", "nan", "inf", "h"):
        with pytest.raises(ValueError):
            units.read_duration(bad)
    for bad in ("", "GB", "1 XB", "-1"):
        with pytest.raises(ValueError):
            units.read_size(bad)
