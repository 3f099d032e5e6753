"""The script bare_ddp.py with Lightning, which must detect the existing ranks."""

import sys

import lightning
import torch


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return (self.layer(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(1, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(32, 8))
model = Line()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(devices) if (devices := (sys.argv[3:] or ["2"])[0]).isdecimal() else devices,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
if sys.argv[2:3] == ["fail"] and trainer.global_rank == 1:
    raise RuntimeError("planted")
with open(f"{sys.argv[1]}{trainer.global_rank}", "w") as file:
    file.write(f"{trainer.world_size} {trainer.local_rank} {model.layer.bias.item():.6f}")
