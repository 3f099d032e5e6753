"""Paths and file access of the run directory. File names are defined here only."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from training.core import log
from training.core.messages import msg

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from training.core.contracts import events

VARIABLE = "DUET_RUN_DIR"
# A kind of failure besides exits and hangs (training.watchdog): the user asked for it.
ASKED: Final = "asked"
MTIME_SLACK_S = 0.05  # file times come from a coarser clock than time.time()

_warned: set[Path] = set()  # files whose write error was reported


class RunDir:
    """Paths of one run. `create()` makes the folders; readers do not need them. `node`: index of
    the machine; each has a folder for its own plan and results, which is the run directory for the
    first one."""

    def __init__(self, path: str | os.PathLike[str], node: int = 0) -> None:
        self.path = Path(path)
        self.own = self.path / f"node{node}" if node else self.path
        self.plan = self.path / "plan.json"
        # Those before a resume, kept until the resumed run has ended (training.core.standing).
        self.plan_before = self.path / "plan.before.json"
        self.data_before = self.path / "data.before.json"
        self.own_plan = self.own / "plan.json"
        self.preflight = self.own / "preflight.json"
        self.argv = self.own / "launch.argv"
        self.env = self.own / "launch.env"
        self.data = self.path / "data.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.failure = self.own / "failure.json"
        self.supervisor = self.own / "supervisor.json"
        self.heartbeats = self.path / "heartbeat"
        self.ranks = self.path / "ranks"
        self.hangs = self.path / "hangs"
        self.watch_error = self.own / "watch_error.txt"
        self.checkpoints = self.path / "checkpoints"
        # images of the model's output, shown in the report
        self.samples = self.path / "samples"
        self.profile = self.path / "profile"  # traces of --profile
        self.tensorboard = self.path / "tb_logger"
        self.wandb = self.path / "wandb"
        self.wandb_id = self.path / "wandb.json"  # the W&B run that every start continues

    @property
    def name(self) -> str:
        return self.path.name

    def create(self) -> None:
        for folder in (self.own, self.heartbeats, self.ranks, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    def is_gone(self) -> bool:
        """Whether the directory was removed; other errors of the disk do not count."""
        try:
            self.own.stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def forget_before(self, created: float) -> None:
        """Delete the results of earlier starts, once the start planned at `created` (unix s) has
        its own."""
        for old in (self.summary, self.failure):
            if not written_since(old, created):
                old.unlink(missing_ok=True)
        for old in (self.plan_before, self.data_before):
            old.unlink(missing_ok=True)

    def heartbeat(self, rank: int) -> Path:
        return self.heartbeats / f"rank{rank}.bin"

    def rank_log(self, rank: int) -> Path:
        return self.ranks / f"rank{rank}.log"

    def rank_error(self, rank: int) -> Path:
        """The error file of a failed rank (training.trainer.error_file)."""
        return self.ranks / f"rank{rank}.error.json"

    def elastic_error(self, rank: int) -> Path:
        """The error file of torch.distributed.elastic's `@record`, in a user script."""
        return self.ranks / f"rank{rank}.torchelastic.json"

    def trace(self, rank: int) -> Path:
        """The Chrome trace of a profiled rank (training.trainer.profiler)."""
        return self.profile / f"rank{rank}.trace.json.gz"

    def profile_digest(self, rank: int) -> Path:
        return self.profile / f"rank{rank}.json"

    def memory_snapshot(self, rank: int) -> Path:
        """The memory of a rank's GPU when it was exhausted. A restart keeps it."""
        return self.ranks / f"rank{rank}.memory.pickle"

    @overload
    def event(self, kind: Literal["start"], /, **facts: Unpack[events.StartFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["checkpoint", "resume"], /, **facts: Unpack[events.CheckpointFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["eval"], /, *, step: int, **scores: float) -> None: ...
    @overload
    def event(self, kind: Literal["shards"], /, **facts: Unpack[events.ShardsFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["end"], /, **facts: Unpack[events.EndFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["warning"], /, **facts: Unpack[events.WarningFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["injected"], /, **facts: Unpack[events.InjectedFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["verdict"], /, **facts: Unpack[events.VerdictFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["failure"], /, **facts: Unpack[events.FailureFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["restart"], /, **facts: Unpack[events.RestartFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["recovered"], /, **facts: Unpack[events.RecoveredFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["given_up"], /, **facts: Unpack[events.TextFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["submitted"], /, **facts: Unpack[events.SubmittedFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["requeue"], /, **facts: Unpack[events.RequeueFacts]) -> None: ...
    def event(self, kind: events.EventKind, /, **facts: object) -> None:
        """Append one record to events.jsonl, in a single write so that several processes may
        append. A write error, such as a full disk, is logged once and not raised."""
        try:
            append_json(self.events, {"time": time.time(), "event": kind, **facts})
        except OSError as error:
            if self.events not in _warned:
                log.warning(
                    msg("core.rundir.unwritable", file=self.events, strerror=error.strerror)
                )
            _warned.add(self.events)


def written_since(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime + MTIME_SLACK_S >= since
    except OSError:
        return False


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` atomically: temporary file in the same folder, fsync, rename. Raises
    OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, object]) -> None:
    write_bytes(
        path,
        (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(
            "utf-8", "backslashreplace"
        ),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file is missing, incomplete or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def append_json(path: Path, record: Mapping[str, object]) -> None:
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a .jsonl file; incomplete lines (crash, write in progress) are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return


def newest(experiments: Path) -> RunDir | None:
    """The most recently planned run in `experiments`."""
    plans = [(plan.stat().st_mtime_ns, plan.parent) for plan in experiments.glob("*/plan.json")]
    return RunDir(max(plans)[1]) if plans else None
