"""Diagnose a failed or hung training from its log: cause, first failed rank,
evidence and advice.

Usage: ./duet diagnose [LOG…] [--json]
       ./duet diagnose RUN --report-issue[=FILE]

LOG is a text file (any launcher, any encoding, also gzip, finished or still
growing), a folder of per-rank logs, a run (its directory, its name in
experiments/, or latest; also --run=RUN), a file of `./duet archive`, or - for
standard input.
Several logs are treated as one run. Default: the newest run in experiments/.

  --json               print one JSON object: cause, rank, line, evidence,
                       confidence, summary, advice, …
  --report-issue=FILE  write a redacted bundle for a bug report: plan, versions,
                       card, last lines of each rank
  -h, --help           this text

Exit codes: 0 diagnosed, with any result; 2 unreadable log or invalid option;
3 the answer cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from training.core import args, find_run, json_text, log, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import WORK, typed
from training.core.suggest import suggest
from training.diagnose import bundle, card, source
from training.diagnose.result import diagnose
from training.host import program

EXPERIMENTS = WORK / "experiments"
COMMAND = "./duet diagnose"
ASKER = find_run.RunSelector("RUN", f"{COMMAND} ", COMMAND)
FLAGS = {
    "json": args.SWITCH,
    "run": args.TEXT,
    "report-issue": args.Flag(str, bare=""),
    "help": args.SWITCH,
}


@dataclass
class DiagnoseOptions:
    """`report_issue`: file of the bundle; "": default name, None: no bundle."""

    logs: list[str]
    json: bool = False
    run: str | None = None
    report_issue: str | None = None
    help: bool = False


def options(argv: list[str]) -> DiagnoseOptions:
    """Raises UserError."""
    line = args.parse(argv, FLAGS, COMMAND)
    if line.problems and "help" not in line.values:
        raise UserError(line.problems)
    return DiagnoseOptions(line.words, **line.values)


def main(argv: list[str]) -> int:
    try:
        wanted = options(argv)
        if wanted.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        program.require_output()
        # `--report-issue RUN`
        if wanted.report_issue and find_run.exists(Path(wanted.report_issue)) and not wanted.logs:
            wanted.logs, wanted.report_issue = [wanted.report_issue], ""
        paths = _logs(wanted)
        record = diagnose(paths)
        if wanted.report_issue is not None:
            made = bundle.write(paths, record, wanted.report_issue)
            print(msg("cli.diagnose.bundle", file=made))
            return int(Exit.DONE)
    except UserError as error:
        log.report(error, closing=msg("cli.diagnose.nothing_diagnosed"))
        return int(error.code)
    except OSError as error:
        log.report(
            UserError(
                Problem(
                    "log.unreadable",
                    msg("cli.diagnose.unreadable", filename=error.filename, error=error.strerror)
                    if error.filename
                    else msg("cli.diagnose.log_unreadable", error=error.strerror),
                )
            ),
            closing=msg("cli.diagnose.nothing_diagnosed"),
        )
        return int(Exit.CONFIG)
    try:
        print(
            json_text.answer(record) if wanted.json else card.draw(record),
            flush=True,
        )
    except OSError as error:
        log.report(
            UserError(
                Problem("output.unwritable", msg("cli.diagnose.unwritable", error=error.strerror)),
                Exit.RESOURCES,
            ),
            closing=msg("cli.diagnose.nothing_printed"),
        )
        program.discard_output()
        return int(Exit.RESOURCES)
    return int(Exit.DONE)


def _logs(wanted: DiagnoseOptions) -> list[Path | None]:
    words = [_run(word) for word in wanted.logs]
    if wanted.run is not None:
        named = None if wanted.run == find_run.LATEST else wanted.run
        words.append(str(find_run.find(named, EXPERIMENTS, ASKER).path))
    if not words:
        newest = find_run.newest(EXPERIMENTS)
        if newest is None:
            raise UserError(
                Problem(
                    "log.none",
                    msg("cli.diagnose.no_log", folder=EXPERIMENTS),
                    msg("cli.diagnose.logs_allowed"),
                )
            )
        return [newest.path]
    paths = [None if word == "-" else Path(word) for word in words]
    if problem := source.missing([path for path in paths if path], _near):
        raise problem
    return paths


def _near(path: Path) -> list[str]:
    """The commands for the run or the file beside it with a similar name, and for the newest run,
    instead of a path that does not exist."""
    runs = [folder.name for _, folder in sorted(find_run.planned(EXPERIMENTS), reverse=True)]
    there = list[str]()
    with contextlib.suppress(OSError):
        there = os.listdir(path.parent)
    similar = suggest(path.name, runs)[:1]
    similar += [str(path.with_name(name)) for name in suggest(path.name, there)[:1]]
    other = msg("core.find_run.newest", newest=COMMAND) if runs else f"{COMMAND} --help"
    return [*map(ASKER.command, similar), other]


def _run(word: str) -> str:
    """The directory of a run in experiments/ where `word` is its name or latest, or of an archived
    run, else `word`. Raises UserError."""
    if word == find_run.LATEST and not find_run.exists(Path(word)):
        return str(find_run.find(None, EXPERIMENTS, ASKER).path)
    if find_run.is_archive(Path(word)):
        return str(find_run.find(word, EXPERIMENTS, ASKER).path)
    run = rundir.RunDir(EXPERIMENTS / word)
    plain = word == Path(word).name and not find_run.exists(Path(word))
    return str(run.path) if plain and find_run.is_run(run) else word


if __name__ == "__main__":
    program.replace_unknown()
    program.use_readable_language()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under `… | head`
    sys.exit(main(sys.argv[1:]))
