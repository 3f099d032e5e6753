"""Paths and file access of the run directory. File names are defined here only."""

from __future__ import annotations

import errno
import json
import os
import stat
import string
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, overload

from training.core import json_text, log, umask
from training.core.matching import matching
from training.core.messages import msg

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from training.core.contracts import events as records
    from training.core.contracts.plan import Plan

VARIABLE = "DUET_RUN_DIR"
# A kind of failure besides exits and hangs (training.watchdog): the user asked for it.
ASKED: Final = "asked"
WRITING_S = 0.05  # for the rest of a line that another process is appending
MTIME_SLACK_S = 0.05  # file times come from a coarser clock than time.time()

# Suffixes of an archived run (training.core.archive).
GZIP, ZSTANDARD = ".tar.gz", ".tar.zst"
ARCHIVES = (GZIP, ZSTANDARD)

NAME = set(string.ascii_letters + string.digits + "._-")  # characters of is_name()

_warned: set[Path] = set()  # files whose write error was reported


class _Inside:
    """A path in the run directory, made at its first use: a list of many runs needs few of them."""

    def __init__(self, name: str, *, own: bool = False) -> None:
        self._name, self._own = name, own

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, run: RunDir, owner: type) -> Path:
        made = (run.own if self._own else run.path) / self._name
        run.__dict__[self._attribute] = made
        return made


class RunDir:
    """Paths of one run. `create()` makes the folders; readers do not need them. `node`: index of
    a machine that does not coordinate the run, which has a folder for its own plan and results."""

    plan = _Inside("plan.json")
    # Those before a resume, kept until the resumed run has ended (training.core.standing); on
    # another machine with its own disk those before the last start.
    plan_before = _Inside("plan.before.json", own=True)
    data_before = _Inside("data.before.json", own=True)
    own_plan = _Inside("plan.json", own=True)
    preflight = _Inside("preflight.json", own=True)
    argv = _Inside("launch.argv", own=True)
    env = _Inside("launch.env", own=True)
    data = _Inside("data.json")
    metrics = _Inside("metrics.jsonl")
    events = _Inside("events.jsonl")
    summary = _Inside("summary.json")
    report = _Inside("report.html")
    failure = _Inside("failure.json", own=True)
    supervisor = _Inside("supervisor.json", own=True)
    heartbeats = _Inside("heartbeat")
    ranks = _Inside("ranks")
    hangs = _Inside("hangs")
    # with --min_ranks on several machines: where the others can be asked, until the run has ended
    machines = _Inside("machines.json", own=True)
    watch_error = _Inside("watch_error.txt", own=True)
    # On a machine with a disk of its own: the newest checkpoint of node 0 of which it has a copy,
    # and the files of another training that were in the place of the copies.
    replica = _Inside("replica.json", own=True)
    replaced = _Inside("replaced", own=True)
    checkpoints = _Inside("checkpoints")
    tokenizer = _Inside("tokenizer")  # a copy of the learned vocabulary
    # images of the model's output, shown in the report
    samples = _Inside("samples")
    profile = _Inside("profile")  # traces of --profile
    tensorboard = _Inside("tb_logger")
    wandb = _Inside("wandb")
    # only in a run that was unpacked from an archive (training.core.archive)
    archived = _Inside("archive.json")
    wandb_id = _Inside("wandb.json")  # the W&B run that every start continues

    def __init__(self, path: str | os.PathLike[str], node: int | None = None) -> None:
        self.path = Path(path)
        self.own = self.path if node is None else self.path / f"node{node}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_archived(self) -> bool:
        """Whether the run was unpacked from an archive: its processes were those of another
        machine."""
        return os.path.exists(self.archived)

    def create(self) -> None:
        for folder in (self.own, self.heartbeats, self.ranks, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def received(self) -> Path:
        """On a machine other than the first: the resumed run as node 0 has sent it
        (training.plan.sent_run)."""
        return self.own / self.path.name

    def token(self, launch: str) -> Path:
        """Made by node 0 at each launch: another machine that finds it has the same disk. A new
        name each time, because NFS may show old contents of a known one."""
        return self.path / f".launch-{launch}"

    def claim(self, launch: str, attempt: int) -> Path:
        """Made by the machine that decides on this start of the ranks (--min_ranks). Removed with
        the token."""
        return self.path / f"{self.token(launch).name}.{attempt}"

    def announcement(self, launch: str, attempt: int) -> Path:
        """Made by the machine that is about to make this claim. Removed with the token."""
        return self.path / f"{self.claim(launch, attempt).name}.next"

    def remove_tokens(self, launch: str = "") -> None:
        """Of this launch; without one, of all. The token goes before its claims."""
        for old in matching(self.path, f"{self.token(launch).name}*"):
            discard(old)

    def is_gone(self) -> bool:
        """Whether the directory was removed; other errors of the disk do not count."""
        try:
            self.own.stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def forget_before(self, plan: Plan, own: Path) -> None:
        """Delete the results of earlier starts, once the start of `plan` has its `own`."""
        for old in (self.summary, self.failure):
            if old != own and not is_of_start(read_json(old) or {}, plan, old, plan["created"]):
                discard(old)
        for old in (self.plan_before, self.data_before):
            discard(old)

    def heartbeat(self, rank: int) -> Path:
        return self.heartbeats / f"rank{rank}.bin"

    def rank_log(self, rank: int) -> Path:
        return self.ranks / f"rank{rank}.log"

    def launcher_log(self, launcher: str) -> Path:
        """Output of another launcher that starts the ranks: torchrun's, or a watched command's."""
        return self.ranks / ("torchrun.log" if launcher == "torchrun" else "launcher.log")

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
    def event(self, kind: Literal["start"], /, **facts: Unpack[records.StartFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["checkpoint", "resume"], /, **facts: Unpack[records.CheckpointFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["eval"], /, *, step: int, **scores: float) -> None: ...
    @overload
    def event(self, kind: Literal["shards"], /, **facts: Unpack[records.ShardsFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["end"], /, **facts: Unpack[records.EndFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["warning"], /, **facts: Unpack[records.WarningFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["injected"], /, **facts: Unpack[records.InjectedFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["verdict"], /, **facts: Unpack[records.VerdictFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["failure"], /, **facts: Unpack[records.FailureFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["restart"], /, **facts: Unpack[records.RestartFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["recovered"], /, **facts: Unpack[records.RecoveredFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["pace"], /, **facts: Unpack[records.PaceFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["replica"], /, **facts: Unpack[records.ReplicaFacts]) -> None: ...
    @overload
    def event(self, kind: Literal["given_up"], /, **facts: Unpack[records.TextFacts]) -> None: ...
    @overload
    def event(
        self, kind: Literal["takeover"], /, **facts: Unpack[records.TakeoverFacts]
    ) -> None: ...
    @overload
    def event(
        self, kind: Literal["submitted"], /, **facts: Unpack[records.SubmittedFacts]
    ) -> None: ...
    @overload
    def event(self, kind: Literal["requeue"], /, **facts: Unpack[records.RequeueFacts]) -> None: ...
    def event(self, kind: records.EventKind, /, **facts: object) -> None:
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


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value from a network is safe as a file name and on a terminal."""
    return (
        isinstance(value, str) and bool(value) and set(value) <= NAME and not value.startswith(".")
    )


def is_of_start(
    record: Mapping[str, object], plan: Mapping[str, object], file: Path, since: float
) -> bool:
    """Whether the record in `file` is of the start of `plan`. Only its ID shows that for certain:
    the clock may have been set back. A record of early 0.1 has none: its file was written at or
    after `since` (unix s)."""
    own, wanted = record.get("launch"), plan.get("launch")
    return own == wanted if own and wanted else written_since(file, since)


def written_since(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime + MTIME_SLACK_S >= since
    except OSError:
        return False


def write_words(path: Path, words: Iterable[str]) -> None:
    """NUL-terminated, as the shell reads them. Raises OSError."""
    write_bytes(path, b"".join(os.fsencode(word) + b"\0" for word in words))


def write_bytes(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace `path` atomically: temporary file in the same folder, fsync, rename. `mode`: its
    permissions; None: by the umask. Raises OSError."""
    import tempfile

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is None:
            umask.use(temporary)
        else:
            umask.change(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_output(path: Path, content: bytes) -> None:
    """As write_bytes, to a path that a user has typed: a link is followed, a device or pipe is
    written to, and a file keeps its permissions. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    write_bytes(Path(os.path.realpath(path)), content, mode)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    write_bytes(
        path,
        (json_text.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(
            "utf-8", "backslashreplace"
        ),
    )


def keep_json(path: Path, value: Mapping[str, object]) -> None:
    """write_json() of a record that the run does not depend on: a disk error is a warning."""
    try:
        write_json(path, value)
    except OSError as error:
        log.warning(msg("core.rundir.unwritable", file=path, strerror=error.strerror))


def discard(path: Path) -> None:
    """Delete a file, if it is there, that is not worth the end of the run: a disk error is a
    warning."""
    if not os.path.lexists(path):  # a read-only disk refuses to delete that, too
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning(msg("core.rundir.undeletable", file=path, strerror=error.strerror))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file is missing, incomplete or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def append_json(path: Path, record: Mapping[str, object]) -> None:
    text = json_text.dumps(record, ensure_ascii=False) + "\n"
    line = text.encode("utf-8", "backslashreplace")
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        line = b"\n" + line if torn(handle) else line
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def torn(handle: int) -> bool:
    """Whether the last line of an open file is incomplete, as after a full disk, and no other
    process is writing it."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return False
    time.sleep(WRITING_S)
    return os.fstat(handle).st_size == size


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a .jsonl file; incomplete lines (crash, write in progress) are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json_text.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return
