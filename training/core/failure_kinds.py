"""Kinds of a failure that concern another machine, beside those of
training.launcher.failure_report."""

from typing import Final

# Kinds of a failure, beside those of training.launcher.failure_report: another machine, or the way
# to it.
SILENT: Final = "silent"
GONE: Final = "gone"
