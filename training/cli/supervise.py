"""The supervisor as a command:

python lib/run_module.py training.cli.supervise RUN_DIR [--node=1] [--analyse]
./duet attach …        where the ranks of a run or of any processes are (training.monitor.attach)
"""

from __future__ import annotations

import sys

from training.host import program


def main(argv: list[str]) -> int:
    if argv[:1] == ["attach"]:
        from training.monitor import attach

        return attach.main(argv[1:])
    from training.launcher import supervisor

    return supervisor.main(argv)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True, pipe=sys.argv[1:2] == ["attach"]))
