"""./duet evaluate: video restoration, and tasks of users."""

from __future__ import annotations

import base64
import io
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.unit.conftest import ROOT
from tests.unit.test_evaluate_command import Page, answer, codes, problems
from tests.unit.trained_runs import checkpoint, gpt, made
from tests.unit.video_data import rendered
from training import tasks
from training.cli import evaluate, export
from training.core import rundir
from training.core.errors import Exit, UserError
from training.tasks.base import Task
from training.tasks.trained import Trained
from training.tasks.video_restoration.options import VideoOptions


def weights_of(run: rundir.RunDir) -> dict[str, torch.Tensor]:
    """Initial ones."""
    plan = json.loads(run.plan.read_text())
    return tasks.make(plan, torch.device("cpu"), None).model().state_dict()


def run_of(
    folder: Path, name: str, file: str | None, options: Mapping[str, Any], **config: Any
) -> rundir.RunDir:
    """A run with one checkpoint of this task, of step 9."""
    run = made(folder / "run", gpt(1))
    shutil.rmtree(run.checkpoints / "step_00000007")  # of a language model
    plan = json.loads(run.plan.read_text())
    plan["config"] |= config
    plan["task"] = {"name": name, "unit": "samples", "file": file, "options": options}
    rundir.write_json(run.plan, plan)
    checkpoint(run, weights_of(run), {}, 9)
    return run


def restoring(folder: Path) -> tuple[Path, rundir.RunDir]:
    """Validation frames, and a run of video restoration."""
    frames = rendered(folder / "clips") / "test"
    options = vars(VideoOptions(dataroot_gt="/gone", embed_dim=4, num_blocks=1))
    return frames, run_of(folder, "video_restoration", None, options)


def spirals(folder: Path, **config: Any) -> rundir.RunDir:
    options = {"points": 40, "noise": 0.05, "width": 8, "lr": 1e-3}
    return run_of(folder, "spirals.py", str(ROOT / "examples/spirals.py"), options, **config)


def exported(run: Path) -> Trained:
    out = run / "out"
    assert export.main([str(run), "--format=torch", f"--out={out}", "--quiet"]) == 0
    return tasks.load_model(out)


def test_video_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PSNR and SSIM of frames that are not those of the training."""
    frames, run = restoring(tmp_path)
    capsys.readouterr()
    (found,) = answer(capsys, str(run.path), f"--data={frames}")
    # the untrained network returns its input
    assert found["psnr"] == pytest.approx(found["psnr_input"], abs=1e-3) and 0 < found["ssim"] <= 1
    out = tmp_path / "page.html"
    checkpoint(run, weights_of(run), {}, 12)
    answer(capsys, str(run.path), "--checkpoints=all", f"--data={frames}", f"--out={out}")
    page = Page(out)
    assert page.sections == ["scores", "curves", "clips", "pictures"]
    assert len(page.pictures) == 4  # input, two results, target of the only clip
    given, _, _, target = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))
        for address in page.pictures
    )
    assert given.shape == target.shape and (given != target).any()
    assert page.rows[-1][0] == "clip_000" and page.rows[-1][1] == f"{found['psnr_input']:.2f}"
    assert codes(str(run.path)) == ["video.no_data"]
    assert codes(str(run.path), f"--data={frames}", "--encoding=gbk") == ["flag.unknown"]
    (problem,) = problems(str(run.path), f"--data={tmp_path / 'clips/tset'}")
    fix = f"./duet evaluate {shlex.quote(str(run.path))} --data={frames}"
    assert problem.fixes == [fix] and "--data" in problem.what
    for name in ("x" * 300, "x" * 300 + ".lmdb"):  # a place that cannot be examined
        assert codes(str(run.path), f"--data={tmp_path / name}") == ["video.folder_missing"]
    # the validation frames of the run, relative to where it was started
    plan = json.loads(run.plan.read_text())
    plan["task"]["options"]["test_dataroot_gt"] = "clips/test"
    plan["command"] = {"script": "train.py", "args": [], "cwd": str(tmp_path)}
    rundir.write_json(run.plan, plan)
    (chosen,) = evaluate.parse([str(run.path)]).weights
    assert chosen.plan["task"]["options"]["test_dataroot_gt"] == str(frames)
    shutil.rmtree(tmp_path / "clips")
    (problem,) = problems(str(run.path))
    assert problem.code == "video.folder_missing" and "--data" not in problem.what


def test_a_damaged_frame_does_not_lose_the_other_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its header is intact, which is read before."""
    frames, run = restoring(tmp_path)
    own = spirals(tmp_path / "own")
    plan = json.loads(run.plan.read_text())
    plan["task"]["options"]["test_dataroot_gt"] = str(frames)
    rundir.write_json(run.plan, plan)
    frame = next(frames.rglob("sharp/000003.png"))
    frame.write_bytes(frame.read_bytes()[:200])
    capsys.readouterr()
    words = [str(run.path), str(own.path), "--device=cpu", "--json"]
    assert evaluate.main(words) == Exit.CONFIG
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["evaluations"]
    assert "accuracy" in row and str(frame) in printed.err
    with pytest.raises(UserError) as caught:
        tasks.load_model(run.path).evaluate()
    assert [problem.code for problem in caught.value.problems] == ["video.frame_unreadable"]


def test_a_users_task_measures_its_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spirals(tmp_path)
    assert 0.2 < answer(capsys, str(run.path))[0]["accuracy"] < 0.8
    assert codes(str(run.path), "--data=stdlib") == ["task.unsupported"]


@pytest.mark.parametrize("of", [tasks.load_model, exported])
def test_a_batch_is_not_larger_than_in_the_training(
    of: Callable[[Path], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples may form no larger one, or not fit into memory."""
    sizes, real = set[int](), Task.measure

    def measure(task: Task, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        sizes.add(task.count(batch))
        return real(task, model, batch)

    monkeypatch.setattr(Task, "measure", measure)
    for number, (planned, own, wanted) in enumerate([(4, None, 4), (500, None, 16), (4, 50, 50)]):
        trained = of(spirals(tmp_path / str(number), device_batch_size=planned).path)
        assert trained.task
        trained.task.eval_batch = own
        sizes.clear()
        trained.evaluate()
        assert max(sizes) == wanted


def test_a_score_with_the_name_of_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the name under which a run records it."""
    run = spirals(tmp_path)
    own = dict.fromkeys(("run", "step", "weights", "file", "accuracy"), 0.5)
    monkeypatch.setattr(Trained, "evaluate", lambda *given: own)
    (found,) = answer(capsys, str(run.path))
    assert (found["run"], found["step"], found["weights"]) == ("run", 9, "raw")
    assert [found[f"val_{name}"] for name in ("run", "step", "weights", "file")] == [0.5] * 4
    assert found["accuracy"] == 0.5
