"""Mistakes in a launch request: all of a command line at once, with fixes that work when pasted."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.unit.conftest import (
    ENHANCED,
    LAUNCH,
    ROOT,
    SIMPLE,
    TRAIN,
    Shell,
    Write,
    ask,
    make_run,
    only,
    wrong,
)
from training.core import find_run
from training.core.errors import UserError
from training.plan import cli_args

CONFIGS = ROOT / "configs/dual_gpu"


def test_all_errors_of_a_command_are_reported_at_once(home: Path, write: Write) -> None:
    config = write(
        "bad config.py", "depth = 'twelve'\nimport os\nunknown_field = 1\nmatrix_lr = -1.0\n"
    )
    problems = wrong(
        config,
        "--depht=12",
        "--seed=first",
        "--device=tpu",
        "--data=missing.txt",
        "--total_batch_size=24577",
        "--run_name=a/b",
        "--resume=latest",
        env={"DUET_TYPO": "1", "TORCH_COMPILE": "maybe", "DUET_RETRIES": "-1"},
    )
    expected = [
        "--depht is not a known flag",
        "bad config.py:2: not a plain assignment: 'import os'",
        "resume is 'latest' (from --resume on the command line), but there is no run",
        "unknown_field is not a known field (bad config.py:3)",
        "DUET_TYPO is set in the environment but matches no field",
        "depth is 'twelve' (from bad config.py:1), a str",
        "matrix_lr is -1.0 (from bad config.py:4), too small",
        "seed is 'first' (from --seed on the command line)",
        "device is 'tpu' (from --device on the command line)",
        "compile is 'maybe' (from TORCH_COMPILE in the environment)",
        "retries is '-1' (from DUET_RETRIES in the environment), too small",
        "total_batch_size 24577 (from --total_batch_size on the command line) is not divisible by "
        "device_batch_size 8 (default)",
        "data is 'missing.txt' (from --data on the command line): no such file",
        "run_name is 'a/b' (from --run_name on the command line)",
    ]
    told = [p.what for p in problems]
    assert not [e for e in expected if not any(t.startswith(e) for t in told)]
    assert len(told) == len(expected), told
    assert all(p.allowed or p.fixes for p in problems)
    assert not (home / "experiments").exists()


MISTAKES = [
    (
        ["--depth=0"],
        "depth is '0' (from --depth on the command line)",
        "a whole number from 1 to 256 (blocks)",
    ),
    (
        ["--depth", "x"],
        "depth is 'x' (from --depth on the command line)",
        "a whole number from 1 to 256 (blocks)",
    ),
    (
        ["--max-seq-len=4"],
        "max_seq_len is '4' (from --max-seq-len on the command line)",
        "a whole number from 8",
    ),
    (
        ["--device-batch-size", "few"],
        "device_batch_size is 'few' (from --device-batch-size on the",
        "a whole number from 1",
    ),
    (
        ["--total_batch_size=1e5"],
        "total_batch_size is '1e5' (from --total_batch_size on",
        "a whole number from 1",
    ),
    (
        ["--precision=fp4"],
        "precision is 'fp4' (from --precision on the command line)",
        "one of auto, bf16, fp16, fp8, fp32",
    ),
    (
        ["--persistent_workers"],
        "persistent_workers is on (from --persistent_workers on the command line) but num_workers "
        "is 0",
        "at least 1 worker",
    ),
    (["--config=a.toml"], "config a.toml does not exist", "a .py or .json file"),
    (
        ["--data=a.parquet"],
        "data is 'a.parquet' (from --data on the command line): no such file",
        ".txt or .jsonl",
    ),
]


@pytest.mark.parametrize(
    ("args", "what", "allowed"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES]
)
def test_a_single_error_is_one_problem(
    args: list[str], what: str, allowed: str, home: Path
) -> None:
    problem = only(wrong(*args))
    assert problem.what.startswith(what)
    assert allowed in problem.allowed


@pytest.mark.parametrize(
    "args",
    [
        ["--depht=12"],
        ["--total-batch=24576", "--seed=1"],
        ["--tensorbord"],
        ["--dta=a file.txt"],
        ["--persistent_workers"],
        ["--run_name=taken"],
        ["--run_name=a b"],
        ["--resume=taken2"],
        ["--num_workers=-1"],
        ["--depth=12.5"],
        ["--compile=False"],
    ],
    ids=" ".join,
)
def test_suggestions_are_whole_commands_that_are_accepted(
    args: list[str], home: Path, shell: Shell
) -> None:
    make_run(home / "experiments", "taken")
    (home / "a file.txt").write_text("text")
    fixes = only(wrong(*args)).fixes
    assert fixes
    for fix in fixes:
        shell.read(fix)


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--seed=42", "--seed=43"], {"seed": 43}),
        (["--seed=1", "--seed=2", "--precision=bf"], {"seed": 2, "precision": "bf16"}),
        (["--depth=2", "--depth=2.5", "--tensorboard=fasle"], {"depth": 2, "tensorboard": False}),
        (["--dry_run=ture", "--depht=5"], {"depth": 5}),
    ],
)
def test_every_suggested_command_corrects_all_mistakes(
    args: list[str], values: dict[str, object], home: Path, shell: Shell
) -> None:
    problems = wrong(*args)
    assert all(problem.fixes for problem in problems)
    for fix in (fix for problem in problems for fix in problem.fixes):
        config = shell.read(fix).config
        assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    "unsolved",
    [["--notify=\0"], ["--seed"], ["--notify=a", "--notify=\0"]],
)
def test_no_whole_command_beside_a_mistake_without_a_suggestion(
    unsolved: list[str], home: Path
) -> None:
    problems = wrong("--depht=5", "--precision=bf", *unsolved)
    fixes = [fix for problem in problems for fix in problem.fixes]
    assert sorted(fixes) == ["--depth=5", "--precision=bf16"]


def test_a_flag_whose_variable_was_unset_is_replaced(home: Path, shell: Shell) -> None:
    for word, fix in (
        ("--hosts=", "--hosts=a,b"),
        ("--hosts", "--hosts=a,b"),
        ("--hostfile=", "--hostfile=HOSTFILE"),
        ("--master_addr=", "--master_addr=ADDRESS"),
    ):
        problem = only(wrong("2", word, "--depth=3", script=LAUNCH))
        assert problem.code == "flag.no_value"
        assert problem.fixes == [f"./{LAUNCH} 2 --depth=3 {fix}"]


def test_the_number_of_processes_in_the_wrong_place(home: Path, write: Write, shell: Shell) -> None:
    config = write("c.py", "total_batch_size = 147456\n")
    for script, words, expected in (
        (LAUNCH, [config, "3", "--seed=7"], f"./{LAUNCH} 3 {config} --seed=7"),
        (SIMPLE, ["2", config, "--seed=7"], f"./{SIMPLE} {config} --seed=7"),
        (SIMPLE, [config, "--seed=7", "3"], f"./{LAUNCH} 3 {config} --seed=7"),
        (TRAIN, ["3", config, "--seed=7"], f"./{LAUNCH} 3 {config} --seed=7"),
        (LAUNCH, ["2", config, "3", "--seed=7"], f"./{LAUNCH} 3 {config} --seed=7"),
    ):
        assert only(wrong(*words, script=script)).fixes == [expected]
        assert shell.read(expected).config.seed == 7


def test_a_field_that_could_not_be_read_is_not_judged_by_its_default(
    home: Path, write: Write
) -> None:
    # 24576 is not in this config, so no error may mention it.
    config = write("c.py", "device_batch_size = 12\nmax_seq_len = 2048\ntotal_batch_size = 2**15\n")
    assert only(wrong(config)).what == "c.py:3: total_batch_size: not a plain value"
    assert "does not exist" in only(wrong("5", "missing.py", script=LAUNCH)).what
    assert "depth" in only(wrong("5", write("d.py", "depth =\n"), script=LAUNCH)).what


def test_two_configs_are_one_too_many(home: Path, write: Write) -> None:
    a, b = write("a.py", ""), write("b.py", "")
    assert "'b.py' is one argument too many" in only(wrong(a, b)).what
    assert "'b.py' is one argument too many" in only(wrong(f"--config={a}", b)).what


def test_the_simple_script_requires_a_config(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(cli_args, "ROOT", ROOT)
    monkeypatch.setattr(find_run, "WORK", ROOT)
    monkeypatch.chdir(ROOT)
    problem = only(wrong(script=SIMPLE))
    assert problem.what == "no config given"
    assert problem.allowed.endswith("aggressive, balanced, conservative, quickstart")
    assert shell.read(problem.fixes[0]).config_file == Path("configs/dual_gpu/quickstart.py")


def test_a_resumed_run_needs_no_config_for_any_script(home: Path) -> None:
    make_run(home / "experiments", "r1")
    assert ask("--resume=r1", script=SIMPLE).resume_from is not None
    assert ask(script=SIMPLE, env={"DUET_RESUME": "r1"}).resume_from is not None


@pytest.mark.parametrize("word", ["0", "two", "1025", "-1", "1.5", "2x", "", "²", "9" * 5000])
def test_an_invalid_number_of_processes(word: str, home: Path, write: Write) -> None:
    # The parser takes `-1` for a flag, so N is missing too.
    problem = wrong(word, write("c.py", ""), script=LAUNCH)[0]
    assert (f"the number of processes is {word[:20]!r}"[:45] in problem.what) or word == "-1"
    assert "from 1 to 1024" in problem.allowed or word == "-1"


def test_the_number_of_processes_is_missing(
    home: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = only(wrong(script=LAUNCH))
    assert problem.what == "the number of processes is missing"
    assert problem.allowed == "a whole number from 1 to 1024"
    monkeypatch.chdir(ROOT)
    assert shell.read(problem.fixes[0]).ranks == 2
    monkeypatch.chdir(home)
    assert "'--'" not in problem.what
    forgotten = wrong(str(CONFIGS / "balanced.py"), script=LAUNCH)
    assert "balanced.py" in forgotten[0].what and "first argument" in forgotten[0].what


def test_a_batch_that_does_not_divide(home: Path, write: Write, shell: Shell) -> None:
    config = write(
        "my config.py", "device_batch_size = 16\ntotal_batch_size = 49152\nmax_seq_len = 2048\n"
    )
    problem = only(wrong(config, "--seed", "7", script=SIMPLE))
    assert problem.what == (
        "total_batch_size 49152 (from my config.py:2) is not divisible by device_batch_size 16 "
        "(from my config.py:1) "
        "× max_seq_len 2048 (from my config.py:3) × 2 ranks = 65536"
    )
    assert problem.allowed == "a multiple of 65536 tokens"
    assert problem.fixes == [
        "./train_dual_gpu.sh 'my config.py' --seed 7 --total_batch_size=65536",
        "./train_dual_gpu.sh 'my config.py' --seed 7 --device_batch_size=12",
    ]
    sizes = [
        (r.config.total_batch_size, r.config.device_batch_size, r.config.seed)
        for r in map(shell.read, problem.fixes)
    ]
    assert sizes == [(65536, 16, 7), (49152, 12, 7)]


@pytest.mark.parametrize("script", [SIMPLE, ENHANCED, LAUNCH, TRAIN])
def test_the_suggested_batches_pass_when_pasted(
    script: str, home: Path, write: Write, shell: Shell
) -> None:
    chance = random.Random(script)
    config = write("it's a\tconfig.py", f"data = '{write('a.txt', 'text')}'\n")
    forms = ["--{}={}", "--{} {}"]
    pasted = 0
    for _ in range(40):
        ranks = {SIMPLE: 2, ENHANCED: 2, TRAIN: 1}.get(script) or chance.randint(1, 9)
        sizes = {
            "device-batch-size": chance.choice([1, 3, 8, 14, "auto"]),
            "max_seq_len": chance.choice([64, 100, 1536]),
        }
        sizes["total_batch_size"] = chance.randint(1, 300_000)
        args = [str(ranks)] * (script == LAUNCH) + [config]
        for name, value in sizes.items():
            args += chance.choice(forms).format(name, value).split(" ")
        try:
            ask(*args, script=script)
        except UserError as error:
            for fix in only(error.problems).fixes:
                # Pasting costs a process: bash for a few, its rules by shlex for the others.
                found = (
                    shell.read(fix)
                    if pasted < 6
                    else ask(*shlex.split(fix)[2 if script == TRAIN else 1 :], script=script)
                )
                pasted += 1
                assert found.ranks == ranks
                assert found.config.max_seq_len == sizes["max_seq_len"]
                assert found.config_file == Path(config)
    assert pasted > 20


def test_a_corrected_total_stays_below_its_limit(home: Path, shell: Shell) -> None:
    sizes = ("--total_batch_size=24576", "--max_total_batch_size=30000")
    for words, total, most in (
        ((*sizes, "--gradient_accumulation_steps=3"), 3 * 24576, 6 * 24576),
        (("--total_batch_size=49000", "--max_total_batch_size=49001"), 49152, 2 * 49152),
        (("--total_batch_size=24577", "--max_total_batch_size=30000"), 24576, 30000),
    ):
        config = shell.read(wrong(*words)[0].fixes[0]).config
        assert (config.total_batch_size, config.max_total_batch_size) == (total, most), words
    for most, fixes in ((24576, 2), (24577, 1)):
        problem = only(wrong("--total_batch_size=49152", f"--max_total_batch_size={most}"))
        found = [shell.read(fix).config for fix in problem.fixes]
        assert len(found) == fixes
        assert all(config.total_batch_size <= config.max_total_batch_size for config in found)


def test_an_automatic_device_batch_is_corrected_with_its_total(home: Path, shell: Shell) -> None:
    for words in (("--device_batch_size=Auto",), ("--device_batch_size=auto", "--dpeth=3")):
        fixes = [fix for problem in wrong("5", *words, script=LAUNCH) for fix in problem.fixes]
        found = [shell.read(fix).config for fix in fixes]
        assert {config.device_batch_size for config in found} == {"auto"}, words
    block = wrong("--device_batch_size=auto", "--block_size=1000")[0].fixes[0]
    assert shell.read(block).config.max_seq_len == 1000


def test_a_long_run_name_is_cut_to_one_that_is_allowed(home: Path, shell: Shell) -> None:
    for name in ("模" * 70, "é!" * 70, "a" * 200):
        (fix,) = only(wrong(f"--run_name={name}")).fixes
        assert len(shell.read(fix).config.run_name) >= 21
    taken = "模" * 42  # 126 bytes
    for number in ("", *(f"_{n}" for n in range(2, 10))):
        make_run(home / "experiments", f"{taken[:33]}{number}" if number else taken)
    shell.read(only(wrong(f"--run_name={taken}")).fixes[-1])


def test_an_automatic_device_batch_needs_a_total_that_divides(home: Path, shell: Shell) -> None:
    assert ask("--device_batch_size=auto").config.device_batch_size == "auto"
    problem = only(wrong("--device_batch_size=auto", "--total_batch_size=24577"))
    assert "device_batch_size auto (from --device_batch_size on the command line)" in problem.what
    assert [shell.read(f).config.total_batch_size for f in problem.fixes] == [24576, 27648]
