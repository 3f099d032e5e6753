"""Names of other tools: every row of the table gives a valid command, config line or variable."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import ENHANCED, LAUNCH, ROOT, SIMPLE, Shell, make_run, only, python, wrong
from training.config import foreign_names, meant
from training.config.foreign_names import ROWS, Foreign
from training.config.schema import FIELDS
from training.config.translate import RANKS
from training.core import suggest
from training.core.rundir import write_json
from training.tasks import everything
from training.tasks.video_restoration.kair.keys import KEYS, leaf

Write = Callable[..., str]
CONFIG = (
    "device = 'auto'\ndevice_batch_size = 4\nmax_seq_len = 32\ntotal_batch_size = "
    "256\nnum_iterations = 400\ndata = 'a.txt'\n"
)


@pytest.fixture
def small(home: Path, write: Write) -> str:
    """A config, a run to resume, and the files used in examples."""
    write("a.txt", "some text")
    write("net.pth", "weights")
    write("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    plan = {
        "config": {"depth": 2, "data": "a.txt", "max_seq_len": 32},
        "config_file": "small.py",
        "command": {"cwd": str(Path.cwd())},
    }
    write_json(make_run(home / "experiments", "earlier").plan, plan)
    return write("small.py", CONFIG)


def flag(name: str, row: Foreign) -> str:
    return f"--{name}={row.example}" if row.example else f"--{name}"


@each("row", ROWS, ids=lambda row: row.names[0])
def test_suggestions_for_a_flag_are_valid(row: Foreign, small: str, shell: Shell) -> None:
    for name in row.names:
        others = ["--num_workers=1"] if "workers" in name else []
        problem = only(wrong("2", small, *others, flag(name, row), script=LAUNCH))
        assert problem.what.startswith(f"--{name} is not a known flag: ") or not (
            row.to or row.note
        )
        assert problem.fixes
        for fix in problem.fixes:
            if fix == f"./{LAUNCH} --help":
                assert (
                    row.translate is foreign_names.none or row.note or name == "tokenizer_name"
                ), "a flag without suggestions needs a note"
                continue
            found = shell.read(
                fix.partition(" ./")[1].strip() + fix.partition(" ./")[2]
                if "VISIBLE" in fix
                else fix
            )
            assert found.config_file == Path("small.py")


@each("row", ROWS, ids=lambda row: row.names[0])
def test_the_same_for_a_variable_and_a_key(
    row: Foreign, home: Path, write: Write, small: str
) -> None:
    name = row.names[0]
    value = row.example or "true"
    variable = only(wrong(small, env={f"DUET_{name.upper()}": value}))
    assert variable.fixes[-1] == f"unset DUET_{name.upper()}"
    for fix in variable.fixes[:-1]:
        for found in re.findall(r"DUET_([A-Z_]+)=", fix):
            assert found.lower() in FIELDS
    key = only(wrong(write("keys.py", f"{CONFIG}{name} = {value!r}\n")))
    assert f"{name} is not a known field (keys.py:7)" in key.what
    for fix in key.fixes:
        corrected = write("corrected.py", CONFIG + fix.replace("; ", "\n") + "\n")
        try:
            wrong(corrected)
        except pytest.fail.Exception:
            continue
        # a divisible batch, a run of that config, a file of weights, workers to keep
        of_others = (
            "total_batch_size",
            "device_batch_size",
            "max_seq_len",
            "resume",
            "init_from",
            "persistent_workers",
        )
        assert any(name in fix for name in of_others)


def test_every_target_is_a_field() -> None:
    assert {target for row in ROWS for target in row.to} <= {*FIELDS, RANKS}
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names)), "names are unique"
    assert not set(names) & set(FIELDS), "a Duet field is not a foreign name"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--max_steps=100", "--num_iterations=100"),
        ("--max-steps 100", "--num_iterations=100"),
        ("--train.max_steps=100", "--num_iterations=100"),
        ("--block_size=64", "--max_seq_len=64 --total_batch_size=512"),
        ("--block_size=16", "--max_seq_len=16"),
        ("--n_layer=6", "--depth=6"),
        ("--resume_from_checkpoint=out/checkpoint-5", "--resume=latest"),
        ("--resume_from_checkpoint=experiments/earlier/checkpoints/step_5", "--resume=earlier"),
        ("--fp16", "--precision=fp16"),
        ("--fp16=true", "--precision=fp16"),
        ("--fp8", "--precision=fp8"),
        ("--mixed_precision=fp8", "--precision=fp8"),
        ("--gradient_accumulation_steps=4", "--total_batch_size=1024"),
        ("--batch_size=16", "--device_batch_size=16 --total_batch_size=1024"),
        ("--global_batch_size=16", "--total_batch_size=512"),
        (
            "--lr=3e-4",
            "--optimizer=adamw --matrix_lr=3e-4 --embedding_lr=3e-4 --unembedding_lr=3e-4",
        ),
        ("--warmup_steps=40", "--warmup_ratio=0.1"),
        ("--wandb_log=False", "--use_dummy_wandb=true"),
        ("--gradient_checkpointing", "--activation_checkpointing=12"),
    ],
)
def test_values_are_translated(typed: str, fix: str, small: str) -> None:
    assert (
        only(wrong(small, *typed.split(" "), script=SIMPLE)).fixes[0] == f"./{SIMPLE} {small} {fix}"
    )


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--notensorboard", "--tensorboard=false"),
        ("--nodebug", "--debug=false"),
        ("--no_tensorbord", "--tensorboard=false"),
        ("--disable-report=true", "--report=false"),
        ("--without_report=off", "--report=true"),
    ],
)
def test_a_negated_switch_is_never_switched_on(typed: str, fix: str, small: str) -> None:
    assert only(wrong(small, typed, script=SIMPLE)).fixes == [f"./{SIMPLE} {small} {fix}"]


@pytest.mark.parametrize(
    ("typed", "steps"),
    [
        ("val_check_interval=1.0", None),
        ("val_check_interval=0.25", None),
        ("val_check_interval=1", 1),
        ("eval_steps=1.0", None),
        ("eval_steps=100.0", 100),
        ("eval_interval=-1", 0),
    ],
)
def test_a_fraction_is_not_a_number_of_steps(
    typed: str, steps: int | None, small: str, shell: Shell
) -> None:
    fixes = only(wrong(small, f"--{typed}", script=SIMPLE)).fixes
    if steps is None:
        assert fixes == [f"./{SIMPLE} --help"]
    else:
        assert shell.read(fixes[0]).config.eval_every == steps


def test_a_total_for_a_file_divides(home: Path, write: Write) -> None:
    batch = "device_batch_size = 12\nmax_seq_len = 64\ntotal_batch_size = 2304\n"
    for key, total in (
        ("gradient_accumulation_steps = 3", 3 * 12 * 64 * 3),
        ("global_batch_size = 50", 12 * 64 * 3),
    ):
        path = write("accumulates.py", f"{batch}{key}\n")
        (problem,) = (p for p in wrong("3", path, script=LAUNCH) if p.code == "field.unknown")
        assert problem.fixes == [f"total_batch_size = {total}   # {path}:4"]


@each(
    "machines",
    [("--nnodes=2", "--master_addr=10.0.0.1"), ("--hosts=node1,node2", "--master_addr=10.0.0.1")],
)
@each(("typed", "total"), [("gradient_accumulation_steps=4", 4), ("batch_size=8", 2)])
def test_a_total_is_that_of_all_machines(
    machines: tuple[str, ...], typed: str, total: int, small: str
) -> None:
    """Two with three ranks each."""
    whole = 3 * 2 * 4 * 32
    asked = ("3", small, *machines, f"--total_batch_size={whole}")
    problem = next(p for p in wrong(*asked, f"--{typed}", script=LAUNCH) if typed[:5] in p.what)
    assert f"--total_batch_size={total * whole}" in problem.fixes[0].split()


def test_a_file_does_not_select_gpus_by_include(home: Path, write: Write, small: str) -> None:
    problem = only(wrong(write("c.py", "include = 'other.py'\n")))
    assert (problem.code, problem.fixes) == ("field.unknown", [])
    assert "CUDA_VISIBLE_DEVICES" not in problem.what
    assert "CUDA_VISIBLE_DEVICES=0,1" in only(wrong(small, "--include=0,1")).fixes[0]


def test_a_number_of_processes(small: str, shell: Shell) -> None:
    assert only(wrong("--nproc_per_node=2", small, script=LAUNCH)).fixes == [
        f"./{LAUNCH} 2 {small}"
    ]
    assert only(wrong("4", "--gpus=2", small, script=LAUNCH)).fixes == [f"./{LAUNCH} 2 {small}"]
    assert only(wrong(small, "--gpus=2", script=SIMPLE)).fixes == [f"./{SIMPLE} {small}"]
    assert only(wrong(small, "--devices=3", script=ENHANCED)).fixes == [
        f"./{LAUNCH} 3 {small} --total_batch_size=384"
    ]
    both = only(wrong(small, "--gpu_ids=0,3", script=SIMPLE)).fixes
    assert both == [f"CUDA_VISIBLE_DEVICES=0,3 ./{SIMPLE} {small}"]


def test_a_time_limit(small: str, shell: Shell) -> None:
    fix = only(wrong(small, "--time_limit=01:00:00", script=SIMPLE)).fixes[0]
    assert shell.read(fix).config.max_time == 3600.0


def test_all_flags_are_corrected_in_one_command(small: str, shell: Shell) -> None:
    problems = wrong(
        small,
        "--max_steps=9",
        "--batch_size=2",
        "--gradient_accumulation_steps=3",
        "--depht=4",
        "--device=gpu",
        script=SIMPLE,
    )
    assert len(problems) == 5
    assert len({problem.fixes[0] for problem in problems}) == 1
    config = shell.read(problems[0].fixes[0]).config
    assert (
        config.num_iterations,
        config.device_batch_size,
        config.total_batch_size,
        config.depth,
    ) == (9, 2, 2 * 32 * 2 * 3, 4)
    assert config.device == "cuda"


def test_a_value_of_another_tool(small: str, shell: Shell) -> None:
    for typed, name, value in (
        ("--precision=bf16-mixed", "precision", "bf16"),
        ("--precision=16", "precision", "fp16"),
        ("--precision=32-true", "precision", "fp32"),
        ("--precision=tf32", "precision", "auto"),
        ("--tf32=true", "precision", "auto"),
        ("--tf32", "precision", "auto"),
        ("--device=gpu", "device", "cuda"),
        ("--device=cuda:1", "device", "cuda"),
        ("--compile=True", "compile", "1"),
        ("--eval_every=1k", "eval_every", 1000),
        ("--total_batch_size=64K", "total_batch_size", 65536),
        ("--total_batch_size=1e5", "total_batch_size", 100096),
        ("--device_batch_size=0", "device_batch_size", 1),
    ):
        for fix in only(wrong(small, typed, script=SIMPLE)).fixes[:1]:
            assert getattr(shell.read(fix).config, name) == value
        assert only(wrong(small, typed, script=SIMPLE)).fixes
    (fix,) = only(wrong(small, "--depth=twelve", script=SIMPLE)).fixes
    assert shell.read(fix).config.depth == FIELDS["depth"].default


def test_a_value_in_a_file(home: Path, write: Write) -> None:
    write("a.txt", "some text")
    assert only(wrong(write("c.py", "precision = 'bfloat16'\ndata = 'a.txt'\n"))).fixes == [
        "precision = 'bf16'   # c.py:1"
    ]
    assert only(wrong(write("c.json", '{"precision": "16-mixed", "data": "a.txt"}'))).fixes == [
        '"precision": "fp16"   in c.json: \'precision\''
    ]
    assert only(wrong(env={"DUET_DEVICE": "gpu"})).fixes == ["export DUET_DEVICE=cuda"]


def test_the_keys_of_option_files_are_known_as_flags() -> None:
    """Those with another name than Duet's field, which is a field of every task."""
    renamed = {
        word: key.field
        for dotted, key in KEYS.items()
        if (word := leaf(dotted)) != key.field in FIELDS and word not in everything()
    }
    assert len(renamed) > 10
    del renamed["root"]  # too common to mean out_dir
    rows = {word: foreign_names.row_of(word) for word in renamed}
    assert {word: row.to if row else () for word, row in rows.items()} == {
        word: (field,) for word, field in renamed.items()
    }


def test_a_similar_spelling_neither_continues_a_run_nor_replaces_a_flag(small: str) -> None:
    for typed in ("--checkpoint_saved=10", "--checkpoint_tests=10", "--checkpoint_prints=1"):
        (problem,) = wrong("2", small, "--resume=earlier", typed, script=LAUNCH)
        fixes = " ".join(problem.fixes)
        assert "--resume=latest" not in fixes and "--out_dir" not in fixes, typed
    assert meant.name("depht", "8", FIELDS).changes == ({"depth": "8"},)
    assert meant.name("depht", "8", FIELDS, given={"depth": "4"}).changes == ()
    (problem,) = wrong("2", small, "--depth=4", "--depht=8", script=LAUNCH)
    assert problem.fixes == [f"./{LAUNCH} --help"]


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs/reference/names.md").read_text(encoding="utf-8")
    assert "\n".join(foreign_names.table()) in text, (
        "regenerate it: python -m training.config.foreign_names"
    )


def test_similar_names() -> None:
    known = list(FIELDS)
    for far in (
        "block_size",
        "gpus",
        "fp16",
        "lr",
        "n_layer",
        "dataset",
        "model",
        "steps",
        "output",
    ):
        assert suggest.suggest(far, known) == [], far


def test_the_module_prints_the_table() -> None:
    done = python("-m", "training.config.foreign_names", cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("| name elsewhere |")
