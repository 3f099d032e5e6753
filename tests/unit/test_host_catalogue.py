"""Catalogue of environment variables: real names, one line each, and replacements for ineffective
or unknown ones."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.conftest import ROOT
from training.host import env_catalog
from training.host.env_vars import explain

TABLE = json.loads(env_catalog.TABLE.read_text(encoding="utf-8"))
HEADERS = ROOT / ".venv/lib"


def test_each_name_has_one_description() -> None:
    seen: set[str] = set()
    for group in TABLE["groups"]:
        names = [*group["variables"], *group["undocumented"]]
        assert len(names) == len(set(names))
        assert not seen & set(names), seen & set(names)
        seen |= set(names)
        for name, does in group["variables"].items():
            assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
            assert 10 < len(does) < 140 and "\n" not in does and not does.endswith("."), name
        assert all(n.startswith(group["prefix"]) for n in names)
    assert not seen & set(TABLE["wrong"])
    assert len(seen) > 350


def test_variables_set_or_read_by_duet_are_described() -> None:
    for name in (
        *(
            "PYTHONUNBUFFERED",
            "OMP_NUM_THREADS",
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
            "CUDA_DEVICE_ORDER",
            "CUDA_HOME",
        ),
        *(
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
            "TORCH_DISTRIBUTED_DEBUG",
            "TORCH_CPP_LOG_LEVEL",
            "NCCL_DEBUG",
        ),
        *(
            "TORCH_COMPILE",
            "WANDB_MODE",
            "WANDB_PROJECT",
            "WANDB_RUN",
            "WANDB_API_KEY",
            "CUDA_VISIBLE_DEVICES",
            "TORCH_LOCAL_PATH",
        ),
        *(
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "SLURM_STEP_ID",
            "USE_LIBUV",
            "TORCH_FR_BUFFER_SIZE",
        ),
    ):
        assert explain(name, "1", "cuda"), name


def torch_names() -> set[str]:
    """Variables read by the headers of torch."""
    found: set[str] = set()
    for header in HEADERS.glob(
        "python3*/site-packages/torch/include/torch/csrc/distributed/c10d/*.hpp"
    ):
        found |= set(
            re.findall(
                r'"((?:TORCH_NCCL|TORCH_FR|NCCL)_[A-Z0-9_]+)"', header.read_text(errors="replace")
            )
        )
    return found


def test_all_names_in_the_headers_of_torch_are_known() -> None:
    names = torch_names()
    if not names:
        pytest.skip("no headers of torch here")
    assert names - set(env_catalog.known()) == set()


def test_unknown_names_get_suggestions() -> None:
    assert (
        env_catalog.unknown("NCCL_SOCKET_IFNAM")
        == "is unknown to NCCL; did you mean NCCL_SOCKET_IFNAME?"
    )
    assert (
        env_catalog.unknown("TORCH_NCCL_ENABLE_TIMINGS")
        == "is unknown to torch; did you mean TORCH_NCCL_ENABLE_TIMING?"
    )
    assert env_catalog.unknown("NCCL_NOTHING_LIKE_IT") == "is unknown to NCCL"
    assert env_catalog.unknown("NCCL_DEBUG") == ""
    assert env_catalog.unknown("CUDA_WHATEVER") == "", "names without a reserved prefix are allowed"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_TIMEOUT", "1800", "; use --hang_timeout=1800"),
        ("NCCL_TIMEOUT", "half an hour", "; use --hang_timeout=VALUE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "9", "; use TORCH_FR_BUFFER_SIZE=9"),
        ("NCCL_BLOCKING_WAIT", "1", "; use TORCH_NCCL_BLOCKING_WAIT=1"),
    ],
)
def test_replacements(name: str, value: str, expected: str) -> None:
    assert explain(name, value, "cuda").endswith(expected)


def test_variables_without_effect_on_a_cpu() -> None:
    assert explain("NCCL_DEBUG", "INFO", "cpu").endswith(" (unused on a CPU)")
    assert "unused" not in explain("NCCL_DEBUG", "INFO", "cuda")
    assert "unused" not in explain("OMP_NUM_THREADS", "1", "cpu")


def test_relevant_variables() -> None:
    environ = {
        "PATH": "/bin",
        "NCCL_ZZZ": "1",
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "LS_COLORS": "x",
        "NCCL_TIMEOUT": "1",
    }
    assert env_catalog.relevant(environ) == [
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "NCCL_TIMEOUT",
        "NCCL_ZZZ",
    ]
