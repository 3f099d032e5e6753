"""What every room needs: errors and exit codes, the log, the run directory and its records, units, redaction. Imports nothing of ours above it."""
