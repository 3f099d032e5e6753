"""Pack a run into one file that report, runs, monitor and diagnose read anywhere.

Usage: ./duet archive [RUN] [--out=FILE] [--without_checkpoints]
       ./duet archive FILE

  RUN                    a run directory, the name of a run, or latest (default)
  --out=FILE             ends in .tar.gz or .tar.zst; default: <name>.tar.zst
                         in the current folder, .tar.gz without the package
                         zstandard
  --without_checkpoints  no weights: a few megabytes instead of gigabytes
  FILE                   an archive, such as a copy: verify all its files

  ./duet report FILE · ./duet runs FILE · ./duet diagnose FILE
  ./duet monitor --run=FILE --once      tar -xf FILE: the run directory again

The file begins with the checksums of all its members. They are verified after
writing and by ./duet archive FILE, and those of the files without weights
whenever it is opened.
Exit codes: 0 written, or intact; 2 no such run, it is running, or the archive
is damaged; 3 a file cannot be read or written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import stat
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import training
from training.core import archive, args, find_run, log, redact, rundir, umask, units
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import LATEST, RunSelector
from training.core.messages import msg
from training.core.project import WORK, typed
from training.core.rundir import RunDir
from training.host import process, program
from training.monitor import term_text
from training.monitor.runs import facts

if TYPE_CHECKING:
    from training.core.contracts.run_files import ArchivedFile, ArchiveIndex

COMMAND = "./duet archive"
ASKER = RunSelector("RUN", f"{COMMAND} ", f"{COMMAND} {LATEST}")
FLAGS = {
    "out": args.TEXT,
    "without-checkpoints": args.SWITCH,
    "help": args.SWITCH,
}
# Of this machine and start only; hidden files are being written or deleted.
LEFT_OUT = ("launch.argv", "launch.env", "archive.json")
PLANS = ("plan.json", "plan.before.json")


@dataclass(frozen=True)
class ArchiveOptions:
    """A checked command line. `verify`: the archive to verify; nothing is written then."""

    run: RunDir
    out: Path
    checkpoints: bool = True
    verify: Path | None = None
    help: bool = False


def options(argv: list[str], root: Path = WORK) -> ArchiveOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    if "help" in values:
        return ArchiveOptions(RunDir(""), Path(), help=True)
    problems += find_run.several(line.words, ASKER)
    word = line.words[0] if line.words else LATEST
    places = (find_run.path_of(word), root / find_run.EXPERIMENTS / word)
    file = next((place for place in places if find_run.is_archive(place)), None)
    if file and not values and not problems:
        return ArchiveOptions(RunDir(""), Path(), verify=file)
    run = RunDir("")
    try:
        run = find_run.find(None if word == LATEST else word, root / find_run.EXPERIMENTS, ASKER)
        problems += _not_archivable(run)
    except UserError as error:
        problems += error.problems
    suffix = rundir.ZSTANDARD if archive.has_zstandard() else rundir.GZIP
    out = find_run.path_of(values.get("out") or f"{run.name}{suffix}").absolute()
    problems += _not_writable(out, word)
    if problems:
        raise UserError(problems)
    return ArchiveOptions(run, out, "without_checkpoints" not in values)


def _not_archivable(run: RunDir) -> list[Problem]:
    if run.is_archived:
        what = msg("cli.archive.archived", name=run.name)
        return [Problem("run.archived", what, msg("cli.archive.ended"))]
    state = facts.read(run.path).state
    if state not in facts.LIVE:
        return []
    what = msg("cli.archive.live", name=run.name, state=facts.word(state))
    return [Problem("run.live", what, msg("cli.archive.ended"))]


def _not_writable(out: Path, run: str) -> list[Problem]:
    allowed = msg("cli.archive.out_allowed")
    if not out.name.endswith(rundir.ARCHIVES):
        fix = f"{COMMAND} {shlex.quote(run)} --out={shlex.quote(str(out))}.tar.gz"
        what = msg("cli.archive.suffix", out=out)
        return [Problem("output.suffix", what, allowed, [fix], "out")]
    if out.name.endswith(rundir.ZSTANDARD) and not archive.has_zstandard():
        other = str(out).removesuffix(rundir.ZSTANDARD) + rundir.GZIP
        fixes = [f"{COMMAND} {shlex.quote(run)} --out={shlex.quote(other)}"]
        what = msg("cli.archive.no_zstandard", out=out)
        return [Problem("archive.zstandard", what, rundir.GZIP, fixes, "out")]
    if find_run.exists(out):
        what = msg("cli.archive.exists", out=out)
        return [Problem("output.exists", what, allowed, [f"rm {shlex.quote(str(out))}"], "out")]
    if not find_run.is_folder(out.parent):
        what = msg("monitor.report.options.no_folder", folder=str(out.parent))
        fix = f"mkdir -p {shlex.quote(str(out.parent))}"
        return [
            Problem(
                "output.no_folder",
                what,
                msg("monitor.report.options.existing_folder"),
                [fix],
                "out",
            )
        ]
    return []


def members(run: RunDir, *, checkpoints: bool) -> tuple[list[Path], list[str]]:
    """(files of the run, checkpoints last; what is left out), relative to the run directory."""
    found, left_out = [], []
    for folder, folders, files in os.walk(run.path, onerror=_raise):
        at = Path(folder)
        for name in [*folders, *files]:
            path = at / name
            relative = path.relative_to(run.path)
            mode = path.lstat().st_mode
            if name.startswith("."):
                continue
            if stat.S_ISREG(mode):
                if name == archive.STATE and not checkpoints:
                    left_out.append(str(relative))
                elif name not in LEFT_OUT:
                    found.append(relative)
            elif not stat.S_ISDIR(mode):
                left_out.append(str(relative))
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found, key=lambda path: (path.name == archive.STATE, str(path))), left_out


def _raise(error: OSError) -> None:
    raise error


def _unreadable(file: str | Path, error: OSError) -> UserError:
    what = msg("cli.archive.unreadable", file=file, error=error.strerror or error)
    denied = isinstance(error, PermissionError)
    fixes = [f"chmod u+rX {shlex.quote(str(file))}"] if denied else []
    return UserError(Problem("archive.unreadable", what, "", fixes), Exit.RESOURCES)


def pack(run: RunDir, out: Path, *, checkpoints: bool) -> ArchiveIndex:
    """Write the archive, read it back, and give it its name: complete or not at all. Raises
    OSError, and UserError for a file of the run."""
    try:
        files, left_out = members(run, checkpoints=checkpoints)
    except OSError as error:
        raise _unreadable(error.filename or run.path, error) from None
    listed: dict[str, ArchivedFile] = {}
    plans = {path: _redacted(run.path / path) for path in files if path.name in PLANS}
    for path in files:
        if content := plans.get(path):
            digest, size = hashlib.sha256(content).hexdigest(), len(content)
        else:
            digest, size = _sha256(run.path / path)
        listed[f"{run.name}/{path}"] = {"bytes": size, "sha256": digest}
    index: ArchiveIndex = {
        "version": archive.VERSION,
        "duet_version": training.__version__,
        "name": run.name,
        "created": time.time(),
        "files": listed,
        "left_out": left_out,
    }
    suffix = rundir.ZSTANDARD if out.name.endswith(rundir.ZSTANDARD) else rundir.GZIP
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=suffix)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            with (
                archive.compressed(temporary, file) as stream,
                tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                _add_index(tar, index)
                for path in files:
                    _add(tar, run, path, listed, plans.get(path))
            file.flush()
            os.fsync(file.fileno())
        archive.verify(temporary)
        umask.use(temporary)
        temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)
    return index


def _sha256(path: Path) -> tuple[str, int]:
    """Digest and size of a file of the run. Raises UserError."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(archive.CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest(), size


def _add_index(tar: tarfile.TarFile, index: ArchiveIndex) -> None:
    content = json.dumps(index, indent=1).encode()
    member = tarfile.TarInfo(archive.INDEX)
    member.size, member.mtime = len(content), int(index["created"])
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        tar.addfile(member, file)


def _redacted(plan: Path) -> bytes | None:
    """A plan without the secrets in the arguments of a script; None for a damaged one, which is
    kept as it is."""
    record = rundir.read_json(plan)
    if record is None:
        return None
    for name in ("command", "script"):
        if isinstance(part := record.get(name), dict) and isinstance(part.get("args"), list):
            part["args"] = redact.words(map(str, part["args"]))
    return json.dumps(record, indent=1).encode()


def _add(
    tar: tarfile.TarFile,
    run: RunDir,
    path: Path,
    listed: dict[str, ArchivedFile],
    content: bytes | None,
) -> None:
    """One file, without its owner. What changes meanwhile is found by the verification. `content`:
    instead of that of the file."""
    name = f"{run.name}/{path}"
    with (run.path / path).open("rb") as opened:
        found = os.fstat(opened.fileno())
        file = opened if content is None else io.BytesIO(content)
        member = tarfile.TarInfo(name)
        member.size, member.mtime = listed[name]["bytes"], found.st_mtime
        tar.addfile(member, _Exactly(file, member.size))  # type: ignore[arg-type]


class _Exactly:
    """The first `size` bytes of a file; OSError if it has become shorter."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        chunk = self._file.read(min(size, self._left))
        if not chunk and self._left:
            raise OSError(msg("cli.archive.changed", file=self._file.name))
        self._left -= len(chunk)
        return chunk


def _verify(file: Path) -> int:
    try:
        index = archive.checked(file)
    except UserError as error:
        log.report(error, closing=msg("cli.archive.not_intact"))
        return int(error.code)
    count = units.plural(len(index["files"]), "file")
    print(msg("cli.archive.intact", file=term_text.clean(str(file)), count=count))
    return int(Exit.DONE)


def main(argv: list[str]) -> int:
    try:
        chosen = options(argv)
        if chosen.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        process.exit_on_stop()
        if chosen.verify:
            return _verify(chosen.verify)
        try:
            index = pack(chosen.run, chosen.out, checkpoints=chosen.checkpoints)
        except (OSError, archive.Unsafe) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            what = msg("cli.archive.unwritable", out=chosen.out, error=reason)
            raise UserError(Problem("output.unwritable", what), Exit.RESOURCES) from None
    except UserError as error:
        log.report(error, closing=msg("cli.archive.not_written"))
        return int(error.code)
    links = [name for name in index["left_out"] if Path(name).name != archive.STATE]
    if links:
        log.warning(msg("cli.archive.left_out", names=", ".join(links)))
    size = units.size(chosen.out.stat().st_size)
    count = units.plural(len(index["files"]), "file")
    print(msg("cli.archive.written", out=chosen.out, count=count, size=size))
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
