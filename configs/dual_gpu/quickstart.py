"""Quickstart: a minute on two slow CPU cores, seconds on two GPUs, with text that every machine
already has."""

device = "auto"  # two GPUs if available, else two CPU ranks
depth = 2
max_seq_len = 128
device_batch_size = 16
total_batch_size = 2 * device_batch_size * max_seq_len  # two ranks, no accumulation
num_iterations = 300
eval_every = 100
eval_tokens = 32768
save_every = 100
sample_tokens = 400
data = "stdlib"  # source code of the Python standard library
