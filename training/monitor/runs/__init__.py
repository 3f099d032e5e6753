"""The table of runs: facts of many run directories, filters, order, text."""
