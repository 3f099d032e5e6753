"""Alerts of the monitor; a healthy run has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.monitor_runs import GIB, Made, look, text_of
from training.host import gpu_processes, gpus
from training.monitor import alerts

STALLED = "no step for 89 s: ranks 0, 1 in 'step 7: forward'"
HOT = gpus.SLOWDOWNS[0x40]
FREE = {"ram": (1, 10), "shm": (1, 10), "disk": (1, 10)}


@pytest.fixture
def healthy(made: Made) -> dict[str, Any]:
    """The state of a training run on a machine with free memory and disk space."""
    made.supervisor(os.getpid()).steps(100).beats()
    seen = look(made.run)
    seen["time_unix_s"] = seen["training"]["last_step_unix_s"] + 1
    for name, (used, total) in FREE.items():
        seen["system"] |= {f"{name}_used_bytes": used * GIB, f"{name}_total_bytes": total * GIB}
    return seen


def waits(seen: dict[str, Any], seconds: float) -> None:
    """All ranks stay in their phase."""
    seen["time_unix_s"] += seconds
    for rank in seen["ranks"]:
        rank["beat_age_s"] += seconds


def texts(seen: dict[str, Any]) -> list[str]:
    return [a["text"] for a in alerts.active_alerts(seen)]


def gpu(**facts: Any) -> dict[str, Any]:
    own = {"pid": 1, "user": "ann", "command": "python", "used_bytes": 21 * GIB, "this_run": True}
    usual = {
        "index": 1,
        "in_plan": True,
        "use_percent": 100,
        "power_w": 431.0,
        "power_limit_w": 575.0,
        "temperature_c": 70,
    }
    return usual | {"throttle_reasons": [], "processes": [own]} | facts


def test_healthy_run_has_no_alerts(healthy: dict[str, Any]) -> None:
    healthy["gpus"] = [
        gpu(),
        gpu(index=2, in_plan=False, processes=[], use_percent=0, power_w=10.0),
    ]
    assert texts(healthy) == []


@pytest.mark.parametrize("limit", [575.0, None])
def test_full_use_at_idle_power_without_steps_is_a_collective(
    healthy: dict[str, Any], limit: float | None
) -> None:
    healthy["gpus"] = [gpu(power_w=70.0, power_limit_w=limit)]
    assert texts(healthy) == []  # steps are recent
    waits(healthy, 89)
    assert texts(healthy) == [
        STALLED,
        "GPU 1: 100 % utilization at 70 W and no step for 89 s: stuck in a collective",
    ]
    healthy["gpus"] = [gpu(power_w=431.0)]  # it computes
    assert texts(healthy) == [STALLED]
    healthy["gpus"] = [gpu(use_percent=0, power_w=60.0)]
    assert texts(healthy) == [
        STALLED,
        "GPU 1: 0 % utilization and no step for 89 s: its rank submits no work",
    ]


@pytest.mark.parametrize(
    "phase",
    ["evaluation", "checkpoint", "gather state", "epoch 2: creating data iterator", "sample"],
)
def test_long_phases_raise_no_alert(healthy: dict[str, Any], phase: str) -> None:
    healthy["gpus"] = [gpu(power_w=70.0)]
    waits(healthy, 89)
    healthy["ranks"][1]["phase"] = phase
    assert texts(healthy) == []


def test_the_steps_after_a_long_evaluation_raise_no_alert(healthy: dict[str, Any]) -> None:
    healthy["time_unix_s"] += 120  # the last step is from before it
    assert texts(healthy) == []
    waits(healthy, 60)
    assert [alert["code"] for alert in alerts.active_alerts(healthy)] == ["alert.no_step"]


def test_slow_steps_raise_no_alert(healthy: dict[str, Any]) -> None:
    healthy["training"]["step_ms_p95"] = 20_000.0
    healthy["gpus"] = [gpu(power_w=70.0)]
    waits(healthy, 89)
    assert texts(healthy) == []


def test_heat_and_other_processes(healthy: dict[str, Any]) -> None:
    other = {
        "pid": 77,
        "user": "bob",
        "command": "jupyter",
        "used_bytes": 2 * GIB,
        "this_run": False,
    }
    mine, of_host = gpu()["processes"], other | {"pid": 2912345, "known": False}
    server = other | {"pid": 88, "user": "root", "command": f"/usr/bin/{gpu_processes.MPS}"}
    healthy["gpus"] = [
        gpu(
            throttle_reasons=[HOT],
            temperature_c=93,
            processes=[*mine, other, of_host, server],
        ),
        # not used by this run: no alert
        gpu(
            index=2,
            in_plan=False,
            processes=[other],
            throttle_reasons=[HOT],
        ),
    ]
    assert texts(healthy) == [
        f"GPU 1: {HOT}, 93 °C",
        "GPU 1: another process of user bob, pid 77 with 2.0 GiB",
    ]


def test_stalled_run_reports_each_rank_and_no_time_left(made: Made) -> None:
    made.supervisor(os.getpid()).steps(100)
    made.beats("backward", 101, ranks=[0], age_s=60).beats("forward", 101, ranks=[1], age_s=60)
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
    assert texts(look(made.run)) == []  # too few steps
    for step in range(40, 110):
        made.step(step, 2.0, compute_ms=[40.0, 62.0])
    assert any(t.startswith("rank 1 is slow: 62 ms") for t in texts(look(made.run)))
    assert "! rank 1 is slow: 62 ms" in text_of(made.run)
    for step in range(110, 300):
        made.step(step, 2.0, compute_ms=[40.0, 41.0])
    assert not any("is slow" in t for t in texts(look(made.run)))


@pytest.mark.parametrize(
    ("name", "shown"), [("ram", "memory"), ("shm", "/dev/shm"), ("disk", "disk")]
)
def test_nearly_full(healthy: dict[str, Any], name: str, shown: str) -> None:
    healthy["system"] |= {f"{name}_used_bytes": 99 * GIB, f"{name}_total_bytes": 100 * GIB}
    assert texts(healthy) == [f"{shown} is nearly full: 99.0/100 GiB"]
    healthy["system"] |= {
        f"{name}_used_bytes": int(12.4 * GIB),
        f"{name}_total_bytes": 25 * GIB // 2,
    }
    assert texts(healthy) == [f"{shown} is nearly full: 12.4/12.5 GiB"]
    healthy["system"] |= {f"{name}_used_bytes": 63 << 20, f"{name}_total_bytes": 64 << 20}
    assert texts(healthy) == [f"{shown} is nearly full: 63/64 MiB"]


def test_clock_that_was_set_back_and_nan(healthy: dict[str, Any]) -> None:
    healthy["time_unix_s"] -= 3601
    healthy["training"] |= {"loss": float("nan"), "loss_is_finite": False}
    assert texts(healthy) == [
        "the loss is nan",
        "the last step is 3600 s in the future: the clock of this machine was set back",
    ]


def test_ended_run_has_no_alerts(healthy: dict[str, Any]) -> None:
    healthy["gpus"] = [gpu(throttle_reasons=[HOT])]
    healthy["run"]["state"] = "finished"
    assert texts(healthy) == []


def test_driver_query_covers_the_alerts(nvidia: Callable[..., dict[str, str]]) -> None:
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
    assert list(seen.slowdowns or ()) == [HOT]


def test_a_restart_has_no_last_step_before_its_first_one(made: Made) -> None:
    """The last one before it may be hours old, and the first one takes long."""
    made.supervisor(os.getpid()).beats(step=101, age_s=90)
    for step in range(1, 101):
        made.step(step, 2.0, at=made.at + step * 0.01)
    assert codes(made) == ["alert.no_step"]
    made.run.event("restart", attempt=2, cause="unknown", step=100)
    assert look(made.run)["run"]["state"] == "running"
    assert codes(made) == []
    assert look(made.run)["training"]["last_step_unix_s"] is None
    made.step(101, 2.0, at=time.time())
    assert look(made.run)["training"]["last_step_unix_s"] is not None


def codes(made: Made) -> list[str]:
    return [a["code"] for a in look(made.run)["alerts"] if "full" not in a["code"]]
