"""`python lib/run_module.py training.cli.resources RUN_DIR`: log the resource report of the
plan."""

from __future__ import annotations

import os
import sys

from training.core import log as console
from training.core import rundir
from training.core.messages import msg
from training.host import program
from training.plan.preflight.report import table


def main() -> int:
    if log := os.environ.get(console.LOG_VARIABLE):
        console.open_log(log)
    found = rundir.read_json(rundir.RunDir(sys.argv[1]).preflight) or {"checks": []}
    console.info(msg("cli.resource_check") + table(found["checks"]).rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(program.run(lambda _: main(), __doc__, internal=True))
