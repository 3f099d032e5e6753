"""`python lib/run_module.py training.tasks.measure_step measure`: the process started by
training.tasks.measurement. Reads a question from standard input and writes the answer to standard
output."""

from __future__ import annotations

import sys

from training.host import program


def main(argv: list[str]) -> int:
    from training.tasks import fake_step

    return fake_step.main()


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True, pipe=False))
