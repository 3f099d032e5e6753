"""Environment variables of the ranks with their reasons; the user's values are kept."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import each
from training.host import env_vars
from training.host.env_vars import FOUND, choose, useless
from training.host.gpus import Gpu
from training.host.placement import Topology


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal conditions on machines with and without CUDA; eight cores."""
    monkeypatch.setattr(env_vars, "_cuda_home", lambda: None)
    monkeypatch.setattr(env_vars, "cpu_count", lambda: 8)


def names(
    environ: dict[str, str] | None = None,
    *,
    device: str = "cpu",
    ranks: int = 2,
    local: int = 2,
    debug: bool = False,
) -> dict[str, str]:
    found = choose(
        environ or {},
        device=device,
        ranks=ranks,
        local_ranks=local,
        alone=ranks == local,
        debug=debug,
    )
    return {v.name: v.value for v in found if v.origin != FOUND}


def test_one_process_on_the_cpu() -> None:
    assert names(ranks=1, local=1) == {"PYTHONUNBUFFERED": "1"}


def test_two_ranks_on_the_cpu_share_the_cores() -> None:
    assert names() == {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo"}
    assert names(ranks=16, local=16)["OMP_NUM_THREADS"] == "1"


@each(
    ("source", "own", "machine", "environ", "threads"),
    [
        ("slurm", 8, 64, {"SLURM_CPUS_ON_NODE": "32"}, "8"),  # --cpus-per-task=8
        ("slurm", 2, 64, {"SLURM_CPUS_ON_NODE": "8"}, "2"),
        ("slurm", 64, 64, {"SLURM_CPUS_ON_NODE": "32"}, "8"),  # no task plugin that binds
        ("slurm", 1, 64, {"SLURM_CPUS_ON_NODE": "32"}, "1"),
        ("mpi", 4, 16, {}, "4"),
        ("mpi", 16, 16, {}, "4"),  # --bind-to none
        ("mpi", 4, 4, {}, "1"),
        ("torchrun", 8, 64, {"SLURM_CPUS_ON_NODE": "32"}, "2"),  # its ranks share the cores
    ],
)
def test_four_ranks_that_may_be_bound_to_cores(
    source: str,
    own: int,
    machine: int,
    environ: dict[str, str],
    threads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_vars, "cpu_count", lambda: own)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(env_vars.cgroups, "cpuset", lambda: "")
    monkeypatch.setattr(env_vars.cgroups, "cpu_quota", lambda: None)
    cores = env_vars.cores_of_ranks(Topology("rank", source, ""), environ)
    found = choose({}, device="cpu", ranks=4, local_ranks=4, debug=False, cores=cores)
    assert {v.name: v.value for v in found}["OMP_NUM_THREADS"] == threads


@each(("cores", "local_ranks", "node_threads", "threads", "why"), [
    (8, 2, None, "4", "8 cores shared by 2 ranks"),
    (1, 2, None, "1", "1 core shared by 2 ranks"),
    (8, 1, None, "8", "8 cores shared by 1 rank"),
    (8, 2, 2, "2", "NUMA"),
    (2, 2, 1, "1", "NUMA"),  # both GPUs on a node of one core
])  # fmt: skip
def test_the_reason_of_the_threads(
    cores: int, local_ranks: int, node_threads: int | None, threads: str, why: str
) -> None:
    ranks = {"ranks": 2, "local_ranks": local_ranks, "node_threads": node_threads}
    found = choose({}, device="cuda", debug=False, cores=cores, **ranks)  # type: ignore[arg-type]
    (variable,) = [v for v in found if v.name == "OMP_NUM_THREADS"]
    assert variable.value == threads and why in variable.why


def test_sets_have_one_order_in_all_ranks_of_a_task_but_not_of_a_script() -> None:
    def seeds(environ: dict[str, str], task: bool) -> list[tuple[str, str]]:
        found = choose(environ, device="cpu", ranks=2, local_ranks=2, debug=False, task=task)
        return [(v.value, v.origin) for v in found if v.name == "PYTHONHASHSEED"]

    assert seeds({}, task=True) == [("0", env_vars.HERE)]
    assert seeds({"PYTHONHASHSEED": "random"}, task=True) == [("random", env_vars.KEPT)]
    assert seeds({}, task=False) == []


def test_a_user_id_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with any user ID."""
    assert "USER" not in names()

    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(env_vars.pwd, "getpwuid", unknown)
    assert names()["USER"] == names({"USER": ""})["USER"] == f"uid_{os.getuid()}"
    assert not any("USER" in names({name: "me"}) for name in env_vars.NAMES)


def test_triton_builds_its_driver_elsewhere_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with the home / of a user ID without an account."""
    (tmp_path / "file").touch()
    own = {"TMPDIR": str(tmp_path), "LOGNAME": "a/user"}

    def folder(**environ: str) -> str | None:
        return names(own | environ, device="cuda").get("TRITON_CACHE_DIR")

    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    assert folder() is None
    for home in (str(tmp_path / "file/home"), "~"):
        monkeypatch.setenv("HOME", home)
        assert folder() == str(tmp_path / "torchinductor_a_user/triton")
        assert folder(TORCHINDUCTOR_CACHE_DIR="/compiled") == "/compiled/triton"
        assert folder(TRITON_HOME="/") is None and "TRITON_CACHE_DIR" not in names(own)
    monkeypatch.setattr(env_vars, "_name", lambda environ: "")
    assert folder() == str(tmp_path / f"torchinductor_uid_{os.getuid()}/triton")


def test_two_ranks_on_gpus() -> None:
    assert names(device="cuda") == {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_SOCKET_IFNAME": "=lo",
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_the_allocator_of_a_script_is_as_under_torchrun() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    for own in ({}, environ):
        found = choose(own, device="cuda", ranks=1, local_ranks=1, debug=False, script=True)
        chosen = [v for v in found if "ALLOC_CONF" in v.name]
        assert {v.name: (v.value, v.origin) for v in chosen} == {
            name: (value, FOUND) for name, value in own.items()
        }


@each(
    ("card", "driver", "there", "names"),
    [
        ("NVIDIA GeForce RTX 4090", "535.183.01", (), ["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]),
        ("NVIDIA RTX 4000 Ada Generation", "550.40.06", ("NCCL_P2P_DISABLE",), ["NCCL_IB_DISABLE"]),
        ("NVIDIA GeForce RTX 4090", "550.40.07", (), []),
        ("NVIDIA GeForce RTX 4090", "560.28.03", (), []),
        ("NVIDIA GeForce RTX 4090", None, (), []),
        ("NVIDIA GeForce RTX 3090", "535.183.01", (), []),
    ],
)
def test_gpus_without_copies_by_accelerate(
    card: str, driver: str | None, there: tuple[str, ...], names: list[str]
) -> None:
    found = env_vars.without_copies(["NVIDIA GeForce RTX 3090", card], driver, there)
    assert [v.name for v in found] == names
    assert all((v.value, v.origin) == ("1", env_vars.HERE) for v in found)
    assert env_vars.without_copies([card], driver, there) == [], "it asks about several GPUs only"


def test_segments_are_not_expandable_where_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def segments(*gpus: Gpu) -> str:
        found = choose({}, device="cuda", ranks=1, local_ranks=1, debug=False, gpus=gpus)
        return next(v.value for v in found if v.name == "PYTORCH_ALLOC_CONF")

    card = Gpu(0, "GPU-0", "-", None, None, None, None, None)
    assert segments(card) == "expandable_segments:True"
    assert segments(card, replace(card, mig=True)) == "expandable_segments:False"
    assert segments(card, replace(card, virtual=True)) == "expandable_segments:False"
    monkeypatch.setattr(env_vars, "TEGRA", tmp_path)
    assert segments(card) == "expandable_segments:False"
    monkeypatch.undo()
    release = os.uname_result(("Linux", "wsl", "6.6.87.2-microsoft-standard-WSL2", "#1", "x86_64"))
    monkeypatch.setattr(env_vars.os, "uname", lambda: release)
    assert segments(card) == "expandable_segments:False"


def test_a_run_that_repeats_bit_for_bit_sets_its_variables_before_cuda_starts() -> None:
    def found(device: str, environ: dict[str, str]) -> dict[str, str]:
        chosen = choose(
            environ, device=device, ranks=2, local_ranks=2, debug=False, deterministic=True
        )
        return {v.name: v.value for v in chosen}

    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    assert ours.items() <= found("cuda", {}).items()
    assert (
        not ours.keys() & found("cpu", {}).keys() and not ours.keys() & names(device="cuda").keys()
    )
    kept = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert (ours | kept).items() <= found("cuda", kept).items()


def test_several_machines_do_not_use_loopback() -> None:
    found = names(device="cuda", ranks=4, local=2)
    assert "GLOO_SOCKET_IFNAME" not in found
    assert "NCCL_SOCKET_IFNAME" not in found
    assert found["OMP_NUM_THREADS"] == "4"


def test_nccl_gets_the_exact_name_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    towards = ("eth1", "10.0.0.1")
    monkeypatch.setattr(env_vars.network, "interface_towards", lambda address: towards)
    for local in (2, 4):  # 4: the most that are possible, where the number is unknown
        found = choose(
            {},
            device="cuda",
            ranks=4,
            local_ranks=local,
            alone=False,
            debug=False,
            rendezvous="10.0.0.2",
        )
        values = {v.name: v.value for v in found if v.name.endswith("_SOCKET_IFNAME")}
        assert values == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_debug_output_only_with_debug() -> None:
    debug = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    assert debug.items() <= names(debug=True).items()
    assert (debug | {"NCCL_DEBUG": "INFO"}).items() <= names(device="cuda", debug=True).items()
    assert not set(debug) & set(names())


def test_values_of_the_user_are_kept_and_shown() -> None:
    environ = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": ""}
    found = {v.name: v for v in choose(environ, device="cuda", ranks=2, local_ranks=2, debug=False)}
    assert (found["OMP_NUM_THREADS"].value, found["OMP_NUM_THREADS"].origin) == ("3", "kept")
    assert (found["NCCL_SOCKET_IFNAME"].value, found["NCCL_SOCKET_IFNAME"].origin) == (
        "eth0",
        "kept",
    )
    # Empty counts as unset.
    assert (found["GLOO_SOCKET_IFNAME"].value, found["GLOO_SOCKET_IFNAME"].origin) == (
        "lo",
        "set here",
    )
    assert all(v.why for v in found.values())
    assert found["OMP_NUM_THREADS"].record() == {
        "name": "OMP_NUM_THREADS",
        "value": "3",
        "why": "your value is kept",
        "origin": "kept",
    }


def test_the_older_allocator_variable_takes_precedence() -> None:
    assert "PYTORCH_ALLOC_CONF" not in names(
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, device="cuda"
    )


def test_only_effective_variables_are_set() -> None:
    for device in ("cpu", "cuda"):
        found = names(device=device, debug=True)
        assert not {
            "NCCL_TIMEOUT",
            "NCCL_ASYNC_ERROR_HANDLING",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "NCCL_IB_DISABLE",
        } & set(found)


def test_warnings_about_variables_without_effect() -> None:
    assert useless({"PATH": "/bin", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}) == []
    found = useless(
        {
            "NCCL_TIMEOUT": "1800",
            "NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        }
    )
    assert len(found) == 3
    assert found[0].startswith("NCCL_TIMEOUT=1800 has no effect: it does not exist")
    assert found[0].endswith("; use --hang_timeout=1800")


def test_typos_are_reported_but_not_names_of_other_libraries() -> None:
    found = useless(
        {"NCCL_SOCKET_IFNAM": "eth0", "NCCL_FASTPLUGIN_X": "1", "CUDA_VISIBLE_DEVICE": "0"}
    )
    assert found == ["NCCL_SOCKET_IFNAM=eth0 is unknown to NCCL; did you mean NCCL_SOCKET_IFNAME?"]


def test_relevant_variables_are_shown_without_secrets() -> None:
    environ = {
        "WANDB_API_KEY": "k" * 40,
        "NCCL_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": "1,0",
        "PATH": "/bin",
        "WANDB_NOTES": "",
        "NCCL_ZZZ": "1",
    }
    found = {
        v.name: v
        for v in choose(environ, device="cuda", ranks=1, local_ranks=1, debug=False)
        if v.origin == FOUND
    }
    assert list(found) == ["NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "WANDB_API_KEY", "NCCL_ZZZ"]
    assert found["WANDB_API_KEY"].value == "set, not shown"
    assert found["CUDA_VISIBLE_DEVICES"].line() == (
        "CUDA_VISIBLE_DEVICES=1,0   from the environment: GPUs visible to this run, by number "
        "or UUID; renumbered from 0 inside"
    )
    assert found["NCCL_ZZZ"].why == "is unknown to NCCL"


def test_the_line_of_a_variable() -> None:
    lines = {
        v.name: v.line()
        for v in choose({"OMP_NUM_THREADS": "3"}, device="cpu", ranks=2, local_ranks=2, debug=False)
    }
    assert (
        lines["OMP_NUM_THREADS"]
        == "OMP_NUM_THREADS=3   kept: your value is kept (threads for CPU work in each rank)"
    )
    assert lines["GLOO_SOCKET_IFNAME"].startswith(
        "GLOO_SOCKET_IFNAME=lo   set here: one machine: no name lookup"
    )
    long = env_vars.Variable("LD_LIBRARY_PATH", "/x" * 99 + "\n\x1b[2J", "folders", FOUND).line()
    assert long == f"LD_LIBRARY_PATH={'/x' * 49}/…   from the environment: folders"
    assert "\n" not in env_vars.Variable("TMPDIR", "a\nb", "x", FOUND).line()


def test_cuda_is_found_through_its_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    home = tmp_path / "cuda-13"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    (home / "bin/nvcc").touch()
    (tmp_path / "nvcc").symlink_to(home / "bin/nvcc")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "nvcc"))
    assert names(device="cuda")["CUDA_HOME"] == str(home)
    assert names({"CUDA_HOME": "/opt/cuda"}, device="cuda")["CUDA_HOME"] == "/opt/cuda"
    assert "CUDA_HOME" not in names(device="cpu")


def test_cores_available_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert env_vars.cpu_count() == 1
