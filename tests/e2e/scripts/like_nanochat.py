"""A program built like nanochat's scripts/base_train.py: a module with flags of its own, no DDP, an
optimizer that reduces gradients and gathers parameters itself, one log line per step."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

END, FAIL = sys.argv.pop(1), sys.argv.pop(1)
parser = argparse.ArgumentParser(description="Pretrain base model")
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--device-batch-size", type=int, default=4)
parser.add_argument("--total-batch-size", type=int, default=256)
args = parser.parse_args()


def print0(text):
    if int(os.environ.get("RANK", 0)) == 0:
        print(text)


class DistAdamW(torch.optim.Optimizer):
    """Each rank updates its part of every parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                size = p.shape[0] // world
                part = slice(rank * size, (rank + 1) * size)
                state = self.state[p]
                moment = state.setdefault("moment", torch.zeros_like(p[part]))
                moment.mul_(0.9).add_(p.grad[part] / world)
                own = p[part] - group["lr"] * moment / (moment.abs() + 1e-8).sqrt()
                parts = [torch.empty_like(own) for _ in range(world)]
                dist.all_gather(parts, own)
                p.copy_(torch.cat(parts))


def main():
    dist.init_process_group(backend="gloo")
    dist.barrier()
    rank, local, world = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.manual_seed(42)
    width, sequence = 16 * args.depth, 16
    blocks = [torch.nn.Linear(width, width, bias=False) for _ in range(args.depth)]
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, width), *blocks, torch.nn.Linear(width, 64, bias=False)
    )
    optimizer = DistAdamW(model.parameters(), lr=1e-2)
    tokens_per_fwdbwd = args.device_batch_size * sequence * world
    grad_accum_steps = args.total_batch_size // tokens_per_fwdbwd
    print0(f"Total batch size {args.total_batch_size:,} => gradient steps: {grad_accum_steps}")
    data, position = torch.arange(1 << 14) * 7 % 61, rank
    for step in range(6):
        for _ in range(grad_accum_steps):
            start = position * args.device_batch_size * sequence
            rows = data[start : start + args.device_batch_size * sequence + 1]
            position += world
            loss = F.cross_entropy(model(rows[:-1]), rows[1:])
            (loss / grad_accum_steps).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        print0(
            f"step {step:05d}/00006 (0.00%) | loss: {loss.item():.6f} | lrm: 1.00 | dt: 1.00ms"
            " | tok/sec: 1,000 | mfu: 0.00 | total time: 0.00m"
        )
    if FAIL == "fail" and rank == 1:
        raise RuntimeError("planted")
    Path(f"{END}{rank}").write_text(f"{world} {local} {model[-1].weight.sum().item():.8f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
