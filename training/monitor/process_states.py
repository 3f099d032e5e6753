"""States of a process, as --json has them, in words for the screen."""

from __future__ import annotations

from training.core.messages import msg


def process_word(state: str | None) -> str:
    words = {
        "running": msg("monitor.process.running"),
        "sleeping": msg("monitor.process.sleeping"),
        "blocked in I/O": msg("monitor.process.blocked"),
        "stopped": msg("monitor.process.stopped"),
        "held by a debugger": msg("monitor.process.traced"),
        "ended": msg("monitor.process.ended"),
    }
    return words.get(state or "", state or "")
