"""Command line of the report, and the page of several runs."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import python
from tests.unit.monitor_runs import Made
from tests.unit.report_runs import CONFIG, comparison, event, page_of, planned, read, trained
from training.cli import report as command
from training.core import rundir
from training.core.errors import Exit, UserError
from training.monitor.report import charts, compare_figures, options, run

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project folder with two runs; `second_run` is the newer one."""
    for i, name in enumerate(("first_run", "second_run")):
        made = trained(planned(tmp_path / "experiments" / name), 30)
        os.utime(made.run.plan, (2000.0 + i, 2000.0 + i))
    return tmp_path


def problems(root: Path, *argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        options.parse(list(argv), root)
    assert caught.value.code == Exit.CONFIG
    return ["\n".join(problem.lines()) for problem in caught.value.problems]


def test_one_run(root: Path) -> None:
    for word in (
        "first_run",
        str(root / "experiments/first_run"),
        str(root / "experiments/first_run") + "/",
    ):
        chosen = options.parse([word], root)
        assert chosen.out == root / "experiments/first_run/report.html"
    assert options.parse(["latest"], root).out.parent.name == "second_run"
    chosen = options.parse(["latest", "--out", "x.html", "--quiet"], root)
    assert (chosen.out, chosen.quiet) == (Path.cwd() / "x.html", True)


def test_output_of_a_comparison(root: Path) -> None:
    assert (
        options.parse(["first_run", "second_run"], root).out
        == root / "experiments/comparison_first_run_second_run.html"
    )
    for name in ("a" * 90, "odd name"):
        trained(planned(root / "experiments" / name), 1)
        place = options.parse(["first_run", name], root).out.name
        assert place.startswith("comparison_2") and place.endswith(".html") and len(place) < 40


def test_all_problems_at_once(root: Path) -> None:
    found = problems(
        root,
        "frist_run",
        "second_run",
        "second_run",
        "--uot=x.html",
        "--quiet=1",
        "--out",
    )
    assert len(found) == 5
    together = "\n".join(found)
    for part in (
        "RUN is 'frist_run'",
        "./duet report first_run",
        "second_run is given twice",
        "./duet report frist_run second_run second_run --quiet --out=x.html",
        "--quiet has the value '1'",
        "--out has no value",
    ):
        assert part in together, part
    assert "monitor" not in together


def test_no_run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "./duet report latest" in problems(root)[0]
    (text,) = problems(tmp_path_factory.mktemp("empty"), "latest")
    assert "there is no run" in text and "./duet report latest" not in text


def test_impossible_output(root: Path) -> None:
    assert "is a directory" in problems(root, "first_run", f"--out={root}")[0]
    (problem,) = problems(root, "first_run", f"--out={root}/not there/x.html")
    assert f"mkdir -p '{root}/not there'" in problem


def test_the_command(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = root / "experiments/first_run"
    assert command.main([str(run)]) == 0
    assert capfd.readouterr().out == f"{run}/report.html\n"
    page = (run / "report.html").read_text()
    assert "first_run" in read(page).text
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"], (
        "no temporary file is left"
    )
    assert command.main([str(run), "--quiet"]) == 0
    assert capfd.readouterr().out == ""


def test_closed_input(root: Path) -> None:
    """The library that draws the pictures fails if it finds another file in its place."""
    run = root / "experiments/first_run"
    here = Path(options.__file__).resolve().parents[3]
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" report "$1" --quiet <&- 2>&1', here / "duet", run],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "<svg" in (run / "report.html").read_text()


def test_call_by_the_supervisor(root: Path) -> None:
    run = root / "experiments/first_run"
    here = Path(options.__file__).resolve().parents[3]
    done = python(str(here / "lib/run_module.py"), "training.cli.report", str(run), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = python(str(here / "lib/run_module.py"), "training.cli.report", str(run / "nothing"))
    assert (
        done.returncode == Exit.CONFIG
        and "no report was written (exit 2)" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "./duet report RUN" in capsys.readouterr().out


def test_unwritable_page(root: Path, on_small_disk: Callable[..., object]) -> None:
    run = root / "experiments/first_run"
    here = Path(options.__file__).resolve().parents[3]
    done = on_small_disk(
        str(here / "lib/run_module.py"),
        "training.cli.report",
        str(run),
        "--out=page.html",
        options="size=64k",
    )
    assert done.returncode == Exit.RESOURCES  # type: ignore[attr-defined]
    assert "page.html" in done.stderr and "No space left on device" in done.stderr  # type: ignore[attr-defined]


def test_no_torch_and_no_numpy() -> None:
    modules = (
        "training.cli.report, training.monitor.report.compare_page, "
        "training.monitor.report.run_page"
    )
    code = (
        f"import sys, {modules}; print(*sorted(m for m in sys.modules if m.split('.')[0] in "
        f"('torch', 'numpy', 'pandas')))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", [])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Made, Made]:
    config = CONFIG | {"depth": 6, "tensorboard": False}
    one = trained(planned(tmp_path / "experiments" / "small"), 120).summary()
    two = trained(planned(tmp_path / "experiments" / "deep", config=config, torch="2.12.0"), 80)
    return one, two


def test_comparison_page(pair: tuple[Made, Made]) -> None:
    page = comparison(*pair)
    reader = read(page)
    for text in (
        "Comparison of 2 runs",
        "small finished",
        "best validation, bits/byte",
        "final loss",
        "Machine and software differences",
        "2.12.0",
    ):
        assert text in reader.text, text
    differences = reader.text[
        reader.text.index("Configuration differences") : reader.text.index("Curves Hover")
    ]
    assert (
        "depth 3 6" in differences
        and "tensorboard true false" in differences
        and "embedding_lr" not in differences
    )
    best = page[page.index('class="n best"') :]
    assert best.startswith('class="n best">1.8000<'), "the lower one, of the longer run"
    names = [facts["data-name"] for facts in reader.all("button") if "data-name" in facts]
    assert names == ["small", "deep"], "one legend for all charts"


def test_values_per_token_of_different_tokenizers_have_no_best(tmp_path: Path) -> None:
    marked = []
    for densities in ((3.0, 3.0), (3.0, 1.0)):
        made = []
        for i, density in enumerate(densities):
            one = planned(tmp_path / str(densities) / "experiments" / f"run{i}")
            for step in (1, 2, 3):
                one.step(step, 0.5 - i / 10, tokens_per_s=5000.0 + i)
            one.scores(3, val_loss=1.0 + i, val_bpb=0.5 + i)
            rundir.write_json(one.run.data, {"bytes_per_token": density})
            made.append(run.read_run(one.run))
        columns = compare_figures.figures(made, ["run0", "run1"])
        head, *rows = re.findall(r"<tr>(.*?)</tr>", str(columns))
        titles = re.findall(r"<th[^>]*>(.*?)</th>", head)
        cells = [re.findall(r"<t[dh][^>]*>", row) for row in rows]
        marked.append(
            {titles[i].split(",")[0] for row in cells for i, td in enumerate(row) if "best" in td}
        )
    same, other = marked
    assert same >= {"best validation", "best validation loss", "final loss", "tokens/s"}
    assert other == {"best validation", "final loss"}


def test_scores_on_different_data_have_no_best(tmp_path: Path) -> None:
    made = []
    for i, name in enumerate(("stdlib", "text")):
        data = {"name": name, "files": 1, "bytes": 86890}
        one = planned(tmp_path / "experiments" / f"run{i}", data=data)
        for step in (1, 2, 3):
            one.step(step, 0.5 - i / 10, tokens_per_s=5000.0 + i)
        one.scores(3, val_bpb=0.5 + i)
        made.append(run.read_run(one.run))
    table = str(compare_figures.figures(made, ["run0", "run1"]))
    assert re.findall(r'class="n best">([^<]*)<', table) == ["5,001"]
    assert (
        "stdlib: 1 file,"
        in read(page_of(planned(tmp_path / "one", data=made[0].plan["data"]))).text
    )


def test_equal_runs_have_no_differences_and_no_best_value(tmp_path: Path) -> None:
    made = [trained(planned(tmp_path / place / "experiments" / "same"), 40) for place in ("a", "b")]
    for one in made:
        one.summary()
    page = comparison(*made)
    assert (
        "No differences: every field has the same value." in page
        and "No differences recorded in the plans." in page
    )
    assert page.count("/experiments/same") > 1, "runs with the same name are shown by their folders"


def launched(path: Path, script: str, *args: str) -> Made:
    """A run of a user script."""
    plan = {"script": {"path": script, "args": list(args)}, "origins": {}}
    return Made(path, config={"hang_timeout": 60}, **plan)


def test_scripts_differ_by_path_and_redacted_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    key = ["--api_key", "hidden1"]
    made = [launched(folder / str(lr), "a/main.py", f"--lr={lr}", *key) for lr in (1, 2)]
    assert differing(comparison(*made)) == [["args", "--lr=1 --api_key …", "--lr=2 --api_key …"]]
    other = launched(folder / "other", "b/main.py", "--lr=1", *key)
    assert differing(comparison(made[0], other)) == [["script", "a/main.py", "b/main.py"]]
    assert (
        differing(
            comparison(
                made[0], launched(folder / "same", "a/main.py", *made[0].plan["script"]["args"])
            )
        )
        == []
    )
    assert "hidden1" not in comparison(*made)


def test_a_missing_task_is_a_difference_but_another_missing_field_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    runs = [planned(folder / f"depth{n}", config={"task": "gpt", "depth": n}) for n in (2, 3)]
    script = launched(folder / "script", "main.py", "--lr=1")
    assert differing(comparison(runs[0], script)) == [["task", "gpt", "-"]]
    assert differing(comparison(*runs, script)) == [
        ["task", "gpt", "gpt", "-"],
        ["depth", "2", "3", "-"],
    ]


def differing(page: str) -> list[list[str]]:
    """Rows of the table of differences."""
    (part,) = re.findall(r'<section id="differences".*?</section>', page, re.DOTALL)
    return [
        [
            html.unescape(re.sub("<[^>]*>", "", cell))
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in re.findall(r"<tr>.*?</tr>", part)[1:]
    ]


def test_comparison_with_empty_runs(pair: tuple[Made, Made], tmp_path: Path) -> None:
    empty = planned(tmp_path / "experiments" / "empty").failure()
    page = read(comparison(pair[0], empty))
    assert "since no step is finished: empty" in page.text and "gpu_oom" in page.text
    bare = tmp_path / "experiments" / "bare"
    bare.mkdir()
    (bare / "events.jsonl").write_text("")
    made = planned(tmp_path / "experiments" / "another")
    made.run = rundir.RunDir(bare)
    assert "Comparison of 2 runs" in read(comparison(made, empty)).text


def test_comparison_with_untrusted_names(pair: tuple[Made, Made], tmp_path: Path) -> None:
    made = trained(planned(tmp_path / "experiments" / "evil", run_name=EVIL, config={EVIL: EVIL}))
    event(made, "warning", 1.0, text=EVIL)
    made.step(121, 1.0, **{EVIL: 1.0})
    page = comparison(pair[0], made.failure())
    reader = read(page)
    assert not reader.all("img") and page.count("</script") == 4 and EVIL in reader.text


def test_latest_mistyped(root: Path) -> None:
    assert "./duet report latest" in problems(root, "latst")[0]


def test_marks_in_a_comparison_belong_to_their_run(pair: tuple[Made, Made]) -> None:
    pair[1].step(81, float("nan"))
    page = comparison(*pair)
    assert "× deep: non-finite loss (step 81)" in page
    stored = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    assert stored
    (loss,) = [chart for chart in json.loads(stored[1]) if chart["id"] == "loss"]
    (layer,) = [layer for layer in loss["spec"]["layer"] if layer["mark"].get("shape") == "cross"]
    assert layer["mark"]["color"] == "var(--c2)" and charts.MARK - 1 in loss["columns"]["series"]


def test_more_runs_than_colours_differ_by_dashes(tmp_path: Path) -> None:
    page = comparison(
        *(trained(planned(tmp_path / "experiments" / f"run{i}"), 30) for i in range(10))
    )
    keys = [facts["style"] for facts in read(page).all("i") if facts.get("class") == "key"]
    assert len(set(keys)) == len(keys) == 10 and "repeating-linear-gradient(90deg,var(--c1)" in (
        keys[8] or ""
    )
    assert '"strokeDash":{"field":"series"' in page
