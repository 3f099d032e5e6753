"""What was found out about GPUs is known at later starts, and no state of the file is a reason to
stop."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from training.core.messages import msg
from training.host import p2p_cache
from training.host.p2p_cache import Key, known, remember, remembered, verdict

GPUS = ("GPU-a", "GPU-b")
HERE = ("580.65.06", "2.13.0")  # driver, torch
SET = {"NCCL_P2P_DISABLE": "1"}


def key(gpus: Iterable[str] = GPUS, *here: str | None, **environ: str) -> Key:
    return p2p_cache.key(gpus, *(here or HERE), environ)


def learn(of: Key, values: dict[str, str] = SET) -> str:
    return remember(of, verdict(of, values, gb_per_s=9.5, small_ms=0.04))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "a user's cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "duet/communication.json"


def test_a_verdict_is_remembered(file: Path) -> None:
    assert (known(key()), remembered(key())) == (None, {})
    text = f"cached in {file}: later starts on these GPUs set it automatically"
    assert learn(key()) == text
    assert remembered(key()) == SET
    (one,) = json.loads(file.read_text())["verdicts"]
    assert (one["gpus"], one["driver"], one["torch"]) == (list(GPUS), *HERE)
    assert known(key()) == one and (one["gb_per_s"], one["small_ms"]) == (9.5, 0.04)


def test_gpus_that_work_are_remembered_too(file: Path) -> None:
    assert learn(key(), {}) == ""
    found = known(key())
    assert found and found["variables"] == {} and remembered(key()) == {}
    assert known(key(("GPU-a", "GPU-b", "GPU-c"))) is None, "a third one may be slower"


def test_a_plan_gets_it_with_its_reason(file: Path) -> None:
    learn(key())
    (variable,) = p2p_cache.variables(remembered(key()), {"NCCL_P2P_DISABLE": ""})
    assert (variable.name, variable.value, variable.origin) == ("NCCL_P2P_DISABLE", "1", "set here")
    assert str(file) in variable.why
    assert p2p_cache.variables(SET, {"NCCL_P2P_DISABLE": "0"}) == [], "the user's own value stays"


def test_it_holds_for_these_gpus_alone_or_with_others() -> None:
    learn(key())
    assert remembered(key(reversed(GPUS))) == SET, "the order does not matter"
    assert remembered(key(("GPU-c", *GPUS))) == SET, "these two are among them"
    assert remembered(key(("GPU-a",))) == {}
    assert remembered(key(("GPU-a", "GPU-c"))) == {}
    assert remembered(key(GPUS, "590.1", "2.13.0")) == {}, "another driver"
    assert remembered(key(GPUS, "580.65.06", "2.14.0")) == {}, "another torch, so another NCCL"
    assert remembered(key(GPUS, None, None)) == {}
    assert remembered(replace(key(), machine="Linux 6.9, IOMMU off")) == {}, "another IOMMU"
    assert remembered(replace(key(), nccl="2.99")) == {}, "another NCCL"


def test_it_holds_for_the_same_variables_of_nccl() -> None:
    learn(key(), {})
    assert known(key(NCCL_P2P_LEVEL="SYS")) is None
    assert known(key(NCCL_P2P_DISABLE="1")) is None
    assert known(key(NCCL_DEBUG="INFO", NCCL_P2P_DISABLE="0", NCCL_PROTO="")) == known(key())


def test_peer_to_peer_copies_that_the_user_demands_are_tested_again() -> None:
    learn(key())
    assert known(key(NCCL_P2P_DISABLE="0")) is None and known(key()) is not None


def test_results_for_other_gpus_stay(file: Path) -> None:
    others = key(("GPU-x", "GPU-y"))
    learn(others)
    learn(key())
    learn(key())
    assert len(json.loads(file.read_text())["verdicts"]) == 2, "one for each set of GPUs"
    assert learn(key(NCCL_P2P_DISABLE="0"), {}) == (
        f"peer-to-peer copies work now: removed from {file}"
    )
    assert (remembered(key()), remembered(others)) == ({}, SET)
    assert learn(key(), {}) == "", "nothing changes"


def test_copies_that_work_in_a_larger_group_refute_a_pair() -> None:
    learn(key())
    three = key((*GPUS, "GPU-c"), NCCL_P2P_DISABLE="0")
    assert "work now" in learn(three, {})
    assert remembered(key()) == {} and known(key()) is None


def test_a_failed_test_withdraws_the_result_for_its_gpus(file: Path) -> None:
    others = key(("GPU-x", "GPU-y"))
    learn(others, {})
    learn(key(), {})
    p2p_cache.forget(key())
    assert known(key()) is None and known(others) is not None
    learn(key())
    p2p_cache.forget(key(NCCL_P2P_DISABLE="0"))
    assert remembered(key()) == SET, "a hang with the copies is what it is about"
    p2p_cache.forget(key())
    assert remembered(key()) == {}
    p2p_cache.forget(key())
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no lock is left"


def test_times_of_busy_gpus_are_marked_and_replace_no_others() -> None:
    one = verdict(key(), {}, gb_per_s=1.0, small_ms=1.0)
    busy = {"busy": "GPU 0 is busy"}
    assert remember(key(), one, **busy) == msg("host.p2p.without_times", why=busy["busy"])
    found = known(key())
    assert found == {**one, "busy": True} and remembered(key()) == {}
    learn(key(), {})
    remember(key(), one, **busy)
    found = known(key())
    assert found and found["gb_per_s"] == 9.5 and "busy" not in found, "of idle GPUs"
    assert remember(key(), {**one, "variables": SET}, **busy).startswith("cached")
    assert remembered(key()) == SET
    assert "work now" in remember(key(), one, **busy)
    found = known(key())
    assert remembered(key()) == {} and found and found["busy"]


def test_results_of_several_processes_are_kept(file: Path) -> None:
    code = """
import sys
from training.core.messages import msg
from training.host import p2p_cache
for number in range(30):
    one = p2p_cache.key([f"{sys.argv[1]}-{number}"], "580", "2.13", {})
    p2p_cache.remember(one, p2p_cache.verdict(one, {}, gb_per_s=1, small_ms=1))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(json.loads(file.read_text())["verdicts"]) == 90


def test_a_kernel_and_its_iommu(tmp_path: Path) -> None:
    assert p2p_cache.machine(tmp_path).endswith(", IOMMU off")
    (tmp_path / "class/iommu/dmar0").mkdir(parents=True)
    assert p2p_cache.machine(tmp_path).endswith(", IOMMU on"), "no access to its groups"
    for number, kind in enumerate(("DMA-FQ", "DMA-FQ", "identity")):
        group = tmp_path / f"kernel/iommu_groups/{number}"
        group.mkdir(parents=True)
        (group / "type").write_text(f"{kind}\n")
    (tmp_path / "kernel/iommu_groups/3/type").mkdir(parents=True)  # cannot be read
    assert p2p_cache.machine(tmp_path).endswith(", IOMMU DMA-FQ, identity")


WHOLE = {
    "gpus": ["GPU-a"],
    "driver": HERE[0],
    "torch": HERE[1],
    "nccl": None,
    "machine": "",
    "settings": {},
    "variables": SET,
    "gb_per_s": 1.0,
    "small_ms": 1.0,
    "time": 1.0,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"verdicts": [',
        b"\xff\xfe",
        b"[]",
        b'{"verdicts": {}}',
        json.dumps({"verdicts": [1, {}, WHOLE | {"gpus": "GPU-a"}]}).encode(),
        json.dumps({"verdicts": [WHOLE | {"gpus": []}]}).encode(),
        json.dumps({"verdicts": [WHOLE | {"variables": {"LD_PRELOAD": "/tmp/x.so"}}]}).encode(),
        json.dumps({"verdicts": [WHOLE | {"gb_per_s": "fast"}]}).encode(),
        json.dumps(
            {"verdicts": [WHOLE | {"gb_per_s": 0}, WHOLE | {"small_ms": math.nan}]}
        ).encode(),
        json.dumps(  # no date has such a time
            {"verdicts": [WHOLE | {"time": time} for time in (math.inf, math.nan, 1e300)]}
        ).encode(),
        # the format of early 0.1
        json.dumps(
            {"verdicts": [{n: WHOLE[n] for n in ("gpus", "driver", "torch", "variables")}]}
        ).encode(),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert remembered(key()) == {}
    learn(key())
    assert remembered(key()) == SET
    assert len(json.loads(file.read_text())["verdicts"]) == 1


def test_an_unwritable_folder_is_reported(file: Path) -> None:
    file.parent.parent.write_text("a file where the folder should be")
    assert learn(key()) == f"not cached: cannot write {file} (Not a directory)"
    assert remembered(key()) == {} and known(key()) is None


def test_gpus_without_a_name_are_not_remembered(file: Path) -> None:
    assert learn(key(("", ""))) == "not cached: the driver does not report GPU UUIDs"
    assert learn(key(GPUS, None, "2.13.0")).startswith("not cached")
    assert learn(key(())).startswith("not cached")
    assert not file.exists()


def test_another_slot_or_bridge_is_another_machine() -> None:
    plain: Any = {"uuid": "GPU-a", "pci": "0000:01:00.0", "nvlinks": None}
    names = [p2p_cache.identity(plain | facts) for facts in (
        {}, {"pci": "0000:02:00.0"}, {"nvlinks": 0}, {"nvlinks": 4}, {"peers": 4}, {"lanes": 4}
    )]  # fmt: skip
    assert len(set(names)) == len(names)
    assert p2p_cache.identity(plain | {"uuid": "-"}) == ""


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
    assert (p2p_cache.path(), remembered(key())) == (None, {})
    assert learn(key()) == "not cached: no home folder"
