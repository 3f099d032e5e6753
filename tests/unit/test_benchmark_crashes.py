"""The checks of the crash benchmark must find every kind of damage."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import crash_moments as moments
from benchmarks import crash_proof as proof
from benchmarks.crash_report import LOST, Tally, report
from tests.cases import each
from training.core import manifest
from training.core.rundir import RunDir, append_json, write_json

FACTS = {
    "epoch": 0,
    "used": 0,
    "shape": {},
    "optimizer": "muon",
    "world_size": 2,
    "data": {},
    "tokenizer": "bytes",
}


def checkpoint(run: RunDir, step: int, state: bytes = b"") -> Path:
    state, folder = (
        state or f"weights of {step}".encode(),
        run.checkpoints / manifest.folder_name(step),
    )
    folder.mkdir(parents=True)
    (folder / "state.pt").write_bytes(state)
    manifest.write(
        folder,
        {"step": step, **FACTS, "bytes": len(state), "sha256": proof.checksum(folder / "state.pt")},
    )
    return folder


def record(run: RunDir, step: int, **more: Any) -> None:
    measured = {
        "time": random.random(),
        "step_ms": random.random(),
        "compute_ms": [random.random()],
        "memory_bytes": [random.randrange(1 << 30)],
    }
    append_json(run.metrics, {"step": step, "loss": 1 / step, **measured, **more})


def trained(run: RunDir, steps: int = 10) -> RunDir:
    run.create()
    for step in range(1, steps + 1):
        record(run, step)
        if step % 5 == 0:
            checkpoint(run, step)
    append_json(run.metrics, {"time": 1.0, "step": 10, "val_loss": 0.5, "eval_ms": random.random()})
    write_json(run.summary, dict.fromkeys(proof.SAME, 1) | {"steps": steps})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return trained(RunDir(tmp_path / "run"))


@pytest.fixture
def whole(tmp_path: Path) -> proof.Reference:
    return proof.reference(trained(RunDir(tmp_path / "whole")))


def test_the_same_run_has_nothing_wrong(run: RunDir, whole: proof.Reference) -> None:
    record(run, 3)  # from a start that was killed
    assert proof.damaged(run, whole) == proof.wrong_end(run, whole) == []
    assert (whole.steps, whole.every, proof.newest(run)) == (10, 5, 10)


def test_every_damage_of_a_checkpoint_is_found(run: RunDir, whole: proof.Reference) -> None:
    newest = run.checkpoints / "step_00000010"
    (newest / "state.pt").write_bytes(b"flipped")
    assert proof.damaged(run, whole) == ["step_00000010: state.pt does not match its checksum"]
    (newest / "state.pt").unlink()
    assert proof.damaged(run, whole) == [
        "step_00000010: cannot read state.pt: No such file or directory"
    ]
    (newest / "manifest.json").unlink()
    assert proof.damaged(run, whole) == ["step_00000010: manifest.json is missing or damaged"]
    shutil.rmtree(newest)
    checkpoint(run, 10, b"complete, but from another training")
    assert proof.damaged(run, whole) == ["step_00000010: other weights than the uninterrupted run"]
    assert any("other weights" in text for text in proof.wrong_end(run, whole))


def test_any_different_metric_is_found(run: RunDir, whole: proof.Reference) -> None:
    record(run, 3, loss=1 / 3 + 1e-16)
    assert len(proof.wrong_records(list(proof.read_records(run.metrics)), whole)) == 1
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text(
        "\n".join(line for line in lines if json.loads(line)["step"] not in (3, 10)) + "\n"
    )
    assert proof.wrong_end(run, whole) == [
        "metrics.jsonl lacks loss of step 3, loss of step 10, val_loss of step 10"
    ]


def test_leftovers_of_a_finished_run_are_found(run: RunDir, whole: proof.Reference) -> None:
    write_json(run.failure, {})
    (run.checkpoints / ".writing-abc").mkdir()
    write_json(run.summary, dict.fromkeys(proof.SAME, 1) | {"steps": 10, "sample": "other"})
    shutil.rmtree(run.checkpoints / "step_00000010")
    assert proof.wrong_end(run, whole) == [
        "the last checkpoint is of step 5, not 10",
        "summary.json: sample is 'other', not 1",
        "failure.json is left over",
        f"a partial checkpoint is left in {run.checkpoints}",
    ]


def test_a_run_killed_in_its_sample_is_complete(run: RunDir, whole: proof.Reference) -> None:
    write_json(run.summary, dict.fromkeys(proof.SAME, 1) | {"steps": 10, "sample": None})
    follows = proof.Continuity(run)
    run.event("start", step=0)
    assert follows.launched() and proof.wrong_end(run, whole)
    follows.problems(10)
    assert not follows.launched() and not proof.wrong_end(run, whole, launched=False)


def test_a_start_continues_from_the_newest_and_announced_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    follows = proof.Continuity(run)
    for kind, step in (("start", 0), ("checkpoint", 5)):
        run.event(kind, step=step)
    assert follows.problems(10) == []  # killed between the rename and its announcement
    run.event("start", step=10)
    assert follows.problems(10) == []
    run.event("start", step=5)
    assert follows.problems(10) == ["started at step 5, but the newest checkpoint was of step 10"]
    for kind, step in (("start", 10), ("checkpoint", 15)):
        run.event(kind, step=step)
    assert follows.problems(10) == [
        "step 15 was announced as saved, but the newest checkpoint is of step 10"
    ]


def test_a_start_killed_before_its_first_event_changes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    follows = proof.Continuity(run)
    assert follows.problems(0) == follows.problems(0) == []
    run.event("start", step=5)
    assert len(follows.problems(5)) == 1


def test_steps_lost(whole: proof.Reference) -> None:
    assert (proof.lost(12, 10), proof.lost(0, 10)) == (2, 0)
    assert proof.most_lost(whole) == 10


def test_every_round_has_every_victim_and_the_script_only_before_the_supervisor() -> None:
    dealer = moments.Dealer(random.Random(1), 2)
    victims = Counter(
        dealer.draw(supervised=False, training=False).victim.split()[0]
        for _ in range(5 * len(moments.ROUND))
    )
    assert victims == {victim: 5 * moments.ROUND.count(victim) for victim in moments.ROUND}
    drawn = [dealer.draw(supervised=True, training=False).victim for _ in range(50)]
    assert moments.LAUNCHER not in drawn and {"rank 0", "rank 1", moments.SUPERVISOR} <= set(drawn)


def test_phases_with_few_hits_come_first() -> None:
    dealer = moments.Dealer(random.Random(1), 2)
    dealer.hit.update(dict.fromkeys(moments.PHASES, 100))
    dealer.hit["gather state"] = dealer.hit["reduce"] = 0
    drawn = {m.phase for m in (dealer.draw(supervised=True, training=True) for _ in range(60))}
    assert drawn == {"gather state", "reduce", moments.WRITING, moments.REMOVING}


@each(
    ("phase", "steps_on", "origin", "first"),
    [
        ("forward", 3, 20, 23),
        ("forward", 9, 45, moments.STEPS),
        ("gather state", 1, 20, 25),
        ("evaluation", 4, 12, 30),
        (moments.WRITING, 1, 0, 5),
        ("barrier: before iteration", 1, 20, 21),
        ("barrier: before iteration", 2, 20, 0),
        ("sample", 1, 20, moments.STEPS),
        ("building the model", 5, 20, 0),
        ("forward", 3, moments.STEPS, 0),
    ],
)
def test_first_step_of_a_moment(phase: str, steps_on: int, origin: int, first: int) -> None:
    assert moments.Moment("rank 0", 0, phase, steps_on, 0).first_step(origin) == first


def test_a_missed_moment_is_now_or_recurs() -> None:
    model = moments.Moment("rank 0", 0, "waiting for data", 1, 0)
    assert not model.now("importing torch", 0, 0, False)
    assert model.now("waiting for data", 0, 0, False) and model.now(
        "building the model", 0, 0, False
    )
    forward = moments.Moment("rank 0", 0, "forward", 1, 0)
    assert not forward.now("forward", 4, 5, False) and forward.now("forward", 5, 5, False)
    assert not forward.now("backward", 5, 5, False), "it recurs"
    assert forward.now("sample", 48, 5, False), "it does not recur"
    writing = moments.Moment("rank 0", 0, moments.WRITING, 1, 0)
    assert writing.now("forward", 6, 5, True) and not writing.now("forward", 6, 5, False)


def test_the_table_counts_everything() -> None:
    tally = Tally(starts=5, restarts=2, lost=[1, 4, 2], gone_s=[0.5])
    tally.kills.update(
        {("rank 0", "forward"): 2, ("rank 1", "forward"): 1, ("supervisor", "backward"): 4}
    )
    tally.wrong[LOST] += 1
    lines = [line.split() for line in report(tally, 2, 60).splitlines()]
    assert ["forward", "3", "2", "1", "·"] in lines and ["all", "7", "2", "1", "4"] in lines
    text = report(tally, 2, 60)
    assert (
        "7 in 2 runs" in text
        and "3 resumed by command, 2 restarted" in text
        and "median 2, at most 4" in text
    )
    assert next(line for line in text.splitlines() if line.startswith(LOST)).split()[-1] == "1"
