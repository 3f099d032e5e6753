"""A total batch that grows where GPUs would wait for their gradients (--max_total_batch_size)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ask, make_run, only, python, wrong
from tests.unit.test_plan_gradients import CARD, begun
from tests.unit.test_resuming import run_of
from training.config import resolve
from training.config.flags import parse
from training.config.origin import DEFAULT, asked_for
from training.core.errors import NothingToDo
from training.core.messages import msg
from training.core.rundir import write_json
from training.host.decisions import Decision
from training.plan import exchange, gradients, larger_batch, length
from training.plan.request import Request
from training.tasks.planning import Decided, Situation

GIB = 1 << 30
BATCH = 2 * 4 * 1024  # two ranks, one micro-batch each
SMALL = 2 * 4 * 1536  # of the default length
RUN = ("configs/dual_gpu/quickstart.py", "--depth=16", "--max_seq_len=1024")
SIZES = ("--device_batch_size=4", "--vocab_size=32768")


def grow(
    rate: float | None,
    most: int,
    *more: str,
    room: int | None = None,
    batch: int = BATCH,
    name: str = CARD,
) -> tuple[Request, Decided, list[str]]:
    sizes = (*SIZES, f"--total_batch_size={batch}", f"--max_total_batch_size={most}")
    request = ask(*RUN, *sizes, "--tokenizer=bpe", *more)
    decided = request.kind.decide(request, machine(room))
    start = begun(rate, name=name)
    return request, *larger_batch.grow(request, start, decided, machine(room))


def machine(room: int | None = None) -> Situation:
    return Situation("cuda", Decision("bf16", ""), Decision(True, ""), room)


@each(
    ("rate", "most", "factor"),
    [
        (6.0, 64 * BATCH, 8),  # as much as needed
        (6.0, 7 * BATCH, 4),  # as much as allowed
        (6.0, BATCH, 1),
        (100.0, 64 * BATCH, 1),  # hidden
        (None, 64 * BATCH, 1),  # not measured
        (6.0, 0, 1),
    ],
)
def test_the_batch_grows_as_far_as_needed_and_allowed(
    rate: float | None, most: int, factor: int
) -> None:
    request, decided, text = grow(rate, most, "--num_iterations=99")
    assert decided.batch.total_tokens == factor * BATCH == request.config.total_batch_size
    assert request.config.num_iterations == -(-99 // factor), "for the same amount of data"
    assert len(text) == (1 if most else 0)
    assert request.values()["total_batch_size"] == factor * BATCH


def test_the_batch_of_a_job_grows_in_its_first_start(home: Path) -> None:
    """The plan of a SLURM job before it has only the configuration."""
    values = grow(6.0, 0, "--num_iterations=99", batch=4 * BATCH)[0].values()
    values |= {"device_batch_size": 1}
    run = make_run(home / "experiments", "r1", **values)
    most = f"--max_total_batch_size={8 * BATCH}"
    situation = machine(80 * GIB)
    for more, factor in (dict[str, Any](), 2), ({"device": {"value": "cuda"}}, 1):
        write_json(run.plan, {"config": values} | more)
        found = ask("--resume=r1", most)
        decided = found.kind.decide(found, situation)
        assert len(decided.notes) == (factor > 1), "a larger micro-batch"
        then = larger_batch.grow(found, begun(6.0), decided, situation)[0]
        assert then.batch.total_tokens == factor * 4 * BATCH == found.config.total_batch_size
        assert found.config.num_iterations == -(-99 // factor)


def test_the_next_smaller_batch_would_not_do() -> None:
    for factor, enough in ((4, False), (8, True)):
        _, decided, _ = grow(6.0, factor * BATCH)
        one = gradients.predicted(begun(6.0), decided, Decision("bf16", ""), Decision(True, ""))
        assert one and one.accumulation == factor and one.speed_up
        assert (one.speed_up >= exchange.LITTLE * 2) is enough


def test_compressed_gradients_need_a_smaller_batch() -> None:
    found = grow(6.0, 64 * BATCH, "--gradient_compression=bf16")[1].batch.total_tokens
    assert BATCH < found < 8 * BATCH


@each(
    ("name", "rate", "wish"),
    [
        *[(CARD, rate, wish) for rate in (3.0, 6.0) for wish in ("none", "auto", "bf16")],
        *[("NVIDIA H100 80GB HBM3", rate, "auto") for rate in (6.0, 20.0, 30.0)],
    ],
)
def test_a_larger_batch_is_chosen_by_the_exchange_that_the_plan_predicts(
    name: str, rate: float, wish: str
) -> None:
    def plan(most: int) -> tuple[gradients.GradientPlan, Decided, list[str]]:
        compression = f"--gradient_compression={wish}"
        request, decided, text = grow(rate, most, compression, name=name)
        found = gradients.decide(request, [], begun(rate, name=name), decided, machine())
        return found, decided, text

    before, (after, decided, (text,)) = plan(0)[0], plan(256 * BATCH)
    assert before.notes and decided.batch.total_tokens > BATCH
    for found in (before, after):
        assert f"{gradients.times(found.fields['exchange']['speed_up'])} ×" in text
    assert not after.notes, "enough"


def test_a_batch_that_does_not_fit_is_not_chosen() -> None:
    """Gradients that are accumulated take memory besides DDP's buckets."""
    fixed = ("--loss_chunks=1", "--activation_checkpointing=none")
    _, decided, _ = grow(None, 0, *fixed)
    assert decided.step
    room = decided.step.estimate.needed + (1 << 20)
    request, decided, text = grow(6.0, 64 * BATCH, *fixed, room=room)
    assert decided.batch.total_tokens == BATCH == request.config.total_batch_size and text


@each("fits", [True, False])
def test_help_against_slow_links_fits(fits: bool) -> None:
    request, decided, _ = grow(
        None, 0, "--loss_chunks=1", "--activation_checkpointing=none", "--gradient_compression=none"
    )
    assert decided.step
    room = decided.step.estimate.needed + (GIB << 4 if fits else 1 << 20)
    (note,) = gradients.decide(request, [], begun(3.0), decided, machine(room)).notes
    one_gpu = msg("plan.gradients.help_one_gpu")  # which holds all of Muon's state
    for part in ("--max_total_batch_size=", "--gradient_compression=bf16", one_gpu):
        assert (part in note) is fits


@each(
    ("steps", "begun_before", "flag"),
    [(9, False, "--max_total"), (9, True, "--total"), (0, False, "--total")],
)
def test_the_suggested_batch_keeps_the_amount_of_data_of_a_new_run(
    steps: int, begun_before: bool, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fewer steps, which neither epochs nor a run that has begun can have."""
    plan = {"device": {"value": "cuda"}} if begun_before else None
    request, decided, _ = grow(None, 0)
    request.config = replace(request.config, num_iterations=steps)
    monkeypatch.setattr(gradients.standing, "plan_of_start", lambda run: plan)
    (note,) = gradients.decide(request, [], begun(3.0), decided, machine()).notes
    assert f"{flag}_batch_size=" in note


@each(
    ("typed", "batch", "steps"),
    [
        (["--max_total_batch_size=4096", "--num_iterations=100"], 2048, 25),
        (["--max_total_batch_size=4096"], 2048, 30),
        (["--max_total_batch_size=4096", "--num_iterations=0"], 2048, 0),
        (["--max_total_batch_size=1024", "--num_iterations=100"], 512, 100),
        (["--max_total_batch_size=4096", "--total_batch_size=768"], 768, 30),
    ],
)
def test_the_command_of_a_grown_run_continues_it(typed: list[str], batch: int, steps: int) -> None:
    recorded = {name: (value, DEFAULT) for name, value in values().items()}
    file = {"total_batch_size": (512, "c.py:1")}
    for line, lines in (
        (parse(["--total_batch_size=512", *typed]), {}),
        *([] if "--total_batch_size=768" in typed else [(parse(typed), file)]),
    ):
        own = resolve.resolve(line, lines, {}).config
        resolved = resolve.resolve(line, lines, {}, recorded)
        length.keep_batch(resolved, recorded, own)
        assert resolved.config.num_iterations == steps, lines
        origin = resolved.origins["num_iterations"]
        assert steps or "total_batch_size" not in origin, "0, no limit, is not divided"
        if steps == 25:
            assert origin == msg("plan.larger_batch.origin_steps", steps=100, factor=4)
            assert asked_for(origin) and origin.name == "--num_iterations"
        wanted = 2048 if lines else batch  # the run wins over a file
        assert resolved.config.total_batch_size == wanted


def test_a_command_without_the_limit_counts_the_steps_of_the_run(home: Path) -> None:
    make_run(home / "experiments", "r1", **sizes(4 * SMALL, 30), max_total_batch_size=4 * SMALL)
    make_run(home / "experiments", "r2", **sizes(4 * SMALL, 30))  # it never grew
    own = (f"--max_total_batch_size={4 * SMALL}", f"--total_batch_size={SMALL}")
    for run, more, steps in (("r1", (), 120), ("r1", own, 30), ("r2", own[:1], 120)):
        found = ask(f"--resume={run}", "--num_iterations=120", *more).config
        assert (found.num_iterations, found.total_batch_size) == (steps, 4 * SMALL), (run, more)


@each(("typed", "steps"), [((), 60), ((f"--total_batch_size={SMALL}",), 240)])
def test_a_finished_grown_run_is_prolonged(typed: tuple[str, ...], steps: int, home: Path) -> None:
    limits = sizes(4 * SMALL, 30) | {"max_total_batch_size": 4 * SMALL}
    run_of(home, f"r{steps}", steps=30, status="done", **limits)
    growing = (f"--max_total_batch_size={4 * SMALL}", *typed) if typed else ()
    with pytest.raises(NothingToDo) as caught:
        ask(f"--resume=r{steps}", *growing)
    assert f"--num_iterations={steps}" in str(caught.value)
    assert (
        ask(f"--resume=r{steps}", *growing, f"--num_iterations={steps}").config.num_iterations == 60
    )


def sizes(total: int, steps: int) -> dict[str, int]:
    batch = {"total_batch_size": total, "device_batch_size": 4, "max_seq_len": 1536}
    return {"num_iterations": steps, **batch}


def values() -> dict[str, int]:
    return {"total_batch_size": 2048, "max_total_batch_size": 4096, "num_iterations": 30}


def test_a_limit_below_the_batch_is_rejected() -> None:
    problem = only(wrong(RUN[0], "--max_total_batch_size=1000"))
    assert (problem.code, problem.field) == ("flag.contradiction", "max_total_batch_size")


PLAN = """
import json, os, sys
from training.host import p2p_cache
from training.plan import training_plan
from training.plan.request import read
def made():
    request = read("train_dual_gpu_enhanced.sh", sys.argv[1:], os.environ)
    return training_plan.build(request, os.environ)[0]
plan = made()
key = p2p_cache.key(map(p2p_cache.identity, plan["gpus"]), plan["driver"], plan["torch"])
p2p_cache.remember(key, p2p_cache.verdict(key, {}, gb_per_s=6.0, small_ms=0.03))
print(json.dumps([plan, made()]))
"""


def test_the_plan_of_two_slow_gpus(nvidia: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    flags = (f"--total_batch_size={BATCH}", "--max_total_batch_size=65536", "--num_iterations=100")
    there = nvidia(COUNT=2, NAME=CARD, FREE_GIB="22,22", TOTAL_GIB="24")
    done = python("-c", PLAN, *RUN, *SIZES, *flags, **there, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    unmeasured, plan = json.loads(done.stdout)
    assert unmeasured["config"]["total_batch_size"] == BATCH
    assert (plan["config"]["total_batch_size"], plan["config"]["num_iterations"]) == (65536, 13)
    assert plan["batch"]["accumulation"] == 8
    assert plan["exchange"]["speed_up"] > 1.5
    assert plan["origins"]["total_batch_size"] != unmeasured["origins"]["total_batch_size"]
