"""Every file and answer of Duet is JSON for other parsers too: jq, JavaScript and Go refuse NaN."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from training.core import json_text, jsonl, read_backwards, run_reader, rundir
from training.core.contracts import events, metrics, run_files

BAD = {"loss": math.nan, "score": math.inf, "low": -math.inf, "deep": {"loss": math.nan}, "step": 7}


def strict(text: str) -> Any:
    """As other parsers read it."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_files_name_what_json_lacks_and_readers_get_the_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rundir.append_json(file, BAD)
    assert strict(file.read_text()) == {
        "loss": "NaN",
        "score": "Infinity",
        "low": "-Infinity",
        "deep": {"loss": "NaN"},
        "step": 7,
    }
    for found in (
        *rundir.read_records(file),
        *read_backwards.backwards(file),
        *jsonl.Tail(file).read()[0],
    ):
        assert math.isnan(found["loss"]) and math.isnan(found["deep"]["loss"])
        assert (found["score"], found["low"], found["step"]) == (math.inf, -math.inf, 7)


def test_the_summary_of_a_training_without_a_step(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    rundir.write_json(file, {"loss_first": math.nan, "steps": 0})
    assert strict(file.read_text()) == {"loss_first": "NaN", "steps": 0}
    for found in (run_reader.read_summary(file), jsonl.read_figures(file)):
        assert found and math.isnan(found["loss_first"])


def test_files_of_an_earlier_version_are_read() -> None:
    found = jsonl.parse(b'{"loss": NaN, "best": Infinity}')
    assert found and math.isnan(found["loss"]) and found["best"] == math.inf


def test_words_of_a_command_stay_words(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    rundir.append_json(file, {"args": ["--most", "Infinity"], "loss": math.nan})
    assert next(iter(rundir.read_records(file)))["args"] == ["--most", "Infinity"]
    rundir.write_json(tmp_path / "plan.json", {"env": {"MOST": "Infinity"}})
    assert rundir.read_json(tmp_path / "plan.json") == {"env": {"MOST": "Infinity"}}


def test_texts_of_a_record_stay_texts(tmp_path: Path) -> None:
    """A model may write any word."""
    file = tmp_path / "summary.json"
    for word in json_text.NAMES:
        rundir.write_json(file, {"sample": word, "loss_last": math.inf})
        for found in (run_reader.read_summary(file), jsonl.read_figures(file)):
            assert found and found["sample"] == word and found["loss_last"] == math.inf
        line = json.dumps({"event": "warning", "text": word, "step": 1})
        assert jsonl.parse(line.encode()) == json.loads(line)


def test_every_declared_text_is_known_as_one() -> None:
    records = [
        run_files.SummaryRecord,
        run_files.ScriptSummary,
        metrics.StepRecord,
        metrics.EvaluationRecord,
        *(one for name, one in vars(events).items() if name.endswith(("Facts", "EventRecord"))),
    ]
    declared = {name: str(kind) for one in records for name, kind in one.__annotations__.items()}
    text = re.compile(r"\bstr\b|Literal|Kind|Status")
    texts = {name for name, kind in declared.items() if text.search(kind) and "dict[" not in kind}
    assert texts == json_text.TEXTS


def test_commands_print_null() -> None:
    assert strict(json_text.answer(BAD | {"all": [math.nan, 1.0]})) == {
        "loss": None,
        "score": None,
        "low": None,
        "deep": {"loss": None},
        "step": 7,
        "all": [None, 1.0],
    }


def test_commands_print_paths_in_any_encoding_of_the_output() -> None:
    """Also those that are not text, in a terminal that is not UTF-8."""
    found = {"dir": "名/é\udce9", "text": "2 × 3 °C…"}
    printed = json_text.answer(found)
    assert printed.isascii() and strict(printed) == found
