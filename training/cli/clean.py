"""Free disk space: delete runs, checkpoints, logs or traces by rule. Without
--yes it only lists what would be deleted.

Usage: ./duet clean [NAME…] --keep=last,best | --what=PART,… [--yes]

What is deleted:
  --keep=RULE         checkpoints, except those of the rule: last, best, none,
                      or how many of the newest (--keep=3,best). The last intact
                      one is deleted only with none
  --what=PART         checkpoints (--keep=last), logs (output of the ranks,
                      hang verdicts), traces (profiles, memory snapshots), or
                      runs (the whole directory)
Of which runs (all conditions must hold; default: all, except for --what=runs):
  NAME                these; * and ? are wildcards
  --state=STATE       finished, stopped, failed, died, damaged, empty
  --older_than=TIME   planned longer ago than 30d, 12h, 2w
  --filter=TERM       as in ./duet runs: depth=12, "loss>3", "size>1GB"
Further:
  --yes               delete
  --dry_run           only list, also with --yes
  --dir=DIR           default: experiments/
  --json              print one JSON object

Running and starting runs, runs of other users (except by root), links, and
folders without a run are never touched.
Exit codes: 0 listed or deleted; 2 invalid option; 3 something was not deleted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from training.cli.cleaning import deletion, options, selection
from training.cli.cleaning.options import CleanOptions
from training.cli.cleaning.selection import Item, Selection
from training.core import find_run, log, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import typed
from training.core.suggest import suggest
from training.host import program
from training.monitor import term_text


def main(argv: list[str]) -> int:
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        try:
            # before the first run there is no folder
            found = selection.select(chosen) if find_run.is_folder(chosen.dir) else Selection()
        except OSError as error:
            what = msg("cli.runs.unreadable", folder=chosen.dir, error=error.strerror)
            raise UserError(
                Problem("runs.no_folder", what, msg("cli.runs.folder_allowed"))
            ) from None
        done, failed = deletion.delete(found, chosen) if chosen.yes else ([], [])
    except UserError as error:
        log.report(error, closing=msg("cli.clean.nothing_deleted"))
        return int(error.code)
    _warn_of_missing(found)
    if chosen.json:
        print(_json(found, chosen, done, failed))
    else:
        _print(found, chosen, done, failed)
    return int(Exit.RESOURCES if failed else Exit.DONE)


def _warn_of_missing(found: Selection) -> None:
    for name in found.missing:
        shown = term_text.clean(name)
        if near := suggest(name, found.runs)[:1]:
            log.warning(msg("cli.clean.near", name=shown, near=term_text.clean(near[0])))
        else:
            log.warning(msg("cli.clean.no_run", name=shown))


def _json(
    found: Selection, chosen: CleanOptions, done: list[Item], failed: list[tuple[Path, str]]
) -> str:
    gone = set(done)
    items = [
        {
            "run": item.run.name,
            "kind": item.kind,
            "path": str(item.path),
            "bytes": item.bytes,
            "deleted": item in gone,
        }
        for item in found.items
    ]
    left = [{"run": name, "reason": reason} for name, reason in found.left]
    left += [{"run": str(path), "reason": reason} for path, reason in failed]
    facts = {"schema_version": 1, "dry_run": not chosen.yes, "items": items, "left": left}
    return json.dumps(
        {**facts, "bytes": sum(i.bytes for i in (done if chosen.yes else found.items))}
    )


def _print(
    found: Selection, chosen: CleanOptions, done: list[Item], failed: list[tuple[Path, str]]
) -> None:
    for item in done if chosen.yes else found.items:
        shown = item.path.relative_to(chosen.dir)
        print(f"{units.size(item.bytes):>9}  {item.kind:<11}  {term_text.clean(str(shown))}")
    for name, reason in found.left:
        print(msg("cli.clean.left", name=term_text.clean(name), reason=reason))
    for path, reason in failed:
        log.error(msg("cli.clean.failed", path=term_text.clean(str(path)), reason=reason))
    amount = sum(item.bytes for item in (done if chosen.yes else found.items))
    if found.runs and not found.chosen and not found.items:
        print(msg("cli.runs.none_of", count=len(found.runs), folder=chosen.dir))
    elif chosen.yes:
        print(msg("cli.clean.deleted", size=units.size(amount), count=len(done)))
    elif found.items:
        print(msg("cli.clean.would", size=units.size(amount), count=len(found.items)))
    else:
        print(msg("cli.clean.nothing"))


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
