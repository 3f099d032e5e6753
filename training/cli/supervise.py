"""The supervisor as a command:

python lib/run_module.py training.cli.supervise RUN_DIR [--node=1] [--analyse] [--stopped=TERM]
./duet attach …        where the ranks of a run or of any processes are (training.monitor.attach)
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from training.host import process

STOPPED = "--stopped="


def main(argv: list[str], asked: Sequence[int] = ()) -> int:
    """`asked`: gets the stop signals of the time before the supervisor handles them."""
    if argv[:1] == ["attach"]:
        from training.monitor import attach

        return attach.main(argv[1:])
    from training.launcher import supervisor

    try:
        return supervisor.main(argv, asked)
    finally:
        process.ignore_stop_signals()  # Python restores their default action when it exits


if __name__ == "__main__":
    attaches = sys.argv[1:2] == ["attach"]
    # before the other imports, which take half a second
    early = [] if attaches else process.remember_stops()
    if sys.argv[-1].startswith(STOPPED):  # the launch script was, before it became this process
        early.insert(0, signal.Signals[f"SIG{sys.argv.pop().removeprefix(STOPPED)}"])
    from training.host import program

    program.leave(
        program.run(lambda argv: main(argv, early), __doc__, internal=True, pipe=attaches)
    )
