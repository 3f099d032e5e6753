"""./duet export: every format is loaded again, by Duet, torch, tokenizers and transformers."""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.trained_runs import checkpoint, flip_a_bit, gpt, made, stored
from training import tasks
from training.cli import export
from training.core import rundir
from training.core.errors import Exit, UserError
from training.data import bpe, hugging_face, tokenizer
from training.data.tokenizer_base import Bytes, Tokenizer
from training.tasks import export as writer
from training.tasks import model_card, weights
from training.tasks.gpt.generate import Sampling, generate
from training.tasks.weights import FORMATS

TEXTS = ["The plan", "naïve 训练 🙂", "", " two  spaces\n\n\ttab 12345 it's", "<|bos|> is text"]


def codes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        export.parse(list(argv))
    return [problem.code for problem in caught.value.problems]


def tiktoken_file(folder: Path) -> Path:
    """256 bytes and the merges of a few words."""
    tokens = [bytes([n]) for n in range(256)]
    tokens += [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b" pl", b"an", b" plan", b"12"]
    file = folder / "ranks.tiktoken"
    file.write_text("".join(f"{base64.b64encode(t).decode()} {n}\n" for n, t in enumerate(tokens)))
    return file


def bpe_file(folder: Path) -> Path:
    bpe.train([(ROOT / "CONTRIBUTING.md").read_text()], 400, folder)
    return folder / "tokenizer.json"


@each("form", FORMATS)
def test_a_run_of_schema_1_is_exported(form: str, tmp_path: Path) -> None:
    run, out = stored(tmp_path), tmp_path / "out"
    plan = json.loads(run.plan.read_text())
    plan.pop("task", None)  # from before there were several
    rundir.write_json(run.plan, plan)
    out.mkdir()  # an empty one is fine
    assert export.main([str(run.path), f"--format={form}", f"--out={out}", "--quiet"]) == 0
    record = json.loads((out / "duet.json").read_text())
    assert (record["run"], record["step"], record["tokenizer"]) == ("tiny", 300, "bytes")
    assert record["task"]["name"] == tasks.DEFAULT.name
    first, again = tasks.load_model(run.path), tasks.load_model(out)
    wanted = first.model.state_dict()
    assert all(torch.equal(t, wanted[n]) for n, t in again.model.state_dict().items())
    assert first.generate("The ", 20, 0.0) == again.generate("The ", 20, 0.0)
    if form == "torch":
        plain = torch.load(out / "model.pt", weights_only=True)
        assert plain.keys() == wanted.keys() and torch.equal(
            plain["head.weight"], wanted["head.weight"]
        )
        assert plain._metadata == wanted._metadata
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny"]
    assert codes(str(run.path), f"--format={form}", f"--out={out}") == ["output.not_empty"]
    flip_a_bit(out / record["weights"])
    with pytest.raises(UserError) as caught:
        tasks.load_model(out)
    assert [p.code for p in caught.value.problems] == ["checkpoint.damaged"]


def test_the_model_card_of_a_long_run_needs_little_memory(tmp_path: Path) -> None:
    run, steps = stored(tmp_path), 5000
    trained = tasks.load_model(run.path)
    first = json.loads(run.metrics.read_text().partition("\n")[0])
    every = {"compute_ms": [1.5] * 8, "memory_bytes": [1 << 40] * 8}
    run.metrics.write_text(
        "".join(json.dumps(first | every | {"step": n}) + "\n" for n in range(1, steps + 1))
    )
    facts: Any = {**trained.weights.facts, "step": steps}
    trained.weights = replace(trained.weights, facts=facts)
    model_card.text(trained, "hf")  # without what its first use imports
    tracemalloc.start()
    text = model_card.text(trained, "hf")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 200 * steps and f"| {steps} |" in text


def test_the_model_card(tmp_path: Path) -> None:
    run = stored(tmp_path)
    plan = json.loads(run.plan.read_text())
    plan["command"]["args"].append("--wandb_key=0123456789abcdef0123456789abcdef01234567")
    private = ["--hosts=eve@one.corp,two:2", "--master_addr", "one.corp", "--notify=send topic7"]
    private += ["--ssh-args=-J jump.corp", "--out_dir=/disk7/runs", "--log-dir", "/disk7/logs"]
    plan["command"]["args"] += [*private, "--depth=4"]
    rundir.write_json(run.plan, plan)
    text = model_card.text(tasks.load_model(run.path), "hf")
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 300, "val_bpb": null}\n')
    assert "val_bpb -" in model_card.text(tasks.load_model(run.path), "hf")
    summary = json.loads(run.summary.read_text())
    assert text.startswith("---\nlicense: #") and f"val_bpb {summary['val_bpb_last']:.4f}" in text
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")] == [
        "| step", "| 100", "| 200", "| 300"
    ]  # fmt: skip
    assert "./launch_train.sh 1 --device=cpu" in text and "26,265 tokens" in text
    assert "0123456789abcdef" not in text and "/home/user/" not in text
    assert " --depth=4\n" in text
    for part in ("eve@", "two:", "corp", "topic7", "disk7", "hosts", "log-dir"):
        assert part not in text, part


def test_nothing_is_left_of_a_failed_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    run = stored(tmp_path)
    monkeypatch.setattr(writer.model_card, "text", full)
    with pytest.raises(UserError) as caught:
        export.main([str(run.path), "--format=torch", f"--out={tmp_path / 'out'}"])
    assert [p.code for p in caught.value.problems] == ["output.unwritable"]
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


@each("form", ["safetensors", "torch"])
def test_a_full_disk_is_answered(form: str, tmp_path: Path) -> None:
    run, out = stored(tmp_path), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            export.main([str(run.path), f"--format={form}", f"--out={out}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.code for p in caught.value.problems] == ["output.unwritable"]
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_a_damaged_record_is_answered(tmp_path: Path) -> None:
    run, out = stored(tmp_path), tmp_path / "out"
    assert export.main([str(run.path), f"--out={out}", "--quiet"]) == 0
    record = json.loads((out / "duet.json").read_text())
    wrong: list[Any] = [{k: v for k, v in record.items() if k != name} for name in weights.PARTS]
    wrong += [
        record | {"task": 3},
        record | {"task": {}},
        record | {"task": record["task"] | {"options": 3}},
        record | {"format": 9},
        [],
        "x",
    ]
    for one in wrong:
        rundir.write_bytes(out / "duet.json", json.dumps(one).encode())
        assert codes(str(out), "--format=torch", f"--out={tmp_path / 'b'}") == [
            "weights.unreadable"
        ], one
    for one, code in (
        (record | {"shape": {"layers": 3}}, "resume.other_model"),
        (record | {"task": record["task"] | {"name": "lost.py", "file": None}}, "task.unreadable"),
    ):
        rundir.write_json(out / "duet.json", one)
        with pytest.raises(UserError) as caught:
            tasks.load_model(out)
        assert [p.code for p in caught.value.problems] == [code]


def test_tensors_that_share_memory_are_separated() -> None:
    base = torch.arange(6.0)
    found = writer._separate({"a": base, "b": base, "c": base[2:], "d": base.view(2, 3).T})
    places = [tensor.untyped_storage() for tensor in found.values()]
    assert len({one.data_ptr() for one in places}) == 4
    assert [one.nbytes() for one in places] == [24, 24, 16, 24]
    assert found["a"].data_ptr() == base.data_ptr()  # not copied


def test_bad_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(stored(tmp_path).path)
    assert codes(run, "--format=onnx") == ["flag.value", "flag.no_value"]
    assert codes(run, f"--out={tmp_path}/no/where") == ["output.no_folder"]
    with pytest.raises(UserError) as caught:
        export.parse([run, f"--out={tmp_path}/no/where"])
    assert caught.value.problems[0].what == f"the directory '{tmp_path}/no' does not exist"
    assert codes(run, "--out=/") == ["output.not_empty"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert export.parse([run, f"--out={tmp_path / 'link'}"]).out == tmp_path / "empty"
    assert codes(run, f"--out={tmp_path / 'tiny/plan.json'}") == ["output.not_empty"]
    monkeypatch.setattr(export.safetensors_file.packages, "lacking", list)
    with pytest.raises(UserError) as caught:
        export.parse([run, f"--out={tmp_path / 'new'}"])
    assert [problem.code for problem in caught.value.problems] == ["package.missing"]
    assert caught.value.code == Exit.RESOURCES
    with pytest.raises(UserError) as caught:
        export.parse([run, "--out=/"])
    assert caught.value.code == Exit.CONFIG, "another folder is needed first"
    assert export.parse([run, f"--out={tmp_path / 'new'}", "--format=torch"]).form == "torch"


def test_a_users_task_is_exported_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without a tokenizer; not for transformers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "small")
    source = ROOT / "examples/spirals.py"
    private = {"words": f"{tmp_path}/mine/words.txt"}
    private |= {
        "api_key": "hunter42",
        "run_token": "hf_" + "a1" * 9,
        "hub_token": "a8f3-99c1-77de-12ab",
        "db": "s3://me:hunter42@host/x",
    }
    kept = {"image_key": "image", "pad_token": "<pad>", "auth": "auto", "log": "/disk/small"}
    kept |= {"data": "/home/shared/imagenet", "near": f"{tmp_path}2/x"}
    options = {"points": 40, "noise": 0.05, "width": 8, "lr": 3e-3, "kind": "small"}
    options |= {**private, **kept}
    run = made(tmp_path / "run", gpt(1))
    plan = json.loads(run.plan.read_text())
    plan["task"] = {
        "name": "spirals.py",
        "unit": "samples",
        "file": str(source),
        "options": options,
    }
    rundir.write_json(run.plan, plan)
    task = tasks.make(plan, torch.device("cpu"), None)
    model = task.model()
    checkpoint(run, model.state_dict(), {"words": private["words"]}, 9)
    out = tmp_path / "out"
    assert codes(str(run.path), "--format=hf", f"--out={out}") == ["task.unsupported"]
    assert export.main([str(run.path), f"--out={out}"]) == 0
    assert (out / "spirals.py").read_text() == source.read_text()
    record = json.loads((out / "duet.json").read_text())
    shown = {"words": "~/mine/words.txt", "api_key": "", "run_token": "", "hub_token": "", "db": ""}
    assert "api_key, run_token, hub_token, db" in capsys.readouterr().err
    assert record["task"]["options"] == options | shown, "a word may be a choice"
    assert record["shape"] == {"words": shown["words"]}
    loaded = tasks.load_model(out).weights
    assert loaded.plan["task"]["options"] == options | dict.fromkeys(shown, "") | {
        "words": private["words"]
    }
    assert loaded.facts["shape"] == {"words": private["words"]}
    points = torch.randn(5, 2)
    with torch.no_grad():
        torch.testing.assert_close(tasks.load_model(out).model(points), model(points))


@each("kind", ["bytes", "bpe", "tiktoken"])
def test_the_exported_tokenizer_has_the_same_ids(kind: str, tmp_path: Path) -> None:
    words: Tokenizer = Bytes()
    if kind != "bytes":
        file = bpe_file(tmp_path) if kind == "bpe" else tiktoken_file(tmp_path)
        words = tokenizer.load(str(file))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(hugging_face.tokenizer_json(words)))
    theirs.encode_special_tokens = True
    texts = [*TEXTS, (ROOT / "README.zh-CN.md").read_text(), "the then thing planning 123 in"]
    ours = [ids.tolist() for ids in words.encode_documents(texts)]
    assert [theirs.encode(text).ids for text in texts] == ours
    assert [theirs.decode(ids) for ids in ours] == texts


@each("kind", ["bpe", "tiktoken"])
def test_a_learned_tokenizer_stays_with_the_model(kind: str, tmp_path: Path) -> None:
    file = bpe_file(tmp_path) if kind == "bpe" else tiktoken_file(tmp_path)
    rows = tokenizer.load(str(file)).padded_vocab
    run = made(tmp_path / "run", gpt(1, vocab=rows), file)
    wanted = tasks.load_model(run.path).generate("The plan", 10, 0.0)
    for form in ("torch", "hf"):
        out = tmp_path / form
        assert export.main([str(run.path), f"--format={form}", f"--out={out}"]) == 0
        assert tasks.load_model(out).generate("The plan", 10, 0.0) == wanted
        again = SimpleNamespace(folder=str(out))
        words = tokenizer.load(str(tokenizer.file_in(out)))
        words.save(tmp_path / "run/tokenizer")  # as the preparation of a run with this file does
        saved = tokenizer.file_in(tmp_path / "run/tokenizer")
        assert saved and tokenizer.identity(again) == tokenizer.checksum(  # type: ignore[arg-type]
            tmp_path / "run/tokenizer" / Path(str(tokenizer.file_in(out))).name
        )


def in_transformers(script: str, folder: Path, answer: Path, texts: list[str]) -> Any:
    """What the script of tests/unit prints, in a process without Duet."""
    if not (ROOT / ".tools/peers/transformers").is_dir():
        pytest.skip("transformers is not there: make peers")
    home = answer.parent
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit" / script), str(folder), str(answer), *texts],
        cwd=home,
        env=clean_environment(
            PYTHONPATH=str(ROOT / ".tools/peers"), HF_HUB_OFFLINE="1", HF_HOME=str(home / "hf")
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answer.read_text())


@pytest.mark.slow
def test_transformers_train_alike_in_one_batch_and_in_parts(tmp_path: Path) -> None:
    """Texts of unequal lengths: the mean over all labels of a step, as one batch has it."""
    run, out = made(tmp_path / "run", gpt(2, length=64)), tmp_path / "model"
    assert export.main([str(run.path), "--format=hf", f"--out={out}"]) == 0
    texts = [("The plan of " * 4)[: 3 + 5 * n] for n in range(8)]
    found = in_transformers("hub_trainer.py", out, tmp_path / "answer", texts)
    for parts in ("parts", "checkpointed"):
        assert found[parts] == pytest.approx(found["whole"], rel=1e-4), parts
    model = tasks.load_model(run.path).model
    width, rows = model.shape.width, model.shape.vocab
    ids = len(tasks.load_model(run.path).encode(texts[0]))
    assert found["states"] == [[1, ids, width]] * 3
    assert (found["embedded"], found["last"], found["kept"]) == (True, True, True)
    assert found["grown"] == [rows + 64, rows + 64]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_transformers_compute_the_same(kind: str, tmp_path: Path) -> None:
    file = bpe_file(tmp_path) if kind == "bpe" else None
    rows = tokenizer.load(str(file)).padded_vocab if file else 320
    model = gpt(2, vocab=rows, length=64, key_offset=kind == "bpe")
    run = made(tmp_path / "run", model, file)
    out, answer = tmp_path / "model", tmp_path / "answer"
    assert export.main([str(run.path), "--format=hf", f"--out={out}"]) == 0
    texts = ["The plan of", "naïve 训练"]
    found = in_transformers("hub_reader.py", out, answer, texts)
    ours = tasks.load_model(run.path)
    ids = [ours.encode(text) for text in texts]
    assert found["ids"] == ids and found["decoded"] == texts and found["modules"] == []
    theirs = torch.load(tmp_path / "answer.pt", weights_only=True)
    with torch.no_grad():
        for number, (one, logits) in enumerate(zip(ids, theirs["logits"], strict=True)):
            wanted = ours.model(torch.tensor([one]))[0]
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
            for padded in theirs["padded"]:  # before the tokens, and between them
                torch.testing.assert_close(padded[number], wanted[-1], rtol=1e-4, atol=1e-4)
        inputs = torch.tensor(ids[:1])
        assert found["loss"] == pytest.approx(
            ours.model(inputs[:, :-1], inputs[:, 1:]).item(), rel=1e-4
        )
    how = Sampling(12, 0.0, known=ours.tokenizer.vocab)
    steps = [column[0] for column in generate(ours.model, ids[0], how)]
    assert found["made"] == ids[0] + steps
