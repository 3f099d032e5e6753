"""./duet evaluate: text in any format, several models, other tasks."""

from __future__ import annotations

import gzip
import json
import math
import os
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import each
from tests.unit.trained_runs import flip_a_bit, gpt, made, on_fake_gpu, stored
from training import tasks
from training.cli import evaluate, export
from training.core import manifest
from training.core.cells import cells
from training.core.errors import Exit, Problem, UserError
from training.data.tokenizer_base import BOS, Bytes
from training.tasks.gpt import trained
from training.tasks.gpt.model import GPT
from training.tasks.gpt.passages import Passages
from training.tasks.weights import RAW

TEXT = "The plan of a run is written before it starts. naïve 🙂\n" * 20


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert evaluate.main([*argv, "--json", "--device=cpu"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["evaluations"]
    return found


def test_a_gpu_without_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto uses the CPU; the weights are not to blame."""
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    run = made(tmp_path / "run", gpt(1))
    (found,) = evaluate.parse([str(run.path), f"--data={data}"]).weights
    spec, real = tasks.spec_of(found.plan), trained.TrainedGpt

    def loaded(weights: Any, state: Any, device: torch.device) -> trained.TrainedGpt:
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore")
        return real(weights, state, device)

    monkeypatch.setattr(trained, "TrainedGpt", loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tasks.trained.load(spec, found, "auto").device.type == "cpu"
    said = capsys.readouterr().err
    assert "(CUDA out of memory. Tried to allocate 2.00 MiB.): the CPU is used" in said
    with pytest.raises(UserError) as caught:
        tasks.trained.load(spec, found, "cuda")
    (problem,) = caught.value.problems
    assert (problem.code, problem.fixes) == ("gpu.memory", ["--device=cpu"])
    assert caught.value.code == Exit.RESOURCES


def test_a_gpu_that_fails_while_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other models keep their scores; auto measures this one on the CPU."""
    run, data = stored(tmp_path), tmp_path / "a.txt"
    data.write_text(TEXT)
    words = [str(run.path), "--checkpoints=all", f"--data={data}"]
    wanted = answer(capsys, *words)
    on_fake_gpu(monkeypatch, full_at=150)
    for device, code, count in (("auto", Exit.DONE, 2), ("cuda", Exit.RESOURCES, 1)):
        assert evaluate.main([*words, f"--device={device}", "--json"]) == code
        printed = capsys.readouterr()
        assert json.loads(printed.out)["evaluations"] == wanted[-count:]
        assert ("--device=cpu" in printed.err) == (device == "cuda")


def test_scores_before_an_interruption_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, page = stored(tmp_path), tmp_path / "a.txt", tmp_path / "page.html"
    data.write_text(TEXT)
    real = trained.TrainedGpt.evaluate

    def stopped(model: trained.TrainedGpt, *given: Any) -> dict[str, float]:
        if model.weights.step == 300:
            raise KeyboardInterrupt
        return real(model, *given)

    monkeypatch.setattr(trained.TrainedGpt, "evaluate", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([str(run.path), "--checkpoints=all", f"--data={data}", f"--out={page}"])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [["tiny", "150"]] and page.exists()


def problems(*argv: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        evaluate.parse(list(argv))
    return caught.value.problems


def codes(*argv: str) -> list[str]:
    return [problem.code for problem in problems(*argv)]


@torch.no_grad()
def nats(model: GPT, ids: list[int]) -> float:
    """Sum over all tokens but separators, window by window, from the logits."""
    context, total = model.shape.max_seq_len, 0.0
    for start in range(0, len(ids) - 1, context):
        part = torch.tensor(ids[start : start + context + 1])
        chances = model(part[None, :-1])[0].log_softmax(-1)
        told = part[1:] != BOS
        total -= float(chances[torch.arange(len(told)), part[1:]][told].double().sum())
    return total


@each("length, tokens", [(16, 8192), (16, 40), (64, 1), (4096, 8192)])
def test_scores_equal_those_of_single_windows(
    length: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several documents, whatever the batch size and the parts of the logits."""
    monkeypatch.setattr(trained, "EVALUATED", tokens)
    monkeypatch.setattr(trained, "LOGITS", 4000)
    data = tmp_path / "texts"
    data.mkdir()
    texts = [TEXT, "short", TEXT[:77]]
    for number, text in enumerate(texts):
        (data / f"{number}.txt").write_text(text)
    run = made(tmp_path / "run", gpt(1, length=length))
    (found,) = evaluate.parse([str(run.path), f"--data={data}"]).weights
    model = tasks.trained.load(tasks.spec_of(found.plan), found)
    scores = model.evaluate()
    ids = [token for text in texts for token in [BOS, *text.encode()]]
    size = sum(len(text.encode()) for text in texts)
    wanted = nats(gpt(1, length=length), ids)
    assert (scores["tokens"], scores["bytes"]) == (size, size)
    assert scores["loss"] == pytest.approx(wanted / size, rel=1e-5)
    assert scores["bpb"] == pytest.approx(wanted / size / math.log(2), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(wanted / size), rel=1e-4)


def test_weights_in_bf16_are_evaluated_as_in_a_training(tmp_path: Path) -> None:
    """With a residual stream in bf16."""
    (tmp_path / "a.txt").write_text(TEXT)
    run = made(tmp_path / "run", gpt(2))
    (found,) = evaluate.parse([str(run.path), f"--data={tmp_path / 'a.txt'}"]).weights
    model = tasks.trained.load(tasks.spec_of(found.plan), found)
    whole, seen = model.evaluate()["loss"], []
    model.model.bfloat16()
    model.model.blocks[1].register_forward_pre_hook(  # type: ignore[union-attr,index,operator]
        lambda _, given: seen.append(given[0].dtype)
    )
    assert model.evaluate()["loss"] == pytest.approx(whole, rel=2e-3)
    assert set(seen) == {torch.bfloat16}


def test_formats_and_checkpoints_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path)
    plain, lines, packed = (tmp_path / f"a.{s}" for s in ("txt", "jsonl", "txt.gz"))
    plain.write_text(TEXT)
    lines.write_text(json.dumps({"body": TEXT}) + "\n")
    packed.write_bytes(gzip.compress(TEXT.encode()))
    words = [str(run.path), str(run.checkpoints / "step_00000150")]
    newest, older = answer(capsys, *words, f"--data={plain}")
    assert (newest["step"], older["step"]) == (300, 150) and newest["bpb"] < older["bpb"]
    for more in ([f"--data={packed}"], [f"--data={lines}", "--text_field=body"]):
        assert answer(capsys, words[0], *more) == [newest]
    assert evaluate.main([*words, f"--data={plain}"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "step", "loss", "bpb", "perplexity", "tokens", "bytes"]
    assert [row.split()[:2] for row in rows] == [["tiny", "300"], ["tiny", "150"]]


def test_the_columns_of_any_name_are_straight() -> None:
    """Chinese characters are two columns wide, and a name cannot clear the screen."""
    names = ("模型甲", "base\x1b[2Jline", "a")
    rows: list[dict[str, object]]
    rows = [{"run": name, "step": 7, "weights": RAW, "file": "", "loss": 1.5} for name in names]
    table = evaluate._table(rows)
    assert len({cells(line) for line in table}) == 1
    assert [line.split()[0] for line in table] == ["run", "模型甲", "baseline", "a"]


def test_few_tokens_are_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "a.txt"
    data.write_text("x" * 23)
    assert evaluate.main([str(stored(tmp_path).path), f"--data={data}", "--device=cpu"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["23", "23"]


def test_an_exported_folder_without_an_average(tmp_path: Path) -> None:
    """The folder is named, not its run, and the command to try has the same data."""
    run, out, data = stored(tmp_path), tmp_path / "out", tmp_path / "some text.txt"
    data.write_text(TEXT)
    assert export.main([str(run.path), "--format=torch", f"--out={out}", "--quiet"]) == 0
    with pytest.raises(UserError) as caught:
        evaluate.parse([str(out), f"--data={data}", "--weights=ema"])
    (problem,) = caught.value.problems
    assert problem.code == "weights.other_kind" and problem.what.startswith(f"{out}: ")
    (fix,) = problem.fixes
    assert shlex.split(fix) == ["./duet", "evaluate", str(out), f"--data={data}", "--weights=raw"]


def test_problems(tmp_path: Path) -> None:
    run, empty = str(stored(tmp_path).path), tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(UserError) as raised:
        evaluate.parse([run, "--device=cpu"])
    assert raised.value.problems[0].fixes[0].endswith(" --device=cpu --data=stdlib")
    assert codes(run, "nothing", "--data=/nowhere", "--encoding=xx", "--devise=cpu") == [
        "flag.unknown", "data.encoding_name", "data.missing", "run.missing"
    ]  # fmt: skip
    assert codes(run, f"--data={empty}") == ["data.empty"]


def test_a_replaced_checkpoint_is_measured_on_the_same_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the newest one is damaged; and a model that cannot be read does not lose the others."""
    run, other, data = stored(tmp_path), stored(tmp_path / "b"), tmp_path / "a.txt"
    data.write_text(TEXT)
    (wanted,) = answer(capsys, str(run.checkpoints / "step_00000150"), f"--data={data}")
    flip_a_bit(run.checkpoints / "step_00000300" / manifest.STATE)
    (found,) = answer(capsys, str(run.path), f"--data={data}")
    assert found == wanted
    flip_a_bit(run.checkpoints / "step_00000150" / manifest.STATE)
    words = [str(run.path), str(other.path), f"--data={data}", "--json"]
    assert evaluate.main(words) == Exit.CONFIG
    printed = capsys.readouterr()
    assert "are intact" in printed.err and "1 of 2 models measured (exit 2)" in printed.err
    (measured,) = json.loads(printed.out)["evaluations"]
    assert measured["step"] == 300


def test_a_checkpoint_that_the_training_deletes_meanwhile_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, real = stored(tmp_path), tmp_path / "a.txt", evaluate._measure
    data.write_text(TEXT)
    older = run.checkpoints / "step_00000150"

    def measure(*given: Any) -> str:
        shutil.rmtree(older, ignore_errors=True)
        return real(*given)

    monkeypatch.setattr(evaluate, "_measure", measure)
    words = [str(run.path), "--checkpoints=all", f"--data={data}", "--json"]
    assert evaluate.main(words) == Exit.DONE
    printed = capsys.readouterr()
    assert [one["step"] for one in json.loads(printed.out)["evaluations"]] == [300]
    (line,) = printed.err.splitlines()
    assert "[WARNING]" in line and line.endswith(f"{older} was deleted meanwhile")


class Page(HTMLParser):
    """Text of the cells, addresses of the pictures, and what would be loaded from elsewhere."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        self.sections: list[str] = []
        self.passages = 0
        self.cell = False
        self.text = file.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.cell = tag in ("td", "th") or (self.cell and tag == "i")
        if tag == "img":
            self.pictures.append(str(given["src"]))
        if tag == "section":
            self.sections.append(str(given["id"]))
        self.passages += tag == "pre" and given.get("class") == "sample"
        assert not str(given.get("href") or given.get("src") or "").startswith("http")

    def handle_endtag(self, tag: str) -> None:
        self.cell = self.cell and tag == "i"

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1][-1] += data


def test_the_page_of_all_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data, out = stored(tmp_path), tmp_path / "a.txt", tmp_path / "page.html"
    data.write_text(TEXT * 3 + "\x00\x01 QZXJ <b> 7#" * 20)
    words = [str(run.path), "--checkpoints=all", f"--data={data}", f"--out={out}"]
    assert [one["step"] for one in answer(capsys, *words)] == [150, 300]
    page = Page(out)
    assert page.sections == ["scores", "curves", "passages"]
    head, first, second = page.rows
    assert [len(head), first[0][-3:], second[0][-3:]] == [6, "150", "300"]
    assert second[2].split()[0] == f"{answer(capsys, *words)[1]['bpb']:.4f}"
    assert page.passages == 8 and "<b>" not in page.text and page.text.count("chart-bpb") == 1
    assert evaluate.main([*words[:1], *words[2:]]) == 0  # one model: no curve
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert Page(out).sections == ["passages"]
    same = stored(tmp_path / "b").path  # another run of this name
    assert len(answer(capsys, str(same), str(run.checkpoints / "step_00000150"), *words[2:])) == 2
    page = Page(out)
    assert page.sections == ["scores", "passages"] and page.rows[1][0].startswith(str(same))


def test_problems_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = str(stored(tmp_path).path), tmp_path / "a.txt"
    data.write_text(TEXT)
    words = (run, f"--data={data}")
    assert codes(*words, f"--out={tmp_path / 'a.json'}") == ["output.suffix"]
    assert codes(*words, f"--out={tmp_path / 'no/a.html'}") == ["output.no_folder"]
    (tmp_path / "x.html").mkdir()
    assert codes(*words, f"--out={tmp_path / 'x.html'}", "--checkpoints=some") == [
        "flag.value", "output.is_folder"
    ]  # fmt: skip
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError) as caught:
        evaluate.parse([*words, f"--out={tmp_path / 'b.html'}"])
    assert caught.value.code == Exit.RESOURCES
    assert [problem.code for problem in caught.value.problems] == ["output.unwritable"]


def test_passages_are_parts_of_one_document() -> None:
    """Their bits per byte and their place; short ones are not shown."""
    seen = Passages(Bytes())
    one, two = b"a" * 70, b"b" * 30 + b"c" * 70
    ids = [BOS, *one, BOS, *two]
    rows = torch.tensor([ids[:102], [*ids[101:], *[BOS] * (102 - len(ids[101:]))]])
    sizes = (rows[:, 1:] != BOS).long()
    nats = torch.where(rows[:, 1:] == ord("a"), 2.0, 1.0) * math.log(2) * sizes
    seen.add(rows, {"nats": nats, "bytes": sizes})
    high, low = seen.parts()
    assert (high.scores["bpb"], high.text) == (pytest.approx(2.0), "a" * 70)
    assert (low.scores["bpb"], low.text) == (pytest.approx(1.0), "c" * 70)
    assert "100" in low.name
