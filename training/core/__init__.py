"""What every room needs: errors and exit codes, the log, the run directory and its records, the
heartbeat, units, redaction."""
