"""Page of one run: its content, its safety against untrusted text, and missing or damaged files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, dead_pid, old
from tests.unit.report_runs import CONFIG, event, page_of, planned, read, trained
from tests.unit.verdicts import spawned
from training.core import messages, rundir
from training.core.messages import msg
from training.monitor.report import chart_render, plan_sections, run

EVIL = "</script><img src=x onerror=alert(1)>\"'&"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


@pytest.fixture
def whole(tmp_path: Path) -> Made:
    return trained(planned(tmp_path / "experiments" / "quick"), pace=1.6)


def test_the_best_score_of_averaged_weights_is_marked(whole: Made) -> None:
    """By the record of the best evaluation, not by the configuration of the last start."""
    for step, value, more in ((121, 1.5, {"weights": "ema"}), (122, 1.6, {}), (123, 1.4, {})):
        scores = {"time": whole.at + 20, "step": step, "epoch": 1, "val_bpb": value}
        rundir.append_json(whole.run.metrics, {**scores, "eval_ms": 9.0, **more})
        marked = "averaged weights" in read(page_of(whole)).text
        assert marked is (step < 123)


def test_content_of_the_page(whole: Made) -> None:
    whole.summary(exit_code=0, sample="def main():", parameters=1449984)
    page = read(page_of(whole))
    for text in (
        "quick finished",
        "2 ranks on CPU · bf16 · data stdlib",
        "Steps 120 of 400",
        "Best validation 1.8000 bits/byte, step 120",
        "Memory 520 MiB",
        "Rank 1 is slow: it takes 60 % longer than rank 0, the fastest.",
        "4 defaults",
        "configs/quick.py:4",
        "16 sequences × 128 tokens × 2 ranks × 1 accumulation step = 4096 tokens per step",
        "torch 2.13.0+cpu",
        "OMP_NUM_THREADS",
        "def main():",
        "11.5 GiB free",
        "No warnings, verdicts or restarts.",
    ):
        assert text in page.text, text
    drawn = [facts["id"] for facts in page.all("figure")]
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
    assert drawn == [f"chart-{name}" for name in expected]
    assert len(page.all("svg")) == len(drawn), "a picture of each, even without JavaScript"


def test_changed_values_come_first(whole: Made) -> None:
    page = page_of(whole)
    shown = page[page.index('id="configuration"') :]
    assert shown.index(">num_iterations<") < shown.index("<details") < shown.index(">embedding_lr<")


def test_the_estimated_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    for free in ({}, {"free_bytes": 4 << 30}):
        memory = {"total_bytes": 2 << 30, "needed_bytes": 3 << 30, **free}
        made = planned(tmp_path / f"experiments/{len(free)}", memory=memory)
        shown = str(plan_sections.data(run.read_run(made.run)))
        text = msg("monitor.report.data.memory", total="2.0 GiB", needed="3.0 GiB")
        if free:
            text = msg("monitor.report.data.memory_free", estimate=text, free="4.0 GiB")
        assert f">{text}<" in shown


def test_defaults_that_a_resume_has_kept_are_folded(tmp_path: Path) -> None:
    """A value of the run itself, or of this start even if it is the default, is not."""
    for text in ("from resumed run back", "恢复的运行 back"):
        origins = dict.fromkeys(CONFIG, text) | {"tensorboard": "from --tensorboard"}
        made = planned(tmp_path / "experiments" / "back", origins=origins)
        section = str(plan_sections.configuration(run.read_run(made.run)))
        shown, folded = (
            {name for name in CONFIG if f">{name}<" in part} for part in section.split("<details")
        )
        assert shown == {"depth", "num_iterations", "tensorboard"}
        assert folded == {"matrix_lr", "embedding_lr", "wandb_run"}


def test_page_is_self_contained(whole: Made) -> None:
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


def test_program_is_compressed_and_allowed_by_the_policy(whole: Made) -> None:
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


def test_machine_facts_have_what_the_numbers_depend_on(tmp_path: Path) -> None:
    made = planned(
        tmp_path / "experiments" / "exact",
        config={**CONFIG, "deterministic": True},
        precision={"value": "bf16", "reason": "every GPU has it"},
        gradient_compression={"value": "none", "reason": "one rank"},
    )
    facts = plan_sections.facts(run.read_run(made.run))
    wanted = {
        "precision": "bf16: every GPU has it",
        "gradient_compression": "none: one rank",
        "deterministic": "true",
    }
    assert {name: facts.get(name) for name in wanted} == wanted


def test_page_without_a_curve_has_only_pictures(tmp_path: Path) -> None:
    page = page_of(planned(tmp_path / "experiments" / "early").failure())
    assert 'id="program"' not in page and 'id="charts"' not in page and len(page) < 200_000


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
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
    assert not reader.all("img") and len(reader.all("script")) == 4
    assert page.count("</script") == 4
    assert "onerror=alert(1)" in reader.text, "shown as text"
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


def test_failed_run_shows_its_card(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    whole.failure()
    page = read(page_of(whole))
    assert (
        "quick failed" in page.text
        and "gpu_oom: CUDA out of memory" in page.text
        and "--device_batch_size=8" in page.text
    )
    assert [facts for facts in page.all("div") if facts.get("class") == "card"]
    monkeypatch.setenv("DUET_LANG", "zh")
    assert "原因" in page_of(whole)


def test_the_origin_of_a_default_is_in_the_language_of_the_page(
    whole: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = {}
    for language in messages.LANGUAGES:
        monkeypatch.setenv("DUET_LANG", language)
        origins[language] = re.findall(r'<td class="from">([^<]*)</td>', page_of(whole))
        assert messages.msg("config.origin.default") in origins[language]
    assert "default" in origins["en"] and "default" not in origins["zh"]


@pytest.mark.parametrize(
    "content",
    ["{}", '{"cause": 1, "evidence": 3, "phases": [], "advice": null}', '{"cause": "hang", "wai'],
)
def test_malformed_failure_file(whole: Made, content: str) -> None:
    whole.run.failure.write_text(content)
    assert "quick" in read(page_of(whole)).text


def test_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    page = read(page_of(planned(tmp_path / "experiments" / "early").failure()))
    assert "No curves: no step was finished." in page.text and "gpu_oom" in page.text
    assert [facts["id"] for facts in page.all("figure")] == ["chart-timeline"]


def test_running_run_has_a_notice(whole: Made) -> None:
    whole.supervisor(os.getpid())
    page = read(page_of(whole))
    assert (
        "quick running" in page.text and "This run has not ended; the report is as of" in page.text
    )


def test_run_that_died(whole: Made) -> None:
    whole.supervisor(dead_pid())
    old(whole.run.supervisor, 10)
    assert "quick died" in read(page_of(whole)).text


def test_user_script(tmp_path: Path) -> None:
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
        and "User script without recognised figures: see the logs of its ranks." in page.text
        and "Exit code 0" in page.text
    )
    assert [facts["id"] for facts in page.all("figure")] == ["chart-timeline"]
    made.run.ranks.mkdir(exist_ok=True)
    printed = "".join(
        f"step {n} loss {3 - n / 100} lr 0.1\nval loss {3 - n / 90}\n" for n in range(1, 51)
    )
    (made.run.ranks / "rank0.log").write_text(printed)
    page = read(page_of(made))
    assert {"chart-loss", "chart-lr", "chart-timeline"} <= {
        facts["id"] for facts in page.all("figure")
    }
    assert "User script: its figures are read from its output" in page.text
    assert "time" not in {facts.get("data-axis") for facts in page.all("button")}, (
        "no line has a time"
    )


def test_pictures_are_embedded(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole.run.path / "samples"
    folder.mkdir()
    (folder / "one.png").write_bytes(PNG)
    (folder / "not a picture.png").write_bytes(b"<svg onload=alert(1)>")
    (folder / "large.png").write_bytes(PNG + bytes(100))
    (folder / "text.txt").write_text("no")
    monkeypatch.setattr(run, "PICTURE_BYTES", 80)
    page = read(page_of(whole))
    assert [facts["alt"] for facts in page.all("img")] == ["one.png"]
    assert (page.all("img")[0]["src"] or "").startswith("data:image/png;base64,iVBOR")
    assert "large.png" in page.text and "not a picture.png" in page.text


def test_tables_without_vl_convert(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_render, "vl_convert", None)
    page = read(page_of(whole))
    assert page.text.count("pip install vl-convert-python") == 1
    assert not page.all("svg") and len(page.all("script")) == 1
    assert "loss, smoothed" in page.text and len(page.all("figure")) == 10


def test_chart_that_cannot_be_drawn(whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(chart: object) -> str:
        raise ValueError("no such mark\nat line 3")

    monkeypatch.setattr(chart_render, "picture", fails)
    page = read(page_of(whole))
    assert "Chart not drawn: Loss: no such mark" in page.text and len(page.all("figure")) == 10


def test_nonsensical_values(tmp_path: Path) -> None:
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


def test_program_is_cached(tmp_path: Path) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    source = chart_render.program(place)
    (kept,) = (tmp_path / "duet").iterdir()
    assert kept.read_text(encoding="utf-8") == source and "</script" not in source.lower()
    kept.write_text("kept")
    assert chart_render.program(place) == "kept"
    nowhere = tmp_path / "file"
    nowhere.write_text("not a directory")
    assert chart_render.program({"XDG_CACHE_HOME": str(nowhere)}) == source, (
        "an unwritable cache is ignored"
    )


def test_errors_of_ranks_without_a_supervisor(whole: Made) -> None:
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
    assert "ZeroDivisionError" not in page_of(whole), "from an earlier start"
    text = spawned("ValueError: bad sample")
    raised = lost | {"guilty_rank": 0, "type": "ProcessRaisedException", "message": text}
    rundir.write_json(whole.run.rank_error(0), raised)
    card = page_of(whole)
    assert "exception: ValueError: bad sample" in card and "/data/train.py:9" in card
