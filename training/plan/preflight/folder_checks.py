"""The folders of a run and its log: writable, with room for what is to come."""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from training.core import manifest
from training.core.messages import msg
from training.core.rundir import RunDir
from training.plan.preflight.report import ERROR, OK, Check
from training.plan.request import LaunchRequest, Request
from training.tasks import memory
from training.tasks.memory import StepNeeds

OTHER_FILES_BYTES = 64 << 20  # of a run: logs and metrics
LOCAL, ANOTHER = "/local/folder", "/another/folder"  # in fixes: to be replaced by the user
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run_folder(request: LaunchRequest, step: StepNeeds | None) -> Check:
    """Room for the checkpoints to come. A resumed run stays in its folder. The heartbeats of a
    task's ranks are mapped files."""
    run, needed, maps = request.resume_from, OTHER_FILES_BYTES, isinstance(request, Request)
    if step:
        needed += step.stored * _more_checkpoints(request)
    path = run.path if run else request.experiments

    def moved(to: str) -> str:
        if run is None:
            return f"--out_dir={to}"
        return (
            f"cp -a {shlex.quote(str(path))} {to}/ && {request.command(resume=f'{to}/{run.name}')}"
        )

    origin = request.origins["resume" if run else "out_dir"]
    room = f"du -sh {shlex.quote(str(path.parent))}/* | sort -h" if run else moved(ANOTHER)
    local = [moved(LOCAL)] if maps else None
    found = folder("run", path, needed, origin, [room], [moved(ANOTHER)], local)
    if run is None or found.status == ERROR:
        return found
    return _closed(run, moved(ANOTHER)) or found


def _closed(run: RunDir, copied: str) -> Check | None:
    """The files of a run to resume that are appended to, but not by this user, as another user's in
    a shared folder; the others are replaced. `copied`: the command that resumes a copy."""
    files = [
        path for path in (run.metrics, run.events) if path.exists() and not os.access(path, os.W_OK)
    ]
    if not files:
        return None
    text = msg("plan.run.closed", files=", ".join(map(str, files)))
    opened = msg("plan.run.opened", files=shlex.join(map(str, files)))
    return Check("run folder", ERROR, text, [opened, copied])


def _more_checkpoints(request: LaunchRequest) -> int:
    """The checkpoints that need room besides those that are there."""
    config, run = request.config, request.resume_from
    most = config.keep_checkpoints + config.keep_best + 1  # one more exists while it is written
    more = most - len(manifest.all_in(run.checkpoints)) if run else most
    if last := int(config.num_iterations):
        begin = manifest.newest_step(run.checkpoints) if run else 0
        saves = _times(config.save_every, begin, last)
        saves += config.keep_best * _times(config.eval_every, begin, last)
        more = min(more, saves)
    return max(1, more)


def _times(every: int, begin: int, last: int) -> int:
    """How often something is due after step `begin` that is also due at the `last` one."""
    return 1 if not every else last // every - begin // every + (last % every > 0)


def folder(
    name: str,
    path: Path,
    needed: int,
    origin: str,
    fixes: list[str],
    another: list[str] | None = None,
    local: list[str] | None = None,
) -> Check:
    """The folder (or its nearest existing parent) is writable, and the disk has room. Leaves no
    files. `another`: the fixes for a folder that may not be written, if they differ from those for
    a full disk; `local`: for a file system that cannot map files, None: that does not matter."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    shown = (
        msg("plan.folder.log", path=path, origin=origin)
        if name == "log"
        else msg("plan.folder.run", path=path, origin=origin)
    )
    if not there.is_dir():
        return Check(
            f"{name} folder", ERROR, msg("plan.folder.no_folder", shown=shown, there=there), fixes
        )
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
            mapped = local is None or _mappable(probe.fileno())
    except OSError as error:
        return Check(
            f"{name} folder",
            ERROR,
            msg("plan.folder.not_writable", shown=shown, error=error.strerror),
            another if another and error.errno not in NO_ROOM else fixes,
        )
    if not mapped:
        text = msg("plan.folder.not_mappable", shown=shown)
        return Check(f"{name} folder", ERROR, text, local or [])
    free = shutil.disk_usage(there).free
    if free < needed:
        return Check(
            f"{name} folder",
            ERROR,
            msg("plan.folder.full", shown=shown, free=memory.gib(free), needed=memory.gib(needed)),
            fixes,
        )
    return Check(f"{name} folder", OK, msg("plan.folder.free", path=path, free=memory.gib(free)))


def _mappable(handle: int) -> bool:
    """False on some FUSE file systems: those mounted with direct_io."""
    try:
        mmap.mmap(handle, mmap.PAGESIZE).close()
    except OSError:
        return False
    return True
