"""A user task under the real launcher: the example of the documentation, with workers, over many
epochs, killed and resumed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from training.core.messages import msg
from training.core.rundir import read_json

Launch = Callable[..., Launched]
EXAMPLE = ROOT / "examples/spirals.py"
SMALL = {
    "task": "examples/spirals.py",
    "device": "cpu",
    "device_batch_size": 16,
    "points": 256,
    "eval_every": 0,
    "use_dummy_wandb": True,
    "tensorboard": False,
    "report": False,
}


@pytest.fixture
def task(launch: Launch) -> Callable[..., Launched]:
    def start(ranks: int = 2, **flags: object) -> Launched:
        return launch("./launch_train.sh", str(ranks), tiny=False, **SMALL | flags)

    return start


def test_the_documentation_contains_the_example() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)
    assert shown and shown[1] == EXAMPLE.read_text()
    assert len(EXAMPLE.read_text().splitlines()) < 100


@pytest.mark.soak  # in CI as a command of the README
def test_the_example_trains_as_documented(launch: Launch) -> None:
    command = re.search(
        r"^\./launch_train\.sh 2 --task=.*$", (ROOT / "docs/tasks.md").read_text(), re.MULTILINE
    )
    assert command
    run = launch(*command[0].split(), tiny=False, report=True).ok()
    assert run.summary["val_accuracy_last"] > 0.95 > run.summary["val_accuracy_first"]
    assert (
        run.summary["samples"] == 620 * 128
        and "samples/s" in run.output
        and "tokens" not in run.output
    )
    assert (run.run.samples / "belief.png").read_bytes().startswith(
        b"\x89PNG"
    ) and b"belief" in run.run.report.read_bytes()


@pytest.mark.soak
def test_options_come_from_a_config_file_and_stay_when_resumed(
    task: Callable[..., Launched], launch: Launch, tmp_path: Path
) -> None:
    config = tmp_path / "narrow.py"
    config.write_text('task = "examples/spirals.py"\nwidth = 12\npoints = 128\n')
    run = task(config=config, task=None, points=None, num_iterations=6, save_every=3).ok()
    parameters = 2 * 12 + 12 + 12 * 12 + 12 + 12 * 2 + 2
    assert run.summary["parameters"] == parameters and run.summary["steps"] == 6
    again = launch("./launch_train.sh", "2", tiny=False, resume=run.run.name, num_iterations=9).ok()
    assert again.summary["parameters"] == parameters and again.summary["steps"] == 9


@pytest.mark.parametrize(
    "persistent",
    [False, True],
)
@pytest.mark.soak
def test_a_killed_run_resumes_bit_for_bit(
    task: Callable[..., Launched], launch: Launch, persistent: bool
) -> None:
    settings = {
        "num_epochs": 6,
        "save_every": 5,
        "num_workers": 1,
        "persistent_workers": persistent,
        "log_every": 1,
    }
    whole = task(**settings).ok()
    cut = task(**settings)
    cut.wait_for("Epoch: 3, Iter: 18,")
    cut.process.send_signal(signal.SIGKILL)
    cut.wait()
    resumed = launch("./launch_train.sh", "2", tiny=False, resume=cut.run.name).ok()
    assert resumed.losses == whole.losses and len(whole.losses) == 48


@pytest.mark.parametrize(
    ("persistent", "ranks"),
    [
        (True, 2),
        (True, 4),
        (False, 2),
        (False, 4),
    ],
)
@pytest.mark.soak
def test_hundreds_of_epochs(task: Callable[..., Launched], ranks: int, persistent: bool) -> None:
    """Each switch restarts the workers, or keeps persistent ones, on every rank."""
    run = task(
        ranks,
        points=32 * ranks,
        num_epochs=200,
        num_workers=1,
        persistent_workers=persistent,
        log_every=1000,
    )
    assert run.wait(240) == 0, run.output[-2000:]  # restarts 800 workers, also on a busy machine
    assert run.summary["steps"] == 400 and run.steps[400]["epoch"] == 200


@pytest.mark.slow
def test_an_error_of_the_task_is_reported_with_its_line(
    task: Callable[..., Launched], tmp_path: Path
) -> None:
    own = tmp_path / "my_task.py"
    own.write_text(
        EXAMPLE.read_text().replace(
            "points, label = batch\n", "points, label = batch[:3]\n        undefined_name\n", 1
        )
    )
    run = task(task=own, num_iterations=3)
    assert run.wait() == 4
    assert "undefined_name" in run.failure["summary"] and str(own) in run.failure["where"]
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_problem_of_another_rank_than_0_is_reported(
    task: Callable[..., Launched], tmp_path: Path
) -> None:
    own = tmp_path / "my_task.py"
    own.write_text(
        EXAMPLE.read_text()
        + """
    def optimizer(self, model):
        import os
        more = [nn.Parameter(torch.zeros(3))] if os.environ["RANK"] == "1" else []
        return torch.optim.SGD([*model.parameters(), *more], lr=0.1)
"""
    )
    run = task(task=own, num_iterations=3)
    assert run.wait() == 2
    assert (run.failure["rank"], run.failure["cause"]) == (1, "config_error")
    (problem,) = run.failure["rejected"]
    assert problem["text"].startswith("rank 1 on ") and problem["text"] in run.output


@pytest.mark.parametrize(
    ("method", "on_rank_1"),
    [
        ("val_data", "None"),
        pytest.param("val_data", "spirals(999, 0.1, 2)", marks=pytest.mark.soak),
        pytest.param("train_data", "spirals(0, 0.1, 1)", marks=pytest.mark.soak),
    ],
)
@pytest.mark.slow
def test_ranks_with_different_numbers_of_samples_are_refused(
    task: Callable[..., Launched], tmp_path: Path, method: str, on_rank_1: str
) -> None:
    own = tmp_path / "my_task.py"
    head = f"    def {method}(self):\n"
    line = (
        f"        if __import__('os').environ.get('RANK') == '1':\n            return {on_rank_1}\n"
    )
    own.write_text(EXAMPLE.read_text().replace(head, head + line))
    run = task(task=own, num_iterations=3)
    assert run.wait() == 2
    assert f"{method}()" in run.output and "rank 1 on " in run.output


@pytest.mark.slow
def test_an_operator_without_a_deterministic_variant_is_named(
    task: Callable[..., Launched], tmp_path: Path
) -> None:
    own = tmp_path / "my_task.py"
    undecided = "torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))"
    own.write_text(
        EXAMPLE.read_text().replace(
            "points, label = batch\n", f"points, label = batch\n        {undecided}\n", 1
        )
    )
    run = task(task=own, num_iterations=3, deterministic=True)
    assert run.wait() == 4
    assert run.failure["cause"] == "config_error" and "put_" in run.failure["summary"]
    assert any("--deterministic" in line for line in run.failure["advice"])


@pytest.mark.soak
def test_a_rank_without_samples_is_named(task: Callable[..., Launched]) -> None:
    run = task(num_iterations=8, inject="empty@rank=1,step=3")
    assert run.wait() == 4
    assert run.failure["rank"] == 1 and "empty batch" in run.failure["summary"]


@pytest.mark.soak
def test_too_little_data_is_rejected_without_a_traceback(
    task: Callable[..., Launched],
) -> None:
    run = task(points=16)
    assert run.wait() == 2
    assert (
        "the training data has 16 samples; one step needs 32" in run.output
        and "Traceback" not in run.output
    )


@pytest.mark.slow
def test_an_automatic_batch_trains_and_a_nan_in_it_is_named(task: Callable[..., Launched]) -> None:
    """Not only for gpt: the memory of the step is measured, the batch is chosen by it, and the
    fault is injected."""
    run = task(device_batch_size="auto", total_batch_size=64, num_iterations=4)
    assert run.wait() == 0
    plan = read_json(run.run.plan) or {}
    assert plan["batch"] == {
        "device_sequences": 32,
        "seq_len": 1,
        "world_size": 2,
        "accumulation": 1,
    }
    assert (
        plan["memory"]["parameters_bytes"] == 4 * 4482
        and plan["memory"]["needed_bytes"] < plan["memory"]["free_bytes"]
    )
    assert plan["device_batch_size"]["reason"] == msg("tasks.gpt.fit.largest", sizes=6)
    broken = task(num_iterations=8, inject="nan@rank=1,step=3")
    assert broken.wait() == 4
    assert (broken.failure["rank"], broken.failure["cause"]) == (1, "nan_loss")
