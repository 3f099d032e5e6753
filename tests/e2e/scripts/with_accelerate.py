"""The script bare_ddp.py with Hugging Face accelerate."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(1)
layer = torch.nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8))
model, optimizer, loader = accelerator.prepare(
    layer,
    torch.optim.SGD(layer.parameters(), lr=0.1),
    torch.utils.data.DataLoader(data, batch_size=4),
)
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward((model(batch) - 1).square().mean())
    optimizer.step()
if sys.argv[2:] == ["fail"] and accelerator.process_index == 1:
    raise RuntimeError("planted")
bias = accelerator.unwrap_model(model).bias.item()
with open(f"{sys.argv[1]}{accelerator.process_index}", "w") as file:
    file.write(f"{accelerator.num_processes} {accelerator.local_process_index} {bias:.6f}")
accelerator.end_training()
