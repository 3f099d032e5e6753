"""Shared by all packages: errors and exit codes, the log, the run directory and its records, the
heartbeat, units, redaction."""
