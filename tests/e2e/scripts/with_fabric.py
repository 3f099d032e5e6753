"""The script bare_ddp.py with Lightning Fabric, which must detect the existing ranks."""

import sys

import lightning
import torch

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1, verbose=False)
layer = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(32, 8))
for (batch,) in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4)):
    optimizer.zero_grad()
    fabric.backward((model(batch) - 1).square().mean())
    optimizer.step()
if sys.argv[2] == "fail" and fabric.global_rank == 1:
    raise RuntimeError("planted")
with open(f"{sys.argv[1]}{fabric.global_rank}", "w") as file:
    file.write(f"{fabric.world_size} {fabric.local_rank} {layer.bias.item():.8f}")
