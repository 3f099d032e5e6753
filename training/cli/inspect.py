"""Check whether all ranks of a running training are training. Works from outside:
needs no preparation and does not stop the training.

Usage: ./duet inspect [RUN] [--json] [--watch[=SECONDS]]
       ./duet inspect --pid=PID [--json] [--watch[=SECONDS]]

  RUN                 a run directory, the name of a run, or latest (default)
  --pid=PID           any process of any training: torchrun, a rank, a worker
  --json              print one JSON object
  --watch[=SECONDS]   repeat every 10 s, until Ctrl-C or the end of the training

Takes 1 to 2 s if every rank trains, otherwise up to 6 s or a few steps.

Exit codes: 0 YES, every rank trains, or the run has finished; 5 NO, a rank does
not train, or the run ended unfinished; 3 unknown: no permission, starting, no
progress yet, or how a job of another launcher has ended (--watch); 2 invalid
option, no such run or process; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import time

from training.core import json_text, log
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.project import typed
from training.host import program
from training.monitor.health import health, options, render
from training.monitor.health.health import HAS_ENDED, HealthReport
from training.monitor.health.options import HealthOptions
from training.watchdog.probes import procfs


def main(argv: list[str]) -> int:
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed((__doc__ or "").strip()))
            return int(Exit.DONE)
        program.require_output()
        run = options.find(chosen.run) if chosen.pid is None else None
        pid = chosen.pid or 0
        while True:
            report = health.of_run(run) if run else health.of_process(pid)
            _print(report, chosen)
            if chosen.every_s is None or report.answer == HAS_ENDED:
                return int(report.code)
            time.sleep(chosen.every_s)
            run = run or report.run
            if run is None and (found := report.target) is not None:
                # the process that was named may be a worker that ends before the training
                left = list(filter(procfs.lives, (pid, *found.pids.values())))
                if not left:
                    text = msg("monitor.health.processes.gone")
                    _print(HealthReport(HAS_ENDED, text, Exit.RESOURCES), chosen)
                    return int(Exit.RESOURCES)
                pid = left[0]
    except UserError as error:
        log.report(error, closing=msg("monitor.attach.nothing"))
        return int(error.code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def _print(report: HealthReport, chosen: HealthOptions) -> None:
    if chosen.json:
        print(
            json_text.answer(render.record(report), indent=None if chosen.every_s else 1),
            flush=True,
        )
        return
    colour = log.colourful(sys.stdout)
    if chosen.every_s is not None:
        print("\x1b[H\x1b[2J" if colour else "", end="" if colour else "\n")
    print("\n".join(render.screen(report, colour=colour)), flush=True)


if __name__ == "__main__":
    program.replace_unknown()
    program.use_readable_language()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under `… | head`
    sys.exit(main(sys.argv[1:]))
