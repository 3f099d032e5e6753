"""The table of all runs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.monitor_person import Person
from tests.unit.monitor_runs import Made, dead_pid, old
from training.cli import monitor
from training.core import rundir
from training.core.cells import cells
from training.host.gpus import Gpu, GpuInventory
from training.monitor import host_stats, pages, run_list
from training.monitor.run_list import RunTable
from training.monitor.screen import View
from training.monitor.terminal import END, HOME, PAGE_DOWN, PAGE_UP


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An active run that is older than a finished and a failed one."""
    monkeypatch.setattr("training.core.project.WORK", tmp_path)
    experiments = tmp_path / "experiments"
    living = Made(experiments / "living").supervisor(os.getpid()).steps(100).beats()
    old(living.run.plan)
    Made(experiments / "finished").supervisor(dead_pid()).steps(40).summary()
    Made(experiments / "failed").supervisor(dead_pid()).steps(20).failure()
    (experiments / "no run").mkdir()
    return experiments


def test_active_runs_come_first(runs: Path) -> None:
    seen = RunTable(runs).read()
    assert [(r["run"]["name"], r["run"]["state"]) for r in seen["runs"]] == [
        ("living", "running"),
        ("failed", "failed"),
        ("finished", "finished"),
    ]
    assert (
        seen["system"]["ram_total_bytes"]
        and seen["schema_version"] == seen["runs"][0]["schema_version"]
    )


def test_ended_run_is_read_once_until_it_is_restarted(runs: Path) -> None:
    every = RunTable(runs)
    every.read()
    old(runs / "finished" / "summary.json")
    finished = Made(runs / "finished", age_s=0.0).supervisor(os.getpid())
    os.utime(finished.run.plan)
    names = {r["run"]["name"]: r["run"]["state"] for r in every.read()["runs"]}
    assert names["finished"] in ("starting", "running") and names["failed"] == "failed"


@pytest.mark.parametrize(("width", "height"), [(20, 4), (80, 24), (120, 40), (200, 50)])
def test_the_table_fits(
    runs: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    monkeypatch.setenv("DUET_LANG", "zh")
    chinese = run_list.screen(RunTable(runs).read(), View(width, height, footer="q 退出"))
    assert len(chinese) == height and max(map(cells, chinese)) <= width
    monkeypatch.setenv("DUET_LANG", "en")
    lines = run_list.screen(RunTable(runs).read(), View(width, height, footer="q quit"))
    assert len(lines) == height and max(map(len, lines)) <= width
    if width >= 80:
        row = next(line for line in lines if " living " in line)
        assert re.search(r"living +RUNNING +100 +25 % +2\.1070 +2\.0000 +38,000 +0:\d\d", row)
        assert any("failed" in line and "FAILED" in line for line in lines)


def test_more_runs_than_rows_scroll_to_the_mark(tmp_path: Path) -> None:
    for number in range(30):
        Made(tmp_path / "experiments" / f"run {number:02}", age_s=1.0).supervisor(
            dead_pid()
        ).summary()
    seen = RunTable(tmp_path / "experiments").read()
    for marked in (0, 15, 29):
        shown = "\n".join(run_list.screen(seen, View(80, 16), marked))
        assert f"> {seen['runs'][marked]['run']['name']}" in shown and "of 30" in shown


def test_pages_skip_no_run_on_a_machine_with_gpus(tmp_path: Path) -> None:
    """GPUs, alerts and the machine take half of the screen."""
    for number in range(40):
        Made(tmp_path / "experiments" / f"r{number:02}", age_s=1.0).supervisor(dead_pid()).summary()
    seen = RunTable(tmp_path / "experiments").read()
    cards = tuple(Gpu(n, f"GPU-{n}", "a card", 32 << 30, 1 << 30, 0, 40, 50.0) for n in range(8))
    seen["gpus"] = host_stats.gpu_records(GpuInventory(cards, ""), set(), set())
    for forwards in (True, False):
        page, shown = pages.Runs(), set[str]()
        page.key(HOME if forwards else END, seen)
        for _ in range(20):
            lines = page.lines(seen, View(80, 24, footer="q quit"))
            names = {match[0] for line in lines if (match := re.search(r"\br\d\d\b", line))}
            assert 3 < len(names) < 12
            shown |= names
            page.key(PAGE_DOWN if forwards else PAGE_UP, seen)
        assert len(shown) == 40


def test_active_run_is_shown_at_any_age(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "MOST", 1)
    every = RunTable(runs)
    for _ in range(2):
        seen = every.read()
        assert [r["run"]["name"] for r in seen["runs"]] == ["living", "failed"] and seen[
            "runs_there"
        ] == 3
    assert "3 runs, 1 alive, the newest 2 shown" in "\n".join(run_list.screen(seen, View(80, 24)))


def test_an_older_run_stays_for_a_day_after_its_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would disappear the moment it fails, and no alert would fire."""
    monkeypatch.setattr(run_list, "MOST", 1)
    every, living = RunTable(runs), Made(runs / "living")
    old(living.run.plan)
    living.supervisor(os.getpid())
    assert states(every) == {"living": "running", "failed": "failed"}
    living.supervisor(dead_pid()).failure()
    for _ in range(2):
        assert states(every) == {"living": "failed", "failed": "failed"}
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + run_list.KEPT_S + 10)
    assert states(every) == {"failed": "failed"}
    assert states(RunTable(runs)) == {"failed": "failed"}


def states(every: RunTable) -> dict[str, str]:
    return {r["run"]["name"]: r["run"]["state"] for r in every.read()["runs"]}


def test_an_older_run_of_another_machine_is_shown_while_it_writes(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "MOST", 1)
    away = {"pid": 1 << 30, "host": "gpu-box-2", "ranks": []}
    for name in ("living", "finished"):
        supervisor = rundir.read_json(runs / name / "supervisor.json") or {}
        rundir.write_json(runs / name / "supervisor.json", supervisor | away)
    assert states(RunTable(runs)) == {"living": "running", "failed": "failed"}


def test_wide_letters_and_long_names(tmp_path: Path) -> None:
    for name in (
        "图像恢复_五号",
        "quickstart_of_the_long_night_20261121_031906",
        "quickstart_of_the_long_night_20261121_032227",
    ):
        Made(tmp_path / "experiments" / name).supervisor(dead_pid()).steps(40).summary()
    lines = run_list.screen(RunTable(tmp_path / "experiments").read(), View(80, 24))
    rows = [line for line in lines if "FINISHED" in line]
    assert len({cells(row[: row.index("FINISHED")]) for row in rows}) == 1
    assert any("031906" in row for row in rows) and any("032227" in row for row in rows)


def test_long_losses_keep_the_columns(tmp_path: Path) -> None:
    losses = {"pixels": 12345.6789, "snr": -200.1234, "huge": 2.885e12, "least": -1.7e300}
    losses |= {"bits": 2.1234, "tiny": -1.234e-7, "plain": -123456789.0}
    for name in losses:
        Made(tmp_path / name).supervisor(dead_pid()).steps(2)
    seen = RunTable(tmp_path).read()
    for run in seen["runs"]:
        loss = losses[run["run"]["name"]]
        run["training"] |= {"loss": loss, "eval_best": loss, "bytes_per_token": None}
        row = "".join(text for text, _ in run_list._row(run, 12, False, False))
        head = run_list._titles(seen["runs"], 12, False)
        figures = row[: head.index("EVAL") + 4].split()[-2:]
        assert len(row) == len(head) and figures[0] == figures[1]
        assert float(figures[0]) == pytest.approx(loss, rel=0.2)


def test_json_and_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert monitor.main(["--all", "--json"]) == 0
    assert [r["run"]["name"] for r in json.loads(capsys.readouterr().out)["runs"]] == [
        "living",
        "failed",
        "finished",
    ]
    (runs / "living" / "supervisor.json").unlink()
    for beat in (runs / "living" / "heartbeat").glob("*"):
        beat.unlink()
    assert monitor.main(["--all", "--interval=0.2"]) == 0  # no active run: a line each, then exit
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_no_runs_give_an_empty_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.core.project.WORK", tmp_path)
    assert monitor.main(["--all", "--once"]) == 0
    assert "0 runs, 0 alive" in capsys.readouterr().out


def test_run_is_opened_and_closed(
    tmp_path: Path, copied: Callable[[Path], Path], people: Callable[..., Person]
) -> None:
    command = copied(tmp_path / "project")
    experiments = command.parent / "experiments"
    Made(experiments / "first").supervisor(os.getpid()).steps(100).beats()
    Made(experiments / "second").supervisor(dead_pid()).steps(20).summary()
    person = people("--all", "--interval=0.2", command=str(command))
    person.until(lambda: "> first" in person.sees and "2 runs, 1 alive" in person.sees)
    person.child.send("\x1b[B")
    person.until(lambda: "> second" in person.sees)
    person.child.send("\r")
    person.until(lambda: "Duet  second" in person.sees and "FINISHED" in person.sees)
    person.child.send("\x1b")
    # still marked
    person.until(lambda: "2 runs, 1 alive" in person.sees and "> second" in person.sees)
    person.child.send("q")
    assert person.left() == (0, None)
