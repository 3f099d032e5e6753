"""Fault injection without a training: syntax and timing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, ROOT, ask, python, wrong
from training.config import fault_spec
from training.config.fault_spec import Spec, parse
from training.core import heartbeat
from training.core.rundir import RunDir, read_records
from training.launcher import endings
from training.trainer import faults, inject

FAULTS = """
    sleep lock_tqdm gil loop stop io desync desync_shape kill segv abort exit raise ecc oom nan empty no_data slow slow_disk enospc
    corrupt files wandb_hang worker_stuck worker_kill worker_raise worker_bus
"""


def one(text: str, ranks: int = 2) -> Spec:
    specs, problems = parse(text, ranks)
    assert problems == []
    (spec,) = specs
    return spec


def test_the_faults_are_pinned_and_described() -> None:
    assert sorted(faults.TABLE) == sorted(FAULTS.split())
    for fault in faults.TABLE.values():
        assert 10 < len(fault.text) < 120, fault.name
        assert fault.text in fault_spec.overview()
        assert set(fault.keys) <= set(fault_spec.KEYS)
    assert all(f"\n  {key} " in fault_spec.overview() for key in fault_spec.KEYS)


def test_every_key() -> None:
    spec = one(
        "slow@rank=0,step=7,epoch=2,phase=creating data iterator,call=3,attempt=2,seconds=1.5"
    )
    assert (spec.fault.name, spec.rank, spec.step, spec.epoch, spec.phase) == (
        "slow",
        0,
        7,
        2,
        "creating data iterator",
    )
    assert (spec.call, spec.attempt, spec.seconds) == (3, 2, 1.5)
    assert one("exit@code=7").code == 7 and one("oom@above=8").above == 8
    assert one("worker_kill@worker=1,epoch=2").worker == 1
    assert one("kill@attempt=any").attempt is None


def test_several_and_spaces() -> None:
    specs, problems = parse(" corrupt@step=8 ; kill@rank=0, step=11;", 2)
    assert problems == [] and [s.fault.name for s in specs] == ["corrupt", "kill"]
    assert (specs[1].rank, specs[1].step) == (0, 11)


@pytest.mark.parametrize(
    ("text", "ranks", "rank", "step", "phase"),
    [
        ("kill", 2, 1, fault_spec.STEP, "forward"),
        ("kill", 1, 0, fault_spec.STEP, "forward"),
        ("kill@step=3", 2, 1, 3, "forward"),
        ("kill@epoch=2", 2, 1, None, "creating data iterator"),
        ("kill@phase=barrier", 2, 1, None, "barrier"),
        ("empty", 2, 1, fault_spec.STEP, "fetch"),
        ("corrupt", 2, 0, None, "checkpoint"),
        ("no_data", 2, 1, None, "creating data iterator"),
        ("wandb_hang", 2, 0, None, "building the model"),
    ],
)
def test_defaults(text: str, ranks: int, rank: int, step: int | None, phase: str) -> None:
    spec = one(text, ranks)
    assert (spec.rank, spec.step, spec.phase) == (rank, step, phase)


COMMAND = "./launch_train.sh 2 configs/dual_gpu/quickstart.py --device=cpu"


def problems(text: str, *flags: str) -> list[tuple[str, str, list[str]]]:
    found = wrong(
        "2",
        "configs/dual_gpu/quickstart.py",
        "--device=cpu",
        f"--inject={text}",
        *flags,
        script=LAUNCH,
    )
    origin = " (from --inject on the command line)"
    assert all(p.what.startswith("inject: ") and p.what.endswith(origin) for p in found)
    return [
        (p.what.removeprefix("inject: ").removesuffix(origin), p.allowed, p.fixes) for p in found
    ]


@each(
    ("text", "what", "allowed", "fixes"),
    [
        ("kil@rank=0", "unknown fault 'kil'", "", [f"{COMMAND} --inject=kill@rank=0"]),
        ("quux", "unknown fault 'quux'", ", ".join(faults.TABLE), [f"{COMMAND} --inject=list"]),
        (
            "kill@stp=5",
            "unknown key 'stp' of kill",
            "rank, step, epoch, phase, call, attempt",
            ["step=5"],
        ),
        (
            "kill@seconds=5",
            "unknown key 'seconds' of kill",
            "rank, step, epoch, phase, call, attempt",
            [],
        ),
        (
            "worker_kill@step=5",
            "unknown key 'step' of worker_kill",
            "rank, epoch, worker, call, attempt",
            [],
        ),
        ("kill@step", "'step' of kill has no value", "step=…", []),
        ("kill@step=five", "step of kill is 'five'", "a whole number from 1", []),
        ("kill@step=0", "step of kill is '0'", "a whole number from 1", []),
        ("kill@rank=-1", "rank of kill is '-1'", "a whole number from 0", []),
        ("kill@attempt=all", "attempt of kill is 'all'", "a whole number from 1, or any", []),
        ("kill@phase=", "phase of kill is ''", "part of a phase name, such as 'barrier'", []),
        ("exit@code=256", "code of exit is '256'", "a whole number from 0 to 255", []),
        ("slow@seconds=nan", "seconds of slow is 'nan'", "seconds above 0", []),
        ("slow@seconds=0", "seconds of slow is '0'", "seconds above 0", []),
        ("kill@step=5,step=6", "step of kill is given twice", "once", []),
        ("kill@rank=2", "rank 2 of 'kill@rank=2' does not exist", "0 to 1", []),
        ("corrupt@rank=1", "corrupt cannot happen on rank 1, only on rank 0", "rank=0", []),
        (
            " ; ",
            "no fault given",
            "FAULT@key=value,…",
            [f"{COMMAND} --inject=kill@rank=1,step=5"],
        ),
    ],
)
def test_errors(text: str, what: str, allowed: str, fixes: list[str]) -> None:
    assert problems(text) == [(what, allowed, fixes)]


def test_the_list_has_the_place_of_each_fault() -> None:
    lines = {line.split()[0]: line for line in fault_spec.overview().splitlines() if line.strip()}
    assert lines["kill"].endswith(f"[step {fault_spec.STEP}, forward]")
    assert lines["empty"].endswith(f"[step {fault_spec.STEP}, fetch]")
    assert lines["enospc"].endswith("[rank 0 only; checkpoint]")
    assert lines["worker_kill"].endswith("[first batch of worker 0]")


def test_a_worker_needs_workers() -> None:
    needs = "files needs data-loader worker 0, but num_workers is 0"
    fix = f"{COMMAND} --inject=files --num_workers=1"
    assert problems("files", "--num_workers=0") == [(needs, "", [fix])]
    needs = "worker_kill needs data-loader worker 1, but num_workers is 1"
    assert problems("worker_kill@worker=1", "--num_workers=1") == [
        (needs, "", [f"{COMMAND} --inject=worker_kill@worker=1 --num_workers=2"])
    ]
    ask(
        "2",
        "configs/dual_gpu/quickstart.py",
        "--num_workers=2",
        "--inject=worker_kill@worker=1",
        script=LAUNCH,
    )


def test_all_errors_at_once() -> None:
    assert len(problems("kil;kill@step=x,rank=y;corrupt@rank=1")) == 4


def test_the_plan_notes_injected_faults() -> None:
    request = ask("2", "configs/dual_gpu/quickstart.py", "--inject=kill", script=LAUNCH)
    assert "fault injection enabled: kill (from --inject on the command line)" in request.notes
    assert ask("2", "configs/dual_gpu/quickstart.py", script=LAUNCH).config.inject == ""


def test_a_script_has_no_phases() -> None:
    done = python(
        str(ROOT / "lib/run_module.py"),
        "training.cli.check_request",
        LAUNCH,
        "2",
        "--script",
        __file__,
        "--inject=kill",
    )
    assert done.returncode == 2 and "--inject is a field of Duet's own training" in done.stderr


@pytest.mark.parametrize(
    "program", [["lib/run_module.py", "training.cli.plan", LAUNCH], ["train.py"]]
)
def test_list(program: list[str]) -> None:
    done = python(str(ROOT / program[0]), *program[1:], "--inject=list")
    assert (done.returncode, done.stdout.rstrip("\n"), done.stderr) == (
        0,
        fault_spec.overview(),
        "",
    )


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[Callable[..., RunDir]]:
    """Arm this process as a rank, and restore its heartbeat afterwards."""
    before = heartbeat.current
    run = RunDir(tmp_path)
    run.create()

    def arm(text: str, rank: int = 1, attempt: str = "1", **config: object) -> RunDir:
        heartbeat.start(run.heartbeat(rank), rank)
        plan = {"config": {"inject": text, **config}, "ranks": 2, "device": {"value": "cpu"}}
        inject.arm(plan, run, rank, {fault_spec.ATTEMPT: attempt})
        return run

    yield arm
    heartbeat.current = before


def beats(*phases: str, step: int = 5, epoch: int = 1) -> None:
    heartbeat.current.step, heartbeat.current.epoch = step, epoch
    for phase in phases:
        heartbeat.current.beat(phase)


def test_it_happens_once_and_is_recorded_before(armed: Callable[..., RunDir]) -> None:
    run = armed("raise@step=5,phase=forward")
    beats("fetch", "forward", step=4)
    beats("fetch")
    with pytest.raises(ValueError, match="injected on purpose"):
        beats("forward")
    (event,) = read_records(run.events)
    assert (event["event"], event["fault"], event["rank"], event["text"]) == (
        "injected",
        "raise",
        1,
        "raise@step=5,phase=forward",
    )
    assert event["pid"] == os.getpid()
    beats("forward")
    beat = heartbeat.read(run.heartbeat(1))
    assert beat and str(beat) == "step 5: forward", "published before it happened"


def test_the_n_th_time_and_parts_of_a_phase(armed: Callable[..., RunDir]) -> None:
    armed("raise@epoch=2,phase=creating,call=2")
    beats("epoch 1: creating data iterator", epoch=1)
    beats("epoch 2: creating data iterator", epoch=2)
    with pytest.raises(ValueError):
        beats("epoch 2: creating data iterator", epoch=2)


@pytest.mark.parametrize(
    ("text", "rank", "attempt"),
    [("raise", 0, "1"), ("raise", 1, "2"), ("raise@attempt=2", 1, "1"), ("", 1, "1")],
)
def test_other_ranks_have_an_ordinary_heartbeat(
    armed: Callable[..., RunDir], text: str, rank: int, attempt: str
) -> None:
    armed(text, rank, attempt)
    assert type(heartbeat.current) is heartbeat.Heartbeat
    beats("forward")


@pytest.mark.parametrize(
    ("text", "attempt"), [("raise@attempt=2", "2"), ("raise@attempt=any", "3")]
)
def test_another_start(armed: Callable[..., RunDir], text: str, attempt: str) -> None:
    armed(text, attempt=attempt)
    with pytest.raises(ValueError):
        beats("forward")


def test_out_of_memory_above_a_batch_size_only(armed: Callable[..., RunDir]) -> None:
    run = armed("oom@above=4", device_batch_size=4)
    beats("forward")
    assert list(read_records(run.events)) == [], "it did not happen"


def test_missed_faults_are_reported_at_the_end(armed: Callable[..., RunDir]) -> None:
    run = armed("raise@step=400")
    beats("forward", heartbeat.FINISHED)
    assert [e["text"] for e in read_records(run.events)] == [
        "inject: raise@step=400 did not happen: rank 1 did not reach it"
    ]
    now: Any = {"config": {"inject": "raise@step=400"}, "created": 0.0}
    assert endings.missed_faults(run, now) == [e["text"] for e in read_records(run.events)]
    assert endings.missed_faults(run, now | {"created": time.time() + 1}) == [], "of an earlier run"


def test_the_console_has_the_missed_faults_of_rank_0(armed: Callable[..., RunDir]) -> None:
    run = armed("raise@rank=0,step=400", rank=0)
    beats(heartbeat.FINISHED)
    plan: Any = {"config": {"inject": "raise@rank=0,step=400"}, "created": 0.0}
    assert [e["event"] for e in read_records(run.events)] == ["warning"]
    assert endings.missed_faults(run, plan) == []
