"""The pattern of the DDP tutorial (multigpu_torchrun.py): a Trainer class, a sampler, a snapshot that
a restart continues."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.epochs_run, self.snapshot_path = save_every, 0, snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")
        self.model = DDP(self.model)

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[{self.global_rank}] Epoch {epoch} | Batchsize: {size}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.local_rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.snapshot_path)


def main(end, fail, total_epochs=3):
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(256, 20), torch.rand(256, 1))
    model = torch.nn.Linear(20, 1)
    loader = DataLoader(
        dataset, batch_size=32, shuffle=False, sampler=DistributedSampler(dataset), num_workers=1
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, loader, optimizer, 1, "snapshot.pt")
    trainer.train(total_epochs)
    if fail == "fail" and trainer.global_rank == 1:
        raise RuntimeError("planted")
    with open(f"{end}{trainer.global_rank}", "w") as file:
        size = torch.distributed.get_world_size()
        file.write(f"{size} {trainer.local_rank} {model.bias.item():.8f}")
    destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
