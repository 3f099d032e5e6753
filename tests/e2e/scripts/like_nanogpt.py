"""A program built like nanoGPT's train.py: settings as globals that a second file overrides from
the command line, ranks from the environment, checkpoints by the first rank."""

import os
import sys
from ast import literal_eval
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

END, FAIL = sys.argv.pop(1), sys.argv.pop(1)
out_dir = "out"
max_iters = 5
gradient_accumulation_steps = 4
batch_size = 4
block_size = 16
n_embd = 16
learning_rate = 1e-2
backend = "gloo"
config_keys = [
    k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))
]
for word in sys.argv[1:]:  # configurator.py
    key, _, value = word.removeprefix("--").partition("=")
    assert key in globals(), f"Unknown config key: {key}"
    try:
        globals()[key] = literal_eval(value)
    except (SyntaxError, ValueError):
        globals()[key] = value
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp
init_process_group(backend=backend)
ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
if master_process:
    Path(out_dir).mkdir(parents=True, exist_ok=True)
torch.manual_seed(1337 + ddp_rank)
data = torch.arange(4096) % 61


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])


model = DDP(torch.nn.Sequential(torch.nn.Embedding(61, n_embd), torch.nn.Linear(n_embd, 61)))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
X, Y = get_batch()
for iter_num in range(max_iters + 1):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with nullcontext():
            logits = model(X)
            loss = F.cross_entropy(logits.view(-1, 61), Y.view(-1)) / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time 1.00ms, mfu 0.00%")
        torch.save(
            {"model": model.module.state_dict(), "config": config}, os.path.join(out_dir, "ckpt.pt")
        )
if FAIL == "fail" and ddp_rank == 1:
    raise RuntimeError("planted")
with open(f"{END}{ddp_rank}", "w") as file:
    file.write(f"{ddp_world_size} {ddp_local_rank} {model.module[1].bias.sum().item():.8f}")
destroy_process_group()
