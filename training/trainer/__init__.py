"""A rank: the loop (loop.py), train state, evaluation, checkpoints, metrics, trackers, faults on
purpose. Imports torch."""
