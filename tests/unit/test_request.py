"""Launch requests: all errors of a command line are reported at once, with fixes that work when
pasted."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import (
    ENHANCED,
    LAUNCH,
    ROOT,
    SIMPLE,
    TRAIN,
    Shell,
    ask,
    clean_environment,
    only,
    python,
    wrong,
)
from training.core.errors import UserError
from training.core.rundir import RunDir, write_json
from training.plan import cli_args, request
from training.plan.cli_args import command

Write = Callable[..., str]
CONFIGS = ROOT / "configs/dual_gpu"


def make_run(folder: Path, name: str, **config: object) -> RunDir:
    """A run directory as an earlier run leaves it."""
    run = RunDir(folder / name)
    run.create()
    write_json(run.plan, {"config": config})
    return run


# ── a sound request
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["conservative", "balanced", "aggressive", "quickstart"])
@pytest.mark.parametrize("script", [SIMPLE, ENHANCED])
def test_the_ready_configs_pass_on_two_ranks(name: str, script: str, home: Path) -> None:
    found = ask(str(CONFIGS / f"{name}.py"), script=script)
    assert (found.ranks, found.local_ranks, found.dry_run, found.resume_from) == (2, 2, False, None)
    assert found.config_file == CONFIGS / f"{name}.py"
    assert found.origins["depth"].startswith("from ") and f"{name}.py:" in found.origins["depth"]
    assert (found.experiments, found.logs) == (home / "experiments", home / "logs")
    assert found.source.name == "stdlib"
    assert not list(home.iterdir()), "looking changes nothing"


def test_both_dual_gpu_scripts_read_the_same_from_the_same_input(home: Path) -> None:
    args = [f"--config={CONFIGS / 'balanced.py'}", "--seed=7"]
    simple, enhanced = ask(*args, script=SIMPLE), ask(*args, script=ENHANCED)
    assert (simple.config, simple.origins, simple.ranks) == (
        enhanced.config,
        enhanced.origins,
        enhanced.ranks,
    )
    assert ask(args[0].partition("=")[2], "--seed=7").config == enhanced.config


def test_the_enhanced_script_needs_no_config(home: Path) -> None:
    found = ask("--total_batch_size=49152", "--dry-run")
    assert (found.config_file, found.dry_run, found.config.total_batch_size) == (None, True, 49152)


def test_the_documented_example_command(home: Path) -> None:
    # 16 × 1536 × 2 is all of 49152.
    found = ask(
        "--device_batch_size=16",
        "--total_batch_size=49152",
        "--num_iterations=50",
        "--eval_every=25",
    )
    assert (
        found.config.device_batch_size,
        found.config.num_iterations,
        found.config.eval_every,
    ) == (16, 50, 25)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1024])
def test_any_number_of_processes(n: int, home: Path) -> None:
    assert ask(str(n), f"--total_batch_size={8 * 1536 * n}", script=LAUNCH).ranks == n


def test_ranks_of_another_launcher(home: Path) -> None:
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    found = request.read(TRAIN, ["--total_batch_size=49152"], environ)
    assert (found.ranks, found.local_ranks, found.place.rank) == (4, 2, 3)
    assert request.read(TRAIN, [], {}).local_ranks == 1
    told = request.read(LAUNCH, ["3", "--total_batch_size=49152"], environ)
    assert told.ranks == 4 and told.notes == [
        "3 processes were requested, but 4 ranks are already running"
    ]
    for typed in ("2", "4"):
        assert request.read(LAUNCH, [typed, "--total_batch_size=49152"], environ).notes == []


def test_local_ranks_without_a_local_world_size(home: Path) -> None:
    environ = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1",
    }
    assert [
        request.read(TRAIN, ["--total_batch_size=49152"], environ, gpus=n).local_ranks
        for n in (0, 2, 8)
    ] == [2, 2, 4]


def test_a_node_of_several_starts_its_own_share(home: Path) -> None:
    by_flags = request.read(
        LAUNCH,
        ["2", "--nnodes=2", "--node_rank=1", "--master_addr=h", "--total_batch_size=49152"],
        {},
    )
    assert (by_flags.ranks, by_flags.local_ranks) == (4, 2)
    injected = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert request.read(TRAIN, ["--total_batch_size=49152"], injected, gpus=2).local_ranks == 2
    assert request.read(TRAIN, ["--total_batch_size=24576"], injected, gpus=0).ranks == 2


def test_a_launcher_in_a_rank_is_refused(home: Path) -> None:
    environ = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "DUET_RUN_DIR": "/runs/outer",
    }
    with pytest.raises(UserError, match="this process is rank 0 of the run /runs/outer"):
        request.read(LAUNCH, ["2"], environ)
    assert (
        request.read(
            LAUNCH, ["2", "--launcher=spawn", "--total_batch_size=24576"], environ
        ).place.kind
        == "local"
    )


def test_an_error_of_all_ranks_is_reported_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for rank, said in (("0", False), ("1", True)):
        with pytest.raises(UserError) as caught:
            request.read(TRAIN, ["--depht=3"], environ | {"RANK": rank})
        assert caught.value.said_by_another is said


def test_default_folders_are_in_the_project_named_ones_in_the_current_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = ask("--log_dir=logs")
    assert (found.experiments, found.logs) == (home / "experiments", elsewhere / "logs")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    assert ask("--out_dir=~/runs").experiments == tmp_path / "alice/runs"
    assert ask(f"--out_dir={tmp_path}/x").experiments == tmp_path / "x"


# ── mistakes: value, origin, what is allowed, and what to do
# ─────────────────────────────────────────────────────────


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
    monkeypatch.setattr(cli_args, "WORK", ROOT)
    monkeypatch.chdir(ROOT)
    problem = only(wrong(script=SIMPLE))
    assert problem.what == "no config given"
    assert problem.allowed.endswith("aggressive, balanced, conservative, quickstart")
    assert shell.read(problem.fixes[0]).config_file == Path("configs/dual_gpu/quickstart.py")


def test_a_resumed_run_needs_no_config_for_any_script(home: Path) -> None:
    make_run(home / "experiments", "r1")
    assert ask("--resume=r1", script=SIMPLE).resume_from is not None
    assert ask(script=SIMPLE, env={"DUET_RESUME": "r1"}).resume_from is not None


# ── N ─────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the batch
# ──────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_an_automatic_device_batch_needs_a_total_that_divides(home: Path, shell: Shell) -> None:
    assert ask("--device_batch_size=auto").config.device_batch_size == "auto"
    problem = only(wrong("--device_batch_size=auto", "--total_batch_size=24577"))
    assert "device_batch_size auto (from --device_batch_size on the command line)" in problem.what
    assert [shell.read(f).config.total_batch_size for f in problem.fixes] == [24576, 27648]


# ── the user's own command again
# ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "changes", "expected"),
    [
        ([], {}, "./train_dual_gpu_enhanced.sh"),
        ([], {"depth": 2}, "./train_dual_gpu_enhanced.sh --depth=2"),
        (["--depth=3"], {"depth": 2}, "./train_dual_gpu_enhanced.sh --depth=2"),
        (["--depth", "3", "c.py"], {"depth": 2}, "./train_dual_gpu_enhanced.sh c.py --depth=2"),
        (
            ["--max-seq-len", "3"],
            {"max_seq_len": 2},
            "./train_dual_gpu_enhanced.sh --max_seq_len=2",
        ),
        (
            ["--max-seq-len=3", "--seed=1"],
            {"max_seq_len": 2},
            "./train_dual_gpu_enhanced.sh --seed=1 --max_seq_len=2",
        ),
        (
            ["--dry_run", "c.py"],
            {"depth": 2},
            "./train_dual_gpu_enhanced.sh --dry_run c.py --depth=2",
        ),
        (
            ["a b.py", "--data=it's"],
            {},
            "./train_dual_gpu_enhanced.sh 'a b.py' '--data=it'\"'\"'s'",
        ),
    ],
)
def test_the_command_with_changes(
    args: list[str], changes: dict[str, object], expected: str
) -> None:
    assert command(ENHANCED, args, **changes) == expected


def test_the_command_of_the_entry_point() -> None:
    assert command(TRAIN, ["c.py"], depth=2) == "python train.py c.py --depth=2"


def test_a_rebuilt_command_means_the_same(shell: Shell) -> None:
    chance = random.Random(3)
    words = [
        "a b",
        "it's",
        'run "x"',
        "$HOME",
        "`id`",
        "a\nb",
        "*",
        "训练",
        "",
        "--",
        "~",
        "!x",
        "#c",
        "a\\b",
        ";",
        "\t",
    ]
    for _ in range(10):
        args = [
            chance.choice(words) if chance.random() < 0.5 else f"--data={chance.choice(words)}"
            for _ in range(6)
        ]
        assert shell.paste(command(ENHANCED, args)) == (ENHANCED, args)
        script, changed = shell.paste(command(ENHANCED, args, seed=7))
        assert (script, changed) == (ENHANCED, [*args, "--seed=7"])


# ── as a program
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_as_a_program_it_only_checks(tmp_path: Path) -> None:
    good = python("-m", "training.cli.check_request", LAUNCH, "2", "--depth=3", cwd=tmp_path)
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
    bad = python(
        "-m", "training.cli.check_request", LAUNCH, "zwei", "--depht=3", cwd=tmp_path, DUET_TYPO="1"
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("[ERROR]") == 4
    assert bad.stderr.endswith("3 problems; nothing was launched (exit 2)\n")
    assert bad.stderr.count("    try:     ./launch_train.sh 2 --depth=3\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_it_runs_before_the_installation(tmp_path: Path) -> None:
    # -S: without site-packages, as on a fresh machine.
    code = (
        "import sys, os; from training.cli import check_request; sys.argv = ['x', "
        "'launch_train.sh', '2']; sys.exit(check_request.main())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
