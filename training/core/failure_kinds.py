"""Kinds of a failure that concern another machine, beside those of training.launcher.failure_report."""

# Kinds of a failure, beside those of training.launcher.failure_report: another machine, or the way to it.
SILENT, GONE = "silent", "gone"
