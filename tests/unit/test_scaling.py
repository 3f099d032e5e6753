"""The scaling check before the measurement: command line and fixed settings."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.unit.conftest import python
from training.cli.scaling import __main__ as command
from training.cli.scaling import measure, options, render
from training.cli.scaling.experiment import Experiment, prepare
from training.config import flags
from training.core.errors import Exit, UserError

QUICKSTART = str(ROOT / "configs/dual_gpu/quickstart.py")


def ready(*argv: str, **environ: str) -> Experiment:
    return prepare(options.parse(list(argv)), environ)


def wrong(*argv: str, **environ: str) -> UserError:
    with pytest.raises(UserError) as caught:
        ready(*argv, **environ)
    return caught.value


def all_text(error: UserError) -> str:
    return "\n".join(line for p in error.problems for line in p.lines())


# The command line


def test_defaults_and_own_options() -> None:
    chosen = options.parse([])
    assert (
        chosen.ranks,
        chosen.steps,
        chosen.rounds,
        chosen.json,
        chosen.rest,
        chosen.problems,
    ) == (None, 40, 3, False, [], [])
    chosen = options.parse(
        ["a.py", "--ranks", "4, 2,2", "--steps=7", "--depth", "3", "--rounds=1", "--json"]
    )
    assert (chosen.ranks, chosen.steps, chosen.rounds, chosen.json) == ((1, 2, 4), 7, 1, True), (
        "one rank is always the reference"
    )
    assert chosen.rest == ["a.py", "--depth", "3"] and not chosen.problems
    assert options.parse(["-h"]).help


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("--ranks=1,x", "--ranks is '1,x'", "--ranks=1,2"),
        ("--ranks=0", "--ranks is '0'", "--ranks=1,2"),
        ("--ranks=1,,2", "--ranks is '1,,2'", "--ranks=1,2"),
        ("--steps=1", "--steps is '1'", "--steps=4"),
        ("--steps=4.5", "--steps is '4.5'", "--steps=40"),
        ("--rounds=1000", "--rounds is '1000'", "--rounds=100"),
        ("--rounds=²", "--rounds is '²'", "--rounds=3"),
        ("--json=yes", "--json has the value 'yes'", "--json"),
        ("--step=9", "--step is not a known flag", "--steps=9"),
    ],
)
def test_invalid_options_are_reported_with_value_and_fix(word: str, what: str, fix: str) -> None:
    (problem,) = options.parse([word]).problems
    assert problem.what == what and problem.fixes == [f"./duet scaling {fix}"]
    assert not options.parse([fix]).problems


def test_no_value_and_given_twice() -> None:
    assert [p.what for p in options.parse(["--steps"]).problems] == ["--steps has no value"]
    assert [p.what for p in options.parse(["--steps=5", "--steps=6"]).problems] == [
        "--steps is given twice, as '5' and '6'"
    ]


def test_all_problems_at_once_including_the_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "nofile.py",
        "--ranks=x",
        "--depht=3",
        "--save_every=5",
        "--num_iterations=9",
        "--seed=x",
        "--device=cpu",
    ]
    error = wrong(*argv)
    text = all_text(error)
    for part in (
        "--ranks is 'x'",
        "--depht is not",
        "--depth=3",
        "--save_every cannot be used here",
        "--steps=40",
        "nofile.py",
        "seed is 'x'",
    ):
        assert part in text
    assert error.code == Exit.CONFIG and len(error.problems) == 6
    assert command.main(argv) == 2
    out, err = capsys.readouterr()
    assert (
        out == "" and "6 problems; nothing was measured (exit 2)" in err and "Traceback" not in err
    )


def test_more_ranks_than_gpus_is_refused_as_the_launcher_does(
    nvidia: Callable[..., dict[str, Any]],
) -> None:
    done = python(
        "-m",
        "training.cli.scaling.__main__",
        QUICKSTART,
        "--device=cuda",
        "--ranks=4",
        **nvidia(COUNT=2),
    )
    assert done.returncode == Exit.RESOURCES and done.stdout == ""
    assert (
        "4 GPUs are needed, 2 visible" in done.stderr
        and "nothing was measured (exit 3)" in done.stderr
    )
    assert f"./duet scaling --ranks=2 {shlex.quote(str(QUICKSTART))} --device=cuda" in done.stderr
    assert "Traceback" not in done.stderr and "total_batch_size" not in done.stderr


def test_gpus_are_used_and_named(nvidia: Callable[..., dict[str, Any]]) -> None:
    code = f"""
import os; from training.cli.scaling import options, experiment
e = experiment.prepare(options.parse([{QUICKSTART!r}]), os.environ)
print(e.device, e.ranks, len(set(e.gpus)), [a for a in e.args if 'device=' in a])"""
    done = python("-c", code, **nvidia(COUNT=5))
    assert done.stdout == "cuda (1, 2, 4) 4 ['--device=cuda']\n", done.stderr
    done = python("-c", code, **nvidia(COUNT=1))
    assert done.stdout == "cpu (1, 2) 0 ['--device=cpu']\n", (
        "one GPU and one CPU rank cannot be compared"
    )


def test_gpus_in_use_by_others_are_a_note(nvidia: Callable[..., dict[str, Any]]) -> None:
    code = f"""
import os; from training.cli.scaling import analysis, options, experiment, render
made = experiment.prepare(options.parse([{QUICKSTART!r}, "--ranks=1,2"]), os.environ)
notes = render.notes(analysis.ScalingReport(made, None, [], 0.0))
print(len(made.warnings), notes == list(made.warnings), "pid 1 " in notes[0])"""
    done = python("-c", code, **nvidia(COUNT=2, FREE_GIB="20", PROCESSES="1:11"))
    assert done.stdout == "1 True True\n", done.stderr


# Fixed settings


def test_the_same_work_per_rank() -> None:
    made = ready(QUICKSTART, "--device=cpu", "--ranks=1,2,3")
    assert (made.sequences, made.seq_len, made.accumulation, made.tokens_per_rank) == (
        16,
        128,
        1,
        2048,
    )
    for ranks in (1, 2, 3):
        argv = made.command(ranks, Path("/tmp/some folder"), "run7")
        line = flags.parse(argv[2:])
        assert argv[:2] == [str(ROOT / "launch_train.sh"), str(ranks)] and not line.problems
        values = {name: text for name, (text, _) in line.flags.items()}
        assert (
            values["total_batch_size"] == str(2048 * ranks) and values["device_batch_size"] == "16"
        )
        assert (
            values["num_iterations"] == "45"
            and values["out_dir"] == "/tmp/some folder"
            and values["run_name"] == "run7"
        )
        assert (
            values["save_every"],
            values["eval_every"],
            values["sample_tokens"],
            values["tensorboard"],
            values["max_total_batch_size"],
        ) == ("0", "0", "0", "false", "0")
        assert (
            values["device"] == "cpu"
            and values["precision"] == made.precision
            and values["compile"] == "0"
        )


@pytest.mark.parametrize(
    ("total", "ranks", "accumulation"),
    [
        (4096, "1,2", 1),
        (8192, "1,2", 2),
        (4096, "1,4", 1),
        (6144, "1,4", 1),
        (12288, "1,2", 3),
        (5000, "1,2", 1),
    ],
)
def test_accumulation_is_the_configs(total: int, ranks: str, accumulation: int) -> None:
    made = ready(QUICKSTART, "--device=cpu", f"--total_batch_size={total}", f"--ranks={ranks}")
    assert made.accumulation == accumulation


def test_an_automatic_batch_is_decided_once() -> None:
    made = ready(QUICKSTART, "--device=cpu", "--device_batch_size=auto", "--ranks=1,2")
    assert (
        f"--device_batch_size={made.sequences}" in made.args
        and "--device_batch_size=auto" not in made.args
    )
    assert made.tokens_per_rank == 2048


def test_memory_savings_stay_as_planned(nvidia: Callable[..., dict[str, Any]]) -> None:
    """A mixture of whole and selectively checkpointed blocks has no value: it is found again."""
    code = """
import os, sys; from training.cli.scaling import options, experiment
made = experiment.prepare(options.parse([*sys.argv[1:], "--ranks=2"]), os.environ)
print(*(word for word in made.args if "checkpointing" in word or "chunks" in word))"""
    for gib, args, pinned in (
        ("21", ["configs/dual_gpu/balanced.py"], "auto"),
        ("79", [QUICKSTART, "--activation_checkpointing=selective"], "selective"),
        ("79", [QUICKSTART, "--activation_checkpointing=2"], "2"),
        ("79", [QUICKSTART], "none"),
    ):
        done = python(
            "-c", code, *args, cwd=ROOT, **nvidia(COUNT=2, FREE_GIB=gib, CAPABILITY="9.0")
        )
        assert done.stdout == f"--activation_checkpointing={pinned} --loss_chunks=1\n", done.stderr


def test_without_a_config_it_is_the_quickstart() -> None:
    made = ready("--device=cpu")
    assert (
        made.args[0] == QUICKSTART
        and made.config == "configs/dual_gpu/quickstart.py"
        and made.ranks == (1, 2)
    )


def test_threads_are_one_or_the_users_own() -> None:
    assert ready(QUICKSTART, "--device=cpu").threads == 1
    own = ready(QUICKSTART, "--device=cpu", OMP_NUM_THREADS="64")
    assert (
        own.threads == 64
        and own.share_cores(1)
        and "from your OMP_NUM_THREADS" in "\n".join(render.introduction(own))
    )


def test_variables_of_the_user_do_not_change_the_measurement(tmp_path: Path) -> None:
    made = ready(
        QUICKSTART,
        "--device=cpu",
        DUET_NUM_EPOCHS="3",
        DUET_RESUME="latest",
        DUET_OUT_DIR=str(tmp_path / "no"),
        DUET_DEPTH="1",
        DUET_NOTIFY="mail me",
        DUET_MAX_TOTAL_BATCH_SIZE="1000000",
    )
    values = flags.parse(made.command(2, tmp_path, "r")[2:]).flags
    assert (
        values["num_epochs"][0] == "0"
        and values["resume"][0] == values["notify"][0] == ""
        and values["max_total_batch_size"][0] == "0"
        and values["out_dir"][0] == str(tmp_path)
    )


@pytest.mark.parametrize(
    ("args", "name", "left"),
    [
        (["a.py", "--depth=3", "--seed=1"], "depth", ["a.py", "--seed=1"]),
        (["--depth", "3", "a.py"], "depth", ["a.py"]),
        (["--total-batch-size", "3", "--seed=1"], "total_batch_size", ["--seed=1"]),
        (["--tensorboard", "a.py"], "tensorboard", ["a.py"]),
        (["--tensorboard", "false", "a.py"], "tensorboard", ["a.py"]),
        (["--no-tensorboard", "a.py"], "tensorboard", ["a.py"]),
        (["--dry_run", "a.py"], "dry_run", ["a.py"]),
    ],
)
def test_a_flag_is_taken_out_however_it_was_typed(
    args: list[str], name: str, left: list[str]
) -> None:
    assert flags.without(args, name) == left


@pytest.mark.parametrize("number", measure.STOP_SIGNALS)
def test_an_ignored_signal_stays_ignored(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup ignores SIGHUP, a background job of a script SIGINT; any other stops the check."""

    def interrupted(*_: object) -> int:
        signal.raise_signal(number)
        return 0

    monkeypatch.setattr(command, "prepare", lambda *_: None)
    monkeypatch.setattr(command, "_measure", interrupted)
    before = {one: signal.getsignal(one) for one in measure.STOP_SIGNALS}
    try:
        signal.signal(number, signal.SIG_IGN)
        assert command.main([]) == 0
        signal.signal(number, signal.SIG_DFL)
        assert command.main([]) == 128 + number
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_help_works_without_torch() -> None:
    done = python("lib/run_module.py", "training.cli.scaling.__main__", "--help", cwd=ROOT)
    assert done.returncode == 0 and "--rounds=3" in done.stdout and "130" in done.stdout
    code = (
        "import sys, training.cli.scaling; print([m for m in ('torch', 'numpy', 'wandb') if m "
        "in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"


# Of any task


def test_a_users_own_task_is_measured_in_its_samples(home: Path, line: str) -> None:
    made = ready(
        f"--task={line}", "--width=5", "--device=cpu", "--device_batch_size=6", "--ranks=1,2"
    )
    assert (made.config, made.unit, made.sequences, made.seq_len, made.tokens_per_rank) == (
        line,
        "samples",
        6,
        1,
        6,
    )
    argv = made.command(2, home, "run1")
    assert (
        argv[2:4] == [f"--task={line}", "--width=5"]
        and "--total_batch_size=12" in argv
        and "--device_batch_size=6" in argv
    )
    assert not any(
        word.startswith(("--sample_tokens", "--loss_chunks", "--activation_checkpointing"))
        for word in argv
    )
    assert not (home / f"{line}.ran").exists(), "what is given is not measured before"
    assert (
        "each rank: 6 samples × 1 accumulation step = 6 samples per step for any number of ranks "
        "(weak scaling)" in render.introduction(made)
    )


def test_the_tasks_total_determines_the_accumulation(home: Path, line: str) -> None:
    made = ready(
        f"--task={line}",
        "--device=cpu",
        "--device_batch_size=2",
        "--total_batch_size=12",
        "--ranks=1,2",
    )
    assert (made.accumulation, made.tokens_per_rank) == (3, 6)


def test_the_task_from_a_config_file(home: Path, line: str) -> None:
    (home / "my.py").write_text(
        f"task = {line!r}\ndevice = 'cpu'\ndevice_batch_size = 3\nwidth = 7\n"
    )
    made = ready("my.py")
    assert (made.config, made.unit, made.sequences, made.tokens_per_rank) == (
        "my.py",
        "samples",
        3,
        3,
    )
    assert made.command(1, home, "run1")[2] == "my.py"


def test_an_automatic_batch_of_any_task_is_decided_once(home: Path, line: str) -> None:
    made = ready(
        f"--task={line}",
        "--device=cpu",
        "--device_batch_size=auto",
        "--total_batch_size=12",
        "--ranks=1,2",
    )
    assert made.sequences == 6 and "--device_batch_size=6" in made.args and made.accumulation == 1


def test_problems_of_a_task_are_reported_by_the_launcher(home: Path) -> None:
    assert "task is 'no_such.py'" in all_text(wrong("--task=no_such.py", "--device=cpu"))
