"""./duet sample on runs of this and of an earlier version."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment, python
from tests.unit.nvidia_machine import UUID, Nvidia
from tests.unit.test_host_gpu_choice import gpu
from tests.unit.trained_runs import flip_a_bit, gpt, made, on_fake_gpu, stored
from training import tasks
from training.cli import evaluate, export, sample, weights_argument
from training.core import log, manifest, rundir
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.host import gpu_claims
from training.tasks.gpt import trained as gpt_trained


def codes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        sample.parse(list(argv))
    return [problem.code for problem in caught.value.problems]


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert sample.main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_of_schema_1_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(tmp_path)
    words = (str(run.path), "--prompt=The ", "--max_tokens=24", "--temperature=0")
    found = answer(capsys, *words)
    assert (found["run"], found["step"], found["device"]) == ("tiny", 300, "cpu")
    (one,) = found["samples"]
    assert (
        one["prompt"] == "The "
        and one["tokens"] == 24 == len(one["text"])
        and one["end"] == "length"
    )
    assert tasks.load_model(run.path).generate("The ", max_tokens=24, temperature=0) == one["text"]
    assert sample.main(list(words)) == 0
    assert capsys.readouterr().out == f"The {one['text']}\n"
    assert answer(capsys, str(run.checkpoints / "step_00000150"), "--max_tokens=1")["step"] == 150


def test_several_prompts_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, prompts = stored(tmp_path), tmp_path / "prompts.txt"
    prompts.write_text("The\n\nA run\n")
    words = (str(run.path), f"--prompts={prompts}", "--num=2", "--max_tokens=8", "--seed=5")
    found = answer(capsys, *words)
    assert (
        found["seed"] == 5
        and [s["prompt"] for s in found["samples"]] == ["The"] * 2 + ["A run"] * 2
    )
    assert found["samples"] == answer(capsys, *words)["samples"]
    alone = answer(capsys, str(run.path), "--prompt=A run", "--max_tokens=8", "--seed=5")
    assert alone["samples"] == found["samples"][2:3]
    assert sample.main(list(words)) == 0
    shown = capsys.readouterr().out
    assert all(s["prompt"] + s["text"] in shown for s in found["samples"])


def test_samples_that_do_not_fit_together_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(tmp_path)
    words = (str(run.path), "--num=5", "--max_tokens=6", "--seed=5")
    together = answer(capsys, *words)["samples"]
    monkeypatch.setattr(gpt_trained, "KEPT", 2 * 2 * 64 * 4 * 7 + 1)  # two samples
    assert answer(capsys, *words)["samples"] == together
    assert sample.main(list(words)) == 0
    assert all(one["text"] in capsys.readouterr().out for one in together[:1])


CHOSEN = """
import os, sys
from training.cli import evaluate, sample
from training.core.errors import UserError
from training.tasks import trained
def load(spec, weights, device):
    print(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    sys.exit()
trained.load = load
try:
    {command}.main(sys.argv[1:])
except UserError as error:
    print(error.problems[0].code)
"""
ONLY_ONE_PROCESS = {"COMPUTE_MODE": 3}


@pytest.mark.parametrize(
    ("device", "claimed", "machine", "chosen"),
    [
        ("auto", [0], {}, f"auto {UUID.format(1)}"),
        ("auto", [1], {}, "auto None"),
        ("auto", [0, 1], {}, "cpu None"),
        ("cuda", [0, 1], {"FREE_GIB": "9,30"}, "cuda 1"),
        ("cuda", [0, 1], ONLY_ONE_PROCESS, "gpu.memory"),
        ("auto", [], ONLY_ONE_PROCESS | {"PROCESSES": "4711:1"}, f"auto {UUID.format(1)}"),
        ("auto", [0], {"CUDA_VISIBLE_DEVICES": "0"}, "auto 0"),
        ("cpu", [], {}, "cpu None"),
    ],
)
def test_the_gpu_of_a_running_training_is_left_alone(
    device: str,
    claimed: list[int],
    machine: dict[str, Any],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia: Nvidia,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run, data = stored(tmp_path), tmp_path / "text.txt"
    data.write_text("some text")
    words = {"sample": [], "evaluate": [f"--data={data}"]}
    here = {"TMPDIR": str(tmp_path), "FAKE_NVML_COUNT": "2"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as launch:
        gpu_claims.claim(launch.pid, [replace(gpu(n, 79), uuid=UUID.format(n)) for n in claimed])
        for command, more in words.items() if claimed == [0, 1] else [("sample", [])]:
            code = CHOSEN.format(command=command)
            argv = (str(run.path), f"--device={device}", *more)
            done = python("-c", code, *argv, **(nvidia(**machine) | here))
            assert done.stdout == f"{chosen}\n", done.stderr
            assert (str(launch.pid) in done.stderr) == (chosen == "cpu None" and claimed == [0, 1])


@each("device", ["auto", "cuda"])
def test_a_gpu_that_fails_while_it_generates(
    device: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = stored(tmp_path)
    words = (str(run.path), "--max_tokens=6", "--seed=5")
    wanted = answer(capsys, *words)
    on_fake_gpu(monkeypatch, full_at=300)
    if device == "auto":
        found = answer(capsys, *words)
        assert (found["device"], found["samples"]) == ("cpu", wanted["samples"])
        assert sample.main([*words, "--prompt=Once", "--num=2"]) == 0
        assert capsys.readouterr().out.count("Once") == 2, "once for each sample"
        return
    with pytest.raises(UserError) as caught:
        answer(capsys, *words, "--device=cuda")
    (problem,) = caught.value.problems
    assert (problem.code, problem.fixes) == ("gpu.memory", ["--device=cpu"])
    assert caught.value.code == Exit.RESOURCES


def test_an_empty_prompt_is_text_from_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(stored(tmp_path).path)
    for words in (["--prompt="], ["--prompt", ""]):
        (one,) = answer(capsys, run, *words, "--max_tokens=4", "--seed=5")["samples"]
        assert one["prompt"] == ""
    assert codes(run, "--prompt") == ["flag.no_value"]
    assert codes(run, "--prompts=") == ["flag.no_value"]


def test_prompts_that_are_not_utf8(tmp_path: Path) -> None:
    run, prompts = str(stored(tmp_path).path), tmp_path / "prompts.txt"
    assert codes(run, "--prompt=caf\udce9") == ["prompts.unreadable"]
    prompts.write_bytes(b"\xef\xbb\xbfone \xe2\x80\xa8 line\r\ntwo\n")
    assert sample.parse([run, f"--prompts={prompts}"]).prompts == ["one \u2028 line", "two"]
    prompts.write_bytes(b"one\ncaf\xe9\n")
    assert codes(run, f"--prompts={prompts}") == ["prompts.unreadable"]
    duet = str(ROOT / "duet")
    done = subprocess.run(
        ["bash", "-c", 'printf "\\351" | "$0" sample "$1" --prompt=-', duet, run],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr


def test_a_closed_standard_input_is_an_error(tmp_path: Path) -> None:
    run = str(stored(tmp_path).path)
    words = ["bash", "-c", '"$0" sample "$1" --prompt=- <&-', str(ROOT / "duet"), run]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prompt='Once upon a time'" in done.stderr


def test_a_model_that_has_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt(1)
    model.head.weight.data.fill_(float("nan"))
    run, data = made(tmp_path / "run", model), tmp_path / "text.txt"
    with pytest.raises(UserError) as caught:
        sample.main([str(run.path)])
    assert [p.code for p in caught.value.problems] == ["weights.unreadable"]
    data.write_text("some text for it " * 9)
    words = [str(run.path), f"--data={data}"]
    assert evaluate.main(words) == 0 and "nan" in capsys.readouterr().out
    assert evaluate.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["loss"] is None


def test_a_prompt_longer_than_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, warned = stored(tmp_path), list[str]()
    monkeypatch.setattr(log, "warning", warned.append)
    words = (str(run.path), "--num=2", "--max_tokens=2")
    answer(capsys, *words, "--prompt=" + "word " * 10)
    assert not warned
    answer(capsys, *words, "--prompt=" + "word " * 100)
    assert len(warned) == 1 and "501" in warned[0]


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(tmp_path)
    warned: list[str] = []
    monkeypatch.setattr(log, "warning", warned.append)
    newest = run.checkpoints / "step_00000300"
    flip_a_bit(newest / manifest.STATE)
    assert answer(capsys, str(run.path), "--max_tokens=1")["step"] == 150 and len(warned) == 1
    for words in ([str(newest)], [str(newest / manifest.STATE)]):  # no other one was asked for
        with pytest.raises(UserError) as caught:
            sample.main([*words, "--json"])
        assert [p.code for p in caught.value.problems] == ["checkpoint.damaged"]
    flip_a_bit(run.checkpoints / "step_00000150" / manifest.STATE)
    with pytest.raises(UserError) as caught:
        sample.main([str(run.path), "--json"])
    assert [p.code for p in caught.value.problems] == ["checkpoint.damaged"]
    flip_a_bit(newest / manifest.NAME)
    assert codes(str(newest)) == ["checkpoint.damaged"]


def changed(run: rundir.RunDir, **facts: object) -> None:
    plan = json.loads(run.plan.read_text())
    rundir.write_json(run.plan, plan | facts)


def test_unusable_runs_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = tmp_path / "experiments"
    run = stored(experiments)
    monkeypatch.setattr(weights_argument, "WORK", tmp_path)
    assert codes("tinny") == ["run.missing"] and sample.parse([]).weights is not None
    changed(run, schema_version=99)
    assert codes(str(run.path)) == ["run.later_version"]
    changed(
        run,
        schema_version=1,
        task={"name": "video_restoration", "unit": "samples", "file": None, "options": {}},
    )
    assert codes("tiny") == ["task.unsupported"]
    empty = rundir.RunDir(experiments / "empty")
    empty.create()
    rundir.write_json(empty.plan, {"schema_version": 1, "config": {}})
    assert codes("empty") == ["weights.none"]
    rundir.write_json(empty.plan, {"schema_version": 1, "script": {"path": "main.py"}})
    assert codes("empty") == ["weights.none"]
    empty.plan.write_text("{")
    assert codes("empty") == ["run.damaged"]
    for folder in ("some/step_00000300", "some/good"):  # copied without the run
        shutil.copytree(run.checkpoints / "step_00000300", tmp_path / folder)
        for word in (tmp_path / folder, tmp_path / folder / manifest.STATE):
            with pytest.raises(UserError) as caught:
                sample.parse([str(word)])
            (problem,) = caught.value.problems
            assert problem.code == "run.damaged" and str(tmp_path / folder) in problem.what
            assert problem.allowed == msg("tasks.weights.with_run")
    (run.checkpoints / "step_00000300").rename(run.checkpoints / "good")
    assert codes(str(run.checkpoints / "good")) == ["checkpoint.damaged"]


@each(
    "argv, expected",
    [
        (
            ["--num=0", "--temperature=hot", "--devise=cpu"],
            ["flag.unknown", "flag.value", "flag.value"],
        ),
        (["--prompt=a", "--prompts=b"], ["flag.contradiction"]),
        (["--prompts=/nowhere/a.txt"], ["prompts.unreadable"]),
        (["one", "two"], ["run.several"]),
    ],
)
def test_all_problems_of_a_command_line_are_reported(
    argv: list[str], expected: list[str], tmp_path: Path
) -> None:
    run = [] if "one" in argv else [str(stored(tmp_path).path)]
    assert sorted(codes(*run, *argv)) == expected


def test_a_lost_tokenizer_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = tmp_path / "ranks.tiktoken"

    ranks.write_text("".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256)))
    run = made(tmp_path / "run", gpt(1), ranks)
    assert len(answer(capsys, str(run.path), "--max_tokens=5")["samples"]) == 1
    (run.tokenizer / ranks.name).write_text("IQ== 0\n")
    with pytest.raises(UserError) as caught:
        sample.main([str(run.path), "--json"])
    assert [p.code for p in caught.value.problems] == ["tokenizer.lost"]


def shows(terminal: Any, pattern: Any) -> None:
    """Waits for it 60 times one second: a machine that is paused for a minute uses up one."""
    for _ in range(60):
        if terminal.expect([pattern, pexpect.TIMEOUT]) == 0:
            return
    where = subprocess.run(
        ["py-spy", "dump", "--pid", str(terminal.pid)], capture_output=True, text=True, check=False
    )
    pytest.fail(f"{pattern!r} is not in {terminal.buffer!r}\n{where.stdout}{where.stderr}")


def test_the_name_of_foreign_weights_cannot_write_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    chosen = sample.parse([str(stored(tmp_path).path), "--prompt=x"])
    model: Any = SimpleNamespace(weights=replace(chosen.weights, name="a\x1b[2Jb\n"))
    sample._converse(model, chosen)
    shown = capsys.readouterr().err
    assert shown.startswith("ab , step 300") and shown[:-1].isprintable()


@pytest.mark.slow
def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C stops the answer only; Ctrl-D ends."""
    run = stored(tmp_path)
    terminal = pexpect.spawn(
        str(ROOT / "duet"),
        ["sample", str(run.path), "--max_tokens=1000000", "--temperature=1"],
        env=clean_environment(TERM="dumb"),  # type: ignore[arg-type]
        encoding="utf-8",
        codec_errors="replace",
        timeout=1,
    )
    try:
        for _ in range(2):
            shows(terminal, "> ")
            terminal.sendline("The")
            shows(terminal, "The\r\n")
            shows(terminal, "(?s).{200}")
            terminal.sendintr()
        shows(terminal, "\n> ")
        terminal.sendeof()
        shows(terminal, pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 0
    finally:
        terminal.close(force=True)


@each("command", [sample, evaluate, export])
def test_a_path_that_cannot_be_examined(command: Any) -> None:
    long = f"/tmp/{'x' * 300}"
    with pytest.raises(UserError) as caught:
        command.parse([long, *(["--out=model"] if command is export else [])])
    assert [problem.code for problem in caught.value.problems] == ["run.missing"]
