"""`python lib/run_module.py training.host.preflight RUN_DIR`: print the report that the plan made."""

from __future__ import annotations

import os
import sys

from training import command, console, rundir
from training.host.preflight.report import table


def main() -> int:
    if log := os.environ.get(console.LOG_VARIABLE):
        console.open_log(log)
    found = rundir.read_json(rundir.RunDir(sys.argv[1]).preflight) or {"checks": []}
    console.info("resource check\n" + table(found["checks"]).rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(lambda _: main(), __doc__, internal=True))
