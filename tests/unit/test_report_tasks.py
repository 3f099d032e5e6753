"""Reports of tasks other than gpt: their units, scores and options; comparison with runs of gpt."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.unit.monitor_runs import VIDEO, Made
from tests.unit.report_runs import comparison, page_of, planned, read, restoring, trained
from training.core import rundir
from training.monitor.report import compare_page, headline, run, run_charts, run_page

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


@pytest.fixture
def video(tmp_path: Path) -> Made:
    return restoring(tmp_path / "experiments" / "video")


def figures_of(page: str) -> list[str | None]:
    return [facts["id"] for facts in read(page).all("figure") if "id" in facts]


def test_page_of_a_run_that_counts_samples(video: Made) -> None:
    video.summary(sample="4 clips", parameters=123456, loss_begin=0.0508, loss_end=0.00584)
    video.run.samples.mkdir()
    (video.run.samples / "clip_0.png").write_bytes(PNG)
    page = page_of(video)
    seen = read(page)
    for text in (
        "task video_restoration · data data/moving",
        "Best validation psnr 29.0000 dB, step 100",
        "Final loss 0.00584 from 0.0508",
        "Speed 3.27 samples/s, median",
        "best: 29.0000 at step 100 (higher is better)",
        "8 samples × 2 ranks × 1 accumulation step = 16 samples per step",
        "total steps 300",
        "4 clips",
    ):
        assert text in seen.text, text
    assert "tokens/s" not in seen.text and "nats" not in seen.text
    assert [i["alt"] for i in seen.all("img")] == ["clip_0.png"]
    names = (
        "loss",
        "val_psnr",
        "val_ssim",
        "samples_per_s",
        "step_ms",
        "lr",
        "grad_norm",
        "timeline",
    )
    assert figures_of(page) == [f"chart-{name}" for name in names]
    axes = [button.get("data-axis") for button in seen.all("button") if "data-axis" in button]
    assert (
        axes == ["step", "time", "tokens"]
        and ">samples</button>" in page
        and ">tokens</button>" not in page
    )


def test_score_of_the_input_is_a_second_line(video: Made) -> None:
    chart = next(c for c in run_charts.small(run.read_run(video.run)) if c and c.id == "val_psnr")
    assert chart.legend == [("psnr", 2), ("input", 0)] and chart.unit == "dB"
    values = dict(
        zip(
            zip(chart.columns["series"], chart.columns["step"], strict=True),
            chart.columns["y"],
            strict=True,
        )
    )
    assert (values[0, 100], values[1, 100]) == (29.0, 25.31)
    assert chart.columns["tokens"][:2] == [800, 1600], "samples"


def test_options_of_the_task_are_in_the_configuration(video: Made) -> None:
    page = page_of(video)
    shown = page[page.index('id="configuration"') :]
    assert (
        shown.index(">dataroot_gt<")
        < shown.index(">embed_dim<")
        < shown.index("<details")
        < shown.index(">gt_size<")
    )
    assert "quick.py:3" in shown and "feature channels (channels)" in shown


def test_task_of_a_user(tmp_path: Path) -> None:
    task = {
        "name": "mine",
        "unit": "samples",
        "file": "/somewhere/mine.py",
        "options": {"depth": 3, "scale": "2"},
    }
    made = Made(
        tmp_path / "experiments" / "mine",
        task=task,
        config={"task": "/somewhere/mine.py"},
        origins={"depth": "from mine.py"},
    )
    for step in range(1, 5):
        made.step(step, 1.0 / step)
        made.scores(step, val_loss=1.0 / step, val_wer=0.5 - step / 10, val_top_acc=step / 10)
    page = read(page_of(made))
    assert "task mine" in page.text and "data " not in page.text.split("started")[0]
    assert (
        "best: 0.1000 at step 4 (lower is better)" in page.text
        and "best: 0.4000 at step 4 (higher is better)" in page.text
    )
    assert "transformer blocks" not in page.text and "larger" not in page.text, (
        "the help of a field that has the same name"
    )
    loss = run_charts.loss(run.read_run(made.run))
    assert loss and loss.unit == "" and [name for name, _ in loss.legend] == ["loss", "validation"]


def test_task_with_its_own_unit(tmp_path: Path) -> None:
    made = Made(tmp_path / "experiments" / "clips", task=VIDEO)
    for step in range(1, 30):
        own = {"clips": step * 2, "clips_per_s": 2.5}
        rundir.append_json(
            made.run.metrics,
            {"time": made.first_step + step, "step": step, "loss": 1.0, "step_ms": 800.0, **own},
        )
    page = page_of(made)
    assert figures_of(page)[:3] == [
        "chart-loss",
        "chart-clips_per_s",
        "chart-step_ms",
    ] and "chart-clips" not in figures_of(page)
    assert "Speed 2.5 clips/s, median" in read(page).text and ">clips</button>" in page
    loss = run_charts.loss(run.read_run(made.run))
    assert loss and loss.columns["tokens"][:2] == [2, 4]


def test_runs_of_different_tasks(video: Made, tmp_path: Path) -> None:
    other = restoring(
        tmp_path / "experiments" / "other",
        task=VIDEO | {"options": {**VIDEO["options"], "embed_dim": 24}},
    )
    other.scores(101, val_psnr=30.5, val_ssim=0.91, val_psnr_input=25.31)
    other.step(101, 0.001)
    text = trained(planned(tmp_path / "experiments" / "text"))
    text.step(121, 0.5)
    page = comparison(video, other, text)
    ids = figures_of(page)
    assert ids[:4] == ["chart-loss", "chart-loss_1", "chart-val_psnr", "chart-val_ssim"]
    assert {"chart-tokens_per_s", "chart-samples_per_s", "chart-val_bpb"} <= set(
        ids
    ) and "chart-val_psnr_input" not in ids
    seen = read(page)
    assert "Loss of video_restoration" in seen.text and "Loss of gpt nats/token" in seen.text
    assert ">samples</button>" not in page and ">tokens</button>" not in page, (
        "the runs have no common unit"
    )
    assert [
        facts for tag, facts in seen.elements if tag == "td" and facts.get("class") == "n best"
    ], "among the two comparable runs"
    best = page[page.index("<table") : page.index("</table>")].split("</tr>")
    assert [row.count('class="n best"') for row in best[1:4]] == [0, 2, 0], (
        "psnr and ssim of the other run; losses of different tasks are not compared"
    )
    differ = page[page.index('id="differences"') : page.index('id="curves"')]
    assert ">embed_dim<" in differ and ">16<" in differ and ">24<" in differ
    same = compare_page.page([run.read_run(made.run) for made in (video, other)])
    assert (
        same.counted == "samples"
        and ">embed_dim<" in same.html()
        and ">gt_size<" not in same.html()
    )


@pytest.mark.parametrize(
    ("other", "best"),
    [
        ({"dataroot_gt": "u"}, ["30.5000", "0.9100"]),
        ({"test_dataroot_gt": "u"}, ["0.0049"]),
        ({"test_num_frame": 9}, ["0.0049"]),
    ],
)
def test_scores_of_the_same_validation_data(
    tmp_path: Path, other: dict[str, object], best: list[str]
) -> None:
    """Those of a run on other training data have a best value, but the training loss has none."""
    own = VIDEO["options"] | {"test_dataroot_gt": "t"}
    runs = [
        restoring(tmp_path / "experiments" / str(n), task=VIDEO | {"options": options})
        for n, options in enumerate((own, own | other))
    ]
    runs[1].step(101, 0.001)
    runs[1].scores(101, val_psnr=30.5, val_ssim=0.91)
    page = comparison(*runs)
    rows = page[page.index("<table") : page.index("</table>")].split("</tr>")
    values = re.findall(r'class="n best">([^<]*)<', rows[2])
    assert [value for value in values if " ms" not in value] == best


@pytest.mark.parametrize(
    "task",
    [
        "gpt",
        3,
        [],
        {"name": "x.py", "file": 3, "unit": "</script>", "options": [1]},
        {"options": {"a": {"b": 1}}},
    ],
)
def test_any_task_in_a_plan(tmp_path: Path, task: object) -> None:
    made = trained(planned(tmp_path / "experiments" / "odd"))
    rundir.write_json(made.run.plan, made.plan | {"task": task})
    seen = run.read_run(made.run)
    assert seen.counted == "tokens" and run_page.page(seen).html().count("</script") == 4


def test_run_without_a_step_counts_samples(tmp_path: Path) -> None:
    made = Made(tmp_path / "experiments" / "early", task=VIDEO)
    assert run.read_run(made.run).counted == "samples"


def test_a_script_whose_loss_ends_as_nan_is_not_the_best(tmp_path: Path) -> None:
    """Its finite steps are lower than those of the other script."""
    runs = []
    for name, losses in (
        ("steady", [2.0] * 40),
        ("late", [1.0] * 35 + [math.nan] * 5),
    ):
        made = planned(tmp_path / "experiments" / name, script={"path": "main.py", "args": []})
        made.run.ranks.mkdir(exist_ok=True)
        printed = "".join(f"step {n} loss: {loss}\n" for n, loss in enumerate(losses, 1))
        (made.run.ranks / "rank0.log").write_text(printed)
        runs.append(made)
    steady, late = runs
    assert "NaN" in [value for _, value, _ in headline.figures(run.read_run(late.run))]
    page = comparison(steady, late)
    rows = page[page.index("<table") : page.index("</table>")].split("</tr>")
    assert ['class="n best">2.0000<' in row for row in rows[1:3]] == [True, False]
    assert ">NaN<" in rows[2] and 'class="n best">NaN' not in page
