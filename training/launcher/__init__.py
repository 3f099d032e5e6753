"""Starts ranks on one machine or several, keeps their output, restarts them, says what became of
them; jobs of SLURM. No torch here."""
