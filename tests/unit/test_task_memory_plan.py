"""The measured memory of a step in plans: when it is measured, a plan without it, and its other
uses."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.unit.conftest import LAUNCH, ROOT, ask, python
from tests.unit.measured_task import CPU_ARGS, WEIGHTS, Write, in_process, plan, question, sized
from tests.unit.own_task import SIZED
from training import tasks
from training.cli import doctor
from training.launcher import replan
from training.plan import training_plan as planner
from training.tasks import measurement
from training.tasks.measurement import Question
from training.tasks.memory import gib

__all__ = ["in_process", "sized"]  # fixtures

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
    assert answer.step is None and answer.why == (
        "it took longer than 1 s and was ended: a file that train_data() was writing may be "
        "incomplete"
    )
    assert time.monotonic() - begun < 60
    assert not [p for p in psutil.Process().children(recursive=True) if measures(p)]


def test_a_step_has_less_time_than_the_data(sized: str) -> None:
    asked = replace(question(sized, [1], trick="slow loss"), step_s=1.0)
    assert measurement.ask(asked) == measurement.Answer(None, "it took longer than 1 s")


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
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 2)
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
