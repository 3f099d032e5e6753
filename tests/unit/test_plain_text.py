"""What ranks print and raise reaches no terminal with control characters."""

from __future__ import annotations

import selectors
from pathlib import Path

import pytest

from tests.unit.verdicts import failed, new_run, report_error
from training.core import log, plain_text
from training.core.contracts.verdict import DiagnosisRecord
from training.core.tail import tail
from training.diagnose import card
from training.diagnose.log_line import shown
from training.diagnose.result import diagnose
from training.launcher.other_ranks import OtherRanks
from training.launcher.outputs import Outputs
from training.monitor import term_text

CONTROL = "\x1b[31mlabel\x1b[0m 7\x1b[2J\x1b(B\x1b]0;title\x07 \0is\r out \x9b2J"
PLAIN = "label 7  is  out  2J"
BARS = "\x1b[2J1/20\x1b[A\r2/20\x1b[A\n\x1b[A\n\x1b[1m\x1b[32m"


def test_escape_sequences_are_dropped_and_other_control_characters_are_spaces() -> None:
    assert plain_text.one_line(CONTROL) == PLAIN
    assert plain_text.one_line("a\n\tb\udce9") == "a  b?"
    assert plain_text.plain(f"{CONTROL}\n\t第 7 步 🏖\ufe0f") == f"{PLAIN}\n\t第 7 步 🏖\ufe0f"


def test_the_last_lines_of_a_log_have_no_lines_of_escape_sequences_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\x1b[31mone\x1b[0m\n" + BARS.encode() + b"\0three\n\x1b[A")
    assert tail(tmp_path / "log", 5) == ["one", "2/20", " three"]


def test_the_last_lines_of_a_file_that_was_truncated_since(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo\n")
    assert tail(tmp_path / "log", 5, since=4) == ["two"]
    assert tail(tmp_path / "log", 5, since=8) == []
    assert tail(tmp_path / "log", 5, since=9) == ["one", "two"]


def test_failure_record_card_and_diagnosis_without_control_characters(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    report_error(run, 1, "ValueError", CONTROL)
    run.rank_log(1).write_text(f"{BARS}\n{CONTROL}\n")
    record = failed(run)
    assert record["summary"] == f"ValueError: {PLAIN.partition('  out')[0]}"
    assert record["evidence"] == ["2/20", " out  2J"]
    early = {**record, "summary": CONTROL, "evidence": [CONTROL]}
    diagnosis: DiagnosisRecord = {
        **diagnose([run.rank_log(1)]),
        "summary": CONTROL,
        "lines": [BARS],
    }
    for text in (card.of_run(record), card.of_run(early), card.draw(diagnosis)):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "2/20" in text or PLAIN in text
    assert shown(CONTROL) == PLAIN


def test_messages_of_the_launcher_quote_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.error(f"FAILED rank 1: {CONTROL}\n  Cause")
    said = capsys.readouterr().err
    assert said.startswith("[ERROR] ") and said.endswith(f" FAILED rank 1: {PLAIN}\n  Cause\n")


def test_tables_quote_without_control_characters() -> None:
    text = term_text.render([(CONTROL, "bad")], 80, colour=False, ascii_only=False)
    assert text == term_text.clean(CONTROL) and text.isprintable()


def test_lines_of_another_rank_have_no_control_characters_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = OtherRanks()
    outputs = Outputs(new_run(tmp_path), selectors.DefaultSelector(), lambda: None, [0], 0, others)
    others.add(1, b"a\x1b[2J\t\0b\n", first=False)
    outputs.show_others(ended=True)
    assert capsys.readouterr().err == "[rank1] a\t b\n"


def test_the_evidence_leaves_out_marks_below_lines_of_a_traceback(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.rank_log(1).write_text(
        "[rank1]:     call()\n[rank1]:     ^^^^^^\n    ~~^~~\n[rank1]: E: x\n"
    )
    assert failed(run)["evidence"] == ["[rank1]:     call()", "[rank1]: E: x"]
