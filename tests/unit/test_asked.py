"""Merge of command line, config file, variables and resumed run into one configuration, with
task-specific options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, Shell, ask, only, wrong
from training.config.batch import Batch
from training.core import rundir
from training.plan import cli_args
from training.tasks import sample_batch

Write = Callable[..., str]


def look(*args: str, env: Mapping[str, str] | None = None) -> cli_args.ParsedArgs:
    return cli_args.parse_args(LAUNCH, ["2", *args], env or {})


OPTIONS = ("width", "slope", "bias", "title")


def test_options_are_flags_with_their_types_and_origins(home: Path, line: str) -> None:
    found = look(
        "--width=48",
        f"--task={line}",
        "--no-bias",
        "--title",
        "of mine",
        "--seed=3",
        env={"DUET_SLOPE": "0.25"},
    )
    assert found.problems == [] and found.kind.name == "my line"
    assert found.resolved.options == {"width": 48, "slope": 0.25, "bias": False, "title": "of mine"}
    assert [type(found.resolved.options[n]) for n in OPTIONS] == [int, float, bool, str]
    assert (found.resolved.config.seed, found.resolved.config.task) == (3, line)
    assert [found.resolved.origins[n] for n in (*OPTIONS, "num_epochs")] == [
        "from --width on the command line",
        "from DUET_SLOPE in the environment",
        "from --no-bias on the command line",
        "from --title on the command line",
        "default",
    ]


def test_a_config_may_set_the_task_and_its_options(home: Path, line: str, write: Write) -> None:
    config = write("c.py", f"task = {line!r}\nwidth = 2 * 4\nslope = 1\nbias = False\n")
    for args in ([config], ["--title", "0.5", config], ["--bias", config]):
        found = look(*args)
        assert found.problems == [], args
        assert found.resolved.options["width"] == 8 and found.resolved.options["slope"] == 1.0
        assert (
            found.resolved.origins["width"] == "from c.py:2"
            and found.resolved.origins["task"] == "from c.py:1"
        )
    assert type(look(config).resolved.options["slope"]) is float
    over = look(config, "--width=5").resolved
    assert (over.options["width"], over.options["title"]) == (5, "a line")


def test_an_option_of_a_wrong_type_is_reported_like_a_field(
    home: Path, line: str, write: Write
) -> None:
    config = write("c.py", f"task = {line!r}\nwidth = 'wide'\n")
    assert only(look(config).problems).what == "width is 'wide' (from c.py:2), a str"
    problem = only(look(f"--task={line}", "--slope=steep").problems)
    assert (
        problem.what == "slope is 'steep' (from --slope on the command line)"
        and problem.allowed.startswith("a number")
    )
    assert look(f"--task={line}", "--slope=steep").resolved.options["slope"] == 0.5


def test_internal_variables_set_no_option(home: Path, write: Write) -> None:
    """Every script exports DUET_ROOT."""
    task = write(
        "t.py", "OPTIONS = {'root': 'pictures'}\nclass My(Task): model = train_data = loss = 0\n"
    )
    found = look(f"--task={task}", env={"DUET_ROOT": "/where/we/are"})
    assert found.problems == [] and found.resolved.options == {"root": "pictures"}


def test_an_unknown_option_gets_the_nearest_of_the_task(
    home: Path, line: str, write: Write
) -> None:
    problem = only(wrong(f"--task={line}", "--widht=7"))
    assert problem.what == "--widht is not a known flag" and problem.fixes == [
        f"./{ENHANCED} '--task={line}' --width=7"
    ]
    problem = only(look(write("c.py", f"task = {line!r}\nwidht = 7\n")).problems)
    assert problem.what == "widht is not a known field (c.py:2)" and problem.fixes == [
        "width = 7   # c.py:2"
    ]
    problem = only(look(f"--task={line}", env={"DUET_WIDHT": "7"}).problems)
    assert (
        "DUET_WIDHT" in problem.what and problem.fixes[0] == "unset DUET_WIDHT; export DUET_WIDTH=7"
    )


def test_fields_of_another_task_are_rejected(home: Path, line: str, write: Write) -> None:
    problem = only(wrong(f"--task={line}", "--depth=3"))
    assert problem.code == "field.other_task" and f"{line} (from --task " in problem.what
    problem = only(look(write("c.py", f"task = {line!r}\ndepth = 3\n")).problems)
    assert problem.code == "field.other_task" and f"{line} (from c.py:1)" in problem.what
    assert "c.py:2" in problem.what
    assert only(wrong("--width=7")).what == "--width is not a known flag"
    assert look("--depth=3").problems == [] == look("--depth=3", "--task=gpt").problems


def test_a_wrong_task_is_reported_with_all_other_errors(home: Path) -> None:
    texts = [p.what for p in look("--task=gtp", "--seed=x").problems]
    assert len(texts) == 2 and "task is 'gtp'" in texts[0] and "seed is 'x'" in texts[1]


def make_run(home: Path, line: str) -> rundir.RunDir:
    run = rundir.RunDir(home / "experiments/r1")
    run.create()
    options = {"width": 5, "slope": 2.0, "bias": False, "title": "t"}
    task = {"name": "my line", "unit": "samples", "file": str(home / line), "options": options}
    config = {
        "task": str(home / line),
        "seed": 9,
        "device_batch_size": 3,
        "total_batch_size": 6,
        "device": "cpu",
    }
    rundir.write_json(run.plan, {"config": config, "task": task})
    return run


def test_a_resumed_run_keeps_its_task_and_options(
    home: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(home, line)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    found = look("--resume=r1", "--title=changed")
    assert found.problems == [] and found.resume_from and found.resume_from.path == run.path
    assert (found.kind.name, found.kind.file) == ("my line", home / line)
    assert found.resolved.options == {"width": 5, "slope": 2.0, "bias": False, "title": "changed"}
    assert [found.resolved.origins[n] for n in ("task", "width", "seed")] == [
        "from resumed run r1"
    ] * 3
    assert (
        found.resolved.origins["title"] == "from --title on the command line"
        and found.resolved.config.seed == 9
    )


def test_a_request_has_task_and_options(home: Path, line: str) -> None:
    made = ask("2", f"--task={line}", "--width=7", "--device_batch_size=3", script=LAUNCH)
    assert (made.kind.name, made.seq_len, made.source) == ("my line", 1, None)
    assert made.options == {"width": 7, "slope": 0.5, "bias": True, "title": "a line"}
    make_run(home, line)
    again = ask("2", "--resume=r1", script=LAUNCH)
    assert again.options["width"] == 5 and again.config.total_batch_size == 6
    assert again.resumed["slope"] == (2.0, "resumed run r1")


# ── batch of a task that counts samples
# ──────────────────────────────────────────────────────────────────────────


def test_default_total_is_one_micro_batch_of_all_ranks(home: Path, line: str) -> None:
    for ranks, total in ((1, 4), (3, 12)):
        made = ask(str(ranks), f"--task={line}", "--device_batch_size=4", script=LAUNCH)
        split = sample_batch.split(made.config, made.origins, ranks)
        assert split == Batch(4, 1, ranks, 1) and split.total_tokens == total
        assert split.sentence("samples").endswith(f"= {total} samples per step")
    made = ask(
        "2", f"--task={line}", "--device_batch_size=4", "--total_batch_size=24", script=LAUNCH
    )
    assert sample_batch.split(made.config, made.origins, 2) == Batch(4, 1, 2, 3)


def test_an_indivisible_batch_gets_valid_suggestions(home: Path, line: str, shell: Shell) -> None:
    args = ["2", f"--task={line}", "--device_batch_size=4", "--total_batch_size=28"]
    problem = only(wrong(*args, script=LAUNCH))
    assert problem.what == (
        "total_batch_size 28 (from --total_batch_size on the command line) is not divisible by "
        "device_batch_size 4 (from --device_batch_size on the command line) × 2 ranks = 8"
    )
    assert problem.allowed == "a multiple of 8 samples"
    sizes = [
        (made.config.device_batch_size, made.config.total_batch_size)
        for made in map(shell.read, problem.fixes)
    ]
    assert sizes == [(4, 24), (4, 32), (2, 28)]


def test_an_automatic_batch_is_left_to_the_plan(home: Path, line: str, shell: Shell) -> None:
    auto = ("2", f"--task={line}", "--device_batch_size=auto")
    assert [
        ask(*auto, *more, script=LAUNCH).batch for more in ((), ("--total_batch_size=12",))
    ] == [None, None]
    problem = only(wrong(*auto, "--total_batch_size=13", script=LAUNCH))
    assert "total_batch_size 13 (from --total_batch_size on the command line)" in problem.what
    assert problem.allowed == "a multiple of 2 samples"
    assert {shell.read(fix).config.total_batch_size for fix in problem.fixes} == {12, 14}
