"""Checks a command line with any Python: `run_module.py training.cli.check_request SCRIPT ARGS`."""

from __future__ import annotations

import os
import sys

from training.core import log
from training.core.errors import NothingToDo, UserError
from training.host import program
from training.plan import script_request, script_words
from training.plan.request import read


def main() -> int:
    script, args = sys.argv[1], sys.argv[2:]
    try:
        if script_words.asked_for(args):
            script_request.read(script, args, os.environ)
        else:
            read(script, args, os.environ, installed=False)
    except NothingToDo:
        pass  # reported by the plan
    except UserError as error:
        log.report(error)
        return int(error.code)
    return 0


if __name__ == "__main__":
    sys.exit(program.run(lambda _: main(), __doc__, internal=True))
