"""What the monitor says needs attention, and that it is silent about a healthy run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.monitor_runs import GIB, Made, look, text_of
from training.host import gpus
from training.monitor import alerts

STANDS = "no step for 90 s: ranks 0, 1 in 'step 7: forward'"
FREE = {"ram": (1, 10), "shm": (1, 10), "disk": (1, 10)}


@pytest.fixture
def healthy(made: Made) -> dict[str, Any]:
    """The state of a run that trains; its machine has room."""
    made.supervisor(os.getpid()).steps(100).beats()
    seen = look(made.run)
    seen["time_unix_s"] = seen["training"]["last_step_unix_s"] + 1
    for name, (used, total) in FREE.items():
        seen["system"] |= {f"{name}_used_bytes": used * GIB, f"{name}_total_bytes": total * GIB}
    return seen


def texts(seen: dict[str, Any]) -> list[str]:
    return [a["text"] for a in alerts.active_alerts(seen)]


def gpu(**facts: Any) -> dict[str, Any]:
    ours = {"pid": 1, "user": "ann", "command": "python", "used_bytes": 21 * GIB, "this_run": True}
    usual = {
        "index": 1,
        "in_plan": True,
        "use_percent": 100,
        "power_w": 431.0,
        "power_limit_w": 575.0,
        "temperature_c": 70,
    }
    return usual | {"throttle_reasons": [], "processes": [ours]} | facts


def test_a_healthy_run_needs_no_attention(healthy: dict[str, Any]) -> None:
    healthy["gpus"] = [
        gpu(),
        gpu(index=2, in_plan=False, processes=[], use_percent=0, power_w=10.0),
    ]
    assert texts(healthy) == []


@pytest.mark.parametrize("limit", [575.0, None])
def test_full_use_at_idle_power_without_a_step_is_a_collective(
    healthy: dict[str, Any], limit: float | None
) -> None:
    healthy["gpus"] = [gpu(power_w=70.0, power_limit_w=limit)]
    assert texts(healthy) == []  # steps are made
    healthy["time_unix_s"] += 89
    assert texts(healthy) == [
        STANDS,
        "GPU 1: 100 % use at 70 W and no step for 90 s: stuck in a collective",
    ]
    healthy["gpus"] = [gpu(power_w=431.0)]  # it works hard
    assert texts(healthy) == [STANDS]
    healthy["gpus"] = [gpu(use_percent=0, power_w=60.0)]
    assert texts(healthy) == [
        STANDS,
        "GPU 1: 0 % use and no step for 90 s: its rank does not come to the GPU",
    ]


@pytest.mark.parametrize(
    "phase",
    ["evaluation", "checkpoint", "gather state", "epoch 2: creating data iterator", "sample"],
)
def test_long_phases_are_no_alarm(healthy: dict[str, Any], phase: str) -> None:
    healthy["gpus"] = [gpu(power_w=70.0)]
    healthy["time_unix_s"] += 89
    healthy["ranks"][1]["phase"] = phase
    assert texts(healthy) == []


def test_slow_steps_are_no_alarm(healthy: dict[str, Any]) -> None:
    healthy["training"]["step_ms_p95"] = 20_000.0
    healthy["gpus"] = [gpu(power_w=70.0)]
    healthy["time_unix_s"] += 89
    assert texts(healthy) == []


def test_heat_and_strangers(healthy: dict[str, Any]) -> None:
    stranger = {
        "pid": 77,
        "user": "bob",
        "command": "jupyter",
        "used_bytes": 2 * GIB,
        "this_run": False,
    }
    mine = gpu()["processes"]
    healthy["gpus"] = [
        gpu(
            throttle_reasons=["slowed down for heat (hardware)"],
            temperature_c=93,
            processes=[*mine, stranger],
        ),
        # not ours: not our business
        gpu(
            index=2,
            in_plan=False,
            processes=[stranger],
            throttle_reasons=["slowed down by the hardware"],
        ),
    ]
    assert texts(healthy) == [
        "GPU 1: slowed down for heat (hardware), 93 °C",
        "GPU 1: a process of bob that is not of this run, pid 77 with 2.0 GiB",
    ]


def test_a_standstill_says_who_is_where_and_nothing_of_the_time_left(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100).beats("backward", 101, ranks=[0]).beats(
        "forward", 101, ranks=[1]
    )
    assert look(made.run)["progress"]["eta_s"] is not None
    made.step(100, 2.0, at=made.at + 10, compute_ms=[40.0, 99.0])
    seen = look(made.run)
    assert seen["progress"]["eta_s"] is None
    (first,) = [t for t in texts(seen) if "step" in t]
    assert first.endswith("rank 0 in 'step 101: backward'; rank 1 in 'step 101: forward'")


def test_slow_rank_is_named(made: Made) -> None:
    made.supervisor(os.getpid()).beats()
    for step in range(1, 40):
        made.step(step, 2.0, compute_ms=[40.0, 62.0])
    assert texts(look(made.run)) == []  # too early to say
    for step in range(40, 110):
        made.step(step, 2.0, compute_ms=[40.0, 62.0])
    assert any(
        t.startswith("rank 1 needs 62 ms for its data and forward pass, the others 40 ms")
        for t in texts(look(made.run))
    )
    assert "! rank 1 needs 62 ms" in text_of(made.run)
    for step in range(110, 300):
        made.step(step, 2.0, compute_ms=[40.0, 41.0])
    assert not any("needs" in t for t in texts(look(made.run)))


@pytest.mark.parametrize(
    ("name", "said"), [("ram", "memory"), ("shm", "/dev/shm"), ("disk", "disk")]
)
def test_full(healthy: dict[str, Any], name: str, said: str) -> None:
    healthy["system"] |= {f"{name}_used_bytes": 99 * GIB, f"{name}_total_bytes": 100 * GIB}
    assert texts(healthy) == [f"{said} is nearly full: 99.0 of 100.0 GiB"]


def test_clock_that_was_set_back_and_nan(healthy: dict[str, Any]) -> None:
    healthy["time_unix_s"] -= 3601
    healthy["training"] |= {"loss": float("nan"), "loss_is_finite": False}
    assert texts(healthy) == [
        "the loss is nan",
        "the last step is 3600 s in the future: this machine's clock was set back",
    ]


def test_of_an_ended_run_nothing_is_urgent(healthy: dict[str, Any]) -> None:
    healthy["gpus"] = [gpu(throttle_reasons=["slowed down by the hardware"])]
    healthy["run"]["state"] = "finished"
    assert texts(healthy) == []


def test_a_driver_is_asked_for_what_alerts_need(nvidia: Callable[..., dict[str, str]]) -> None:
    code = (
        "import json; from training.host import gpus; "
        "print(json.dumps(gpus.inventory({}).gpus[1].record()))"
    )
    environ = os.environ | nvidia(
        POWER_LIMIT=575, POWER="400,70", USE="97,100", FAN=33, REASONS="1,64"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    seen = gpus.Gpu(**json.loads(done.stdout))
    assert (seen.use_percent, seen.power_w, seen.power_limit_w, seen.fan_percent) == (
        100,
        70.0,
        575.0,
        33,
    )
    assert list(seen.slowdowns or ()) == ["slowed down for heat (hardware)"]
