"""Ranks that torchrun starts again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tests.cases import each
from tests.unit import trained_runs
from tests.unit.conftest import LAUNCH, ask, only, wrong
from tests.unit.test_init_from import CPU, begun_from
from tests.unit.trained_runs import gpt, made


@each("step", [0, 7])
def test_the_flags_of_the_first_start_are_not_a_contradiction(step: int, tmp_path: Path) -> None:
    """`step`: of the checkpoint they resume from; without one they start from the same weights."""
    model = gpt(2, length=32)
    base = made(tmp_path / "base", model)
    run = begun_from(tmp_path, "latest")
    trained_runs.checkpoint(base, model.state_dict(), asdict(model.shape), 8)
    words = (*CPU, "--init_from=latest", f"--out_dir={tmp_path}")
    of_user = {"DUET_RESUME": str(run.path)}
    if step:
        trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), step)
        problem = only(wrong(*words, script=LAUNCH, env=of_user))
        assert problem.code == "flag.contradiction"
    asked = ask(*words, script=LAUNCH, env=of_user | {"DUET_RESTARTED": "1"})
    assert asked.resume_from and asked.resume_from.path == run.path
    assert (asked.start.step if asked.start else None) == (None if step else 7)
