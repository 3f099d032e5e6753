"""Data of a run: prepared by one process and published for the others, as is a failure."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ROOT, only
from training.config.schema import FIELDS, Config
from training.core import manifest
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir
from training.data import tokenizer
from training.data.prepared_corpus import PreparedCorpus, content, own_copy
from training.trainer import prepared_cache

Write = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def plan(data: str, seq_len: int = 8, **config: Any) -> dict[str, Any]:
    """The part of a plan that data preparation needs: two ranks, one sequence each."""
    return {
        "command": {"script": "train.py", "args": []},
        "config": vars(Config(data=data, **config)),
        "origins": dict.fromkeys(FIELDS, "from --data on the command line"),
        "batch": {"device_sequences": 1, "seq_len": seq_len, "world_size": 2, "accumulation": 1},
        "place": {"node_rank": 0},
    }


def test_published_data_is_found_by_the_others(write: Write, run: RunDir, tmp_path: Path) -> None:
    asked = plan(write("a.txt", "some text" * 100), num_epochs=2)
    assert prepared_cache.published(run) is None
    data = prepared_cache.prepare(run, asked, tmp_path / "cache")
    assert prepared_cache.published(run) == data
    assert Path(data.folder).parent == tmp_path / "cache"
    facts = json.loads(run.data.read_text())
    assert facts["steps_per_epoch"] == (data.train_tokens - 1) // 8 // 2  # sequences per step
    assert (facts["total_steps"], facts["epochs"]) == (2 * facts["steps_per_epoch"], 2)


def test_a_machine_with_the_same_disk_reads_its_own_copy_of_the_text(
    write: Write, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another folder, since the file's time is different."""
    monkeypatch.setenv(prepared_cache.OWN, "")
    text = write("a.txt", "some text" * 100)
    first = prepared_cache.prepare(run, plan(text), tmp_path / "cache")
    os.utime(text, (1, 1))
    other = plan(text) | {"place": {"node_rank": 1}}
    second = prepared_cache.prepare(run, other, tmp_path / "cache1")
    assert json.loads(run.data.read_text())["folder"] == first.folder != second.folder
    assert prepared_cache.published(run) == second and prepared_cache.changed(run) == ""
    Path(second.train[0]).write_bytes(b"")
    assert str(second.train[0]) in prepared_cache.changed(run)
    prepared_cache.prepare(run, other | {"shared": False}, tmp_path / "cache")
    assert prepared_cache.OWN not in os.environ, "data.json of its own disk has it"


def test_a_machine_with_another_text_has_its_own_numbers_of_tokens(
    write: Write, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks compare them and name the machine."""
    monkeypatch.setenv(prepared_cache.OWN, "")
    prepared_cache.prepare(run, plan(write("a.txt", "some text" * 100)), tmp_path / "cache")
    other = plan(write("a.txt", "some text" * 90)) | {"place": {"node_rank": 1}}
    second = prepared_cache.prepare(run, other, tmp_path / "cache1")
    assert prepared_cache.published(run) == second and prepared_cache.changed(run) == ""
    with pytest.raises(UserError):
        prepared_cache.prepare(run, plan("no.txt") | {"place": {"node_rank": 1}})
    with pytest.raises(UserError) as caught:
        prepared_cache.published(run)
    assert caught.value.said_by_another


def test_the_configured_text_field_is_used(write: Write, run: RunDir, tmp_path: Path) -> None:
    name = write("a.jsonl", '{"body": "some text"}\n' * 30)
    assert (
        prepared_cache.prepare(run, plan(name, text_field="body"), tmp_path / "cache").documents
        == 30
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "missing.txt",
            None,
            "data is 'missing.txt' (from --data on the command line): no such file",
        ),
        ("a.jsonl", "{bad\n", "a.jsonl:1: not JSON"),
        ("a.txt", "short", "data a has 6 training tokens; one step needs 17"),
    ],
)
def test_a_failure_is_reported_and_published(
    name: str,
    content: str | None,
    message: str,
    write: Write,
    run: RunDir,
    home: Path,
    tmp_path: Path,
) -> None:
    if content is not None:
        write(name, content)
    with pytest.raises(UserError) as caught:
        prepared_cache.prepare(run, plan(name), tmp_path / "cache")
    assert caught.value.problems[0].what.startswith(message)
    # The others exit with the same code and report nothing, since it has been reported.
    with pytest.raises(UserError) as other:
        prepared_cache.published(run)
    assert (other.value.code, other.value.problems) == (Exit.CONFIG, [])


def test_a_suggestion_is_the_whole_command(write: Write, run: RunDir, tmp_path: Path) -> None:
    name = write("a b.jsonl", '{"the body": "some text"}\n')
    asked = plan(name)
    for script, args, wanted in (
        ("launch_train.sh", ["2", f"--data={name}"], f"./launch_train.sh 2 '--data={name}'"),
        ("train.py", ["--text_field=x"], "python train.py"),
    ):
        asked["command"] = {"script": script, "args": args}
        with pytest.raises(UserError) as caught:
            prepared_cache.prepare(run, asked, tmp_path / "cache")
        (problem,) = caught.value.problems
        assert problem.code == "data.no_text_field"
        assert problem.fixes == [f"{wanted} --text_field='the body'"]


def test_an_unwritable_folder_for_shards(
    write: Write, run: RunDir, home: Path, tmp_path: Path
) -> None:
    # A resource is missing: a message and exit 3, no traceback; and the other ranks must not wait
    # for ever.
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        prepared_cache.prepare(
            run, plan(write("a.txt", "some text" * 100)), tmp_path / "file" / "data"
        )
    assert caught.value.code == Exit.RESOURCES
    assert str(tmp_path / "file") in caught.value.problems[0].what
    with pytest.raises(UserError) as other:
        prepared_cache.published(run)
    assert other.value.code == Exit.RESOURCES


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_user_who_may_not_write_shards_gets_the_command_for_a_copy(
    number: int, write: Write, run: RunDir, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prepared_cache, "ensure", refused)
    with pytest.raises(UserError) as caught:
        prepared_cache.prepare(run, plan(write("a.txt", "some text")), cache)
    (problem,) = caught.value.problems
    assert problem.fixes == ([] if number == errno.ENOSPC else [own_copy()])


def test_shards_are_stored_in_the_project() -> None:
    assert ROOT / "data" == prepared_cache.CACHE


def test_a_long_preparation_logs_progress(
    write: Write,
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for n in range(10):
        write(f"corpus/{n}.txt", "x" * 100_000)
    clock = iter(range(0, 1000, 2))  # two seconds per document
    monkeypatch.setattr(prepared_cache.time, "monotonic", lambda: float(next(clock)))
    prepared_cache.prepare(run, plan("corpus"), tmp_path / "cache")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("preparing data corpus: 300 kB of 1.0 MB (30 %)")
    assert lines[-1].endswith("preparing data corpus: 900 kB of 1.0 MB (90 %)")


def test_a_short_preparation_logs_nothing(
    write: Write, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_cache.prepare(run, plan(write("a.txt", "some text" * 100)), tmp_path / "cache")
    assert capsys.readouterr().err == ""


def saved(run: RunDir, data: PreparedCorpus, words: str = "") -> None:
    """A checkpoint of the run at step 10, trained on `data`."""
    facts = {
        "step": 10,
        "epoch": 0,
        "used": 20,
        "shape": {},
        "optimizer": "",
        "world_size": 2,
        "bytes": 0,
        "sha256": "",
        "tokenizer": words or tokenizer.identity(data),
        "data": {"folder": Path(data.folder).name, "tokens_sha256": content(data)},
    }
    folder = run.checkpoints / manifest.folder_name(10)
    folder.mkdir()
    manifest.write(folder, facts)


def test_the_published_length_of_a_resumed_run_is_the_remaining_one(
    write: Write, run: RunDir, tmp_path: Path
) -> None:
    name = write("a.txt", "some text" * 100)
    data = prepared_cache.prepare(run, plan(name, num_epochs=2), tmp_path / "cache")
    sequences = (data.train_tokens - 1) // 8
    saved(run, data)
    wider = plan(name, num_epochs=2)
    wider["batch"]["accumulation"] = 2
    prepared_cache.prepare(run, wider, tmp_path / "cache")
    found = json.loads(run.data.read_text())
    assert found["total_steps"] == 10 + (sequences - 20) // 4 + sequences // 4
    assert (found["steps_per_epoch"], found["epochs"]) == (sequences // 4, 2)


def test_a_resumed_run_keeps_its_learned_vocabulary(
    write: Write, run: RunDir, tmp_path: Path
) -> None:
    """Also if the text has changed, and if another run has learned one from the changed text."""
    pytest.importorskip("tokenizers")
    cache = tmp_path / "cache"

    def prepared(of: RunDir) -> PreparedCorpus:
        asked = plan(name, tokenizer="bpe", vocab_size=300)
        return prepared_cache.prepare(of, asked, cache)

    name = write("a.txt", "some text, and more of it. " * 100)
    first = prepared(run)
    saved(run, first)
    assert prepared(run) == first
    other = RunDir(tmp_path / "other")
    other.create()
    for learned_first in (False, True):
        write("a.txt", "quite different words that merge otherwise. " * (100 + learned_first))
        if learned_first:
            assert tokenizer.identity(prepared(other)) != tokenizer.identity(first)
        found = prepared(run)
        assert tokenizer.identity(found) == tokenizer.identity(first)
        assert content(found) != content(first) and found.vocab == first.vocab
        assert prepared(run) == found


def test_advice_on_another_tokenizer_names_only_what_was_given(
    write: Write, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan(write("a.txt", "some text" * 100))
    saved(run, prepared_cache.prepare(run, asked, tmp_path / "cache"), words="of another file")

    def fixes(*args: str) -> list[str]:
        asked["command"]["args"] = ["quickstart.py", "--depth=4", *args]
        with pytest.raises(UserError) as caught:
            prepared_cache.prepare(run, asked, tmp_path / "cache")
        problem = only(caught.value.problems)
        assert problem.code == "resume.other_data"
        return problem.fixes

    names = {"--tokenizer", "--vocab_size", "--data", "DUET_DATA"}
    assert fixes() == []
    for args, given in (
        (["--tokenizer=bytes"], {"--tokenizer"}),
        (["--data=a.txt", "--vocab-size", "300"], {"--vocab_size", "--data"}),
    ):
        (fix,) = fixes(*args)
        found = {word.rstrip(":") for word in fix.replace("vocab-size", "vocab_size").split()}
        assert names & found == given
    monkeypatch.setenv("DUET_DATA", "a.txt")
    (fix,) = fixes()
    assert {name for name in names if name in fix} == {"DUET_DATA"}
