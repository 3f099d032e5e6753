"""What was found out about GPUs is known at later starts, and no state of the file is a reason to
stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.host import p2p_cache
from training.host.p2p_cache import forget, remember, remembered

GPUS = ("GPU-a", "GPU-b")
HERE = ("580.65.06", "2.13.0")  # driver, torch
SET = {"NCCL_P2P_DISABLE": "1"}


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "a user's cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "duet/communication.json"


def test_a_verdict_is_remembered(file: Path) -> None:
    assert remembered(GPUS, *HERE) == {}
    assert (
        remember(GPUS, *HERE, "2.27.3")
        == f"cached in {file}: later starts on these GPUs set it automatically"
    )
    assert remembered(GPUS, *HERE) == SET
    (one,) = json.loads(file.read_text())["verdicts"]
    assert (one["nccl"], one["gpus"], one["driver"], one["torch"]) == ("2.27.3", list(GPUS), *HERE)


def test_a_plan_gets_it_with_its_reason(file: Path) -> None:
    assert p2p_cache.variables(GPUS, *HERE, {}) == []
    remember(GPUS, *HERE, "-")
    (variable,) = p2p_cache.variables(GPUS, *HERE, {"NCCL_P2P_DISABLE": ""})
    assert (variable.name, variable.value, variable.origin) == ("NCCL_P2P_DISABLE", "1", "set here")
    assert variable.why == (
        "the GPUs hang or corrupt data with peer-to-peer copies and work without, found by a "
        "communication test "
        f"({file}); NCCL_P2P_DISABLE=0 with --check repeats it"
    )
    assert p2p_cache.variables(GPUS, *HERE, {"NCCL_P2P_DISABLE": "0"}) == [], (
        "the user's own value stays"
    )


def test_it_holds_for_these_gpus_alone_or_with_others() -> None:
    remember(GPUS, *HERE, "-")
    assert remembered(reversed(GPUS), *HERE) == SET, "the order does not matter"
    assert remembered(("GPU-c", *GPUS), *HERE) == SET, "these two are among them"
    assert remembered(("GPU-a",), *HERE) == {}
    assert remembered(("GPU-a", "GPU-c"), *HERE) == {}
    assert remembered(GPUS, "590.1", "2.13.0") == {}, "another driver"
    assert remembered(GPUS, "580.65.06", "2.14.0") == {}, "another torch, so another NCCL"
    assert remembered(GPUS, None, None) == {}


def test_verdicts_of_other_gpus_stay(file: Path) -> None:
    remember(("GPU-x", "GPU-y"), *HERE, "-")
    remember(GPUS, *HERE, "-")
    remember(GPUS, *HERE, "-")
    assert len(json.loads(file.read_text())["verdicts"]) == 2, "one for each set of GPUs"
    assert forget(GPUS, *HERE).startswith("peer-to-peer copies work now")
    assert (remembered(GPUS, *HERE), remembered(("GPU-x", "GPU-y"), *HERE)) == ({}, SET)
    assert forget(GPUS, *HERE) == "", "nothing is known any more"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"verdicts": [',
        b"\xff\xfe",
        b"[]",
        b'{"verdicts": {}}',
        b'{"verdicts": [1, {}, {"gpus": "GPU-a", "driver": "580.65.06", "torch": "2.13.0", '
        b'"variables": {"NCCL_P2P_DISABLE": "1"}}]}',
        b'{"verdicts": [{"gpus": [], "driver": "580.65.06", "torch": "2.13.0", "variables": '
        b'{"NCCL_P2P_DISABLE": "1"}}]}',
        b'{"verdicts": [{"gpus": ["GPU-a"], "driver": "580.65.06", "torch": "2.13.0", "variables": '
        b'{"LD_PRELOAD": "/tmp/x.so"}}]}',
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert remembered(GPUS, *HERE) == {}
    remember(GPUS, *HERE, "-")
    assert remembered(GPUS, *HERE) == SET
    assert len(json.loads(file.read_text())["verdicts"]) == 1


def test_an_unwritable_folder_is_reported(file: Path) -> None:
    file.parent.parent.write_text("a file where the folder should be")
    assert remember(GPUS, *HERE, "-") == f"not cached: cannot write {file} (Not a directory)"
    assert remembered(GPUS, *HERE) == {} and forget(GPUS, *HERE) == ""


def test_gpus_without_a_name_are_not_remembered(file: Path) -> None:
    assert remember(("-", "-"), *HERE, "-") == "not cached: the driver does not report GPU UUIDs"
    assert remember(GPUS, None, "2.13.0", "-").startswith("not cached")
    assert remember((), *HERE, "-").startswith("not cached")
    assert not file.exists()


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    standard = tmp_path / ".cache/duet/communication.json"
    assert p2p_cache.path({}) == standard
    assert p2p_cache.path({"XDG_CACHE_HOME": "relative/is/ignored"}) == standard
    assert p2p_cache.path({"XDG_CACHE_HOME": "/var/cache"}) == Path(
        "/var/cache/duet/communication.json"
    )


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path,
        "home",
        lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")),
    )
    assert (p2p_cache.path(), remembered(GPUS, *HERE)) == (None, {})
    assert remember(GPUS, *HERE, "-") == "not cached: no home folder"
