"""`python lib/run_module.py training.tasks.measure_step measure`: the process that
training.tasks.measurement starts. A question comes on standard input, the answer goes to standard
output."""

from __future__ import annotations

import sys

from training.host import program


def main(argv: list[str]) -> int:
    from training.tasks import fake_step

    return fake_step.main()


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True, pipe=False))
