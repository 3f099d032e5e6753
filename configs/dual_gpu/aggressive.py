"""Aggressive: for two GPUs with 32 GB. `./train_dual_gpu.sh configs/dual_gpu/aggressive.py`"""

depth = 20  # transformer blocks
device_batch_size = 14  # sequences per rank
total_batch_size = 86016  # tokens per optimizer step, all ranks
max_seq_len = 3072  # tokens per sequence
