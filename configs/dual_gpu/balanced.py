"""Balanced: for two GPUs with 32 GB. `./train_dual_gpu.sh configs/dual_gpu/balanced.py`"""

depth = 16  # transformer blocks
device_batch_size = 12  # sequences per rank
total_batch_size = 49152  # tokens per optimizer step, all ranks
max_seq_len = 2048  # tokens per sequence
