"""Start, supervise and restart ranks, on one machine or several; SLURM jobs. No torch here."""
