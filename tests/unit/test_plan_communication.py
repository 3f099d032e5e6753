"""Communication between GPUs in a plan: tested at the first start on them, then remembered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, ask, python
from tests.unit.nvidia_machine import Nvidia
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.host import env_vars, nccl_settings, p2p_cache
from training.host.gpus import Gpu, GpuInventory
from training.launcher.communication import run, start_test
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.result import CommunicationResult
from training.plan import communication, preflight

SET = {"NCCL_P2P_DISABLE": "1"}
UUIDS = ("GPU-a", "GPU-b")
NAMES = [f"{uuid} - - - -" for uuid in UUIDS]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)


def key(names: Sequence[str] = NAMES, **environ: str) -> p2p_cache.Key:
    return p2p_cache.key(names, "580.65.06", "2.13.0", environ)


def verdict(variables: dict[str, str], names: Sequence[str] = NAMES) -> p2p_cache.P2PVerdict:
    return p2p_cache.verdict(key(names), variables, gb_per_s=11.3, small_ms=0.05)


class Ranks:
    """A test whose ranks need these variables; None: no result."""

    def __init__(self, variables: dict[str, str] | None) -> None:
        self.variables, self.plans = variables, list[Any]()

    def __call__(self, plan: Any) -> p2p_cache.P2PVerdict | None:
        self.plans.append({v["name"]: v["value"] for v in plan["variables"]})
        if self.variables is None:
            return None
        p2p_cache.remember(key(), found := verdict(self.variables))
        return found


def settled(
    test: Callable[[Any], p2p_cache.P2PVerdict | None],
    *flags: str,
    checks: tuple[preflight.Check, ...] = (),
    uuids: tuple[str, ...] = UUIDS,
    variables: tuple[env_vars.Variable, ...] = (),
    **environ: str,
) -> dict[str, Any]:
    begun: Any = {
        "device": {"value": "cuda", "reason": ""},
        "local_ranks": len(uuids),
        "gpus": [{"uuid": uuid} for uuid in uuids],
        "driver": "580.65.06",
        "torch": "2.13.0",
        **{name: [] for name in ("notes", "text", "headline")},
        "variables": [v.record() for v in variables],
    }
    request = ask("configs/dual_gpu/quickstart.py", *flags, script=ENHANCED)
    communication.settle(request, begun, list(checks), environ, test)
    done: dict[str, Any] = begun
    done["set"] = {v["name"]: v["value"] for v in begun["variables"]}
    return done


def test_gpus_are_tested_once() -> None:
    test = Ranks({})
    first, second = settled(test), settled(test)
    assert test.plans == [{}], "the second start knows"
    for plan in (first, second):
        assert plan["set"] == {} and plan["notes"] == []
        assert plan["communication"] == first["communication"]
        assert plan["communication"]["gb_per_s"] == 11.3 and plan["communication"]["p2p"]
        assert len(plan["text"]) == 1 and plan["text"] == plan["headline"]


def test_gpus_whose_copies_or_lanes_change_are_others(nvidia: Nvidia) -> None:
    """The driver's version, the slots and the kernel stay."""
    code = (
        "import json, os; from training.host import gpus, p2p_cache;"
        "found = gpus.inventory_at_start(os.environ).gpus;"
        "print(json.dumps([p2p_cache.identity(gpu.record()) for gpu in found]))"
    )
    identities = [
        json.loads(python("-c", code, **nvidia(COUNT=2, **facts)).stdout)
        for facts in ({"P2P": 2}, {"P2P": 0}, {"P2P": 2, "WIDTH_MOST": 8}, {"NOT_SUPPORTED": 1})
    ]
    assert [one.split()[3:] for one, _ in identities] == [
        *(["0", "16"], ["1", "16"], ["0", "8"], ["-", "-"])
    ]
    p2p_cache.remember(key(identities[0]), verdict({}, identities[0]))
    known = [p2p_cache.known(key(one)) is not None for one in identities]
    assert known == [True, False, False, False]


@pytest.mark.parametrize(
    ("tested", "accelerate", "names"),
    [
        ({}, False, []),
        ({}, True, ["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]),
        ({}, None, ["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]),  # a shell script
        (SET, False, ["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]),
        (None, False, ["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"]),
    ],
)
def test_copies_that_work_are_used_unless_accelerate_refuses_them(
    tested: dict[str, str] | None,
    accelerate: bool | None,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if accelerate:
        (tmp_path / "accelerate.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan: Any = settled(Ranks(tested))
    card = Gpu(0, "GPU-a", "NVIDIA GeForce RTX 4090", None, None, None, None, None)
    machine = GpuInventory((card,), "", "535.183.01", hidden=(replace(card, index=1),))
    python = None if accelerate is None else sys.executable
    communication.for_accelerate(plan, machine, python)
    assert [v["name"] for v in plan["variables"]] == names
    # times with copies are no longer those of the run
    kept = tested is not None and accelerate is False
    assert ("communication" in plan, len(plan["text"]), len(plan["headline"])) == (kept, kept, kept)


@pytest.mark.parametrize("use", [80, 3])
def test_gpus_that_were_busy_are_tested_again_once_idle(
    use: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p2p_cache.remember(key(), verdict({}), busy="GPU 0 was busy")
    monkeypatch.setattr(p2p_cache, "busy_gpu", lambda gpus: None if use < 30 else {"index": 0})
    plan, last = settled(test := Ranks({})), settled(Ranks(None))
    assert len(test.plans) == (use < 30)
    for done in (plan, last):
        assert ("communication" in done) == (use < 30) and len(done["text"]) == 1


def test_times_of_busy_gpus_are_not_used() -> None:
    def test(plan: Any) -> p2p_cache.P2PVerdict:
        slow = p2p_cache.verdict(key(), {}, gb_per_s=0.9, small_ms=1.0)
        p2p_cache.remember(key(), slow, busy="GPU 0 was busy")
        return {**slow, "busy": True}

    assert "communication" not in settled(test)
    p2p_cache.remember(key(), verdict({}))
    assert settled(test, "--communication_test=1")["communication"]["gb_per_s"] == 11.3


def test_the_message_is_why_it_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(start_test.log, "info", told.append)
    done = CommunicationResult(2, "cuda", "nccl", None)
    monkeypatch.setattr(run, "run", lambda plan, **limits: done)
    gpus = [{"uuid": uuid, "use_percent": 0} for uuid in UUIDS]
    plan: Any = {"local_ranks": 2, "gpus": gpus, "driver": "580.65.06", "torch": "2.13.0"}
    for busy in (None, "GPU 0 was busy", ""):
        if busy is not None:
            of = run.key(plan)
            new = p2p_cache.verdict(of, {}, gb_per_s=11.3, small_ms=0.05)
            p2p_cache.remember(of, new, busy=busy)
        start_test.StartTest(only_check=False)(plan)
    names = ("first_start", "times_again", "check")
    assert told == [msg(f"launcher.communication.{name}", ranks="2 ranks") for name in names]


@pytest.mark.parametrize(
    ("before", "variables", "busy", "writable", "check", "later"),
    [
        (None, {}, "", False, False, "tests_again"),
        (None, {}, "", False, True, None),
        ("", {}, "", False, False, "use_earlier"),
        ("", SET, "", False, False, "use_earlier"),
        ("busy", {}, "", False, False, "tests_again"),
        ("", {}, "busy", True, False, None),  # the earlier times stay
        ("busy", {}, "busy", True, False, None),
    ],
)
def test_a_start_warns_if_its_result_cannot_be_remembered(
    before: str | None,
    variables: dict[str, str],
    busy: str,
    writable: bool,
    check: bool,
    later: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan: Any = {"local_ranks": 2, "gpus": [{"uuid": u} for u in UUIDS]}
    plan |= {"driver": "580.65.06", "torch": "2.13.0"}
    of, file = run.key(plan), p2p_cache.path()
    if before is not None:
        p2p_cache.remember(of, verdict({}) | {"gpus": sorted(of.gpus)}, busy=before)
    assert file
    if not writable:
        p2p_cache._lock(file).mkdir(parents=True)
    new = p2p_cache.verdict(of, variables, gb_per_s=11.3, small_ms=0.05)
    note = p2p_cache.remember(of, new, busy=busy)
    new["busy"] = bool(busy)
    done = CommunicationResult(2, "cuda", "nccl", None, note=note, verdict=new)
    monkeypatch.setattr(run, "run", lambda plan, **limits: done)
    told = list[str]()
    monkeypatch.setattr(start_test.log, "warning", told.append)
    start_test.StartTest(only_check=check)(plan)
    then = later and msg(f"launcher.communication.{later}")
    text = msg("launcher.communication.not_remembered", note=note, later=then)
    assert told == [text] * bool(later)


def test_the_command_tests_the_gpus_of_the_run() -> None:
    chosen = env_vars.Variable("CUDA_VISIBLE_DEVICES", "2,3", "the emptiest", env_vars.HERE)
    (text,) = settled(Ranks({}), variables=(chosen,))["text"]
    assert "CUDA_VISIBLE_DEVICES=2,3 ./duet communication 2" in text
    chosen = env_vars.Variable("CUDA_VISIBLE_DEVICES", "1,3", "", env_vars.FOUND)
    (text,) = settled(Ranks({}), variables=(chosen,))["text"]
    assert "CUDA_VISIBLE_DEVICES=1,3 ./duet communication 2" in text
    (text,) = settled(Ranks({}))["text"]
    assert "CUDA_VISIBLE_DEVICES" not in text


def test_broken_copies_are_switched_off_with_a_note() -> None:
    test = Ranks(SET)
    first, second = settled(test), settled(test)
    assert test.plans == [{}]
    for plan in (first, second):
        assert plan["set"] == SET and len(plan["notes"]) == 1
        assert not plan["communication"]["p2p"]


def test_a_check_uses_what_is_known() -> None:
    p2p_cache.remember(key(), verdict(SET))
    test = Ranks(SET)
    assert settled(test, "--check")["set"] == SET
    assert test.plans == [SET]


def test_a_test_on_demand_notices_a_repair() -> None:
    p2p_cache.remember(key(), verdict(SET))
    plan = settled(test := Ranks({}), "--communication_test=1")
    assert (test.plans, plan["set"], plan["notes"]) == ([{}], {}, [])
    assert plan["communication"]["p2p"]


def test_gpus_that_hang_now_are_not_called_tested() -> None:
    settled(Ranks({}))

    def test(plan: Any) -> None:
        p2p_cache.forget(key())

    assert "communication" not in settled(test, "--check")
    assert settled(again := Ranks({})) and again.plans == [{}], "the next start tests"


@pytest.mark.parametrize(
    "flags", [("--communication_test=0",), ("--dry_run",), ("--check", "--communication_test=0")]
)
def test_no_test_is_started(flags: tuple[str, ...]) -> None:
    test = Ranks({})
    assert "communication" not in settled(test, *flags) and test.plans == []
    p2p_cache.remember(key(), verdict(SET))
    assert settled(test, *flags)["set"] == SET and test.plans == []


def test_one_rank_unusable_gpus_and_gpus_without_a_name() -> None:
    test = Ranks({})
    assert "communication" not in settled(test, uuids=("GPU-a",))
    for name in ("GPUs", "GPU 1 parts", "torch", "torch kernels"):
        error = preflight.Check(name, preflight.ERROR, "cannot be used")
        assert "communication" not in settled(test, "--check", checks=(error,))
    assert "communication" not in settled(test, uuids=("-", "-"))
    assert test.plans == []


def test_a_test_without_a_result_is_repeated_at_the_next_start() -> None:
    test = Ranks(None)
    for _ in range(2):
        assert "communication" not in settled(test)
    assert len(test.plans) == 2


def test_the_users_variable_stays() -> None:
    p2p_cache.remember(key(), verdict(SET))
    test = Ranks(None)
    plan = settled(test, NCCL_P2P_DISABLE="0")
    assert (plan["set"], plan["notes"], len(test.plans)) == ({}, [], 1)


def conf(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which only this file has settings of NCCL."""
    monkeypatch.setattr(nccl_settings, "OF_SYSTEM", file.with_name("none"))
    monkeypatch.setattr(nccl_settings, "_home", lambda: None)
    return {"NCCL_CONF_FILE": str(file)}


def test_a_change_of_nccls_file_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nccl.conf"
    environ = conf(file, monkeypatch)

    def ranks(plan: Any) -> p2p_cache.P2PVerdict:
        tests.append(file.read_text())
        of = key(**environ)
        new = p2p_cache.verdict(of, {}, gb_per_s=11.3, small_ms=0.05)
        p2p_cache.remember(of, new)
        return new

    tests = list[str]()
    for text, p2p in (
        ("NCCL_P2P_DISABLE=1\nNCCL_DEBUG=INFO\n", False),
        ("# NCCL_P2P_DISABLE=1", True),
    ):
        file.write_text(text)
        for _ in range(2):
            assert settled(ranks, **environ)["communication"]["p2p"] is p2p
        assert tests[-1] == text
        file.write_text(text.replace("INFO", "WARN"))  # without an influence
        settled(ranks, **environ)
    assert len(tests) == 2


def test_the_users_choice_in_nccls_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nccl.conf"
    environ = conf(file, monkeypatch)
    file.write_text("NCCL_P2P_DISABLE=0\n")
    of = key(**environ)
    assert of.forced and of == key(NCCL_P2P_DISABLE="0", **environ)
    p2p_cache.remember(
        replace(of, forced=False), p2p_cache.verdict(of, SET, gb_per_s=1, small_ms=1)
    )
    plan = settled(test := Ranks(None), **environ)
    assert (plan["set"], plan["notes"], len(test.plans)) == ({}, [], 1)
    file.write_text("")
    assert settled(Ranks(None), **environ)["set"] == SET


def started(
    monkeypatch: pytest.MonkeyPatch, kind: str, stage: str, *, check: bool, first: str = ""
) -> Any:
    """A start whose test ends like this; `first`: with copies, before an attempt without them."""
    finding = CommunicationFinding(kind, "found", [0, 1], stage)
    before = CommunicationFinding(first, "before", [0, 1], "warm-up") if first else None
    result = CommunicationResult(2, "cuda", "nccl", finding, first=before)
    monkeypatch.setattr(run, "run", lambda plan, **options: result)
    return start_test.StartTest(only_check=check)({"local_ranks": 2, "gpus": []})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        *(("", "hang"), ("", "wrong data"), ("hang", "hang"), ("wrong data", "wrong data")),
        *(("hang", "failed"), ("hang", "not finished"), ("wrong data", "failed")),
        *(("failed", "hang"), ("failed", "wrong data")),
    ],
)
def test_a_run_that_would_hang_or_be_wrong_is_refused(
    first: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as caught:
        started(monkeypatch, kind, "all_reduce of 64 MiB", check=False, first=first)
    (problem,) = caught.value.problems
    assert (caught.value.code, problem.code) == (Exit.RESOURCES, "preflight.communication")
    assert problem.fixes[-1].startswith("--communication_test=0")
    assert started(monkeypatch, kind, "all_reduce of 64 MiB", check=True, first=first) is None


def test_a_run_whose_gpus_do_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        started(monkeypatch, "hang", "start of the GPU", check=False)
    assert caught.value.code == Exit.RESOURCES


@pytest.mark.parametrize("kind", ["not finished", "failed"])
def test_a_run_starts_when_the_test_itself_fails(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, kind, "warm-up", check=False) is None
    assert "WARNING" in capsys.readouterr().err
