"""Memory of a step of any task by fake tensors: what is counted, `device_batch_size=auto`, and the
plan when it cannot be measured."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.conftest import LAUNCH, ROOT, ask, python
from tests.unit.own_task import SIZED
from training import tasks
from training.cli import doctor
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.launcher import replan
from training.plan import training_plan as planner
from training.plan.preflight import startup_checks
from training.tasks import fake_step, measurement
from training.tasks.measurement import Question
from training.tasks.memory import CONTEXT, GIB, gib
from training.tasks.sample_memory import SampleLoad, SampleStep

Write = Callable[..., str]
WEIGHTS = 64 * 256 + 256 + 256 + 1
CPU_ARGS = ("2", "--task=sized.py", "--device=cpu", "--precision=fp32")


@pytest.fixture
def sized(write: Write) -> str:
    return write("sized.py", SIZED)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """gpus(4.0): two GPUs with 4.0 GiB free on each."""

    def with_free(free: float) -> None:
        cards = tuple(
            Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, int(free * GIB), 0, 40, 70.0, (12, 0))
            for n in range(2)
        )
        monkeypatch.setattr(
            planner.gpus,
            "inventory",
            lambda environ: GpuInventory(cards, "all of them", "580", "13.0"),
        )
        monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
        monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 8)
        monkeypatch.setattr(planner.toolchain, "missing", lambda device, environ: {})

    return with_free


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in this process, which has torch already: another one takes seconds to import it."""

    def ask(question: Question) -> measurement.Answer:
        found: dict[str, Any] = fake_step.answer(question)
        step = SampleStep(SampleLoad(**found.pop("load")))
        return measurement.Answer(step, **found)

    monkeypatch.setattr(measurement, "ask", ask)


def question(
    path: str, sizes: list[int] | None, room: int | None = None, total: int = 0, **options: Any
) -> Question:
    spec = tasks.find(path, "")[0]
    given = {name: f.default for name, f in spec.own.items()} | options
    return Question(
        spec.record(given), {"task": path, "seed": 1}, sizes, room, 2, total, bf16=False, cuda=True
    )


def plan(*args: str) -> dict[str, Any]:
    return planner.make(LAUNCH, list(args), {})[1]


# ── counted memory
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_a_small_model_is_counted(sized: str) -> None:
    load = SampleLoad(**fake_step.answer(question(sized, [100]))["load"])
    assert (load.parameters, load.gradients) == (4 * WEIGHTS, 4 * WEIGHTS)
    assert load.optimizer == 8 * WEIGHTS + 4 * 4, (
        "two moments, and the step count of each of four tensors"
    )
    stored = load.parameters + load.optimizer
    assert stored <= load.pinned < 2 * stored and SampleStep(load).saving == load.pinned
    # One sample: its 64 numbers and target, two layers of 256 forward; slightly more where both
    # directions meet in the backward pass.
    kept = 4 * (64 + 1 + 256 + 256)
    assert kept <= load.per_sample <= kept + 4 * (256 + 64)
    half = SampleLoad(**fake_step.answer(question(sized, [50]))["load"])
    assert SampleStep(load).resized(50).estimate.total == pytest.approx(
        SampleStep(half).estimate.total, rel=0.01
    )


def test_the_average_of_the_weights_is_counted(sized: str) -> None:
    asked = question(sized, [4])
    plain = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
    asked.config["ema"] = 0.999
    load = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
    assert (plain.average, load.average) == (0, 4 * WEIGHTS)
    more = SampleStep(load).estimate.total - SampleStep(plain).estimate.total
    assert more == 4 * WEIGHTS and load.pinned > plain.pinned


def test_no_memory_is_allocated_and_nothing_is_computed(sized: str) -> None:
    """Ten billion weights: 40 GB, and three times as much again."""
    before = psutil.Process().memory_info().rss
    load = SampleLoad(**fake_step.answer(question(sized, [1 << 20], width=10**10 // 65))["load"])
    assert load.parameters > 39 * 10**9 and SampleStep(load).estimate.total > 160 * 10**9
    assert psutil.Process().memory_info().rss - before < GIB


def test_the_estimate_includes_the_needs_of_several_ranks() -> None:
    load = SampleLoad(
        4, 100, 90, 200, fixed=10, per_sample=5, bf16=True, cuda=True, ranks=2, total=8
    )
    estimate = SampleStep(load).estimate
    assert (estimate.activations, estimate.gradients, estimate.context, estimate.saved) == (
        30,
        90,
        CONTEXT,
        0,
    )
    assert estimate.total == 100 + 90 + 200 + 30 + CONTEXT
    assert (estimate.needed, estimate.tight) == (
        int(estimate.total * 1.1) + GIB,
        int(estimate.total * 1.25) + GIB,
    )
    gathering = SampleStep(replace(load, total=16)).estimate
    assert gathering.gradients == 180, "DDP's buckets and the accumulated gradients"
    assert SampleStep(replace(load, total=16, ranks=1)).estimate.gradients == 90
    cpu = SampleStep(replace(load, cuda=False)).estimate
    assert (cpu.context, cpu.saved) == (0, 300), "rank 0's checkpoint copy is in the same memory"


def test_a_constructor_that_needs_values_runs_with_real_tensors(sized: str) -> None:
    tricky = fake_step.answer(question(sized, [100], trick="item"))["load"]
    assert tricky == fake_step.answer(question(sized, [100]))["load"]


# ── choice of the micro-batch
# ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_largest_that_fits_is_chosen(sized: str) -> None:
    width = 1 << 20  # 8 MB per sample
    sizes = [1, 8, 48, 240]
    each = {
        size: SampleStep(
            SampleLoad(**fake_step.answer(question(sized, [size], width=width))["load"])
        ).estimate.needed
        for size in sizes
    }
    assert sorted(each.values()) == list(each.values())
    for best, more in itertools.pairwise(sizes):
        for room in (each[best], each[more] - 1):
            found = fake_step.answer(question(sized, sizes, room=room, width=width))
            assert (found["load"]["sequences"], found["fits"], found["of"]) == (
                best,
                True,
                len(sizes),
            )
    found = fake_step.answer(question(sized, sizes, room=each[1] - 1, width=width))
    assert (found["load"]["sequences"], found["fits"]) == (1, False)


@pytest.mark.parametrize(
    ("samples", "of", "size"), [(6400, 7, 64), (6399, 6, 32), (50, 1, 1), (10**9, 17, 1 << 16)]
)
def test_without_a_total_an_epoch_keeps_its_steps(
    samples: int, of: int, size: int, sized: str
) -> None:
    found = fake_step.answer(question(sized, None, samples=samples))
    assert (found["load"]["sequences"], found["of"]) == (size, of)


@pytest.mark.usefixtures("in_process")
def test_auto_is_decided_by_free_gpu_memory(sized: str, gpus: Callable[[float], None]) -> None:
    wide = (
        "2",
        "--task=sized.py",
        "--width=1000000",
        "--device_batch_size=auto",
        "--total_batch_size=20000",
        "--precision=fp32",
        "--compile=0",
    )
    chosen = {}
    for free in (8.0, 16.0):
        gpus(free)
        made = plan(*wide)
        chosen[free] = made["batch"]["device_sequences"]
        size, total = chosen[free], made["memory"]["needed_bytes"]
        assert (
            made["config"]["device_batch_size"] == made["device_batch_size"]["value"] == size
            and 10000 % size == 0
        )
        assert made["batch"]["accumulation"] == 10000 // size and total <= free * GIB
        more = min(n for n in range(size + 1, 10001) if 10000 % n == 0)
        assert (
            SampleStep(SampleLoad(**made["memory"]["load"])).resized(more).estimate.needed
            > free * GIB
        ), "no larger one fits"
        largest = msg("tasks.gpt.fit.largest", sizes=25)
        assert f"device_batch_size {size}: {largest}" in made["text"]
        assert any(
            text.startswith(
                f"memory, by fake tensors: {gib(made['memory']['total_bytes'])} per rank ("
            )
            for text in made["text"]
        )
    assert chosen[8.0] < chosen[16.0]


def test_a_total_that_is_not_divisible_is_refused(sized: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*CPU_ARGS, "--device_batch_size=auto", "--total_batch_size=7")
    assert (
        caught.value.code == Exit.CONFIG and "total_batch_size 7" in caught.value.problems[0].what
    )
    assert any("--total_batch_size=8" in fix for fix in caught.value.problems[0].fixes)


@pytest.mark.usefixtures("in_process")
def test_a_step_that_does_not_fit_is_refused_and_a_smaller_one_suggested(
    sized: str, gpus: Callable[[float], None]
) -> None:
    gpus(8.0)
    args = (
        "2",
        "--task=sized.py",
        "--width=1000000",
        "--device_batch_size=2000",
        "--precision=fp32",
        "--compile=0",
    )
    with pytest.raises(UserError) as caught:
        plan(*args)
    assert caught.value.code == Exit.RESOURCES
    fixes = [fix for problem in caught.value.problems for fix in problem.fixes]
    size = next(
        int(fix.rpartition("--device_batch_size=")[2].split()[0])
        for fix in fixes
        if "--device_batch_size=" in fix
    )
    assert 1 <= size < 2000
    assert (
        plan(*args[:3], f"--device_batch_size={size}", *args[4:])["batch"]["device_sequences"]
        == size
    ), "the suggested fix is accepted"


# ── when the step is measured, and when it cannot be
# ─────────────────────────────────────────────────────────────────────


def test_a_start_on_the_cpu_does_not_measure(sized: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(question: Question) -> measurement.Answer:
        raise AssertionError("measured")

    monkeypatch.setattr(measurement, "ask", asked)
    made = plan(*CPU_ARGS)
    assert (
        "memory" not in made
        and "device_batch_size" not in made
        and made["batch"]["device_sequences"] == 8
    )
    for more in ("--dry_run", "--check", "--device_batch_size=auto"):
        with pytest.raises(AssertionError, match="measured"):
            plan(*CPU_ARGS, more)


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        (
            "value",
            "it depends on the values of a tensor (aten._local_scalar_dense.default), which fake "
            "tensors do not have (sized.py:{})",
        ),
        ("exit", "SystemExit: enough (sized.py:{})"),
    ],
)
def test_a_failed_measurement_is_noted_and_the_plan_continues(
    trick: str, why: str, sized: str
) -> None:
    line = next(
        n
        for n, text in enumerate(SIZED.splitlines(), 1)
        if ("found.item()" if trick == "value" else "SystemExit") in text
    )
    made = plan(*CPU_ARGS, f"--trick={trick}", "--device_batch_size=auto", "--dry_run")
    assert f"memory of a step: not measured: {why.format(line)}" in made["notes"]
    assert "memory" not in made and made["batch"]["device_sequences"] == 8
    assert "device_batch_size 8: at most 8: the memory of a step is unknown" in made["text"]


def measures(process: psutil.Process) -> bool:
    try:
        return measurement.MODULE in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a child of another test that has just ended
        return False


def test_data_that_loads_too_long_is_left_to_the_ranks(
    sized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "LIMIT_S", 1.0)
    begun = time.monotonic()
    answer = measurement.ask(question(sized, [1], trick="sleep"))
    assert (answer.step, answer.why) == (
        None,
        "it took longer than 1 s",
    ) and time.monotonic() - begun < 60
    assert not [p for p in psutil.Process().children(recursive=True) if measures(p)]


def test_an_error_in_the_file_is_reported(write: Write) -> None:
    path = write(
        "broken.py", SIZED.replace("import torch\n", "import torch\nimport no_such_module\n", 1)
    )
    assert (
        measurement.ask(question(path, [1])).why
        == "ModuleNotFoundError: No module named 'no_such_module' (broken.py:4)"
    )


def test_a_plan_that_measures_imports_no_torch_and_writes_nothing(sized: str, home: Path) -> None:
    code = (
        "import sys; from training.cli import plan;"
        f"sys.argv = ['x', 'launch_train.sh', *{[*CPU_ARGS, '--dry_run']!r}];"
        "code = plan.main(); print([m for m in ('torch', 'numpy') if m in sys.modules], code)"
    )
    done = python("-c", code, cwd=home)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert "memory, by fake tensors: " in done.stdout and "to standard output" not in done.stdout
    assert os.listdir(home) == ["sized.py"]


# ── other uses of the measurement
# ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_check_shows_the_measurement(sized: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "communication", lambda request, plan, checks: [])
    request, made, checks = planner.make(LAUNCH, [*CPU_ARGS, "--check"], {})
    report = doctor.run(request, made, checks)
    assert report.step is not None and report.step.verdict == doctor.FITS
    assert (
        report.step.lines()[0] == f"fake tensors (eager, fp32, with the plan's settings)   "
        f"{gib(made['memory']['total_bytes'])}"
    )
    memory = json.loads(report.json())["memory"]
    assert (
        memory["parameters_bytes"] == 4 * WEIGHTS
        and memory["total_bytes"] == made["memory"]["total_bytes"]
    )
    assert (memory["verdict"], memory["not_measured_because"], memory["measured_bytes"]) == (
        "fits",
        None,
        None,
    )
    assert report.checks[-1].name == "memory of a step" and report.checks[-1].status == "ok"


@pytest.mark.usefixtures("in_process")
def test_a_smaller_batch_after_oom_has_its_own_estimate(sized: str) -> None:
    made = plan(*CPU_ARGS, "--device_batch_size=64", "--dry_run") | {"origins": {}}
    changed = replan.changed_plan(made, {"device_batch_size": 16}, "a rank was out of memory")
    assert changed["memory"]["load"]["sequences"] == 16 and changed["batch"]["accumulation"] == 4
    less = made["memory"]["activations_bytes"] - changed["memory"]["activations_bytes"]
    assert less == 48 * made["memory"]["load"]["per_sample"] > 0
    assert tasks.spec_of(made).lighter == "smaller samples, or a smaller model"


def test_the_documented_example_is_measured(home: Path) -> None:
    path = str(ROOT / "examples/spirals.py")
    found = measurement.ask(question(path, [64]))
    width = 64
    weights = 2 * width + width + width * width + width + 2 * width + 2
    assert found.why == "" and found.step is not None and found.step.load.parameters == 4 * weights


@pytest.mark.usefixtures("in_process")
def test_a_total_that_follows_from_an_automatic_batch_is_not_frozen(sized: str) -> None:
    """A submitted job keeps its values: the schema's default would be taken for an explicit
    value."""
    args = CPU_ARGS[1:]
    assert (
        "total_batch_size"
        not in ask("2", *args, "--device_batch_size=auto", script=LAUNCH).values()
    )
    assert (
        ask(
            "2", *args, "--device_batch_size=auto", "--total_batch_size=10", script=LAUNCH
        ).values()["total_batch_size"]
        == 10
    )
    assert ask("2", *args, "--device_batch_size=3", script=LAUNCH).values()["total_batch_size"] == 6
    assert plan(*CPU_ARGS, "--device_batch_size=auto")["config"]["total_batch_size"] == 128


def test_workers_of_any_task_are_counted_before_the_start(
    sized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_checks.env_vars, "cpu_count", lambda: 2)
    checks = planner.make(LAUNCH, [*CPU_ARGS, "--num_workers=3"], {})[2]
    (cpu,) = (check for check in checks if check.name == "CPU")
    assert cpu.status == "warning" and "2 ranks and 6 workers: more workers than cores" in cpu.text


def test_only_rank_0_measures_when_ranks_plan_together(
    sized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by an external launcher; the plan of rank 0 is used by all."""
    asked: list[Question] = []
    monkeypatch.setattr(
        measurement,
        "ask",
        lambda question: asked.append(question) or measurement.Answer(None, "not in this test"),
    )
    for rank in ("0", "1"):
        environ = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }
        made = planner.make("train.py", [*CPU_ARGS[1:], "--device_batch_size=auto"], environ)[1]
        assert made["batch"]["device_sequences"] == 8
    assert len(asked) == 1
