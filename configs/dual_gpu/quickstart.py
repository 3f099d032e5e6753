"""Quickstart: about a minute on two CPU cores, seconds on two GPUs; real text that is on every
machine already."""

device = "auto"  # two GPUs when they are there, else two CPU ranks
depth = 3
max_seq_len = 128
device_batch_size = 16
total_batch_size = 2 * device_batch_size * max_seq_len  # two ranks, no accumulation
num_iterations = 400
eval_every = 100
save_every = 200
sample_tokens = 400
data = "stdlib"  # the Python standard library's own sources
