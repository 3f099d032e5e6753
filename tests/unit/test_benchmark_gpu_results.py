"""`make gpu`: what its folder keeps when stages are resumed, repeated or of another commit."""

from __future__ import annotations

import errno
import functools
import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, machine, results, stages
from tests.unit.test_benchmark_gpu import figures, made, session, stage


def test_a_stage_that_is_done_is_kept_for_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stage(lambda _: figures(1)), stage(lambda _: figures(2), name="two")
    monkeypatch.setattr(results, "STAGES", {"one": one, "two": other})
    kept = results.Results(session(tmp_path))
    assert kept.before(one) is None
    done = kept.session.measure(one)
    assert done["status"] == "done" and done["figures"] == {"value": 1}
    kept.keep(one, done)
    kept.keep(other, kept.session.measure(other))
    assert kept.before(one) == done
    for changed in ({"commit": "def"}, {"smoke": True}, {"machine": made(torch="2.12.0")}):
        assert results.Results(session(tmp_path, **changed)).before(one) is None
    nanochat = stage(lambda _: figures(1), nanochat=True)
    with_it = results.Results(session(tmp_path, nanochat=tmp_path))
    assert with_it.before(nanochat) is None
    with_it.keep(nanochat, measured := with_it.session.measure(nanochat))
    assert kept.before(nanochat) == measured, "more than this call asks for"


@pytest.mark.parametrize(("before", "now"), [(None, "a"), ("a", "b"), ("a", None)])
def test_a_call_keeps_what_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, now: str | None
) -> None:
    """Also with another checkout of nanochat; not of another commit."""
    speed = stage(lambda _: figures(1), name="speed", nanochat=True)
    oom = stage(lambda _: figures(2), name="oom")
    monkeypatch.setattr(results, "STAGES", {"speed": speed, "oom": oom})
    checkouts = [one and tmp_path / one for one in (before, now)]
    run = functools.partial(command._all, again=False)
    run(session(tmp_path, nanochat=checkouts[0]), [speed])
    run(session(tmp_path, nanochat=checkouts[1]), [oom])
    assert set(json.loads((tmp_path / "gpu.json").read_text())["stages"]) == {"speed", "oom"}
    run(session(tmp_path, nanochat=checkouts[1], commit="def"), [oom])
    assert set(json.loads((tmp_path / "gpu.json").read_text())["stages"]) == {"oom"}
    earlier = json.loads((tmp_path / "gpu-abc.json").read_text())
    assert set(earlier["stages"]) == {"speed", "oom"} and earlier["commit"] == "abc"
    run(session(tmp_path, nanochat=checkouts[1]), [oom])
    run(session(tmp_path, nanochat=checkouts[1], commit="def"), [oom])
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"gpu.json", "gpu-abc.json", "gpu-def.json", "gpu-abc-2.json"}


@pytest.mark.parametrize("status", ["done", "failed"])
def test_figures_that_are_measured_again_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Once in a call: that copy has all that it replaces."""

    def measure(lab: bench.Bench) -> stages.Record:
        if (tmp_path / "broken").exists():
            raise bench.Failed("broken")
        return figures(1)

    both = {name: stage(measure, name) for name in ("one", "two")}
    monkeypatch.setattr(results, "STAGES", both)
    run = functools.partial(command._all, session(tmp_path), list(both.values()))
    run(again=False)
    before = (tmp_path / "gpu.json").read_bytes()
    if status == "failed":
        (tmp_path / "broken").touch()
    run(again=True)
    assert (tmp_path / "gpu-abc.json").read_bytes() == before
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert {record["status"] for record in found.values()} == {status}
    assert len(list(tmp_path.glob("gpu-*.json"))) == 1
    run(again=False)
    assert len(list(tmp_path.glob("gpu-*.json"))) == 1, "a failed stage has no figures to keep"


def test_what_a_failed_stage_has_measured_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([bench.Failed("time limit", {"value": 1}), KeyboardInterrupt()])

    def measure(lab: bench.Bench) -> stages.Record:
        raise next(ends)

    one = stage(measure)
    monkeypatch.setattr(results, "STAGES", {"one": one})
    run = functools.partial(command._all, session(tmp_path), [one], again=False)
    run()
    with pytest.raises(KeyboardInterrupt):
        run()
    earlier = json.loads((tmp_path / "gpu-abc.json").read_text())
    assert earlier["stages"]["one"]["figures"] == {"value": 1}


def test_a_smoke_run_does_not_replace_real_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.arguments(["--smoke"]).out != command.arguments([]).out
    one = stage(lambda _: figures(1))
    monkeypatch.setattr(results, "STAGES", {"one": one})
    monkeypatch.setattr(stages, "STAGES", {"one": one})
    monkeypatch.setattr(machine, "find", lambda cache, python: made())
    for smoke, code in ((True, 0), (False, 0), (True, 2)):
        wanted = command.arguments([f"--out={tmp_path}", *(["--smoke"] if smoke else [])])
        assert command._measure(wanted) == code
    assert f"try:     --out={tmp_path}_smoke" in capsys.readouterr().err
    assert json.loads((tmp_path / "gpu.json").read_text())["smoke"] is False


def test_a_second_call_into_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(_: bench.Bench) -> stages.Record:
        return figures(command._measure(wanted))

    both = {"one": stage(twice)}
    monkeypatch.setattr(results, "STAGES", both)
    monkeypatch.setattr(stages, "STAGES", both)
    monkeypatch.setattr(machine, "find", lambda cache, python: made())
    wanted = command.arguments([f"--out={tmp_path}"])
    assert command._measure(wanted) == 0
    assert f"[ERROR] PID {os.getpid()} on " in capsys.readouterr().err
    record = json.loads((tmp_path / "gpu.json").read_text())["stages"]["one"]
    assert record["figures"] == {"value": 3}


@pytest.mark.parametrize("room", [False, True], ids=["full", "room after the failed stage"])
def test_a_full_disk_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: bool
) -> None:
    def fills(lab: bench.Bench) -> stages.Record:
        large = lab.folder / "checkpoint"
        large.touch()
        write = results.write_json

        def full(path: Path, record: object) -> None:
            if large.exists() or not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, record)

        monkeypatch.setattr(results, "write_json", full)
        raise bench.Failed("no space", {"value": 1})

    both = {"one": stage(fills)}
    monkeypatch.setattr(results, "STAGES", both)
    monkeypatch.setattr(stages, "STAGES", both)
    monkeypatch.setattr(machine, "find", lambda cache, python: made())
    code = command._measure(command.arguments([f"--out={tmp_path}"]))
    printed = capsys.readouterr()
    if room:
        kept = json.loads((tmp_path / "gpu.json").read_text())["stages"]
        assert code == 1 and kept["one"]["figures"] == {"value": 1}
        return
    (line,) = (line for line in printed.out.splitlines() if line.startswith("{"))
    assert code == 3 and json.loads(line)["one"]["figures"] == {"value": 1}
    assert f"[ERROR] {tmp_path}: No space left on device" in printed.err


def test_a_folder_that_cannot_hold_the_results_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(cache: Path, python: str) -> machine.Machine:
        raise machine.NoGpu("probed")

    monkeypatch.setattr(machine, "find", find)
    file, folder = tmp_path / "file", tmp_path / "new"
    file.write_text("")

    def refused(out: Path) -> str:
        assert command._measure(command.arguments([f"--out={out}"])) == 3
        return capsys.readouterr().err

    assert "probed" in refused(folder) and not folder.exists()
    for out in (file, file / "below"):
        assert str(file) in (text := refused(out)) and "probed" not in text
    folder.mkdir()
    for found in ({"oom": {"status": "done"}}, {"oom": {"key": 1}}, {"oom": None}, [1]):
        (folder / "gpu.json").write_text(json.dumps({"stages": found}))
        assert "gpu.json" in (text := refused(folder)) and "probed" not in text
    (folder / "gpu.json").unlink()
    monkeypatch.setattr(results.os, "access", lambda *_: False)
    assert str(folder) in (text := refused(folder)) and "probed" not in text


def test_a_killed_stage_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def killed_once(_: bench.Bench) -> stages.Record:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return figures(len(calls))

    one = stage(killed_once)
    monkeypatch.setattr(results, "STAGES", {"one": one})
    run = functools.partial(command._all, session(tmp_path), [one])
    kept = results.Results(session(tmp_path))
    assert run(again=False) == 0 and run(again=False) == 0 and len(calls) == 1
    with pytest.raises(KeyboardInterrupt):
        run(again=True)
    assert kept.before(one) is None
    assert run(again=False) == 0 and len(calls) == 3
    assert (kept.before(one) or {})["figures"] == {"value": 3}
