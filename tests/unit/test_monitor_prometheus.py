"""Server of `--prometheus`: responses, start and end, with real requests and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.conftest import wait_until
from tests.unit.exported_metrics import RUN, Serving, exporters, get, parsed, value
from tests.unit.monitor_runs import PATIENCE_S, ROOT, Made, dead_pid, look
from training.cli import monitor
from training.core import rundir, standing
from training.core.contracts.state import RunState
from training.core.errors import Exit, UserError
from training.core.heartbeat import Heartbeat
from training.core.jsonl import dig
from training.monitor import options
from training.monitor.prometheus import HOST, Exporter
from training.monitor.state import RunWatch

_serving = pytest.fixture(exporters, name="serving")


def test_many_scrapers_share_one_read(made: Made, serving: Serving) -> None:
    reads: list[int] = []

    def read() -> list[RunState]:
        reads.append(1)
        return [look(made.run)]

    patient, hasty = serving(read, 3600.0), serving(read, 0.0)
    with ThreadPoolExecutor(16) as pool:
        bodies = {body for _, _, body in pool.map(lambda n: get(patient), range(64))}
    assert len(reads) == len(bodies) == 1
    get(hasty), get(hasty)
    assert len(reads) == 3


def test_pages(made: Made, serving: Serving) -> None:
    state = look(made.run)
    state["run"]["name"] = "<script>alert(1)</script>"
    exporter = serving(lambda: [state])
    status, kind, body = get(exporter, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8") and 'href="/metrics"' in body
    assert "<script>" not in body and "&lt;script&gt;alert(1)&lt;/script&gt;: starting" in body
    assert [get(exporter, path)[0] for path in ("/metrics?x=1", "/nothing", "/metrics/..")] == [
        200,
        404,
        404,
    ]
    assert get(exporter, method="HEAD")[::2] == (200, "") and get(exporter, method="POST")[0] == 501


def test_other_machines_cannot_connect(serving: Serving) -> None:
    port = serving().port
    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S)


def test_failed_read_is_an_error_response(made: Made, serving: Serving) -> None:
    broken, reported = True, []

    def read() -> list[RunState]:
        if broken:
            raise RuntimeError("no such luck")
        return [look(made.run)]

    exporter = serving(read, 3600.0, reported.append)
    assert [get(exporter)[::2] for _ in range(2)] == [(500, "RuntimeError: no such luck\n")] * 2
    broken = False
    assert get(exporter)[0] == 200
    assert len(reported) == 1 and "no such luck" in reported[0]


def test_taken_port_names_its_process(serving: Serving) -> None:
    first = serving()
    with pytest.raises(UserError) as caught:
        Exporter(first.port).start()
    (problem,) = caught.value.problems
    assert caught.value.code == Exit.RESOURCES
    assert f"--prometheus={first.port}: the port is taken by pid {os.getpid()}" in problem.what
    other = int(problem.fixes[0].rpartition("=")[2])
    first.close()
    first.close()
    # the suggested port is free, and a closed one is free at once
    for port in (
        other,
        first.port,
    ):
        exporter = Exporter(port)
        exporter.start()
        exporter.close()


def test_missing_package_has_an_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError) as caught:
        Exporter(0).start()
    assert (
        caught.value.code == Exit.RESOURCES and "prometheus-client" in caught.value.problems[0].what
    )


PROGRAM = """
import sys
from training.monitor import prometheus, state
from training.core.rundir import RunDir
watch = state.RunWatch(RunDir(sys.argv[1]))
try:
    prometheus.serve(lambda: [watch.read()], int(sys.argv[2]), 0.2)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_server_ends_on_signals(made: Made, number: signal.Signals, status: int) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", PROGRAM, str(made.run.path), str(port)]
    # As with `nohup … &`: INT and HUP are ignored at the start; only HUP stays ignored.
    ignoring = [
        "env",
        "--default-signal=HUP",
        "bash",
        "-c",
        'trap "" INT; exec "$@"',
        "bash",
        *argv,
    ]
    with subprocess.Popen(ignoring, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert f"http://127.0.0.1:{port}/metrics" in process.stderr.readline()
            there = Exporter(port)
            before = parsed(get(there)[2])
            made.step(7, 2.0)
            wait_until(
                lambda: value(parsed(get(there)[2]), "duet_step", run=RUN) == 7,
                PATIENCE_S,
                "a new read",
                every_s=0.1,
            )
            assert value(before, "duet_step", run=RUN) == 0
            with socket.create_connection((HOST, port)):  # an idle client does not delay the exit
                process.send_signal(number)
                assert process.wait(PATIENCE_S) == status
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_nohup_is_respected_and_an_event_ends_the_server(made: Made) -> None:
    code = PROGRAM.replace("0.2)", "0.2, stop)").replace(
        "watch =",
        "import os, signal, threading; stop = threading.Event(); threading.Timer(0.3, "
        "stop.set).start()\nwatch =",
    )
    code += "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, threading.active_count())\n"
    argv = [
        "bash",
        "-c",
        'trap "" HUP; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        code,
        str(made.run.path),
        "0",
    ]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True 1\n")


def test_threads_end_with_the_server(serving: Serving) -> None:
    exporter = serving()
    get(exporter)
    assert "prometheus" in {t.name for t in threading.enumerate()}
    exporter.close()
    assert "prometheus" not in {t.name for t in threading.enumerate()}


def test_a_newer_run_replaces_one_that_has_ended(made: Made) -> None:
    """As on the screen: not a run that trains, nor one that is about to restart."""
    read = monitor._reader(options.parse(["--prometheus=9464"]), RunWatch(made.run))

    def shown() -> str:
        return str(dig(read()[0], "run", "name"))

    made.supervisor(os.getpid())
    newer = Made(made.run.path.parent / "newer", age_s=0.0)
    assert [shown(), shown()] == [made.run.name] * 2
    made.failure()
    assert [shown(), shown()] == [made.run.name] * 2
    made.supervisor(dead_pid())
    assert [shown(), shown()] == [made.run.name, newer.run.name]


Shown = Callable[[], str]


@pytest.fixture
def shown(made: Made) -> Shown:
    """The run of the next read."""
    read = monitor._reader(options.parse(["--prometheus=9464"]), RunWatch(made.run))
    return lambda: str(dig(read()[0], "run", "name"))


def elsewhere(made: Made) -> None:
    made.supervisor(os.getpid())
    supervisor = rundir.read_json(made.run.supervisor) or {}
    rundir.write_json(made.run.supervisor, supervisor | {"host": "node17"})


def test_a_newer_run_replaces_one_that_has_not_started(made: Made, shown: Shown) -> None:
    """Its job is queued, perhaps without end."""
    newer = Made(made.run.path.parent / "newer", age_s=0.0)
    assert [shown(), shown(), shown()] == [made.run.name, newer.run.name, newer.run.name]


def starting(made: Made) -> None:
    plan = rundir.read_json(made.run.plan) or {}
    own = {"starter": standing.identity(os.getpid()), "run_dir": str(made.run.path)}
    rundir.write_json(made.run.plan, plan | own)


@pytest.mark.parametrize("start", [elsewhere, starting, lambda made: made.beats("data", step=0)])
def test_a_newer_run_does_not_replace_one_that_has_started(
    made: Made, shown: Shown, start: Callable[[Made], None]
) -> None:
    """On another machine its processes cannot be checked; another launcher has no supervisor."""
    start(made)
    Made(made.run.path.parent / "newer", age_s=0.0)
    assert look(made.run)["run"]["state"] == "starting"
    assert [shown(), shown()] == [made.run.name] * 2


def resumed_by_another_launcher(made: Made) -> None:
    made.supervisor(dead_pid())
    resumed = made.at + 50
    rundir.write_json(made.run.plan, made.plan | {"created": resumed})
    os.utime(made.run.plan, (resumed, resumed))
    made.beats("data", step=0)


@pytest.mark.parametrize(
    "start",
    [
        elsewhere,
        resumed_by_another_launcher,
        lambda made: made.supervisor(os.getpid()),
        lambda made: made.beats(step=7),
    ],
)
def test_of_several_queued_runs_the_one_that_starts_is_shown(
    made: Made, shown: Shown, start: Callable[[Made], None]
) -> None:
    newer = Made(made.run.path.parent / "newer", age_s=0.0)
    Made(made.run.path.parent / "ended").supervisor(dead_pid()).failure()
    os.utime(newer.run.plan)
    assert [shown(), shown(), shown()] == [made.run.name, newer.run.name, newer.run.name]
    start(made)
    assert [shown(), shown()] == [made.run.name] * 2
    made.supervisor(dead_pid()).failure()
    assert [shown(), shown(), shown()] == [made.run.name, newer.run.name, newer.run.name]


def test_beside_a_queued_run_those_that_died_are_not_read(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be many, with long metrics, and each scrape would read them again."""
    runs = made.run.path.parent
    dead = dead_pid()
    supervised = Made(runs / "supervised").supervisor(dead).beats()
    known = rundir.read_json(supervised.run.supervisor) or {}
    rundir.write_json(supervised.run.supervisor, known | standing.identity(dead))
    torchrun = Made(runs / "torchrun")
    origin = {"run_dir": str(made.run.path), "created": made.plan["created"]}
    Heartbeat(torchrun.run.heartbeat(0), 0, dead).beat("forward")
    copied = Made(runs / "copied", **origin).beats()
    read, real = list[str](), RunWatch.read

    def counted(watch: RunWatch, *most: float) -> RunState:
        read.append(watch.run.name)
        return real(watch, *most)

    monkeypatch.setattr(RunWatch, "read", counted)
    assert monitor._active(runs) is None and not read
    rundir.write_json(copied.run.plan, copied.plan | {"run_dir": str(copied.run.path)})
    assert monitor._active(runs) is not None and read == [copied.run.name]
