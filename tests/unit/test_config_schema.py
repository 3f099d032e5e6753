"""Public interface: field names and defaults that scripts and saved runs depend on."""

from __future__ import annotations

import time

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT
from training.config import flags, loader
from training.config.convert import convert
from training.config.schema import FIELDS, GROUPS, Config, describe, kind
from training.core.phase_timeouts import backstop_s

CONFIGS = ROOT / "configs/dual_gpu"

# A rename or removal breaks user scripts, so it must be repeated here on purpose.
SURFACE = """
    task depth max_seq_len dropout device_batch_size total_batch_size max_total_batch_size activation_checkpointing loss_chunks num_iterations
    num_epochs max_time tokens_per_param eval_every eval_tokens log_every sample_tokens optimizer matrix_lr embedding_lr unembedding_lr
    weight_decay grad_clip warmup_ratio warmdown_ratio final_lr_frac data text_field encoding tokenizer vocab_size num_workers
    persistent_workers find_unused_parameters use_static_graph debug_ddp inspect_every device precision compile seed deterministic
    run_name out_dir log_dir save_every keep_checkpoints resume hang_timeout retries min_ranks rejoin use_dummy_wandb wandb_mode
    wandb_project wandb_run tensorboard report notify launcher nnodes node_rank master_addr master_port rendezvous_timeout hosts hostfile ssh_args libuv numa show_ranks
    communication_test gradient_compression debug profile inject init_from
    init_weights ema keep_best key_offset
"""
ACTIONS = [
    "config",
    "dry_run",
    "explain",
    "check",
    "json",
    "script",
    "module",
    "no_python",
    "watch",
    "save_config",
    "help",
]

# Unlike the rest of SURFACE, these must never change.
FIXED = """
    depth device_batch_size total_batch_size max_seq_len num_iterations num_epochs eval_every save_every resume run_name
    device precision seed data num_workers persistent_workers find_unused_parameters use_static_graph hang_timeout
    retries use_dummy_wandb
"""


def test_the_names_of_fields_and_flags_are_pinned() -> None:
    assert sorted(FIELDS) == sorted(SURFACE.split())
    assert sorted(flags.ACTIONS) == sorted(ACTIONS)
    assert set(FIXED.split()) <= set(FIELDS)
    assert len(FIXED.split()) == 21


def test_no_action_hides_a_field() -> None:
    assert not set(FIELDS) & set(flags.ACTIONS)
    # `--no_x` switches the bool x off, so no field may be called that.
    assert not [n for n in FIELDS if n.startswith("no_")]


def values(name: str) -> dict[str, object]:
    found, problems = loader.load(CONFIGS / f"{name}.py")
    assert problems == []
    return {n: v for n, (v, _) in found.items()}


@pytest.mark.parametrize(
    ("name", "depth", "device_batch_size", "total_batch_size", "max_seq_len"),
    [
        ("conservative", 12, 8, 24576, 1536),
        ("balanced", 16, 12, 49152, 2048),
        ("aggressive", 20, 14, 86016, 3072),
    ],
)
def test_values_of_the_shipped_configs(
    name: str, depth: int, device_batch_size: int, total_batch_size: int, max_seq_len: int
) -> None:
    assert values(name) == {
        "depth": depth,
        "device_batch_size": device_batch_size,
        "total_batch_size": total_batch_size,
        "max_seq_len": max_seq_len,
    }


def test_quickstart_fits_any_machine() -> None:
    found = values("quickstart")
    assert (found["device"], found["data"]) == ("auto", "stdlib")
    # Two ranks, no accumulation.
    assert found["total_batch_size"] == 2 * found["device_batch_size"] * found["max_seq_len"]  # type: ignore[operator]


def test_the_shipped_configs() -> None:
    assert sorted(p.stem for p in CONFIGS.glob("*.py")) == [
        "__init__",
        "aggressive",
        "balanced",
        "conservative",
        "quickstart",
    ]
    assert loader.load(CONFIGS / "__init__.py") == ({}, [])


def test_the_defaults_match_conservative() -> None:
    default = vars(Config())
    assert {n: default[n] for n in values("conservative")} == values("conservative")


def test_safe_defaults() -> None:
    config = Config()
    assert (config.persistent_workers, config.find_unused_parameters, config.use_static_graph) == (
        False,
        False,
        False,
    )
    assert (config.use_dummy_wandb, config.wandb_mode, config.resume, config.run_name) == (
        False,
        "auto",
        "",
        "",
    )
    assert (config.device, config.precision, config.seed) == ("cuda", "auto", 1337)


@each("name", SURFACE.split())
def test_every_field_is_described_and_its_default_allowed(name: str) -> None:
    field = FIELDS[name]
    meta = field.metadata
    assert meta["help"] and meta["group"] in GROUPS
    assert kind(name) in ("int", "float", "bool", "str")
    assert type(field.default).__name__ == kind(name) or field.default in meta["words"]
    if meta["choices"]:
        assert field.default in meta["choices"]
    if meta["low"] is not None and field.default not in meta["words"]:
        assert field.default >= meta["low"]
    if meta["high"] is not None and field.default not in meta["words"]:
        assert field.default <= meta["high"]
    if kind(name) in ("int", "float"):
        assert meta["low"] is not None, "a number needs a lower limit"


@each("name", ["hang_timeout", "rendezvous_timeout", "max_time"])
def test_the_longest_timeouts_fit_torch_s_clock(name: str) -> None:
    _, wrong = convert(name, "1000000000000000", is_text=True)
    assert wrong
    limit_s = backstop_s(FIELDS[name].metadata["high"], supervised=True)
    assert (time.time() + limit_s) * 1e9 < 1 << 63


@each("name", ["matrix_lr", "embedding_lr", "unembedding_lr"])
def test_rates_beyond_fp32_are_refused(name: str) -> None:
    """torch: value cannot be converted to type float without overflow."""
    assert convert(name, "1e300", is_text=True)[1]
    assert convert(name, "2", is_text=True) == (2.0, None)


def test_every_group_is_used() -> None:
    assert {f.metadata["group"] for f in FIELDS.values()} == set(GROUPS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("depth", "a whole number from 1 to 256 (blocks)"),
        ("num_iterations", "a whole number from 0 to 1000000000, or auto (steps)"),
        ("weight_decay", "a number from 0 to 1"),
        ("persistent_workers", "true or false"),
        ("device", "one of auto, cuda, cpu (all ranks)"),
        ("run_name", "text"),
    ],
)
def test_descriptions_of_allowed_values(name: str, text: str) -> None:
    assert describe(name) == text


def test_auto_is_described_where_allowed() -> None:
    assert describe("device_batch_size").endswith(", or auto (sequences per rank)")
    assert "auto" not in describe("depth")
