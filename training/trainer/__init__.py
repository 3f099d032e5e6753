"""Code of a rank: the loop (loop.py), train state, evaluation, checkpoints, metrics, trackers,
fault injection. Imports torch."""
