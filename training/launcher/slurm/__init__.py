"""Training as a job of SLURM: what is asked for, what is frozen for it, and what happens at its
end. Nothing here imports torch."""
