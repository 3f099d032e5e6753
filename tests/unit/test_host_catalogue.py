"""The table of environment variables: real names, one line each, and what is said of the ones that
do nothing or do not exist."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.conftest import ROOT
from training.host import env_catalog
from training.host.env_vars import explain

TABLE = json.loads(env_catalog.TABLE.read_text(encoding="utf-8"))
HEADERS = ROOT / ".venv/lib"


def test_each_name_is_explained_once_in_a_line() -> None:
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


def test_what_the_product_sets_or_reads_is_explained() -> None:
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
    """What torch's own headers read."""
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


def test_every_name_in_the_headers_of_the_installed_torch_is_known() -> None:
    names = torch_names()
    if not names:
        pytest.skip("no headers of torch here")
    assert names - set(env_catalog.known()) == set()


def test_unknown_names_of_nccl_and_what_was_meant() -> None:
    assert (
        env_catalog.unknown("NCCL_SOCKET_IFNAM")
        == "is not a variable NCCL knows, did you mean NCCL_SOCKET_IFNAME?"
    )
    assert (
        env_catalog.unknown("TORCH_NCCL_ENABLE_TIMINGS")
        == "is not a variable torch knows, did you mean TORCH_NCCL_ENABLE_TIMING?"
    )
    assert env_catalog.unknown("NCCL_NOTHING_LIKE_IT") == "is not a variable NCCL knows"
    assert env_catalog.unknown("NCCL_DEBUG") == ""
    assert env_catalog.unknown("CUDA_WHATEVER") == "", "anybody may use other names"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_TIMEOUT", "1800", "instead: --hang_timeout=1800"),
        ("NCCL_TIMEOUT", "half an hour", "instead: --hang_timeout=VALUE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "9", "instead: TORCH_FR_BUFFER_SIZE=9"),
        ("NCCL_BLOCKING_WAIT", "1", "instead: TORCH_NCCL_BLOCKING_WAIT=1"),
    ],
)
def test_what_to_use_instead(name: str, value: str, said: str) -> None:
    assert explain(name, value, "cuda").endswith(said)


def test_what_only_a_gpu_run_reads() -> None:
    assert explain("NCCL_DEBUG", "INFO", "cpu").endswith(" (nothing reads it on a CPU)")
    assert "nothing reads it" not in explain("NCCL_DEBUG", "INFO", "cuda")
    assert "nothing reads it" not in explain("OMP_NUM_THREADS", "1", "cpu")


def test_what_of_an_environment_matters() -> None:
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
