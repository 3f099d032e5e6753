"""`python lib/run_module.py training.monitor [--log=FILE | --run=DIR] [--interval=3] [--once] …`: see monitor_training.sh."""

from __future__ import annotations

import json
import os
import signal
import sys

from training import console
from training.errors import Exit, UserError
from training.monitor import options, screen, state


def main(argv: list[str]) -> int:
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(__doc__)
            return int(Exit.DONE)
        run, log = options.find(chosen, options.ROOT)
    except UserError as error:
        console.report(error, closing="nothing to show")
        return int(error.code)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    ascii_only = chosen.ascii or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    watch = state.Watch(run, log)
    from training.monitor import terminal

    on_terminal = sys.stdout.isatty()
    if not on_terminal:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends us without a word
    try:
        if chosen.json:
            print(json.dumps(state.finite(watch.read()), indent=1))
        elif chosen.once:
            width, height = terminal.size()
            if not on_terminal:
                width, height = _variable("COLUMNS", 80), _variable("LINES", 24)
            terminal.print_screen(screen.screen(watch.read(), screen.View(width, height - on_terminal, ascii_only=ascii_only)))
        elif on_terminal and os.environ.get("TERM", "dumb") != "dumb":
            terminal.live(watch, chosen.interval_s, ascii_only)
        else:
            terminal.lines(watch, chosen.interval_s, ascii_only)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    return int(Exit.DONE)


def _variable(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and 1 <= int(value) <= 10_000 else otherwise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
