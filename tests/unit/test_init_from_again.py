"""--init_from: the weights of later starts, whatever its word means by then, and lost ones."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import each
from tests.unit import trained_runs
from tests.unit.conftest import LAUNCH, ask, only, wrong
from tests.unit.test_export import bpe_file
from tests.unit.trained_runs import gpt, made
from training.core import manifest, rundir
from training.core.errors import Problem, UserError
from training.inspector.distributed import World
from training.launcher.slurm import options, submission
from training.plan import training_plan
from training.trainer import start_weights

CPU = ("1", "--device=cpu")


def begun_from(folder: Path, word: str) -> rundir.RunDir:
    """A run that ended before its first checkpoint."""
    words = (f"--init_from={word}", "--total_batch_size=256", f"--out_dir={folder}")
    request = ask(*CPU, *words, script=LAUNCH)
    new = rundir.RunDir(folder / "tune")
    new.create()
    rundir.write_json(new.plan, training_plan.build(request, {})[0])
    return new


def test_a_run_without_a_checkpoint_starts_from_the_same_weights_again(tmp_path: Path) -> None:
    model = gpt(2, length=32)
    run = made(tmp_path / "base", model)
    for number, word in enumerate(("latest", str(run.path))):
        new = begun_from(tmp_path, word)
        trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), 8 + number)
        asked = ask(*CPU, "--resume=tune", f"--out_dir={tmp_path}", script=LAUNCH)
        assert asked.start and asked.start.step == 7 + number, word
        plan, _ = training_plan.build(asked, {})
        assert plan["init_from"]["file"] == str(asked.start.file)
        shutil.rmtree(new.path)


@each("word", ["latest", "base"])
def test_a_slurm_job_starts_from_the_weights_of_its_submission(word: str, tmp_path: Path) -> None:
    model = gpt(2, length=32)
    base = made(tmp_path / "base", model)
    given = (f"--init_from={word}", "--total_batch_size=256", f"--out_dir={tmp_path}")
    frozen = submission.FrozenJob(tmp_path / "tune" / "code")
    frozen.run.create()
    line, request = options.split(list(given)), ask(*CPU, *given, script=LAUNCH)
    rundir.write_json(frozen.run.plan, submission._plan(frozen, request, line, 1, None))
    made(tmp_path / "other", model)
    trained_runs.checkpoint(base, model.state_dict(), asdict(model.shape), 8)
    start = ask(*CPU, "--resume=tune", f"--out_dir={tmp_path}", script=LAUNCH).start
    assert start and start.title == "base, step 7"
    # a run that is submitted again, with other weights
    given = ("--resume=tune", "--init_from=base", f"--out_dir={tmp_path}")
    request = ask(*CPU, *given, script=LAUNCH)
    (flag,) = submission._flags(request, options.split(list(given)), None, {})
    assert flag == f"--init_from={base.checkpoints / 'step_00000008' / manifest.STATE}"


def test_lost_weights_of_a_run_without_a_checkpoint_can_be_replaced(tmp_path: Path) -> None:
    model = gpt(2, length=32)
    run = made(tmp_path / "base", model)
    begun_from(tmp_path, "base")
    trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), 9)
    shutil.rmtree(run.checkpoints / "step_00000007")
    problem = only(wrong(*CPU, "--resume=tune", f"--out_dir={tmp_path}", script=LAUNCH))
    assert problem.code == "weights.unreadable" and "step 7" in problem.what
    replaced_by_the_newest(problem)


def replaced_by_the_newest(problem: Problem) -> None:
    (fix,) = problem.fixes
    asked = ask(*shlex.split(fix)[1:], script=LAUNCH)
    assert asked.resume_from and asked.start and asked.start.step == 9


@pytest.mark.parametrize("by", ["name", "path"])
def test_weights_that_are_lost_before_the_first_step_can_be_replaced(
    by: str, tmp_path: Path
) -> None:
    model = gpt(2, length=32)
    run = made(tmp_path / "base", model)
    new = begun_from(tmp_path, "base")
    trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), 9)
    shutil.rmtree(run.checkpoints / "step_00000007")
    if by == "path":  # it is not in the folder of its plan
        new = rundir.RunDir(new.path.rename(tmp_path / "base" / "tune"))
    plan: Any = rundir.read_json(new.plan)
    with pytest.raises(UserError) as caught:
        start_weights.init_from(model, plan, new, World(0, 0, 1, torch.device("cpu"), "none", "-"))
    (problem,) = caught.value.problems
    assert problem.code == "weights.unreadable" and "step 7" in problem.what
    replaced_by_the_newest(problem)


@each("lost", ["deleted", "renamed", "copied"])
def test_a_run_has_the_tokenizer_of_its_weights(lost: str, tmp_path: Path) -> None:
    file, model = bpe_file(tmp_path), gpt(2, vocab=448, length=32)
    made(tmp_path / "base", model, file)
    tune = begun_from(tmp_path, "base")
    tune.tokenizer.mkdir()
    shutil.copy(file, tune.tokenizer)
    trained_runs.checkpoint(tune, model.state_dict(), asdict(model.shape), 3, file)
    folder = tmp_path / "elsewhere" if lost == "copied" else tmp_path
    if lost == "renamed":
        (tmp_path / "base").rename(tmp_path / "old")
    else:
        shutil.rmtree(tmp_path / "base")
    if lost == "copied":
        folder.mkdir()
        tune.path.rename(folder / "tune")
    asked = ask(*CPU, "--resume=tune", f"--out_dir={folder}", script=LAUNCH)
    assert asked.config.tokenizer == str(folder / "tune" / "tokenizer" / file.name)
    assert not asked.start and training_plan.build(asked, {})
    (folder / "tune" / "tokenizer" / file.name).write_text("{}")
    problem = only(wrong(*CPU, "--resume=tune", f"--out_dir={folder}", script=LAUNCH))
    assert problem.code == "tokenizer.missing"
