"""`--prometheus=PORT`: HTTP endpoint on localhost with the metrics of the shown runs.

Exporter serves from its own thread beside the live screen; `serve` serves without a screen. However
many clients ask, runs are read at most once per interval.
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
from training.core.messages import language, msg
from training.host import packages, ports
from training.monitor import prom_metrics, prom_samples
from training.monitor.options import COMMAND
from training.monitor.prom_metrics import AnyState

HOST = "127.0.0.1"  # not reachable from other machines: use a tunnel for that
PACKAGE = "prometheus-client"
CLIENT_S = 10.0  # timeout of an idle client
WAITING_CLIENTS = 64
POLL_S, WAKE_S = 0.1, 1.0
OPENMETRICS = "application/openmetrics-text"
PAGE = """<!DOCTYPE html><html lang="{lang}"><meta charset="utf-8"><title>Duet</title>
<h1>Duet</h1><p><a href="/metrics">/metrics</a> {words}</p><ul>{runs}</ul></html>
"""


class Exporter:
    """HTTP server for the metrics.

    `read`: returns the states to export; called for a scrape if the last call is older than
    `interval_s`. Without it, the states of the last `update` are exported. A state without a run
    has metrics of the machine only. `report`: receives errors of requests.
    """

    def __init__(
        self,
        port: int,
        read: Callable[[], Sequence[AnyState]] | None = None,
        interval_s: float = 0.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.port, self._read, self._interval_s, self._report = port, read, interval_s, report
        self._lock = threading.Lock()
        self._states: Sequence[AnyState] = []
        self._looked: float | None = None
        self._bodies: dict[str, bytes] = {}  # responses of this read, by content type
        self._collected, self._reported = prom_samples.Collected(), ""
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    def start(self) -> None:
        """Returns once it listens; port 0 selects a free one. Raises UserError if the package is
        missing or the port is taken."""
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
        """Frees the port; does not wait for requests in progress."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    def update(self, states: Sequence[AnyState]) -> None:
        """Sets the states to export."""
        with self._lock:
            self._new(states)

    def _new(self, states: Sequence[AnyState]) -> None:
        self._states, self._looked = states, time.monotonic()
        self._bodies.clear()

    def _look(self) -> None:
        """Requires the lock: concurrent clients share one read."""
        if self._read and (
            self._looked is None or time.monotonic() - self._looked >= self._interval_s
        ):
            self._new(self._read())

    def states(self) -> Sequence[AnyState]:
        with self._lock:
            self._look()
            return self._states

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) in the format that the client accepts."""
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
        """Reports a failed request; repeats of the same error only once."""
        text = f"{type(error).__name__}: {error}"
        if self._report and text != self._reported:
            self._report(msg("monitor.prometheus.failed", url=self.url, error=text))
        self._reported = text


class _Families:
    """A collector of prometheus_client, made of the collected samples."""

    def __init__(
        self, collected: list[tuple[prom_metrics.Metric, list[prom_samples.Sample]]]
    ) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import Metric

        for metric, samples in self._collected:
            if not samples:
                continue
            # The library appends these suffixes to the name of the family itself.
            family = Metric(
                metric.name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind
            )
            for labels, value in samples:
                family.add_sample(metric.name, labels, value)
            yield family


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # a taken port is an error
    request_queue_size = WAITING_CLIENTS

    def __init__(self, port: int, exporter: Exporter) -> None:
        self.exporter = exporter
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Skips the name lookup of the standard library, which blocks on a slow name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prevents a traceback on the live screen; disconnects and timeouts of clients are
        ignored."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.exporter.failed(error)


def _serve(server: _Server) -> None:
    """Body of the server thread. Blocks signals here and in the client threads, so that they wake
    the main thread."""
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
                status, kind, body = 404, "text/plain; charset=utf-8", b"not found; see /metrics\n"
        except Exception as error:  # alerts depend on this server: no error may end it
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
        """Disables the log line for each scrape."""


def _page(states: Sequence[AnyState]) -> bytes:
    lines = (
        f"{prom_metrics.label(dig(s, 'run', 'name'))}: {prom_metrics.label(dig(s, 'run', 'state'))}"
        for s in states
        if s.get("run")
    )
    return PAGE.format(
        lang=language(),
        words=msg("monitor.prometheus.page"),
        runs="".join(f"<li>{html.escape(line)}</li>" for line in lines),
    ).encode()


def _library() -> tuple[ModuleType, ModuleType]:
    """prometheus_client and its OpenMetrics exposition. Raises UserError if not installed."""
    try:
        import prometheus_client
        from prometheus_client.openmetrics import exposition
    except ImportError as error:
        what = msg("monitor.prometheus.no_package", package=PACKAGE, error=error)
        raise UserError(
            Problem("package.missing", what, "", packages.add([PACKAGE])), Exit.RESOURCES
        ) from None
    return prometheus_client, exposition


def _no_port(port: int, error: OSError) -> Problem:
    free = ports.next_free(max(port, 1024))
    fixes = (
        [f"{COMMAND} --prometheus={free}"]
        if free
        else [f"{COMMAND} --prometheus=PORT   {msg('monitor.prometheus.another_port')}"]
    )
    if error.errno == errno.EADDRINUSE:
        return Problem(
            "port.taken",
            msg("monitor.prometheus.port_taken", port=port, owner=ports.owner(port)),
            msg("monitor.prometheus.free_port"),
            fixes,
        )
    return Problem(
        "port.unusable",
        f"--prometheus={port}: {error.strerror}",
        msg("monitor.prometheus.free_port_from"),
        fixes,
    )


def serve(
    read: Callable[[], Sequence[AnyState]],
    port: int,
    interval_s: float = 3.0,
    stop: threading.Event | None = None,
) -> None:
    """Serves until Ctrl-C (raises KeyboardInterrupt), TERM or HUP (SystemExit with 143, 129) or
    until `stop` is set (returns). For the main thread only. Raises UserError."""
    exporter = Exporter(port, read, interval_s, report=log.warning)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        # it may have been inherited as ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _leave)
        if before[signal.SIGHUP] != signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, _leave)
        exporter.start()
        log.info(msg("monitor.prometheus.serving", url=exporter.url))
        stop = stop or threading.Event()
        # a signal just before the wait is seen only after it: keep the wait short
        while not stop.wait(WAKE_S):
            pass
    finally:
        for number in before:
            # a second signal must not interrupt the close
            signal.signal(number, signal.SIG_IGN)
        exporter.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
