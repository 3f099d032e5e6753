"""Training as a SLURM job: submission, frozen code and settings, requeue. Nothing here imports
torch."""
