"""Failure kinds of another machine or the connection to it; the others are in
training.launcher.failure_report."""

from typing import Final

SILENT: Final = "silent"
GONE: Final = "gone"
