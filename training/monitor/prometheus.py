"""`--prometheus=PORT`: answers a Prometheus server with the metrics of the runs that are shown, on
this machine only.

Exporter serves from a thread of its own, next to the live screen, which feeds it with what it has
read anyway; `serve` is the same without a screen. A look at a run is never made more often than
once per interval, however many ask.
"""

from __future__ import annotations

import errno
import html
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import FrameType, ModuleType
from typing import Any

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.jsonl import dig
from training.host import packages, ports
from training.monitor import prom_metrics, prom_samples
from training.monitor.options import COMMAND
from training.monitor.prom_metrics import AnyState

HOST = "127.0.0.1"  # nothing of a run is told to other machines: whoever wants that makes a tunnel
PACKAGE = "prometheus-client"
CLIENT_S = 10.0  # a client that sends nothing has a thread for so long
WAITING_CLIENTS = 64
POLL_S, WAKE_S = 0.1, 1.0
OPENMETRICS = "application/openmetrics-text"
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Duet</title>
<h1>Duet</h1><p><a href="/metrics">/metrics</a> for Prometheus. Shown now:</p><ul>{runs}</ul></html>
"""


class Exporter:
    """`read`: one look at all that is to be shown, asked for when somebody scrapes and the last
    look is older than `interval_s`; without it, what the last `update` brought is told. A state
    without a run tells of the machine only. `tell`: gets what went wrong with an answer."""

    def __init__(
        self,
        port: int,
        read: Callable[[], Sequence[AnyState]] | None = None,
        interval_s: float = 0.0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.port, self._read, self._interval_s, self._tell = port, read, interval_s, tell
        self._lock = threading.Lock()
        self._states: Sequence[AnyState] = []
        self._looked: float | None = None
        self._bodies: dict[str, bytes] = {}  # of this look, by content type
        self._collected, self._told = prom_samples.Collected(), ""
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    def start(self) -> None:
        """Listens when it returns. Port 0 becomes a free one. Raises UserError: the package is
        missing, the port is taken."""
        self._library = _library()
        try:
            self._server = _Server(self.port, self)
        except OSError as error:
            raise UserError(_no_port(self.port, error), Exit.RESOURCES) from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=_serve, args=(self._server,), name="prometheus", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """The port is free when it returns; an answer under way is not waited for."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    def update(self, states: Sequence[AnyState]) -> None:
        """What the live screen shows now."""
        with self._lock:
            self._new(states)

    def _new(self, states: Sequence[AnyState]) -> None:
        self._states, self._looked = states, time.monotonic()
        self._bodies.clear()

    def _look(self) -> None:
        """With the lock held: who comes meanwhile waits and gets the same."""
        if self._read and (
            self._looked is None or time.monotonic() - self._looked >= self._interval_s
        ):
            self._new(self._read())

    def states(self) -> Sequence[AnyState]:
        with self._lock:
            self._look()
            return self._states

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) in the form that the client asks for."""
        client, openmetrics = self._library
        kind, form = client.CONTENT_TYPE_PLAIN_0_0_4, client.generate_latest
        if OPENMETRICS in accept:
            kind, form = openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest
        with self._lock:
            self._look()
            if kind not in self._bodies:
                registry = client.CollectorRegistry()
                registry.register(_Families(self._collected.samples(self._states)))
                self._bodies[kind] = form(registry)
            return kind, self._bodies[kind]

    def failed(self, error: BaseException | None) -> None:
        """Said once as long as it is the same."""
        text = f"{type(error).__name__}: {error}"
        if self._tell and text != self._told:
            self._tell(f"a request to {self.url} was not answered: {text}")
        self._told = text


class _Families:
    """What prometheus_client calls a collector: the metrics as its own objects."""

    def __init__(
        self, collected: list[tuple[prom_metrics.Metric, list[prom_samples.Sample]]]
    ) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import Metric

        for metric, samples in self._collected:
            if not samples:
                continue
            # The library puts these ends behind the name of the family itself.
            family = Metric(
                metric.name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind
            )
            for labels, value in samples:
                family.add_sample(metric.name, labels, value)
            yield family


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # a port that is taken is an error
    request_queue_size = WAITING_CLIENTS

    def __init__(self, port: int, exporter: Exporter) -> None:
        self.exporter = exporter
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of a name that the standard library makes here: a slow name server is
        none of our business."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Never a traceback over the live screen. A client that goes away or is silent is its own
        affair."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.exporter.failed(error)


def _serve(server: _Server) -> None:
    """In its thread. Signals are the main thread's: one that came here, or to the threads of the
    clients, would not wake it."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK,
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH),
    )
    server.serve_forever(POLL_S)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    server_version, sys_version = "Duet", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, body = 200, "text/html; charset=utf-8", b""
        try:
            if path == "/metrics":
                kind, body = self.server.exporter.metrics(self.headers.get("Accept", ""))
            elif path == "/":
                body = _page(self.server.exporter.states())
            else:
                status, kind, body = 404, "text/plain; charset=utf-8", b"not here: /metrics\n"
        except Exception as error:  # whatever it is: somebody's alerts depend on this server
            self.server.exporter.failed(error)
            status, kind, body = (
                500,
                "text/plain; charset=utf-8",
                f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"),
            )
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each scrape."""


def _page(states: Sequence[AnyState]) -> bytes:
    lines = (
        f"{prom_metrics.label(dig(s, 'run', 'name'))}: {prom_metrics.label(dig(s, 'run', 'state'))}"
        for s in states
        if s.get("run")
    )
    return PAGE.format(runs="".join(f"<li>{html.escape(line)}</li>" for line in lines)).encode()


def _library() -> tuple[ModuleType, ModuleType]:
    """Raises UserError when it is not installed: the monitor runs with any Python."""
    try:
        import prometheus_client
        from prometheus_client.openmetrics import exposition
    except ImportError as error:
        what = (
            f"--prometheus needs the package {PACKAGE}, which this Python does not have ({error})"
        )
        raise UserError(
            Problem("package.missing", what, "", packages.add([PACKAGE])), Exit.RESOURCES
        ) from None
    return prometheus_client, exposition


def _no_port(port: int, error: OSError) -> Problem:
    free = ports.next_free(max(port, 1024))
    fixes = (
        [f"{COMMAND} --prometheus={free}"]
        if free
        else [f"{COMMAND} --prometheus=PORT   (another one)"]
    )
    if error.errno == errno.EADDRINUSE:
        return Problem(
            "port.taken",
            f"--prometheus={port}: the port is taken by {ports.owner(port)}",
            "a free port",
            fixes,
        )
    return Problem(
        "port.unusable",
        f"--prometheus={port}: {error.strerror}",
        "a free port from 1024 to 65535",
        fixes,
    )


def serve(
    read: Callable[[], Sequence[AnyState]],
    port: int,
    interval_s: float = 3.0,
    stop: threading.Event | None = None,
) -> None:
    """Answer until Ctrl-C (raises KeyboardInterrupt), TERM or HUP (SystemExit with 143, 129) or
    until `stop` is set (returns). Call it in the main thread. Raises UserError."""
    exporter = Exporter(port, read, interval_s, tell=log.warning)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        # it may have been inherited as ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _leave)
        if before[signal.SIGHUP] != signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, _leave)
        exporter.start()
        log.info(f"metrics for Prometheus: {exporter.url}   Ctrl-C ends this, the run goes on")
        stop = stop or threading.Event()
        # a signal in the moment before it waits would be seen only when it wakes
        while not stop.wait(WAKE_S):
            pass
    finally:
        for number in before:
            # one is enough: the port is given back in any case
            signal.signal(number, signal.SIG_IGN)
        exporter.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
