"""'Are all my ranks training?' – answered for a job that runs, from outside; the job needs nothing
for it and is not stopped.

    ./duet inspect [RUN]          a run directory, or the name of a run; nothing or 'latest': the
                                  newest run
    ./duet inspect --pid=PID      any process of any training: torchrun, a rank, a data-loader
                                  worker of one
        --json              one JSON object
        --watch[=SECONDS]   again and again, every 10 s, until Ctrl-C or the end of the job

It takes 1 to 2 s when all is well, and up to 6 s (a few steps, where these are longer) before it
says anything else.

Exit status: 0 YES, every rank trains, or the run has finished; 5 NO, a rank does not, or the run
has ended without finishing; 3 it can not be told, because the ranks may not be looked into, are
only starting, or nothing moves yet; 2 wrong usage, or no such run or process.
"""

from __future__ import annotations

import json
import signal
import sys
import time

from training.core import log
from training.core.errors import Exit, UserError
from training.core.project import typed
from training.monitor.health import health, options, render
from training.monitor.health.health import HAS_ENDED, HealthReport
from training.monitor.health.options import HealthOptions


def main(argv: list[str]) -> int:
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed((__doc__ or "").strip()))
            return int(Exit.DONE)
        run = options.find(chosen.run) if chosen.pid is None else None
        while True:
            report = health.of_run(run) if run else health.of_process(chosen.pid or 0)
            _print(report, chosen)
            if chosen.every_s is None or report.answer == HAS_ENDED:
                return int(report.code)
            time.sleep(chosen.every_s)
    except UserError as error:
        log.report(error, closing="nothing was looked into")
        return int(error.code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def _print(report: HealthReport, chosen: HealthOptions) -> None:
    if chosen.json:
        print(json.dumps(render.record(report), indent=None if chosen.every_s else 1), flush=True)
        return
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    colour = log.colourful(sys.stdout)
    if chosen.every_s is not None:
        print("\x1b[H\x1b[2J" if colour else "", end="" if colour else "\n")
    print("\n".join(render.screen(report, colour=colour)), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends us without a word
    sys.exit(main(sys.argv[1:]))
