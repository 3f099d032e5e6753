"""Advice after a GPU of a training has run out of memory, and the plan of a resume after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.unit import test_launch_recovery
from tests.unit.conftest import ask
from tests.unit.test_launch_remedy import error
from tests.unit.verdicts import new_run
from training.core import find_run
from training.core.rundir import RunDir, write_json
from training.diagnose.advice import of_end, values
from training.host.decisions import AS_ASKED, Decision
from training.launcher.recovery_policy import remedy
from training.launcher.replan import changed_plan
from training.launcher.restart import GiveUp
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload, estimate
from training.tasks.gpt.spec import GptSpec
from training.tasks.memory import SAVINGS
from training.tasks.planning import Decided, Situation

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import EndRecord
    from training.plan.request import Request

SMALL = StepWorkload(2, 2, 64, 320, bf16=True, compiled=False)
LARGE = StepWorkload(24, 8, 4096, 65536, bf16=True, compiled=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(find_run, "WORK", tmp_path)  # the run is in its experiments/
    return new_run(tmp_path)


def plan(load: StepWorkload) -> Plan:
    made = test_launch_recovery.plan(size=load.sequences)
    made["config"]["total_batch_size"] = 8 * load.sequences * load.seq_len
    made["origins"] |= dict.fromkeys(("out_dir", "log_dir"), "default")
    made["batch"] |= {"device_sequences": load.sequences, "seq_len": load.seq_len}
    made["memory"] = {**estimate(load).record(), "load": vars(load)}
    made["gpus"] = [{"total_bytes": 24 << 30}] * 2
    return cast("Plan", made)


def told(
    run: RunDir, load: StepWorkload, allocated: int | None = None, of: Plan | None = None
) -> str:
    end: dict[str, Any] = {"cause": "gpu_oom", "kind": "error", "phase": None, "summary": ""}
    if allocated is not None:
        end["memory"] = {"allocated_bytes": allocated}
    return "\n".join(of_end(cast("EndRecord", end), None, {}, values(run, of or plan(load))))


def test_estimates_that_print_alike_are_not_compared(run: RunDir) -> None:
    assert "fits_gib" not in values(run, plan(SMALL))
    assert "GiB" not in told(run, SMALL)
    known = values(run, plan(LARGE))
    assert float(known["fits_gib"]) < float(known["needs_gib"])
    assert f"{known['fits_gib']} of 24.0 GiB" in told(run, LARGE)


def test_a_gpu_of_unknown_memory_has_no_size(run: RunDir) -> None:
    made = plan(LARGE)
    made["gpus"][1]["total_bytes"] = None
    known = values(run, made)
    assert "gpu_gib" not in known
    assert f"about {known['fits_gib']} GiB instead of" in told(run, LARGE, of=made)


def test_memory_far_above_the_estimate_replaces_it(run: RunDir) -> None:
    total = estimate(LARGE).total
    for allocated, beyond in ((total, False), (2 * total, True)):
        found = told(run, LARGE, allocated)
        assert (f"{allocated / (1 << 30):.1f} GiB allocated" in found) is beyond
        assert (values(run, plan(LARGE))["fits_gib"] in found) is not beyond
    assert "allocated" in told(run, replace(SMALL, sequences=1), 23 << 30), "also without a smaller"


def test_a_task_whose_step_was_not_measured_has_no_estimate(run: RunDir) -> None:
    unmeasured = plan(LARGE)
    del unmeasured["memory"]
    assert not {"fits_gib", "estimated_bytes"} & values(run, unmeasured).keys()


def test_savings_that_keep_the_model_come_before_a_smaller_one(run: RunDir) -> None:
    one = replace(LARGE, sequences=1)
    known = values(run, plan(one))
    flags = known["lighter_command"].partition(" --resume=run ")[2]
    assert flags and known["lighter"].startswith(flags)
    assert known["lighter_command"] in told(run, one).splitlines()
    fields = dict(one.removeprefix("--").split("=") for one in shlex.split(flags))
    blocks, chunks = (int(fields.pop(n)) for n in ("activation_checkpointing", "loss_chunks"))
    assert not fields
    saved = replace(one, blocks=blocks, chunks=chunks)
    assert estimate(saved).total < estimate(one).total
    # with them nothing but a smaller model is left
    assert memory_fit.lightest(saved) == {}
    # its least estimate is that of a mixture, which only auto chooses, where it is needed
    tiny = replace(SMALL, sequences=1, total_tokens=2 * SMALL.seq_len)
    assert memory_fit.lightest(tiny) == {"activation_checkpointing": 2, "loss_chunks": 2}
    assert "lighter_command" not in values(run, plan(saved))
    assert values(run, plan(saved))["lighter"] == GptSpec.lighter
    for load, first in ((one, known["lighter"]), (saved, GptSpec.lighter)):
        given_up = remedy(error("gpu_oom"), cast(Any, plan(load)), [])
        assert isinstance(given_up, GiveUp) and given_up.reason.endswith(first)


# ── the resume after it


FAILED = {"launch": "a1b2", "cause": "gpu_oom"}
Begin = Callable[..., "tuple[RunDir, Plan]"]
SAVED = ("device_batch_size", "activation_checkpointing", "loss_chunks")  # fields
SIZES = ("--depth=20", "--max_seq_len=2048", "--total_batch_size=524288", "--device_batch_size=4")


def decided(request: Request, gib: float) -> Decided:
    machine = Situation("cuda", Decision("bf16", ""), Decision(True, ""), int(gib * (1 << 30)))
    return request.kind.decide(request, machine)


def planned(request: Request, found: Decided) -> Plan:
    made = test_launch_recovery.plan(size=found.batch.device_sequences)
    made |= found.fields | {"batch": found.batch.record(), "config": request.values()}
    made["origins"] = dict.fromkeys(made["config"], "default")
    made |= {"command": {"script": "train_dual_gpu.sh", "args": []}, "gpus": [{"total_bytes": 0}]}
    return cast("Plan", made | {"device": {"value": "cuda", "reason": ""}})


def of(found: Decided) -> list[int]:
    return [found.fields[name]["value"] for name in SAVINGS]


@pytest.fixture
def begin(home: Path) -> Begin:
    """A run that was planned for so many GiB."""

    def made(gib: float, *flags: str) -> tuple[RunDir, Plan]:
        request = ask("configs/dual_gpu/quickstart.py", *SIZES, *flags)
        run, then = RunDir(home / "experiments" / "night"), planned(request, decided(request, gib))
        run.create()
        write_json(run.plan, then)
        return run, then

    return made


@pytest.mark.parametrize("gib", [16, 14, 11])  # some blocks, all, and some of them as a whole
def test_the_suggested_command_needs_the_memory_of_the_card(gib: int, begin: Begin) -> None:
    run, then = begin(gib)
    known = values(run, then)
    args = shlex.split(known["smaller_command"])[1:]
    free = decided(ask(*args), gib)
    assert of(free) != [then[name]["value"] for name in SAVINGS], "without a failure"
    write_json(run.failure, FAILED | {"occupied": {}})
    assert of(decided(ask(*args), gib)) == of(free)
    write_json(run.failure, FAILED)
    kept = decided(ask(*args), gib)
    assert kept.step and f"{kept.step.estimate.total / (1 << 30):.1f}" == known["fits_gib"]
    assert of(kept) == [then[name]["value"] for name in SAVINGS]
    asked = ask(*args, "--activation_checkpointing=auto", "--loss_chunks=auto")
    assert of(decided(asked, gib)) == of(free), "on request"
    explicit = decided(ask(*args, "--activation_checkpointing=3"), gib).fields
    assert explicit["activation_checkpointing"] == {"value": 3, "reason": AS_ASKED}


def test_later_resumes_keep_the_savings_of_a_recovery(begin: Begin) -> None:
    run, then = begin(14)
    now = changed_plan(then, {"device_batch_size": 2}, "a rank was out of memory")
    for _ in range(2):
        write_json(run.plan, now)
        request = ask("--resume=night")
        found = decided(request, 14)
        assert found.batch.device_sequences == 2
        assert of(found) == [then[name]["value"] for name in SAVINGS]
        now = planned(request, found)
    less = decided(ask("--resume=night"), 7)  # of another GPU
    assert less.fields["activation_checkpointing"]["value"] > 0


# ── a resume with --deterministic


def test_a_deterministic_run_keeps_its_savings_as_long_as_they_fit(begin: Begin) -> None:
    for flags, repeats in (((), False), (("--deterministic",), True)):
        run, then = begin(16, *flags)
        before = [then[name]["value"] for name in SAVINGS]
        assert any(value > 1 for value in before)
        for gib in (14.9, 16, 40):  # 14.9: tight, which others would avoid
            found = decided(ask("--resume=night"), gib)
            assert found.step and found.step.estimate.needed <= gib * (1 << 30)
            assert (of(found) == before) == (repeats or gib == 16), (flags, gib)
            assert "keeps_savings" not in found.fields and not found.notes
        assert of(decided(ask("--resume=night"), 11)) != before, "they are too few"
        asked = ask("--resume=night", "--activation_checkpointing=auto", "--loss_chunks=auto")
        assert of(decided(asked, 40)) == [0, 0, 1], "on request"
        (run.path / "plan.json").unlink()


@pytest.mark.parametrize(
    ("gib", "flags", "fixed"),
    [
        (40, {}, None),  # nothing is saved
        (16, {}, ["activation_checkpointing", "loss_chunks"]),
        (11, {}, ["activation_checkpointing", "loss_chunks"]),  # a mixture
        (16, {"activation_checkpointing": "selective", "loss_chunks": "2"}, None),
        (40, {"device_batch_size": "auto"}, list(SAVED)),
    ],
)
def test_a_new_deterministic_run_has_flags_that_fix_its_bits(
    gib: int, flags: dict[str, str], fixed: list[str] | None, home: Path
) -> None:
    sizes = dict(one[2:].split("=") for one in SIZES)

    def made(*more: str, **fixed: str) -> Decided:
        words = [f"--{name}={value}" for name, value in (sizes | flags | fixed).items()]
        return decided(ask("configs/dual_gpu/quickstart.py", *words, *more), gib)

    usual = made().notes
    new = [note for note in made("--deterministic").notes if note not in usual]
    assert len(new) == (fixed is not None)
    for note in new:
        named = re.findall(r"--(\w+)=(\w+)", note)
        assert [name for name, _ in named] == fixed
        again = made("--deterministic", **dict(named))
        assert again.step and again.step.estimate.needed <= gib << 30
        assert not [one for one in again.notes if one not in usual]
