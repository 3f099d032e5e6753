"""Conservative: for two GPUs with 32 GB. `./train_dual_gpu.sh configs/dual_gpu/conservative.py`"""

depth = 12  # transformer blocks
device_batch_size = 8  # sequences per rank
total_batch_size = 24576  # tokens per optimizer step, all ranks
max_seq_len = 1536  # tokens per sequence
