"""Precedence of sources, and the type and range of every value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import only
from training.config.flags import parse
from training.config.loader import Values
from training.config.origin import given
from training.config.resolve import Resolved, command_origins, resolve
from training.config.schema import FIELDS, Config, kind
from training.core.errors import Problem


def merge(
    *flags: str,
    file: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    old: Values | None = None,
) -> Resolved:
    values = {name: (value, f"c.py:{n}") for n, (name, value) in enumerate((file or {}).items(), 1)}
    return resolve(parse(list(flags)), values, env or {}, old)


def accepted(resolved: Resolved) -> Config:
    assert resolved.problems == []
    return resolved.config


def refused(resolved: Resolved) -> Problem:
    return only(resolved.problems)


def test_what_the_command_sets_is_known_in_the_plan_and_in_a_later_process() -> None:
    args, env = ["--vocab-size=300", "--depth=4"], {"DUET_TOKENIZER": "bpe"}
    names = ("tokenizer", "vocab_size", "data", "seed")
    merged = merge(*args, file={"data": "stdlib"}, env=env).origins
    typed = ["DUET_TOKENIZER", "--vocab-size"]
    assert given(merged, names) == typed
    assert given(command_origins(names, parse(args), env), names) == typed


def test_nothing_given_is_the_defaults() -> None:
    resolved = merge()
    assert accepted(resolved) == Config()
    assert resolved.origins == dict.fromkeys(FIELDS, "default")


def test_flag_over_environment_over_resumed_run_over_file_over_default() -> None:
    file, old = {"seed": 1}, {"seed": (2, "resumed run r1")}
    env = {"DUET_SEED": "3"}
    steps = [
        (merge(), 1337, "default"),
        (merge(file=file), 1, "from c.py:1"),
        (merge(file=file, old=old), 2, "from resumed run r1"),
        (merge(file=file, old=old, env=env), 3, "from DUET_SEED in the environment"),
        (merge("--seed=4", file=file, old=old, env=env), 4, "from --seed on the command line"),
        (merge("--seed", "4", file=file), 4, "from --seed on the command line"),
    ]
    for resolved, value, origin in steps:
        assert (accepted(resolved).seed, resolved.origins["seed"]) == (value, origin)


def test_the_origin_of_a_flag_is_its_spelling() -> None:
    resolved = merge("--max-seq-len=64", "--no-tensorboard")
    assert resolved.origins["max_seq_len"] == "from --max-seq-len on the command line"
    assert resolved.origins["tensorboard"] == "from --no-tensorboard on the command line"


@each("name", FIELDS)
def test_every_field_can_be_set_by_each_source(name: str) -> None:
    default, meta = FIELDS[name].default, FIELDS[name].metadata
    other: Any
    if meta["choices"]:
        other = next(c for c in meta["choices"] if c != default)
    elif default in meta["words"]:
        other = {"int": 2, "float": 0.5}[kind(name)]
    elif isinstance(default, bool):
        other = not default
    elif isinstance(default, (int, float)):
        other = (
            default + 1
            if meta["high"] is None or default + 1 <= meta["high"]
            else type(default)(meta["high"])
        )
        other = 0.25 if name in ("warmup_ratio", "warmdown_ratio") else other
    else:
        other = "something"
    # Its precondition; other fields keep their values.
    more = {"num_workers": "1"} if name == "persistent_workers" else {}
    extra = [f"--{n}={v}" for n, v in more.items()]
    assert getattr(accepted(merge(f"--{name}={other}", *extra)), name) == other
    assert getattr(accepted(merge(*extra, env={f"DUET_{name.upper()}": str(other)})), name) == other
    assert getattr(accepted(merge(*extra, file={name: other})), name) == other
    assert getattr(accepted(merge(*extra, old={name: (other, "resumed run r1")})), name) == other


@each(
    ("name", "text"),
    [
        ("depth", "abc"),
        ("depth", ""),
        ("depth", "1.5"),
        ("depth", "12.0"),
        ("depth", "auto"),
        ("depth", "true"),
        ("depth", "0"),
        ("depth", "-3"),
        ("depth", "257"),
        ("depth", "nan"),
        ("depth", "1e2"),
        pytest.param("depth", "9" * 5000, id="depth-5000 digits"),
        ("device_batch_size", "abc"),
        ("device_batch_size", "0"),
        ("device_batch_size", "AUTO"),
        ("total_batch_size", "0"),
        ("total_batch_size", "-24576"),
        # The search for divisors of the largest total is linear.
        ("total_batch_size", str(10**18)),
        ("device_batch_size", str(10**18)),
        ("total_batch_size", "24_576 tokens"),
        ("max_seq_len", "7"),
        ("max_seq_len", str((1 << 20) + 1)),
        ("seed", "-1"),
        ("seed", str(1 << 63)),
        ("matrix_lr", "fast"),
        ("matrix_lr", "nan"),
        ("matrix_lr", "-0.1"),
        ("matrix_lr", "inf"),
        ("matrix_lr", "1e999"),
        ("weight_decay", "1.01"),
        ("weight_decay", "-inf"),
        ("persistent_workers", "maybe"),
        ("persistent_workers", "2"),
        ("persistent_workers", ""),
        ("device", "tpu"),
        ("device", "CUDA"),
        ("device", ""),
        ("precision", "fp4"),
        ("wandb_mode", "dryrun"),
        ("compile", "true"),
        ("launcher", "mpi"),
        ("master_port", "65536"),
        ("master_port", "http"),
        ("hang_timeout", "-1"),
        ("hang_timeout", "10m"),
        ("retries", "101"),
        # An unset variable, as in --data=$TEXT, would mean the current folder.
        ("data", ""),
        ("out_dir", ""),
    ],
)
def test_invalid_text(name: str, text: str) -> None:
    sources = {
        f"from --{name} on the command line": merge(f"--{name}={text}"),
        f"from DUET_{name.upper()} in the environment": merge(env={f"DUET_{name.upper()}": text})
        if text
        else None,
    }
    for origin, resolved in sources.items():
        if resolved is None:  # an empty variable counts as unset
            continue
        problem = refused(resolved)
        assert problem.what.startswith(f"{name} is {text[:50]!r}"[:50])
        assert origin in problem.what
        assert problem.allowed
        # The other checks use a valid value.
        assert getattr(resolved.config, name) == FIELDS[name].default


@each(
    ("name", "value", "expected"),
    [
        ("depth", "12", "a str"),
        ("depth", True, "a bool"),
        ("depth", 12.0, "a float"),
        ("depth", None, "a NoneType"),
        ("depth", [12], "a list"),
        ("depth", {"a": 1}, "a dict"),
        ("depth", b"12", "a bytes"),
        ("depth", 0, "too small"),
        ("depth", -3, "too small"),
        ("depth", 1000, "too large"),
        ("depth", "auto", "a str"),
        ("device_batch_size", "8", "a str"),
        ("device_batch_size", 0, "too small"),
        ("total_batch_size", 24576.0, "a float"),
        ("matrix_lr", "0.1", "a str"),
        ("matrix_lr", True, "a bool"),
        ("matrix_lr", -1, "too small"),
        ("matrix_lr", math.nan, "matrix_lr"),
        ("matrix_lr", math.inf, "matrix_lr"),
        pytest.param("matrix_lr", 10**400, "matrix_lr", id="matrix_lr-10**400"),
        ("data", "a\0b.txt", "data"),
        ("out_dir", "a\0b", "out_dir"),
        ("data", "", "data"),
        ("out_dir", "", "out_dir"),
        ("log_dir", "", "log_dir"),
        ("persistent_workers", 1, "an int"),
        ("persistent_workers", "true", "a str"),
        ("device", 5, "one of auto, cuda, cpu"),
        ("device", ["cpu"], "one of auto, cuda, cpu"),
        ("device", None, "one of auto, cuda, cpu"),
        ("device", True, "one of auto, cuda, cpu"),
        ("compile", 2, "one of auto, 1, 0"),
        ("compile", 1.0, "one of auto, 1, 0"),
        ("data", 5, "an int"),
        ("run_name", None, "a NoneType"),
    ],
)
def test_file_values_of_wrong_type_or_range(name: str, value: object, expected: str) -> None:
    resolved = merge(file={name: value})
    problem = refused(resolved)
    assert problem.what.startswith(
        f"{name} is {str(value)[:20]}" if isinstance(value, int) else f"{name} is {value!r}"
    )
    assert "(from c.py:1)" in problem.what
    assert expected in "\n".join(problem.lines())
    assert getattr(resolved.config, name) == FIELDS[name].default


def test_a_number_too_large_to_print_is_refused_too() -> None:
    problem = refused(merge(file={"depth": 16**5000}))
    assert "depth" in problem.what and "c.py:1" in problem.what


@each(
    ("name", "text", "value"),
    [
        ("depth", "1", 1),
        ("depth", "256", 256),
        ("max_seq_len", "8", 8),
        ("seed", "0", 0),
        ("seed", str((1 << 63) - 1), (1 << 63) - 1),
        ("device_batch_size", "auto", "auto"),
        ("matrix_lr", "0", 0.0),
        ("matrix_lr", "1e-3", 0.001),
        ("weight_decay", "1", 1.0),
        ("master_port", "65535", 65535),
        ("compile", "1", "1"),
        ("compile", "0", "0"),
        ("data", "a b.txt", "a b.txt"),
        ("use_static_graph", "YES", True),
    ],
)
def test_text_at_the_limits(name: str, text: str, value: object) -> None:
    found = getattr(accepted(merge(f"--{name}={text}")), name)
    assert (found, type(found)) == (value, type(value))


def test_compile_may_be_a_number_or_bool_in_a_file() -> None:
    config = accepted(merge(file={"matrix_lr": 1, "compile": True, "device_batch_size": "auto"}))
    assert (config.matrix_lr, config.compile, config.device_batch_size) == (1.0, "1", "auto")
    assert type(config.matrix_lr) is float
    assert accepted(merge(file={"compile": False})).compile == "0"


def test_unknown_names_in_a_file_get_suggestions() -> None:
    problem = refused(merge(file={"depht": 12}))
    assert problem.what == "depht is not a known field (c.py:1)"
    assert problem.fixes == ["depth = 12   # c.py:1"]
    assert refused(merge(file={"qqqqqq": 12})).fixes == []
    assert refused(merge(file={"depht": "twelve"})).fixes == [], "the value must fit"
    # Actions are not allowed in files.
    assert "dry_run" in refused(merge(file={"dry_run": True})).what


def test_variables_of_other_tools() -> None:
    env = {"TORCH_COMPILE": "1", "WANDB_MODE": "offline", "WANDB_PROJECT": "p", "WANDB_RUN": "r"}
    resolved = merge(env=env)
    config = accepted(resolved)
    assert (config.compile, config.wandb_mode, config.wandb_project, config.wandb_run) == (
        "1",
        "offline",
        "p",
        "r",
    )
    assert resolved.origins["compile"] == "from TORCH_COMPILE in the environment"
    assert accepted(merge(env={"TORCH_COMPILE": "0"})).compile == "0"
    assert (
        refused(merge(env={"TORCH_COMPILE": "yes"})).what
        == "compile is 'yes' (from TORCH_COMPILE in the environment)"
    )
    # The DUET_ variable is more specific.
    assert accepted(merge(env={"TORCH_COMPILE": "0", "DUET_COMPILE": "1"})).compile == "1"
    assert accepted(merge("--wandb_mode=disabled", env=env)).wandb_mode == "disabled"


def test_wandb_run_dummy_means_no_wandb() -> None:
    assert accepted(merge(env={"WANDB_RUN": "dummy"})).use_dummy_wandb
    assert accepted(merge("--wandb_run=dummy")).use_dummy_wandb
    assert accepted(merge("--use_dummy_wandb")).use_dummy_wandb
    assert not accepted(merge(env={"WANDB_RUN": "dummy2"})).use_dummy_wandb


def test_an_empty_variable_is_an_unset_one() -> None:
    assert accepted(merge(env={"DUET_DEPTH": "", "TORCH_COMPILE": ""})) == Config()


def test_a_misspelled_variable() -> None:
    problem = refused(merge(env={"DUET_DEPHT": "12", "HOME": "/root", "duet_depth": "3"}))
    assert problem.what == "DUET_DEPHT is set in the environment but matches no field"
    assert (problem.fixes[0], problem.fixes[-1]) == (
        "unset DUET_DEPHT; export DUET_DEPTH=12",
        "unset DUET_DEPHT",
    )
    assert refused(merge(env={"DUET_DRY_RUN": "1"})).fixes[-1] == "unset DUET_DRY_RUN"


def test_variables_of_a_kubernetes_service_are_not_settings() -> None:
    """They are in each pod of a namespace that has a Service `duet-master`."""
    address = "tcp://10.0.0.1:29500"
    for name, value in (
        ("DUET_SERVICE_HOST", "10.0.0.1"),
        ("DUET_MASTER_SERVICE_PORT_RDZV", "29500"),
        ("DUET_MASTER_PORT", address),
        ("MASTER_PORT", address),
        ("DUET_PORT_29500_TCP", address),
        ("DUET_PORT_29500_UDP_PROTO", "udp"),
    ):
        assert accepted(merge(env={name: value})) == Config(), name
    for name in ("DUET_PORT", "DUET_SERVICE"):
        assert name in refused(merge(env={name: "29500"})).what


def test_internal_variables_are_accepted() -> None:
    names = ["ROOT", "RUN_DIR", "LOG_FILE", "SCRIPT"]
    assert accepted(merge(env={f"DUET_{n}": "x" for n in names})) == Config()


def test_persistent_workers_without_workers() -> None:
    problem = refused(merge("--persistent_workers", file={"num_workers": 0}))
    assert "--persistent_workers" in problem.what and "c.py:1" in problem.what
    assert accepted(merge("--persistent_workers", problem.fixes[0])).num_workers == 2
    assert not accepted(merge(problem.fixes[1])).persistent_workers


def test_warm_up_and_decay_longer_than_the_run() -> None:
    problem = refused(merge("--warmup_ratio=0.4"))
    assert "0.4" in problem.what and "--warmup_ratio" in problem.what
    assert f"{Config.warmdown_ratio} (default)" in problem.what
    assert problem.allowed == "a sum of at most 1"
    accepted(merge("--warmup_ratio=0.3"))


def test_all_problems_of_all_sources_at_once() -> None:
    resolved = merge(
        "--depth=0",
        "--matrix_lr=x",
        file={"seed": "1", "nonsense": 2, "depth": "hidden by the flag"},
        env={"DUET_TYPO": "1", "TORCH_COMPILE": "x", "DUET_DEVICE": "tpu"},
        old={"retries": (-1, "resumed run r1")},
    )
    found = [p.what.split(" ")[0] for p in resolved.problems]
    assert sorted(found) == sorted(
        ["nonsense", "DUET_TYPO", "depth", "matrix_lr", "seed", "compile", "device", "retries"]
    )


def test_checkpointing_more_blocks_than_the_model_has() -> None:
    assert (
        accepted(merge("--depth=4", "--activation_checkpointing=4")).activation_checkpointing == 4
    )
    problem = refused(merge("--depth=4", "--activation_checkpointing=5"))
    assert problem.what == (
        "activation_checkpointing is 5 (from --activation_checkpointing on the command line), "
        "but depth is 4 (from --depth on the command line)"
    )
    assert problem.allowed == "at most 4 (blocks), auto or none"
    assert problem.fixes == ["--activation_checkpointing=4", "--activation_checkpointing=auto"]


def test_a_secret_in_a_command_is_rejected_and_not_shown() -> None:
    for resolved in (
        merge("--notify=curl -u me:geheim https://host/"),
        merge(env={"DUET_NOTIFY": "curl https://me:geheim@host/"}),
    ):
        (problem,) = resolved.problems
        assert "notify (from" in problem.what and "a password" in problem.what
        assert "geheim" not in "\n".join(problem.lines())
    assert (
        accepted(merge("--notify=curl -u me:$PASSWORD https://host/")).notify
        == "curl -u me:$PASSWORD https://host/"
    )
