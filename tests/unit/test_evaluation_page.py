"""./duet evaluate: failures, diverged models and many checkpoints on its page and in its table."""

from __future__ import annotations

import errno
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.report_runs import read
from tests.unit.trained_runs import stored
from training.cli import evaluate
from training.core import manifest, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.data.tokenizer_base import BOS, Bytes
from training.monitor.report import charts, evaluation_page
from training.tasks.evaluation import Evaluation, Part, Picture
from training.tasks.gpt.passages import Passages
from training.tasks.weights import RAW

TEXT = "The plan of a run is written before it starts.\n" * 20


def test_scores_are_printed_before_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a full disk loses no measurement."""
    run, data, out = stored(tmp_path), tmp_path / "a.txt", tmp_path / "page.html"
    data.write_text(TEXT)

    def full(file: Path, content: bytes, mode: int | None = None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir, "write_bytes", full)
    words = [str(run.path), f"--data={data}", f"--out={out}", "--device=cpu"]
    assert evaluate.main(words) == Exit.RESOURCES
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split()[:2] == ["tiny", "300"]
    assert f"{out} cannot be written: No space left on device" in printed.err
    assert "1 of 1 models measured (exit 3)" in printed.err


def test_scores_of_a_diverged_model_fit_the_table_and_the_page(tmp_path: Path) -> None:
    huge = Evaluation("run", 1, RAW, "/run", "/run/a", {"loss": 600.0, "perplexity": math.exp(600)})
    broken = replace(huge, step=2, scores={"loss": math.nan, "perplexity": math.inf})
    rows: list[dict[str, object]] = [
        {"run": e.run, "step": e.step, "weights": e.weights, **e.scores} for e in (huge, broken)
    ]
    _, first, second = (line.split() for line in evaluate._table(rows))
    assert first == ["run", "1", "600", "3.773e+260"] and second == ["run", "2", "nan", "inf"]
    page = read(evaluation_page.page([huge, broken], "data", "cpu", 0.0).html())
    for text in ("600.0000 3.773e+260", "NaN +∞"):
        assert text in page.text


def test_a_loss_that_is_not_finite_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = stored(tmp_path), tmp_path / "a.txt"
    data.write_text(TEXT)
    scores: dict[str, float] = {}
    measured = Evaluation("tiny", 300, RAW, str(run.path), str(run.path), scores)
    monkeypatch.setattr(evaluate, "_measured", lambda *_, **__: measured)
    words = [str(run.path), f"--data={data}", "--device=cpu"]
    for found, name, explained in (
        ({"loss": math.nan, "perplexity": math.nan}, "loss", True),
        ({"loss": math.inf, "perplexity": math.inf}, "loss", True),
        ({"acc": 0.5, "f1": math.nan}, "f1", True),
        ({"loss": 900.0, "perplexity": math.inf}, "", False),
        ({"psnr": math.inf}, "", False),
    ):
        scores.clear()
        scores.update(found)
        assert evaluate.main(words) == Exit.DONE
        printed = capsys.readouterr().err
        text = msg(
            "cli.evaluate.not_finite", name=name, value=found.get(name), models="tiny, step 300"
        )
        assert (text in printed, "WARNING" in printed) == (explained, explained), found


def test_scores_per_token_of_different_tokenizers_have_no_best() -> None:
    for tokens, best in ((500.0, ["1.0000", "2.7183", "0.5000"]), (900.0, ["0.5000"])):
        found = [
            Evaluation(
                f"run{i}",
                1,
                RAW,
                f"/run{i}",
                f"/run{i}/a",
                {"loss": 1.0 + i, "perplexity": math.exp(1.0 + i), "bpb": 0.5 + i}
                | {"tokens": each, "bytes": 1800.0},
            )
            for i, each in enumerate((500.0, tokens))
        ]
        html = evaluation_page.page(found, "data", "cpu", 0.0).html()
        assert re.findall(r'class="n best">([^<]*)<', html) == best


def test_the_psnr_of_a_perfect_picture_is_infinite() -> None:
    part = Part("clip", {"psnr": math.inf}, pictures=[Picture("output", b"png", psnr=math.inf)])
    one = Evaluation("run", 1, RAW, "/run", "/run/a", {"psnr": math.inf}, [part])
    html = evaluation_page.page([one], "data", "cpu", 0.0).html()
    assert ": +∞ dB" in html and "inf dB" not in html


def test_only_pictures_that_are_shown_stay_in_memory() -> None:
    """Those of the best and of the last models, at any time."""
    done: list[Evaluation] = []
    for step, psnr in enumerate((20.0, 26.0, math.nan, 24.0, 27.0, 25.0, 23.0, 22.0, 21.0)):
        part = Part("clip", {"psnr": psnr}, pictures=[Picture("output", b"png")])
        done.append(Evaluation("run", step, RAW, "/run", f"/run/{step}", {"psnr": psnr}, [part]))
        complete = [replace(one, parts=[part]) for one in done]
        evaluate._forget_pictures(done)
        left = [one.step for one in done if one.parts[0].pictures]
        assert left == [one.step for one in evaluation_page.pictured(complete)]
    assert left == [4, 6, 7, 8]


def test_a_checkpoint_with_a_damaged_manifest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = stored(tmp_path), tmp_path / "a.txt"
    data.write_text(TEXT)
    (run.checkpoints / "step_00000300" / manifest.NAME).write_text("{}")
    words = [str(run.path), f"--data={data}", "--checkpoints=all", "--json", "--device=cpu"]
    assert evaluate.main(words) == 0
    printed = capsys.readouterr()
    assert [one["step"] for one in json.loads(printed.out)["evaluations"]] == [150]
    assert "step_00000300" in printed.err


def test_a_passage_without_a_valid_character_is_still_a_passage() -> None:
    """Not a clip, which has no text."""
    seen = Passages(Bytes())
    rows = torch.full((1, 71), 0xFF)
    rows[0, 0] = BOS
    seen.add(rows, {"nats": torch.ones(1, 70), "bytes": torch.ones(1, 70)})
    (part,) = seen.parts()
    assert part.text == "\ufffd" * 70


def test_a_checkpoint_without_a_finite_score_is_marked_on_its_curve() -> None:
    found = [
        Evaluation("run", step, RAW, "/run", f"/run/{step}", {"loss": loss})
        for step, loss in ((1, 3.0), (2, math.nan), (3, 2.0))
    ]
    (chart,) = evaluation_page._charts(found, ["", "", ""])
    assert chart
    rows = zip(*(chart.columns[key] for key in ("series", "step", "y")), strict=True)
    assert list(rows) == [(0, 1, 3.0), (0, 2, None), (0, 3, 2.0), (charts.MARK, 2, None)]
