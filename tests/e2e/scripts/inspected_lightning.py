"""Lightning with the inspector's callback: inspected_lightning.py "FAULT;FAULT…" [MODE] [STEPS].
Imports the package under the name that does not clash."""

import sys
import time

import lightning
import torch
from duet_inspector.lightning import InspectorCallback

FAULTS = sys.argv[1].split(";")
MODE = sys.argv[2] if len(sys.argv) > 2 else "auto"
# A loaded machine does slow a rank down: only the tests of a slow rank look for one.
FACTOR = 1.3 if "slow" in FAULTS else 10
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 60
SLOW, QUICK = 0.03, 0.005


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        time.sleep(SLOW if "slow" in FAULTS and self.global_rank == 1 else QUICK)
        return (self.last(self.first(batch[0]).tanh()) - 1).square().mean()

    def on_train_batch_end(self, outputs: object, batch: object, number: int) -> None:
        if "changed" in FAULTS and self.global_rank == 1 and self.global_step == 15:
            with torch.no_grad():
                self.last.weight.add_(1e-6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


data = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
if "nan" in FAULTS:
    data[13, 2] = float("nan")  # rank 1's
callback = InspectorCallback(every=20, on_finding=MODE, slow=FACTOR, patience_s=3)
lightning.seed_everything(1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices="auto" if "alone" in FAULTS else 2,
    strategy="auto" if "alone" in FAULTS else "ddp",
    max_epochs=4,
    max_steps=STEPS,
    use_distributed_sampler="no sampler" not in FAULTS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[callback],
)
trainer.fit(
    Net(),
    torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_size=4, shuffle="shuffle" in FAULTS
    ),
)
print(f"rank {trainer.global_rank} done", flush=True)
