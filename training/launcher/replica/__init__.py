"""Copies of node 0's checkpoints and records on the second machine, if that has a disk of its own:
without node 0 the run can continue there."""
