"""Metrics of a state: correct values, no unknown values, unchanged names."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families

from tests.unit.exported_metrics import (
    RUN,
    VIDEO_RUN,
    Serving,
    everything,
    exporters,
    get,
    names,
    of,
    of_samples,
    parsed,
    value,
)
from tests.unit.monitor_runs import GIB, Made, dead_pid, look
from training.core import heartbeat, rundir
from training.host import gpus
from training.monitor import host_stats, prom_metrics

_serving = pytest.fixture(exporters, name="serving")


def test_all_values_of_a_run(made: Made) -> None:
    state = everything(made)
    seen = of(state)
    run = {"run": RUN}
    assert (
        value(
            seen,
            "duet_run_info",
            **run,
            script="train_dual_gpu.sh",
            device="cpu",
            precision="bf16",
            state="running",
        )
        == 1
    )
    assert [value(seen, "duet_run_state", **run, state=s) for s in prom_metrics.STATES] == [
        float(s == "running") for s in prom_metrics.STATES
    ]
    assert (
        value(seen, "duet_step", **run),
        value(seen, "duet_total_steps", **run),
        value(seen, "duet_epoch", **run),
    ) == (101, 400, 1)
    assert (value(seen, "duet_loss", **run), value(seen, "duet_mfu_ratio", **run)) == (2.25, 0.41)
    assert value(seen, "duet_eval_best", **run, name="val_bpb", unit="bits/byte") == 2.0
    assert value(seen, "duet_step_seconds", **run, quantile="0.5") == pytest.approx(
        0.1045, abs=0.001
    )
    assert value(seen, "duet_step_seconds", **run, quantile="0.95") == pytest.approx(0.109)
    assert value(seen, "duet_tokens_total", **run) == 101 * 4096
    assert value(seen, "duet_eta_seconds", **run) == pytest.approx(state["progress"]["eta_s"])
    assert value(seen, "duet_checkpoint_step", **run) == 100
    assert value(seen, "duet_last_step_timestamp_seconds", **run) == pytest.approx(
        state["training"]["last_step_unix_s"]
    )
    assert (
        value(
            seen, "duet_rank_phase_info", **run, rank="1", phase="epoch #: creating data iterator"
        )
        == 1
    )
    assert (
        value(seen, "duet_rank_alive", **run, rank="1"),
        value(seen, "duet_rank_late", **run, rank="1"),
    ) == (1, 0)
    assert (
        value(seen, "duet_rank_own_seconds", **run, rank="1"),
        value(seen, "duet_rank_step", **run, rank="1"),
    ) == (0.07, 101)
    assert value(seen, "duet_gpu_use_ratio", gpu="1") == pytest.approx(0.97)
    assert value(seen, "duet_gpu_memory_used_bytes", gpu="0") == 100 * GIB
    assert (
        value(seen, "duet_gpu_power_limit_watts", gpu="0"),
        value(seen, "duet_gpu_fan_ratio", gpu="0"),
    ) == (700.0, 0.3)
    assert [value(seen, "duet_gpu_in_plan", **run, gpu=g) for g in "01"] == [1, 0]
    assert [
        value(seen, "duet_gpu_throttled", gpu="1", reason=r) for r in ("too hot", "power limit")
    ] == [1, 1]
    assert value(seen, "duet_gpu_throttled", gpu="0", reason="") == 0
    assert value(seen, "duet_host_cpu_use_ratio") == 0.375


def test_task_that_counts_samples(made: Made) -> None:
    seen = of(everything(made), of_samples(made))
    run = {"run": VIDEO_RUN}
    assert (
        value(seen, "duet_samples_total", **run),
        value(seen, "duet_samples_per_second", **run),
    ) == (100 * 16, 3.27)
    assert value(seen, "duet_samples_total", run=RUN) is None, (
        "a run that counts tokens has no number of samples"
    )
    assert (
        value(seen, "duet_tokens_total", **run)
        is value(seen, "duet_tokens_per_second", **run)
        is None
    )
    assert value(seen, "duet_eval_best", **run, name="val_psnr", unit="dB") == 29.0
    assert value(seen, "duet_total_steps", **run) == 300, (
        "from its start event: such a task has no data.json"
    )


def test_cpu_use_and_memory_of_the_ranks_of_a_script(made: Made) -> None:
    state, run = look(made.run), {"run": RUN}
    state["ranks"][0] |= {"cpu_percent": 150.0, "rss_bytes": GIB, "gpu_bytes": 2 * GIB}
    state["ranks"][1] |= {"cpu_percent": None, "rss_bytes": GIB, "gpu_bytes": None}
    seen = of(state)
    assert value(seen, "duet_rank_cpu_cores", **run, rank="0") == 1.5
    assert value(seen, "duet_rank_cpu_cores", **run, rank="1") is None
    memory = [value(seen, "duet_rank_memory_bytes", **run, rank=r) for r in ("0", "1")]
    assert memory == [2 * GIB, GIB]


def test_every_metric_is_exported(made: Made) -> None:
    other, state = of_samples(made), everything(made)
    state["training"] |= {"loss_scale": 65536.0, "skipped_steps": 2}
    state["ranks"][0]["cpu_percent"] = 150.0  # of a user script
    state["failure"] = {"cause": "gpu_oom", "rank": 1}
    expected = {m.name for m in prom_metrics.METRICS} - (
        {"duet_warnings_total"} if "warnings" not in state["run"] else set()
    )
    assert names(of(other, state)) >= expected - {"duet_run_end_timestamp_seconds"}
    made.supervisor(dead_pid()).beats(heartbeat.FINISHED, 400).summary()
    assert "duet_run_end_timestamp_seconds" in names(of(look(made.run)))


def test_unknown_values_are_absent(made: Made) -> None:
    state = look(made.run)
    state["gpus"] = host_stats.gpu_records(
        gpus.GpuInventory((gpus.Gpu(0, "GPU-0", "old", None, None, None, None, None),), ""),
        set(),
        set(),
    )
    state["gpus"][0]["throttle_reasons"] = None
    seen = of(state)
    training = (
        "loss",
        "eval",
        "learning_rate",
        "grad_norm",
        "tokens",
        "step_seconds",
        "mfu",
        "eta",
        "epoch",
        "last_step",
        "checkpoint",
    )
    assert not [n for n in names(seen) if n.startswith(tuple(f"duet_{word}" for word in training))]
    assert {n for n in names(seen) if n.startswith("duet_gpu")} == {
        "duet_gpu_info",
        "duet_gpu_in_plan",
    }
    assert (
        not [n for n in names(seen) if n.startswith("duet_rank_")]
        and value(seen, "duet_step", run=RUN) == 0
    )
    assert "duet_host_cpu_use_ratio" not in names(seen)  # the first reading


def test_after_the_end(made: Made) -> None:
    made.supervisor(dead_pid()).steps().beats().failure()
    seen = of(look(made.run))
    assert value(seen, "duet_run_failure_info", run=RUN, cause="gpu_oom", rank="1") == 1
    assert value(seen, "duet_run_state", run=RUN, state="failed") == 1
    assert value(seen, "duet_run_supervised", run=RUN) == 0
    assert not names(seen) & {
        "duet_rank_heartbeat_age_seconds",
        "duet_eta_seconds",
        "duet_gpu_in_plan",
    }


def test_non_finite_loss_is_exported(made: Made) -> None:
    made.step(1, float("nan"))
    loss = value(of(look(made.run)), "duet_loss", run=RUN)
    assert loss is not None and math.isnan(loss)
    made.step(2, float("inf"))
    assert value(of(look(made.run)), "duet_loss", run=RUN) == float("inf")


@pytest.mark.parametrize(
    "name", ['a "quoted" \\ run', "two\nlines\\n", "Größe {x=1} 🚀", "bytes \udcff", ""]
)
def test_names_are_exported_unchanged(made: Made, serving: Serving, name: str) -> None:
    state = look(made.run)
    state["run"]["name"] = name
    exporter = serving(lambda: [state])
    as_text = name.replace("\udcff", "?")
    assert value(parsed(get(exporter)[2]), "duet_step", run=as_text) == 0
    kind, body = get(
        exporter, Accept="application/openmetrics-text; version=1.0.0, text/plain;q=0.5"
    )[1:]
    assert kind.startswith("application/openmetrics-text")
    samples = [s for family in open_families(body) for s in family.samples]
    assert {s.labels["run"] for s in samples if s.name == "duet_step"} == {as_text}


def test_openmetrics_has_the_same_metrics(made: Made, serving: Serving) -> None:
    state = everything(made)
    exporter = serving(lambda: [state])
    body = get(exporter, Accept="application/openmetrics-text")[2]
    assert {s.name for family in open_families(body) for s in family.samples} == names(
        parsed(get(exporter)[2])
    )


def test_several_runs_two_with_the_same_name(tmp_path: Path) -> None:
    first, second = Made(tmp_path / "a" / "same").steps(3), Made(tmp_path / "b" / "same").steps(5)
    third = Made(tmp_path / "b" / "third").steps(7)
    states = [look(m.run) for m in (first, second, third)]
    whole = {
        "time_unix_s": states[0]["time_unix_s"] + 1000,
        "runs": states,
        "gpus": [],
        "system": {"cpu_cores": 96},
    }
    seen = of(*states, whole)
    assert [value(seen, "duet_step", run=str(m.run.path)) for m in (first, second)] == [3, 5]
    assert (value(seen, "duet_step", run="third"), value(seen, "duet_host_cpu_cores")) == (7, 96)


def test_runs_on_instances_of_one_gpu(tmp_path: Path) -> None:
    """MIG: the exporter's list has the instances of both runs, under the number of their GPU."""
    parts = [
        gpus.Gpu(0, uuid, "Card 1g.10gb", total * GIB, GIB, 70, 40, None)
        for uuid, total in (("MIG-a", 10), ("MIG-b", 20))
    ]
    states = []
    for name, planned in (("first", "MIG-a"), ("second", "MIG-b"), ("third", "GPU-c")):
        state = look(Made(tmp_path / name).supervisor(os.getpid()).run)
        machine = gpus.GpuInventory(tuple(parts), "")
        states.append({**state, "gpus": host_stats.gpu_records(machine, set(), {planned})})
    seen = of(*states)  # type: ignore[arg-type]
    in_plan = [value(seen, "duet_gpu_in_plan", run=s["run"]["name"], gpu="0") for s in states]
    assert in_plan == [1, 1, 0]
    assert value(seen, "duet_gpu_memory_total_bytes", gpu="0") == 30 * GIB
    assert value(seen, "duet_gpu_memory_used_bytes", gpu="0") == 28 * GIB
    assert value(seen, "duet_gpu_use_ratio", gpu="0") == pytest.approx(0.7), "of the whole GPU"


def test_run_replaces_another(tmp_path: Path, serving: Serving) -> None:
    exporter = serving()
    assert get(exporter) == (200, "text/plain; version=0.0.4; charset=utf-8", "")
    for name in ("first", "second"):
        exporter.update([look(Made(tmp_path / name).run)])
        assert {
            dict(labels)["run"]
            for metric, labels in parsed(get(exporter)[2])
            if metric == "duet_step"
        } == {name}


def test_counter_never_decreases(made: Made, serving: Serving) -> None:
    exporter = serving()
    shown = []
    for step in (50, 20, 60):  # a restart from the checkpoint of step 20
        made.step(step, 2.0)
        exporter.update([look(made.run)])
        seen = parsed(get(exporter)[2])
        shown.append((value(seen, "duet_step", run=RUN), value(seen, "duet_tokens_total", run=RUN)))
    assert shown == [(50, 50 * 4096), (20, 50 * 4096), (60, 60 * 4096)]


def test_counters_of_a_removed_run_are_forgotten(made: Made, serving: Serving) -> None:
    state = everything(made)
    states = [state]
    exporter = serving(lambda: states)
    get(exporter)
    states = []
    get(exporter)
    state["training"]["tokens"], states = 5, [state]
    assert value(parsed(get(exporter)[2]), "duet_tokens_total", run=RUN) == 5


def test_counters_of_a_run_that_was_created_again_begin_again(
    tmp_path: Path, serving: Serving
) -> None:
    """Within one interval of the scrapes; a resume of the same run does not."""
    exporter, shown = serving(), list[float | None]()
    for age_s, last in ((900.0, 50), (900.0, 20), (100.0, 5)):
        shutil.rmtree(tmp_path / RUN, ignore_errors=True)
        made = Made(tmp_path / RUN, age_s=age_s)
        for at in (0.0, 90.0):
            rundir.append_json(made.run.events, {"time": age_s + at, "event": "start"})
        exporter.update([look(made.steps(last).run)])
        shown.append(value(parsed(get(exporter)[2]), "duet_tokens_total", run=RUN))
    assert shown == [50 * 4096, 50 * 4096, 5 * 4096]
