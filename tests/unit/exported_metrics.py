"""Metrics of an exporter, read by the parser of the official client library; a state without
unknown values."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as families

from tests.unit.monitor_runs import GIB, PATIENCE_S, VIDEO, Made, look
from training.core.contracts.state import RunState
from training.host import gpus
from training.monitor import host_stats
from training.monitor.prometheus import HOST, Exporter

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
RUN, VIDEO_RUN = "small run", "video"
Serving = Callable[..., Exporter]


def exporters() -> Iterator[Serving]:
    """For a fixture `serving`: serving(read, …) → an exporter on a free port."""
    started: list[Exporter] = []

    def start(*args: Any, **more: Any) -> Exporter:
        started.append(Exporter(0, *args, **more))
        started[-1].start()
        return started[-1]

    yield start
    for exporter in started:
        exporter.close()


def get(
    exporter: Exporter, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str, str]:
    """(status, content type, body)"""
    with closing(http.client.HTTPConnection(HOST, exporter.port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()


def parsed(text: str) -> Samples:
    out: Samples = {}
    for family in families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in out, f"exported twice: {key}"
            out[key] = sample.value
    return out


def of(*states: RunState) -> Samples:
    exporter = Exporter(0)
    exporter.start()
    try:
        exporter.update(list(states))
        return parsed(get(exporter)[2])
    finally:
        exporter.close()


def value(seen: Samples, name: str, /, **labels: str) -> float | None:
    return seen.get((name, tuple(sorted(labels.items()))))


def names(seen: Samples) -> set[str]:
    return {name for name, _ in seen}


def everything(made: Made) -> RunState:
    """A running run on two GPUs without unknown values; only the driver's answers are made up."""
    made.steps(100).beats("epoch 7: creating data iterator", step=101).supervisor(os.getpid())
    made.step(
        101,
        2.25,
        mfu=0.41,
        compute_ms=[40.0, 70.0],
        memory_bytes=[3 * GIB, 4 * GIB],
        tokens=101 * 4096,
    )
    (made.run.checkpoints / "step_00000100").mkdir()
    shown = [
        gpus.Gpu(
            index=n, uuid=f"GPU-{n}", name="NVIDIA H200", total_bytes=141 * GIB, free_bytes=41 * GIB, use_percent=97, temperature_c=61,
            power_w=612.5, power_limit_w=700.0, fan_percent=30, slowdowns=("too hot", "power limit") if n else (),
        )
        for n in (0, 1)
    ]  # fmt: skip
    seen = look(made.run)
    seen["gpus"] = host_stats.gpu_records(gpus.GpuInventory(tuple(shown), ""), set(), {"GPU-0"})
    seen["system"]["cpu_percent"] = 37.5  # of a second reading
    return seen


def of_samples(made: Made) -> RunState:
    """Another run, whose task counts samples."""
    return look(Made(made.run.path.parent / VIDEO_RUN, task=VIDEO).restored().run)
