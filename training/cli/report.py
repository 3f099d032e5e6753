"""Write a run, or a comparison of several runs, as one HTML file.

Usage: ./duet report RUN… [--out=FILE] [--quiet]
       ./duet report SWEEP [--out=FILE] [--quiet]

  RUN            a run directory, the name of a run, latest, or an archive
  SWEEP          the folder or the name of a sweep: a comparison of its runs
  --out=FILE     default: report.html in the folder of one run or a sweep,
                 <run>.html here for an archive, for several runs
                 experiments/comparison_<names, or date and time>.html
  --quiet        do not print the path of the file
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import typed
from training.host import program

if TYPE_CHECKING:
    from training.monitor.report.options import ReportOptions
    from training.monitor.report.page import ReportPage


def main(argv: list[str]) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def _main(argv: list[str]) -> int:
    # Imported here, where Ctrl-C prints no traceback.
    from training.core import log, rundir
    from training.monitor.report import chart_render, options

    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        chart_render.warm_up()
        page = _page(chosen)
        try:
            rundir.write_output(chosen.out, page.html().encode("utf-8", "replace"))
        except OSError as error:
            what = msg("cli.report.unwritable", out=chosen.out, error=error.strerror)
            raise UserError(
                Problem(
                    "output.unwritable",
                    what,
                    msg("config.saved.writable_file"),
                    [f"{options.COMMAND} … --out=FILE"],
                ),
                Exit.RESOURCES,
            ) from None
    except UserError as error:
        log.report(error, closing=msg("cli.report.not_written"))
        return int(error.code)
    if not chosen.quiet:
        print(chosen.out)
    return int(Exit.DONE)


def _page(chosen: ReportOptions) -> ReportPage:
    from training.monitor.report import compare_page, run, run_page, sweep_page

    if chosen.sweep:
        return sweep_page.of(*chosen.sweep)
    seen = [run.read_run(folder) for folder in chosen.runs]
    return run_page.page(seen[0]) if len(seen) == 1 else compare_page.page(seen)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pages=True))
