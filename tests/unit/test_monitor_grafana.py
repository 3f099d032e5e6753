"""Dashboard, alerts and documentation of `--prometheus`, checked against the exported metrics and
by a real Prometheus."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.exported_metrics import VIDEO_RUN, everything, get, of, of_samples
from tests.unit.monitor_runs import PATIENCE_S, ROOT, Made
from training.core.contracts.state import RunState
from training.monitor import prom_metrics
from training.monitor.prometheus import HOST, Exporter

FOLDER = ROOT / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "duet.json").read_text())
PANELS: list[dict[str, Any]] = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
EXPRESSIONS = sorted(
    {t["expr"] for p in PANELS for t in p["targets"]}
    | {a["expr"] for a in DASHBOARD["annotations"]["list"]}
)
SCRAPES_S = 12.0  # 60 scrapes, which covers the range of every expression
COLUMNS = 24  # of Grafana's grid
NAME = 'a "quoted"\nrun, Größe {1} \\ end'
installed = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus is not installed",
)


def test_table_in_the_documentation_is_current() -> None:
    assert prom_metrics.table() in (ROOT / "docs/prometheus.md").read_text(), (
        "replace it by the output of python lib/run_module.py training.monitor.prom_metrics"
    )


@pytest.mark.parametrize("file", ["duet.json", "alerts.yml", "../prometheus.md"])
def test_all_named_metrics_exist(file: str) -> None:
    named = set(re.findall(r"\bduet_[a-z0-9_]+", (FOLDER / file).read_text())) - {
        "duet_gpu_",
        "duet_host_",
    }
    assert named and named <= {m.name for m in prom_metrics.METRICS}


def test_names_follow_the_conventions() -> None:
    every = [m.name for m in prom_metrics.METRICS]
    assert len(every) == len(set(every))
    for m in prom_metrics.METRICS:
        assert (m.kind == "counter") == m.name.endswith("_total") and (
            m.kind == "info"
        ) == m.name.endswith("_info")
        assert not re.search(
            r"_(ms|percent|minutes|gib|mb|count)(_|$)", m.name
        ) and m.help.endswith(".")


# The dashboard


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    every = DASHBOARD["panels"]
    assert (
        len({p["id"] for p in every})
        == len(every)
        == len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in every})
    )
    taken: dict[tuple[int, int], str] = {}
    for p in every:
        g = p["gridPos"]
        assert g["w"] > 0 and g["h"] > 0 and g["x"] >= 0 and g["x"] + g["w"] <= COLUMNS
        for cell in itertools.product(
            range(g["x"], g["x"] + g["w"]), range(g["y"], g["y"] + g["h"])
        ):
            assert cell not in taken, f"{p['title']} overlaps {taken[cell]}"
            taken[cell] = p["title"]
    # no holes either
    assert set(taken) == set(itertools.product(range(COLUMNS), range(max(y for _, y in taken) + 1)))


def test_dashboard_is_importable() -> None:
    assert (
        DASHBOARD["id"] is None
        and 8 <= len(DASHBOARD["uid"]) <= 40
        and DASHBOARD["schemaVersion"] >= 36
    )
    assert (
        VARIABLES["datasource"]["type"] == "datasource"
        and VARIABLES["run"]["multi"]
        and VARIABLES["run"]["includeAll"]
    )
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(v["datasource"] == source for v in VARIABLES.values() if v["type"] == "query")
    assert all(a["datasource"] == source for a in DASHBOARD["annotations"]["list"])
    for p in PANELS:
        assert (
            p["datasource"] == source and p["targets"] and p["fieldConfig"]["defaults"]["unit"]
        ), p["title"]
        assert all(t["datasource"] == source for t in p["targets"])
        assert len({t["refId"] for t in p["targets"]}) == len(p["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all", "__rate_interval"}
    assert used == set(VARIABLES)
    log = next(p for p in PANELS if p["title"] == "Loss (log scale)")
    assert log["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]["type"] == "log"


def test_warnings_of_the_run_and_active_alerts_have_their_names() -> None:
    (panel,) = (p for p in PANELS if "warnings" in p["title"])
    assert {t["expr"].partition("{")[0]: t["legendFormat"] for t in panel["targets"]} == {
        "duet_restarts_total": "restarts",
        "duet_warnings_total": "warnings",
        "duet_run_alerts": "alerts now",
    }


# A real Prometheus


def promtool(*argv: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *argv],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


@installed
def test_promtool_accepts_metrics_and_rules(made: Made) -> None:
    exporter = Exporter(0, lambda: [state])
    state = everything(made)
    state["failure"] = {"cause": "gpu_oom", "rank": 1}
    exporter.start()
    try:
        assert promtool("check", "metrics", text=get(exporter)[2]) == ""
    finally:
        exporter.close()
    rules = len(re.findall("- alert:", (FOLDER / "alerts.yml").read_text()))
    assert f"SUCCESS: {rules} rules found" in promtool(
        "check", "config", str(FOLDER / "prometheus.yml")
    )


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(
        f"{k}={json.dumps(v)}" for k, v in (labels | {"job": "duet", "instance": "host:1"}).items()
    )
    return {"series": f"{name}{{{inside}}}", "values": values}


def alerts(at: str, name: str, *expected: dict[str, Any]) -> dict[str, Any]:
    """`expected`: labels besides job and instance, summary and description."""
    listed = []
    for e in expected:
        texts = {key: e[key] for key in ("summary", "description") if key in e}
        labels = {k: v for k, v in e.items() if k not in texts} | {
            "job": "duet",
            "instance": "host:1",
        }
        listed.append({"exp_labels": labels, "exp_annotations": texts})
    return {"eval_time": at, "alertname": name, "exp_alerts": listed}


@installed
@pytest.mark.slow
def test_alerts_fire_only_when_they_should(tmp_path: Path) -> None:
    shows = "./monitor_training.sh shows"
    failed = {"run": "bad", "state": "failed", "severity": "critical", "summary": "bad failed"}
    failed["description"] = f"{shows} the details. Cause: gpu_oom, rank 1."
    died = {
        "run": "gone",
        "state": "died",
        "severity": "critical",
        "summary": "gone died",
        "description": f"{shows} the details.",
    }
    waits = died | {"run": "waits", "state": "failed", "summary": "waits failed"}
    stuck = {"run": "stuck", "severity": "critical", "summary": "stuck: no step for 10m 0s"}
    stuck["description"] = f"{shows} what each rank is doing. Longest in its phase: rank 1."
    late = {
        "run": "stuck",
        "rank": "1",
        "severity": "warning",
        "summary": "stuck: rank 1 has been in one phase for over a minute",
    }
    lost = {"run": "nan", "severity": "critical", "summary": "nan: the loss is NaN"}
    hot = {
        "gpu": "1",
        "reason": "too hot",
        "severity": "warning",
        "summary": "host:1: GPU 1 is throttled: too hot",
    }
    gone = {"severity": "warning", "summary": "the monitor at host:1 does not respond"}
    test = {
        "rule_files": [str(FOLDER / "alerts.yml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    *(
                        series("duet_last_step_timestamp_seconds", "0x2000", run=run)
                        for run in ("stuck", "done", "evaluates")
                    ),
                    *(
                        series("duet_run_state", v, run=run, state="running")
                        for run, v in (
                            ("stuck", "1x2000"),
                            ("done", "0x2000"),
                            ("evaluates", "1x2000"),
                        )
                    ),
                    series("duet_rank_heartbeat_age_seconds", "1x20", run="stuck", rank="0"),
                    series("duet_rank_heartbeat_age_seconds", "10+60x20", run="stuck", rank="1"),
                    *(
                        series("duet_rank_late", v, run="stuck", rank=r)
                        for r, v in (("0", "0x20"), ("1", "1x20"))
                    ),
                    series("duet_rank_late", "0x2000", run="evaluates", rank="0"),
                    series("duet_run_state", "1x2000", run="bad", state="failed"),
                    series("duet_run_failure_info", "1x2000", run="bad", cause="gpu_oom", rank="1"),
                    series("duet_run_end_timestamp_seconds", "0x2000", run="bad"),
                    series("duet_run_state", "1x20", run="gone", state="died"),
                    series("duet_run_state", "1x20", run="waits", state="failed"),
                    *(
                        series("duet_run_supervised", v, run=run)
                        for run, v in (("bad", "0x2000"), ("waits", "1x20"))
                    ),
                    series("duet_run_end_timestamp_seconds", "0x20", run="waits"),
                    series("duet_loss", "2" + " NaN" * 20, run="nan"),
                    series("duet_run_state", "1x20", run="nan", state="running"),
                    series("duet_loss", "2" + " NaN" * 20, run="done"),
                    series("duet_gpu_throttled", "1x20", gpu="1", reason="too hot"),
                    series("duet_gpu_throttled", "0x20", gpu="0"),
                    series("up", "1x10 0x20"),
                ],
                "alert_rule_test": [
                    alerts("4m", "DuetNoStep"),
                    alerts("10m", "DuetNoStep", stuck),
                    alerts("30s", "DuetRunFailed"),
                    alerts("5m", "DuetRunFailed", failed, died),  # a restart may follow
                    alerts("12m", "DuetRunFailed", failed, died, waits),  # a restart is overdue
                    alerts("1450m", "DuetRunFailed"),
                    alerts("5m", "DuetRankLate", late),
                    alerts("0m", "DuetLossNotFinite"),
                    alerts("5m", "DuetLossNotFinite", lost),
                    alerts("4m", "DuetGpuThrottled"),
                    alerts("6m", "DuetGpuThrottled", hot),
                    alerts("10m", "DuetMonitorGone"),
                    alerts("14m", "DuetMonitorGone", gone),
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps(test))
    promtool("test", "rules", str(file))


@pytest.fixture
def prometheus(tmp_path: Path, made: Made) -> Iterator[str]:
    """Address of a Prometheus that scrapes a running run five times per second, with the documented
    configuration."""
    # metrics of the machine come from the newest state
    other, state, looks = (
        of_samples(made),
        everything(made),
        itertools.count(1),
    )
    state["run"]["name"], state["failure"] = NAME, {"cause": "gpu_oom", "rank": 1}

    def read() -> list[RunState]:
        state["training"]["tokens"] += 4096
        other["training"]["samples"] += 16
        state["run"]["restarts"] = next(looks) // 5
        return [state, other]

    exporter = Exporter(0, read)
    exporter.start()
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    config = (FOLDER / "prometheus.yml").read_text()
    for pattern, new in (
        (r"127\.0\.0\.1:\d+'", f"{HOST}:{exporter.port}'"),
        (r"(scrape_interval|evaluation_interval): \d+s", r"\1: 200ms"),
    ):
        config, changed = re.subn(pattern, new, config)
        assert changed
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    argv = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*argv, f"--web.listen-address={HOST}:{port}"], stdout=log, stderr=log
        )
    try:
        yield f"http://{HOST}:{port}"
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
        exporter.close()


def ask(address: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(
        f"{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE_S
    ) as answer:
        return json.load(answer)["data"]


@pytest.mark.slow
@installed
def test_real_prometheus_evaluates_every_expression(prometheus: str) -> None:
    def scraped() -> bool:
        try:
            return any(t["health"] == "up" for t in ask(prometheus, "targets")["activeTargets"])
        except OSError:  # not listening yet
            return False

    # As Grafana fills them in for "All".
    filled = {f"${name}": VARIABLES[name]["allValue"] for name in ("run", "instance")} | {
        "$__rate_interval": "4s"
    }
    silent = {e: re.sub(r"\$\w+", lambda match: filled[match[0]], e) for e in EXPRESSIONS}

    def answered() -> bool:
        """Raises if Prometheus rejects a query."""
        for expression, query in list(silent.items()):
            if ask(prometheus, "query", query=query)["result"]:
                del silent[expression]
        return not silent

    wait_until(scraped, PATIENCE_S, "a scrape")
    try:
        wait_until(answered, SCRAPES_S, every_s=0.3)
    except AssertionError:
        pytest.fail(f"without an answer: {silent}")
    counted = [e for e in EXPRESSIONS if "duet_samples" in e]
    of_runs = [
        ask(prometheus, "query", query=re.sub(r"\$\w+", lambda match: filled[match[0]], e))[
            "result"
        ]
        for e in counted
    ]
    assert counted and all(
        {r["metric"]["run"] for r in found} == {NAME, VIDEO_RUN} for found in of_runs
    ), "both kinds of runs have a speed"
    for name, expected in (("run", [NAME, VIDEO_RUN]), ("instance", None)):
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES[name]["definition"])
        assert match and VARIABLES[name]["query"]["query"] == match[0]
        found = ask(prometheus, f"label/{match[2]}/values", **{"match[]": match[1]})
        assert found == expected if expected else len(found) == 1
    rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert rules and [(r["name"], r.get("lastError")) for r in rules if r["health"] != "ok"] == []
    # Names in the OpenMetrics format, which Prometheus requests.
    types = {
        "duet_step": "gauge",
        "duet_tokens": "counter",
        "duet_step_seconds": "summary",
        "duet_run": "info",
    }
    metadata = ask(prometheus, "metadata")
    assert {name: metadata[name][0]["type"] for name in types} == types


def test_test_states_cover_the_dashboard(made: Made) -> None:
    """So that an expression without a result is invalid."""
    shown = set(re.findall(r"\bduet_[a-z0-9_]+", " ".join(EXPRESSIONS)))
    assert shown <= {name for name, _ in of(of_samples(made), everything(made))}
