"""Redacted bug-report bundle."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import platform
import subprocess
import tarfile
import time
from collections.abc import Container, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core import standing
from training.core.errors import Exit, Problem, UserError
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.project import ROOT
from training.core.redact import Anonymous, machines_of, masked, masked_values
from training.core.rundir import RunDir, read_json, read_records, write_bytes
from training.core.tail import last_lines, tail
from training.diagnose import card, run_files
from training.diagnose.source import LogSource, logs_in

if TYPE_CHECKING:
    from training.core.contracts.verdict import DiagnosisRecord

LAST_LINES = 200
MOST_LOGS = 64
PACKAGES = (
    "torch",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "triton",
    "wandb",
    "tensorboard",
    "google-re2",
    "py-spy",
)


def write(paths: Sequence[Path | None], record: DiagnosisRecord, wanted: str) -> Path:
    """Writes a .tar.gz with plan, versions, card and the last lines of each log, without keys,
    user names and home folders. Raises UserError."""
    run = next((r for path in paths if path and (r := run_files.run_of(path))), None)
    target = Path(wanted or f"duet-issue-{time.strftime('%Y%m%d_%H%M%S')}.tar.gz")
    if target.exists():
        raise UserError(
            Problem(
                "output.exists",
                msg("diagnose.bundle.exists", target=target),
                msg("diagnose.bundle.new_file"),
                [f"--report-issue={target.with_name('new-' + target.name)}"],
            )
        )
    clean = _Cleaner((read_json(run.plan) if run else None) or {})
    files = {
        "card.txt": clean(card.draw(record)) + "\n",
        "diagnosis.json": clean.facts(record),
        "versions.json": json.dumps(versions(), indent=1) + "\n",
        **{f"logs/{name}": clean(text) for name, text in _tails(paths)},
    }
    if run:
        files |= {f"run/{name}": text for name, text in _of_run(run, clean)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    try:
        write_bytes(target, packed.getvalue())
    except OSError as error:
        raise UserError(
            Problem(
                "output.unwritable",
                msg("diagnose.bundle.unwritable", target=target, strerror=error.strerror),
            ),
            Exit.RESOURCES,
        ) from error
    return target


class _Cleaner:
    def __init__(self, plan: Record) -> None:
        self._anonymous = Anonymous(logins=machines_of(plan))

    def __call__(self, text: str) -> str:
        return "\n".join(self._anonymous(masked(line)) for line in text.splitlines())

    def facts(self, value: Any) -> str:
        return (
            self._anonymous(json.dumps(masked_values(value), ensure_ascii=False, indent=1)) + "\n"
        )


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    found["duet"] = _output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    found["gpus"] = _output_of(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    )
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _tails(paths: Sequence[Path | None]) -> list[tuple[str, str]]:
    logs: list[tuple[Path, Path]] = []
    for path in paths:
        if path and path.is_dir():
            logs += [(log, log.relative_to(path)) for log in logs_in(path)[0]]
        elif path:
            logs.append((path, Path(path.name)))
    out: dict[str, str] = {}
    for log, name in logs[:MOST_LOGS]:
        plain = str(name).replace(os.sep, "_")
        out[_unused(plain, out)] = "\n".join(_end_of(log))
    return list(out.items())


def _unused(name: str, names: Container[str]) -> str:
    """With a number, if another log has this name."""
    stem, dot, ending = name.partition(".")
    numbered = (f"{stem}_{number}{dot}{ending}" for number in itertools.count(2))
    return name if name not in names else next(one for one in numbered if one not in names)


def _end_of(log: Path) -> list[str]:
    """The last lines, also of a compressed log."""
    if not log.is_file():  # a pipe, which was read before
        return []
    try:
        source = LogSource(log)
    except OSError:
        return []
    with contextlib.closing(source):
        return last_lines(source.file, LAST_LINES)


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _of_run(run: RunDir, clean: _Cleaner) -> list[tuple[str, str]]:
    """(name, content) of the run's records, stacks and last hang."""
    found = []
    for path in (run.plan, run.failure, run.summary, run.preflight):
        if (content := read_json(path)) is not None:
            found.append((path.name, clean.facts(content)))
    records = [clean.facts(record).replace("\n", "") for record in read_records(run.events)][
        -LAST_LINES:
    ]
    found.append((run.events.name, "\n".join(records) + "\n"))
    log = standing.log_file(run, read_json(run.plan))
    texts = [*run.ranks.glob("*.stacks"), *([log] if log else [])]
    hangs = sorted(path for path in run.hangs.glob("*") if path.is_dir())[-1:]
    texts += [path for folder in hangs for path in sorted(folder.iterdir()) if path.is_file()]
    found += [
        (path.name, clean("\n".join(tail(path, LAST_LINES))) + "\n")
        for path in texts
        if path.is_file()
    ]
    return found
