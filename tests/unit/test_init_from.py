"""--init_from: what follows from the weights, what is rejected, and a training that starts from
them."""

from __future__ import annotations

import json
import math
import pickle
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cases import each
from tests.unit import trained_runs
from tests.unit.conftest import LAUNCH, ROOT, ask, clean_environment, only, wrong
from tests.unit.test_export import bpe_file
from tests.unit.trained_runs import flip_a_bit, gpt, made, stored
from training.cli import export
from training.core import manifest, rundir
from training.core.errors import UserError
from training.inspector.distributed import World
from training.plan import training_plan
from training.tasks import trained
from training.tasks.gpt.model_dims import ModelDims
from training.trainer import start_weights

CPU = ("1", "--device=cpu")
ALONE = World(0, 0, 1, torch.device("cpu"), "none", "-")


def codes(*argv: str) -> list[str]:
    return sorted(problem.code for problem in wrong(*CPU, *argv, script=LAUNCH))


def test_the_model_follows_from_the_weights(tmp_path: Path) -> None:
    file = bpe_file(tmp_path)
    run = made(tmp_path / "run", gpt(2, vocab=448, length=32), file)
    request = ask(*CPU, f"--init_from={run.path}", "--total_batch_size=256", script=LAUNCH)
    config = request.config
    assert (config.depth, config.max_seq_len) == (2, 32)
    assert config.tokenizer == str(run.tokenizer / "tokenizer.json")
    assert "run, " in request.origins["depth"] and request.start
    plan, _ = training_plan.build(request, {})
    newest = run.checkpoints / "step_00000007" / manifest.STATE
    assert plan["init_from"]["file"] == str(newest)
    assert any(str(newest) in line for line in plan["text"])


@each("length", [["--tokens_per_param=2"], ["--num_iterations=auto"]])
def test_the_steps_follow_from_the_model_of_the_weights(length: list[str], tmp_path: Path) -> None:
    run = made(tmp_path / "run", gpt(2, length=32))
    words = (f"--init_from={run.path}", "--total_batch_size=256", *length)
    config = ask(*CPU, *words, script=LAUNCH).config
    assert config.depth == 2
    tokens = (config.tokens_per_param or 20) * ModelDims(2, 320, 32).weights
    assert config.num_iterations == math.ceil(tokens / 256)


@each("damage", ["truncated", "empty", "lost", "half a manifest"])
def test_an_earlier_checkpoint_replaces_an_incomplete_one(damage: str, tmp_path: Path) -> None:
    model = gpt(1)
    run = made(tmp_path / "run", model)
    newest = trained_runs.checkpoint(run, model.state_dict(), asdict(model.shape), 9)
    state = newest / manifest.STATE
    if damage == "lost":
        state.unlink()
    elif damage == "half a manifest":
        (newest / manifest.NAME).write_text('{"format": 2, "st')
    else:
        state.write_bytes(b"" if damage == "empty" else state.read_bytes()[:-10])
    words = (f"--init_from={run.path}", "--total_batch_size=256")
    start = ask(*CPU, *words, script=LAUNCH).start
    assert start and start.file == run.checkpoints / "step_00000007" / manifest.STATE
    start.file.write_bytes(b"")
    if damage != "half a manifest":  # a single file is verified by rank 0
        assert codes(*words) == ["checkpoint.damaged"]


def test_weights_of_earlier_versions_keep_their_keys(tmp_path: Path) -> None:
    run, size = stored(tmp_path), "--total_batch_size=512"
    assert "key_offset" not in manifest.newest(run.checkpoints)["shape"]  # type: ignore[index]
    assert not ask(*CPU, f"--init_from={run.path}", size, script=LAUNCH).config.key_offset
    text = tmp_path / "manual.txt"
    text.write_text("some text " * 999)
    resumed = ask(*CPU, f"--resume={run.path}", f"--data={text}", script=LAUNCH)
    assert not resumed.config.key_offset and training_plan.build(resumed, {})
    problem = only(wrong(*CPU, f"--init_from={run.path}", "--key_offset", size, script=LAUNCH))
    assert (problem.code, problem.field) == ("init.differs", "key_offset")
    assert ask(*CPU, script=LAUNCH).config.key_offset


def test_the_keys_of_a_file_of_tensors_are_assumed(tmp_path: Path) -> None:
    file = tmp_path / "bare.safetensors"
    safetensors.torch.save_file(gpt(1).state_dict(), file)
    sizes = ("--depth=1", "--max_seq_len=16", "--total_batch_size=128")

    def notes(*words: str) -> list[str]:
        request = ask(*CPU, f"--init_from={file}", *sizes, *words, script=LAUNCH)
        return [note for note in training_plan.build(request, {})[0]["notes"] if file.name in note]

    assert len(notes()) == 1
    assert not notes("--key_offset=false") and not notes("--key_offset")


def test_a_size_of_the_vocabulary_without_effect_is_noted(tmp_path: Path) -> None:
    run = made(tmp_path / "run", gpt(1, vocab=448), bpe_file(tmp_path))
    words = (f"--init_from={run.path}", "--total_batch_size=128")
    counts = []
    for more in ((), ("--vocab_size=400",)):
        request = ask(*CPU, *words, *more, script=LAUNCH)
        notes = training_plan.build(request, {})[0]["notes"]
        counts.append(sum("--vocab_size" in note for note in notes))
    assert counts == [0, 1]


def test_a_model_of_a_later_version_is_rejected(tmp_path: Path) -> None:
    run, size = stored(tmp_path), "--total_batch_size=512"
    text = tmp_path / "manual.txt"
    text.write_text("some text " * 999)
    for folder in run.checkpoints.iterdir():
        facts = rundir.read_json(folder / manifest.NAME) or {}
        del facts["own_sha256"]
        manifest.write(folder, facts | {"shape": {**facts["shape"], "smear": True}})
    for words in ((f"--init_from={run.path}", size), (f"--resume={run.path}", f"--data={text}")):
        with pytest.raises(UserError) as caught:
            training_plan.build(ask(*CPU, *words, script=LAUNCH), {})
        assert [problem.code for problem in caught.value.problems] == ["resume.other_model"]


def test_a_longer_context_is_accepted(tmp_path: Path) -> None:
    words = (f"--init_from={stored(tmp_path).path}", "--max_seq_len=128", "--total_batch_size=1024")
    assert ask(*CPU, *words, script=LAUNCH).config.max_seq_len == 128


def test_all_differences_are_reported_at_once(tmp_path: Path) -> None:
    run = stored(tmp_path)
    problems = wrong(
        *CPU, f"--init_from={run.path}", "--depth=3", "--tokenizer=bpe", "--vocab_size=300",
        "--total_batch_size=512", script=LAUNCH,
    )  # fmt: skip
    assert [(p.code, p.field) for p in problems] == [
        ("init.differs", "depth"), ("init.differs", "tokenizer")
    ]  # fmt: skip
    again = problems[0].fixes[0]
    assert "--depth=1" in again and "--tokenizer=bytes" in again
    file = bpe_file(tmp_path)
    other = made(tmp_path / "other", gpt(1, vocab=448), file)
    size = "--total_batch_size=128"
    assert codes(f"--init_from={other.path}", "--tokenizer=bpe", size) == ["init.differs"]
    assert codes(f"--init_from={other.path}", f"--tokenizer={tmp_path / 'no.json'}", size) == [
        "init.differs", "tokenizer.missing"
    ]  # fmt: skip
    same = ("--tokenizer=" + str(file), size)
    assert ask(*CPU, f"--init_from={other.path}", *same, script=LAUNCH).start
    (other.tokenizer / "tokenizer.json").unlink()
    assert codes(f"--init_from={other.path}", size) == ["tokenizer.lost"]


def test_unusable_weights(tmp_path: Path) -> None:
    run = stored(tmp_path)
    missing = only(wrong(*CPU, "--init_from=nothing", script=LAUNCH))
    assert (missing.code, missing.field) == ("run.missing", "init_from")
    lost = only(wrong(*CPU, "--init_from=lost.pth", script=LAUNCH))
    assert (lost.code, lost.field) == ("run.missing", "init_from")
    assert missing.allowed == lost.allowed
    words = (f"--out_dir={tmp_path}", "--seed=7")
    again = [
        shlex.split(f) for f in only(wrong(*CPU, "--init_from=tny", *words, script=LAUNCH)).fixes
    ]
    ends = ("--init_from=tiny", "--init_from=latest")
    assert again == [["./launch_train.sh", *CPU, *words, end] for end in ends]
    problem = only(wrong(*CPU, "--init_from=resume", script=LAUNCH))  # nanoGPT
    assert "--resume=latest" in problem.fixes[0]
    assert "flag.contradiction" in codes(f"--init_from={run.path}", f"--resume={run.path}")
    assert codes(f"--init_from={run.path}", "--task=video_restoration", "--dataroot_gt=/x")[0] == (
        "init.differs"
    )
    for checkpoint in manifest.all_in(run.checkpoints):
        flip_a_bit(checkpoint / manifest.NAME)
    assert codes(f"--init_from={run.path}") == ["checkpoint.damaged"]


def test_the_file_of_a_checkpoint_without_its_run_is_a_file_of_tensors(tmp_path: Path) -> None:
    run, alone = made(tmp_path / "run", gpt(1)), tmp_path / "some" / "step_00000007"
    shutil.copytree(run.checkpoints / alone.name, alone)
    words = ("--depth=1", "--max_seq_len=16", "--total_batch_size=128")
    start = ask(*CPU, f"--init_from={alone / manifest.STATE}", *words, script=LAUNCH).start
    assert start and not start.plan and start.file == alone / manifest.STATE
    loaded(start.file, gpt(1, seed=4))
    assert codes(f"--init_from={alone}", *words) == ["run.damaged"]


def test_weights_of_another_task_are_one_problem(tmp_path: Path) -> None:
    """Not one for each field that their task does not have."""
    run, file = stored(tmp_path), tmp_path / "own.py"
    file.write_text("from training.tasks import Task\n\n\nclass Own(Task):\n    pass\n")
    plan = rundir.read_json(run.plan) or {}
    task = {"name": "own", "unit": "samples", "file": str(file), "options": {}}
    rundir.write_json(run.plan, plan | {"task": task})
    config = str(ROOT / "configs/dual_gpu/quickstart.py")
    start = f"--init_from={run.path}"
    for words in ((config, start), (start, "--depth=2"), (config, start, "--task=gpt")):
        problem = only(wrong(*CPU, *words, script=LAUNCH))
        assert (problem.code, problem.field, problem.fixes) == ("init.differs", "task", []), words
        assert str(file) in problem.what
        place = "--task" if words[-1] == "--task=gpt" else "depth from"
        assert place in problem.what, words
    (fix,) = only(wrong(*CPU, start, "--task=gpt", script=LAUNCH)).fixes
    assert f"--task={file}" in shlex.split(fix)


def loaded(file: Path, model: torch.nn.Module, **facts: Any) -> None:
    record = {"file": str(file), "title": "x", "bytes": None, "sha256": None, **facts}
    plan: Any = {"init_from": record, "origins": {"out_dir": "default"}}
    start_weights.init_from(model, plan, rundir.RunDir("new"), ALONE)


def test_weights_are_verified_and_compared_when_they_are_loaded(tmp_path: Path) -> None:
    model, other = gpt(1, seed=3), gpt(1, seed=4)
    for name in ("a.pt", "b.pt"):
        state = model.state_dict()
        torch.save(state if name == "a.pt" else {"state_dict": state}, tmp_path / name)
        loaded(tmp_path / name, other)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
    size = (tmp_path / "a.pt").stat().st_size
    with pytest.raises(UserError) as caught:
        loaded(tmp_path / "a.pt", other, bytes=size, sha256="0")
    assert [p.code for p in caught.value.problems] == ["weights.unreadable"]
    with pytest.raises(UserError) as caught:
        loaded(tmp_path / "a.pt", gpt(2))
    assert [p.code for p in caught.value.problems] == ["init.differs"]
    (tmp_path / "text.pt").write_text("no tensors")
    with pytest.raises(UserError):
        trained.tensors(tmp_path / "text.pt")


def test_sizes_of_a_file_of_tensors_are_compared_before_the_start(tmp_path: Path) -> None:
    """Those of torch when they are loaded."""
    state = {f"module.{n}": t for n, t in gpt(1, vocab=448).state_dict().items()}
    file, other = tmp_path / "bare.safetensors", tmp_path / "bare.pt"
    safetensors.torch.save_file(state, file)
    torch.save(state, other)
    size = ("--max_seq_len=16", "--total_batch_size=128")
    problems = wrong(*CPU, f"--init_from={file}", "--depth=2", *size, script=LAUNCH)
    assert [(p.code, p.field) for p in problems] == [
        ("init.differs", "depth"), ("init.differs", "tokenizer")
    ]  # fmt: skip
    assert "--depth=1" in problems[0].fixes[0] and "448" in problems[1].what
    words = (f"--init_from={file}", "--depth=1", "--tokenizer=bpe", "--vocab_size=448", *size)
    assert ask(*CPU, *words, script=LAUNCH).start
    with pytest.raises(UserError) as caught:
        loaded(other, gpt(2))
    (problem,) = caught.value.problems
    assert (problem.code, problem.fixes) == ("init.differs", ["--depth=1"])
    assert "320" in problem.what and "448" in problem.what and "Error" not in problem.what


@each("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("Error(s) in loading state_dict …: ('CUDA error: out of memory\n…',)."),
])  # fmt: skip
def test_a_full_gpu_is_not_a_wrong_model(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a rank is restarted, with a smaller batch if that helps."""
    model = gpt(1)
    torch.save(model.state_dict(), tmp_path / "a.pt")

    def full(self: object, *args: object) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", full)
    with pytest.raises(type(error)):
        loaded(tmp_path / "a.pt", model)
    facts: Any = {"optimizer": "AdamW"}
    saved: Any = SimpleNamespace(
        state={"model": {}, "optimizer": []}, path=tmp_path, manifest=facts
    )
    optimizer: Any = None
    with pytest.raises(type(error)):
        start_weights.load(model, optimizer, saved, facts)
    monkeypatch.undo()
    with pytest.raises(UserError, match="Missing key"):
        start_weights.load(model, optimizer, saved, facts)


@each("wrapped", [
    lambda s: {f"module.{n}": t for n, t in s.items()},
    lambda s: {f"module._orig_mod.{n}": t.bfloat16() for n, t in s.items()},
    lambda s: {n.replace("blocks.0.", "blocks.0._orig_mod."): t for n, t in s.items()},
    lambda s: {"state_dict": {f"model.{n}": t for n, t in s.items()}, "epoch": 3},
    lambda s: {"model_state_dict": s, "epoch": 3},
    lambda s: {"n_averaged": torch.tensor(5), **{f"module.{n}": t for n, t in s.items()}},
])  # fmt: skip
def test_weights_of_wrapped_models_are_found(wrapped: Any, tmp_path: Path) -> None:
    """DDP, torch.compile, Lightning, the usual training script, a moving average; also in files
    from before torch 1.6."""
    state, file = gpt(1, seed=3).state_dict(), tmp_path / "a.pth"
    for zipped in (True, False):
        torch.save(wrapped(state), file, _use_new_zipfile_serialization=zipped)
        model = gpt(1, seed=4)
        loaded(file, model)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-2, atol=1e-2)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_unreadable_files_are_answered_and_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = gpt(1).state_dict()
    torch.save({"model": state, "args": Harmful()}, "objects.pt")
    torch.save({"a": Harmful()}, "old.pth", _use_new_zipfile_serialization=False)
    Path("pickle.pth").write_bytes(pickle.dumps(Harmful()))
    Path("empty.pt").touch()
    safetensors.torch.save_file(state, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:1000])
    Path("text.safetensors").write_text("no tensors")
    names = ("objects.pt", "old.pth", "pickle.pth", "empty.pt", "cut.safetensors",
             "text.safetensors", "missing.pt", "missing.safetensors")  # fmt: skip
    for name in names:
        with pytest.raises(UserError) as caught:
            loaded(tmp_path / name, gpt(1))
        (problem,) = caught.value.problems
        assert problem.code == "weights.unreadable" and not problem.what.endswith(": "), name
    assert not Path("executed").exists()


@pytest.mark.slow
def test_a_training_starts_from_an_exported_folder(tmp_path: Path) -> None:
    """The first loss is that of the weights, not of a guess; its own checkpoints are complete."""
    out, text = tmp_path / "model", tmp_path / "manual.txt"
    assert export.main([str(stored(tmp_path).path), f"--out={out}", "--quiet"]) == 0
    text.write_text((ROOT / "README.md").read_text())
    words = [
        str(ROOT / "launch_train.sh"), "1", "--device=cpu", f"--init_from={out}", f"--data={text}",
        f"--out_dir={tmp_path}", f"--log_dir={tmp_path}", "--run_name=fine", "--num_iterations=2",
        "--device_batch_size=8", "--total_batch_size=512", "--sample_tokens=0", "--report=false",
        "--eval_tokens=1024", "--tensorboard=false", "--use_dummy_wandb",
    ]  # fmt: skip
    done = subprocess.run(
        words, env=clean_environment(), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = rundir.RunDir(tmp_path / "fine")
    first, *_ = rundir.read_records(run.metrics)
    assert first["step"] == 1 and first["loss"] < 3.5  # ln(320) is 5.8
    assert json.loads(run.plan.read_text())["config"]["depth"] == 1
    assert manifest.newest(run.checkpoints)
