"""The page of one run: what it holds, that nothing in it can break it, and that it is made whatever
is missing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, dead_pid, old
from tests.unit.report_runs import CONFIG, event, page_of, planned, read, trained
from training.core import rundir
from training.monitor.report import (
    chart_render,
    chart_types,
    charts,
    restarts,
    run,
    run_charts,
    timeline,
)

EVIL = "</script><img src=x onerror=alert(1)>\"'&"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


@pytest.fixture
def whole(tmp_path: Path) -> Made:
    return trained(planned(tmp_path / "experiments" / "quick"), pace=1.6)


def test_what_it_holds(whole: Made) -> None:
    whole.summary(exit_code=0, sample="def main():", parameters=1449984)
    page = read(page_of(whole))
    for said in (
        "quick finished",
        "2 ranks on CPU · bf16 · data stdlib",
        "Steps 120 of 400",
        "Best validation 1.8000 bits/byte, step 120",
        "Memory 520 MiB",
        "Rank 1 needs the most time of its own for a step, 60 % more than rank 0",
        "4 defaults",
        "configs/quick.py:4",
        "16 sequences × 128 tokens × 2 ranks × 1 accumulation step = 4096 tokens per step",
        "torch 2.13.0+cpu",
        "OMP_NUM_THREADS",
        "def main():",
        "11.5 GiB free",
        "No warning, no verdict, no restart.",
    ):
        assert said in page.text, said
    charts = [facts["id"] for facts in page.all("figure")]
    expected = [
        "loss",
        "val_bpb",
        "memory",
        "tokens_per_s",
        "step_ms",
        "lr",
        "grad_norm",
        "timeline",
        "balance",
        "phases",
    ]
    assert charts == [f"chart-{name}" for name in expected]
    assert len(page.all("svg")) == len(charts), "a picture of each, also without JavaScript"


def test_changed_values_come_first(whole: Made) -> None:
    page = page_of(whole)
    shown = page[page.index('id="configuration"') :]
    assert shown.index(">num_iterations<") < shown.index("<details") < shown.index(">embedding_lr<")


def test_it_needs_nothing_from_outside(whole: Made) -> None:
    page = page_of(whole)
    reader = read(page)
    assert not reader.all("link") and not reader.all("iframe")
    assert not [
        facts
        for tag, facts in reader.elements
        if facts.get("src") or (facts.get("href") or "#")[0] != "#"
    ]
    (policy,) = [m["content"] for m in reader.all("meta") if m.get("http-equiv")]
    assert (
        policy
        and policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe-inline'; img-src data:" in policy
    )
    assert "unsafe" not in policy.split(";")[1]
    assert not re.search(
        r"@import|url\((?!#)", page[page.index("<style>") : page.index("</style>")]
    )


def test_the_program_is_compressed_and_the_policy_knows_it(whole: Made) -> None:
    page = page_of(whole)
    packed = re.search(
        r'<script type="application/gzip" id="program">([A-Za-z0-9+/=]+)</script>', page
    )
    assert (
        packed and gzip.decompress(base64.b64decode(packed[1])).decode() == chart_render.program()
    )
    assert (
        base64.b64encode(hashlib.sha256(chart_render.program().encode()).digest()).decode() in page
    )
    assert len(packed[1]) < len(chart_render.program()) / 2


def test_a_page_without_a_curve_has_pictures_only(tmp_path: Path) -> None:
    page = page_of(planned(tmp_path / "experiments" / "early").failure())
    assert 'id="program"' not in page and 'id="charts"' not in page and len(page) < 200_000


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    config = CONFIG | {"wandb_run": EVIL, EVIL: EVIL}
    made = trained(
        planned(
            tmp_path / "experiments" / "evil",
            run_name=EVIL,
            config=config,
            origins={"depth": EVIL},
            notes=[EVIL],
        )
    )
    made.summary(sample=EVIL)
    event(made, "warning", 3.0, text=EVIL)
    event(made, "verdict", 4.0, text=EVIL, kind=EVIL)
    event(made, EVIL, 5.0)
    made.step(121, 1.0, **{EVIL: 1.0})
    rundir.write_json(
        made.run.preflight,
        {"checks": [{"name": EVIL, "status": EVIL, "text": EVIL, "fixes": [EVIL]}]},
    )
    page = page_of(made)
    reader = read(page)
    assert not reader.all("img") and len(reader.all("script")) == 3
    assert page.count("</script") == 3
    assert "onerror=alert(1)" in reader.text, "it can be read"
    stored = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    assert stored and EVIL in json.dumps(json.loads(stored[1])).encode().decode("unicode_escape")


def test_secrets_are_not_shown(whole: Made) -> None:
    secret = "hf_" + "aB3" * 12
    plan = whole.plan | {
        "command": {"script": "train_dual_gpu.sh", "args": [f"--wandb_api_key={secret}"]},
        "variables": [{"name": "HF_TOKEN", "value": secret, "why": "", "origin": "kept"}],
        "config": CONFIG | {"wandb_run": f"token={secret}"},
    }
    rundir.write_json(whole.run.plan, plan)
    event(whole, "warning", 3.0, text=f"password: {secret}")
    whole.summary(sample=secret)
    assert secret not in page_of(whole)


def test_a_failed_run_shows_its_card(whole: Made) -> None:
    whole.failure()
    page = read(page_of(whole))
    assert (
        "quick failed" in page.text
        and "gpu_oom: CUDA out of memory" in page.text
        and "--device_batch_size=8" in page.text
    )
    assert [facts for facts in page.all("div") if facts.get("class") == "card"]
    assert "原因" in page_of(whole, "zh")


@pytest.mark.parametrize(
    "content",
    ["{}", '{"cause": 1, "evidence": 3, "phases": [], "advice": null}', '{"cause": "hang", "wai'],
)
def test_a_strange_failure_file(whole: Made, content: str) -> None:
    whole.run.failure.write_text(content)
    assert "quick" in read(page_of(whole)).text


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    page = read(page_of(planned(tmp_path / "experiments" / "early").failure()))
    assert "No step was finished: there are no curves." in page.text and "gpu_oom" in page.text
    assert [facts["id"] for facts in page.all("figure")] == ["chart-timeline"]


def test_a_run_that_goes_on_says_so(whole: Made) -> None:
    whole.supervisor(os.getpid())
    page = read(page_of(whole))
    assert (
        "quick running" in page.text
        and "This run has not ended: the report shows it as of" in page.text
    )


def test_a_run_that_died(whole: Made) -> None:
    whole.supervisor(dead_pid())
    old(whole.run.supervisor, 10)
    assert "quick died" in read(page_of(whole)).text


def test_a_script_of_somebody(tmp_path: Path) -> None:
    made = planned(
        tmp_path / "experiments" / "mine",
        script={"path": "main.py", "args": []},
        config={"hang_timeout": 60},
    )
    rundir.write_json(
        made.run.summary, {"status": "done", "ranks": 2, "seconds": 3.5, "exit_code": 0}
    )
    event(made, "warning", 2.0, text="rank 1 is late")
    page = read(page_of(made))
    assert (
        "script main.py" in page.text
        and "what it measures is in the logs of its ranks" in page.text
        and "Exit code 0" in page.text
    )
    assert [facts["id"] for facts in page.all("figure")] == ["chart-timeline"]
    made.run.ranks.mkdir(exist_ok=True)
    told = "".join(
        f"step {n} loss {3 - n / 100} lr 0.1\nval loss {3 - n / 90}\n" for n in range(1, 51)
    )
    (made.run.ranks / "rank0.log").write_text(told)
    page = read(page_of(made))
    assert {"chart-loss", "chart-lr", "chart-timeline"} <= {
        facts["id"] for facts in page.all("figure")
    }
    assert "its figures are those that its output tells" in page.text
    assert "time" not in {facts.get("data-axis") for facts in page.all("button")}, (
        "no line tells a time"
    )


def test_losses_that_are_no_numbers_can_be_seen(whole: Made) -> None:
    whole.step(121, float("nan"))
    whole.step(122, float("inf"))
    page = page_of(whole)
    assert "2 steps without a finite loss (×)" in page
    stored = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    assert stored
    (loss,) = [chart for chart in json.loads(stored[1]) if chart["id"] == "loss"]
    assert [
        s
        for s, n in zip(loss["columns"]["step"], loss["columns"]["series"], strict=True)
        if n == -1
    ] == [121, 122]


def test_restarts_are_attempts_on_the_timeline(whole: Made) -> None:
    event(whole, "failure", 15.0, cause="hang", rank=0, text="stood still")
    event(
        whole,
        "restart",
        15.1,
        attempt=2,
        seconds_lost=3.0,
        text="hang at step 100: started again from step 80",
    )
    event(whole, "start", 20.0, step=80, total_steps=400, world_size=2)
    event(whole, "recovered", 21.0, attempt=2, step=81, seconds=9.0)
    seen = timeline.timeline_chart(run.read_run(whole.run))
    assert seen
    rows = list(zip(*(seen.columns[key] for key in ("lane", "kind")), strict=True))
    assert {lane for lane, _ in rows} >= {
        "start 1",
        "start 2",
        "restarts",
        "failures",
        "checkpoints",
    }
    assert {
        ("start 1", "training"),
        ("start 1", "evaluation"),
        ("start 2", "start-up"),
        ("start 2", "training"),
    } <= {*rows}
    assert "started again from step 80" in page_of(whole)


def test_pictures_of_results_are_inside(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole.run.path / "samples"
    folder.mkdir()
    (folder / "one.png").write_bytes(PNG)
    (folder / "no picture.png").write_bytes(b"<svg onload=alert(1)>")
    (folder / "large.png").write_bytes(PNG + bytes(100))
    (folder / "text.txt").write_text("no")
    monkeypatch.setattr(run, "PICTURE_BYTES", 80)
    page = read(page_of(whole))
    assert [facts["alt"] for facts in page.all("img")] == ["one.png"]
    assert (page.all("img")[0]["src"] or "").startswith("data:image/png;base64,iVBOR")
    assert "large.png" in page.text and "no picture.png" in page.text


def test_without_vl_convert_there_are_tables(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_render, "vl_convert", None)
    page = read(page_of(whole))
    assert page.text.count("pip install vl-convert-python") == 1
    assert not page.all("svg") and len(page.all("script")) == 1
    assert "loss, smoothed" in page.text and len(page.all("figure")) == 10


def test_a_chart_that_can_not_be_drawn_is_said(
    whole: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(chart: object) -> str:
        raise ValueError("no such mark\nat line 3")

    monkeypatch.setattr(chart_render, "picture", fails)
    page = read(page_of(whole))
    assert (
        "A chart could not be drawn. Loss: no such mark" in page.text
        and len(page.all("figure")) == 10
    )


@pytest.mark.parametrize(
    "missing", ["plan", "metrics", "events", "data", "preflight", "heartbeats"]
)
@pytest.mark.parametrize(
    "content",
    [
        None,
        b'\xff\xfe\x00[[[{"time": 1, "st',
        b'{"config": 3, "gpus": 1, "batch": {"a": 1}, "checks": [1]}\n[1]\n',
    ],
)
def test_a_missing_or_broken_file_is_no_traceback(
    whole: Made, missing: str, content: bytes | None
) -> None:
    path: Path = getattr(whole.run, missing)
    if path.is_dir():
        path /= "rank0.bin"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "Duet" in read(page_of(whole)).text


def test_values_that_make_no_sense(tmp_path: Path) -> None:
    odd = {"a": {"b": [1]}, "c": None, "depth": ["x"]}
    gpus = [{"name": "H200", "index": 0, "total_bytes": 141 << 30}, 3]
    facts = {
        "gpus": gpus,
        "batch": {"x": 1},
        "place": {"nnodes": 2},
        "variables": [{"name": "A"}, 3],
        "command": {"script": 3, "args": "x"},
    }
    made = planned(tmp_path / "experiments" / "odd", config=odd, **facts)
    made.step(10**12, 1e308, at=-5.0, tokens=10**18)
    made.step(10**12 + 1, -1e308, at=float("nan"), compute_ms=[float("nan"), None])
    made.score(10**12 + 1, float("inf"))
    event(made, "start", 1.0, step="x")
    event(made, "restart", -100.0, seconds_lost=float("-inf"))
    event(made, "failure", float("nan"))
    event(made, "start", float("inf"))
    page = read(page_of(made))
    assert "H200, 141 GiB" in page.text and "Steps 1,000,000,000,001" in page.text


def test_of_many_ranks_those_that_differ_are_shown(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "many", ranks=40)
    for step in range(1, 61):
        made.step(
            step, 2.0, compute_ms=[90.0 if rank == 17 else 40 + rank / 100 for rank in range(40)]
        )
    chart = run_charts.balance(run.read_run(made.run))
    assert chart and len(chart.legend) == run_charts.RANKS and "rank 17" in dict(chart.legend)
    assert "the 8 of 40 ranks that differ most" in chart.note
    assert "Rank 17 needs the most time of its own" in read(page_of(made)).text


def test_the_program_is_kept_for_the_next_time(tmp_path: Path) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    source = chart_render.program(place)
    (kept,) = (tmp_path / "duet").iterdir()
    assert kept.read_text(encoding="utf-8") == source and "</script" not in source.lower()
    kept.write_text("kept")
    assert chart_render.program(place) == "kept"
    nowhere = tmp_path / "file"
    nowhere.write_text("no folder")
    assert chart_render.program({"XDG_CACHE_HOME": str(nowhere)}) == source, (
        "a cache that can not be written is no reason to stop"
    )


def loss_of(made: Made) -> chart_types.Chart:
    chart = run_charts.loss(run.read_run(made.run))
    assert chart
    return chart


def marked(chart: chart_types.Chart, of: int) -> list[int]:
    return [
        step
        for step, series in zip(chart.columns["step"], chart.columns["series"], strict=True)
        if series == of
    ]


@pytest.fixture
def resumed(tmp_path: Path) -> Made:
    """Two starts, three days apart: steps 1 to 40, then 41 to 80 by a plan of their own."""
    made = planned(tmp_path / "experiments" / "resumed")
    days, begun = 72 * 3600, made.at - 72 * 3600
    event(made, "start", 1.0 - days, step=0, total_steps=80, world_size=2)
    for step in range(1, 41):
        made.step(step, 3.0 - step / 100, at=begun + 2 + step / 10)
    event(made, "end", 7.0 - days, step=40, exit_code=5)
    event(made, "resume", 3.0, step=40)
    event(made, "start", 4.0, step=40, total_steps=80, world_size=2)
    for step in range(41, 81):
        made.step(step, 3.0 - step / 100, at=made.at + 4 + (step - 40) / 10)
    event(made, "end", 9.0, step=80, exit_code=0)
    rundir.write_json(
        made.run.summary, {"status": "done", "exit_code": 0, "steps": 80, "time": made.at + 9.0}
    )
    return made


def test_a_resumed_run_counts_from_its_first_start_without_the_pause(resumed: Made) -> None:
    seen = run.read_run(resumed.run)
    assert seen.begun == pytest.approx(resumed.at - 72 * 3600 + 1) and seen.starts == 2
    assert seen.pauses == [pytest.approx((resumed.at - 72 * 3600 + 7, resumed.at))]
    assert seen.lasted_s == pytest.approx(6 + 9)
    text = read(page_of(resumed)).text
    first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.begun))
    assert (
        f"started {first} · took 0:15 min without pauses · 2 starts" in text
        and "in 2 starts, without pauses" in text
    )
    assert max(loss_of(resumed).columns["time"]) == pytest.approx(6 + 8, abs=0.1)
    chart = timeline.timeline_chart(seen)
    assert chart and "15 in all without pauses" in chart.note
    ends = [to * 1.0 for to in chart.columns["to"] if to is not None]
    assert max(ends) == pytest.approx(15, abs=0.1), "seconds, not days"
    bars = dict(
        zip(
            zip(chart.columns["lane"], chart.columns["kind"], strict=True),
            chart.columns["lasts"],
            strict=True,
        )
    )
    assert bars["start 2", "start-up"] == pytest.approx(4, abs=0.1), (
        "from its launch, not from the end of the first"
    )
    assert "nothing ran for 2 d 23:59 h" in chart.columns["text"]


def test_a_killed_start_leaves_a_pause_too_and_a_restart_none(resumed: Made) -> None:
    lines = [
        line
        for line in resumed.run.events.read_text().splitlines()
        if '"step": 40, "exit_code"' not in line
    ]
    resumed.run.events.write_text("\n".join(lines) + "\n")
    ((since, until),) = run.read_run(resumed.run).pauses
    assert since == pytest.approx(resumed.at - 72 * 3600 + 6) and until == pytest.approx(resumed.at)
    at = [(1.0, "start"), (60.0, "failure"), (90.0, "restart"), (200.0, "start")]
    assert (
        restarts.pauses([{"time": when, "event": kind} for when, kind in at], [2.0, 59.0], 0.5)
        == []
    )


def test_the_step_that_failed_is_on_the_loss_curve(whole: Made) -> None:
    facts = {
        "cause": "nan_loss",
        "rank": 1,
        "summary": "loss is nan",
        "step": 121,
        "time": whole.at + 20,
    }
    rundir.write_json(whole.run.failure, facts)
    chart = loss_of(whole)
    assert marked(chart, charts.NO_NUMBER) == [121] and "× at step 121: nan_loss" in chart.note


def test_one_spike_does_not_flatten_the_loss(whole: Made) -> None:
    assert "▲" not in loss_of(whole).note, "a high start is no spike"
    whole.step(121, 40.0)
    for step in range(122, 130):
        whole.step(step, 2.0)
    chart = loss_of(whole)
    assert "▲: above 5" in chart.note and 121 in marked(chart, charts.BEYOND)


def test_an_axis_of_one_value_shows_that_value(tmp_path: Path) -> None:
    made = planned(tmp_path / "experiments" / "one")
    made.step(1, 3.5054)
    (layer,) = loss_of(made).spec["layer"]
    assert layer["encoding"]["y"]["scale"]["domain"] == pytest.approx([3.435, 3.575], abs=0.001)


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        (1.4, "No rank stands out: the slowest one, rank 1, needs 40 %"),
        (1.02, "The ranks are even"),
    ],
)
def test_what_chance_can_do_is_no_slow_rank(tmp_path: Path, pace: float, said: str) -> None:
    assert (
        said in read(page_of(trained(planned(tmp_path / "experiments" / "even"), pace=pace))).text
    )


def test_a_few_steps_call_nobody_slow(tmp_path: Path) -> None:
    assert (
        "Too few steps to call a rank slow"
        in read(page_of(trained(planned(tmp_path / "experiments" / "few"), 10, pace=3.0))).text
    )


def test_what_the_ranks_said_where_no_supervisor_was(whole: Made) -> None:
    whole.supervisor(dead_pid())
    old(whole.run.supervisor, 10)
    whole.run.ranks.mkdir(exist_ok=True)
    facts = {"guilty_rank": 1, "where": "net.py:7", "phase": "step 120: forward"}
    lost = {
        "rank": 0,
        "type": "RuntimeError",
        "message": "Connection closed by peer [127.0.0.1]:4242",
        "time": whole.at + 20,
    }
    rundir.write_json(
        whole.run.rank_error(1),
        facts | {"rank": 1, "type": "ZeroDivisionError", "message": EVIL, "time": whole.at + 21},
    )
    rundir.write_json(whole.run.rank_error(0), facts | lost | {"guilty_rank": 0})
    page = read(page_of(whole))
    card = page.text[page.text.index("Cause ") :]
    assert (
        card.index(f"ZeroDivisionError: {EVIL}")
        < card.index("rank 1, in step 120: forward")
        < card.index("net.py:7")
    )
    assert "rank 0: RuntimeError: Connection closed by peer" in card and "quick died" in page.text
    rundir.write_json(
        whole.run.rank_error(1),
        facts | {"rank": 1, "type": "ZeroDivisionError", "message": EVIL, "time": whole.at - 9},
    )
    whole.run.rank_error(0).unlink()
    assert "ZeroDivisionError" not in page_of(whole), "of an earlier start"
