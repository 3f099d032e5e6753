"""User task files, as text, for tests."""

from __future__ import annotations

LINE = '''
"""A line through points."""
import torch
from beside import SLOPE
from torch import nn
from torch.utils.data import TensorDataset

from training.tasks.base import Task

OPTIONS = {"width": 3, "slope": 0.5, "bias": True, "title": "a line"}
raised = open(__file__ + ".ran", "a").write("x")  # only when the file is run


class Unfinished(Task):
    def model(self):
        return nn.Identity()


class Line(Unfinished):
    def model(self):
        return nn.Linear(self.options.width, 1, bias=self.options.bias)

    def train_data(self):
        x = torch.linspace(0, 1, 12 * self.options.width).view(12, -1)
        return TensorDataset(x, SLOPE * x.sum(1))

    def loss(self, model, batch):
        x, y = batch
        return ((model(x)[:, 0] - y) ** 2).mean()
'''

SIZED = '''
"""A task whose memory can be counted by hand: 64 → width → 1."""
import torch
from torch import nn
from torch.utils.data import Dataset

from training.tasks.base import Task

OPTIONS = {"width": 256, "samples": 6400, "lr": 0.1, "trick": "none"}


class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": torch.full((64,), float(index)), "y": torch.ones(()), "name": str(index)}


class Net(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1))
        self.rate = rate

    def forward(self, x):
        return {"found": self.net(x)[:, 0] * self.rate}  # not a bare tensor


class Sized(Task):
    def model(self):
        rate = torch.linspace(0.5, 1.0, 3)[-1].item() if self.options.trick == "item" else 1.0
        return Net(self.options.width, rate)

    def train_data(self):
        print("to standard output")
        if self.options.trick == "sleep":
            import time

            time.sleep(600)
        if self.options.trick == "exit":
            raise SystemExit("enough")
        return Points(self.options.samples)

    def loss(self, model, batch):
        if self.options.trick == "slow loss":
            import time

            time.sleep(600)
        found = ((model(batch["x"])["found"] - batch["y"]) ** 2).mean()
        if self.options.trick == "value" and found.item() > 1e9:
            raise ValueError("far off")
        return found
'''
