"""The host name, with name servers that answer, deny or do not respond; the system clock."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import clean_environment
from training.plan.preflight import host_checks
from training.plan.preflight.host_checks import clock, host_name
from training.plan.preflight.report import OK, WARNING

NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


def test_a_name_that_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    found = host_name(False)
    assert found.status == OK
    assert found.text in ("localhost is 127.0.0.1", "localhost is ::1")


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kinds: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "tower")
    monkeypatch.setattr(socket, "getaddrinfo", denied)
    found = host_name(False)
    assert (found.status, found.fixes) == (
        WARNING,
        ["echo '127.0.1.1 tower' | sudo tee -a /etc/hosts"],
    )
    assert (
        found.text
        == "tower does not resolve; torchrun needs it, a Duet run on one machine does not"
    )
    assert host_name(True).text.endswith("; the machines use it to find each other")


def test_an_invalid_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64)
    assert host_name(False).status == WARNING


def test_a_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.6])
    monkeypatch.setattr(host_checks.network, "resolve", lambda name: "10.0.0.7")
    monkeypatch.setattr(host_checks.time, "monotonic", lambda: next(times, 200.0))
    monkeypatch.setattr(host_checks.threading, "Thread", _AtOnce)
    found = host_name(False)
    assert found.status == WARNING
    assert found.text.startswith(
        f"{socket.gethostname()} is 10.0.0.7, but the look-up took 0.6 s; "
    )


class _AtOnce:
    def __init__(self, target: object, daemon: bool) -> None:
        self.target = target

    def start(self) -> None:
        self.target()  # type: ignore[operator]

    def join(self, limit: float) -> None:
        pass


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver that does not return during the test."""
    end = threading.Event()

    def wait(*args: object, **kinds: object) -> None:
        end.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield
    end.set()


def test_no_answer_is_reported_after_a_second(never: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "NAME_LIMIT_S", 0.1)
    started = time.monotonic()
    found = host_name(False)
    assert time.monotonic() - started < 5
    assert found.status == WARNING
    assert found.text.startswith(
        f"{socket.gethostname()}: no answer within 0.1 s from the name server; "
    )


SILENT = """
import time
from training.plan.preflight.host_checks import host_name
found = host_name(False)
print(found.status, found.text)
"""
# A name server on loopback that never answers, in a separate network namespace.
SETUP = r"""
set -e
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$1/hosts" /etc/hosts
hostname unheard-of
shift
exec "$@"
"""


def test_a_real_name_server_that_is_silent(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private namespaces here (unshare -m -u)")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind(("127.0.0.53", 53))
        except OSError:
            pytest.skip("port 53 is not free here")
        (tmp_path / "resolv.conf").write_text(
            "nameserver 127.0.0.53\noptions timeout:30 attempts:1\n"
        )
        (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
        started = time.monotonic()
        done = subprocess.run(
            [
                "unshare",
                "-m",
                "-u",
                "bash",
                "-c",
                SETUP,
                "bash",
                str(tmp_path),
                sys.executable,
                "-c",
                SILENT,
            ],
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=60,
            check=False,
        )
        took = time.monotonic() - started
    if "mount:" in done.stderr:
        pytest.skip(f"no bind mounts here: {done.stderr.strip()}")
    assert done.stdout.startswith(
        "warning unheard-of: no answer within 1 s from the name server; "
    ), done.stdout + done.stderr
    assert took < 25, "the program ends although its resolver still waits"


def test_a_correct_clock() -> None:
    found = clock(NOON, iter([NOON - 3600, NOON + 60]))
    assert (found.status, found.text) == (OK, "2026-11-21 12:00:00")
    assert clock().status == OK, "with the real clock and the project's real files"


@pytest.mark.parametrize("year", [1970, 2015, 2024, 2107])
def test_an_implausible_year(year: int) -> None:
    found = clock(time.mktime((year, 7, 1, 12, 0, 0, 0, 0, -1)), iter([]))
    assert (found.status, found.fixes) == (WARNING, ["sudo timedatectl set-ntp true"])
    assert found.text == f"the clock is at {year}-07-01 12:00:00: certificates will be rejected"


def test_files_from_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "x.py").touch()
    (tmp_path / "training" / "gone").symlink_to("nowhere")
    os.utime(tmp_path / "training" / "x.py", (NOON + 7200, NOON + 7200))
    monkeypatch.setattr(host_checks, "ROOT", tmp_path)
    found = clock(NOON)
    assert found.status == WARNING
    assert (
        found.text == "the clock is at 2026-11-21 12:00:00, but a project file is from 2026-11-21 "
        "14:00:00: the clock is behind"
    )
    assert clock(NOON + 7200).status == OK
