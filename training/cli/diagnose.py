"""What went wrong: the cause, the rank that failed first, the proof and what to do, from any log of
a training.

Usage: ./duet diagnose LOG… [--json] [--lang=en|zh]
       ./duet diagnose RUN --report-issue[=FILE]

LOG is a text file (any encoding, packed with gzip, alive or ended, of any launcher), a folder of
per-rank logs, a run directory, or - for standard input. Several are one run. Without LOG: the
newest run below experiments/.

  --json               one object: cause, rank, line, evidence, confidence, summary, advice, also, …
  --lang=en|zh         the language of people; otherwise that of LC_ALL or LANG
  --report-issue=FILE  writes a redacted bundle to attach to an issue: plan, versions, card, last
                       lines of each rank
  -h, --help           this text

Exit status: 0 whatever is found; 2 for a log that can not be read or a wrong option.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from training.core import args, log, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.project import WORK, typed
from training.diagnose import bundle, card, source
from training.diagnose.result import diagnose
from training.diagnose.signatures import LANGUAGES

EXPERIMENTS = WORK / "experiments"
COMMAND = "./duet diagnose"
FLAGS = {
    "json": args.SWITCH,
    "lang": args.one_of(*LANGUAGES),
    "report-issue": args.Flag(str, bare=""),
    "help": args.SWITCH,
}


@dataclass
class DiagnoseOptions:
    """`report_issue`: the bundle's file, "" for a usual name, None: no bundle."""

    logs: list[str]
    json: bool = False
    lang: str = ""
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
        # `--report-issue RUN`
        if wanted.report_issue and Path(wanted.report_issue).exists() and not wanted.logs:
            wanted.logs, wanted.report_issue = [wanted.report_issue], ""
        paths = _logs(wanted.logs)
        spoken = wanted.lang or card.language()
        record = diagnose(paths, spoken)
        if wanted.report_issue is not None:
            made = bundle.write(paths, record, wanted.report_issue)
            print(
                f"{made}: read it before you attach it; it holds no keys, names or home folders "
                f"that we know of"
            )
            return int(Exit.DONE)
    except UserError as error:
        log.report(error, closing="nothing was diagnosed")
        return int(error.code)
    except OSError as error:
        log.report(
            UserError(
                Problem(
                    "log.unreadable",
                    f"{error.filename or 'a log'} can not be read: {error.strerror}",
                )
            ),
            closing="nothing was diagnosed",
        )
        return int(Exit.CONFIG)
    try:
        print(
            json.dumps(record, ensure_ascii=False, indent=1)
            if wanted.json
            else card.draw(record, spoken),
            flush=True,
        )
    except OSError as error:
        log.report(
            UserError(
                Problem("output.unwritable", f"the answer can not be written: {error.strerror}")
            ),
            closing="nothing was said",
        )
        # what is left in its buffer would fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.RESOURCES)
    return int(Exit.DONE)


def _logs(words: list[str]) -> list[Path | None]:
    if not words:
        newest = rundir.newest(EXPERIMENTS)
        if newest is None:
            raise UserError(
                Problem(
                    "log.none",
                    f"no log was named, and there is no run in {EXPERIMENTS}",
                    "a log, a folder of logs, a run directory, or -",
                )
            )
        return [newest.path]
    paths = [None if word == "-" else Path(word) for word in words]
    if problem := source.missing([path for path in paths if path]):
        raise problem
    return paths


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends us without a word
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
