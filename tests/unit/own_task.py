"""A task of a user's own, as text, for tests."""

from __future__ import annotations

LINE = '''
"""A line through points."""
import torch
from beside import SLOPE
from torch import nn
from torch.utils.data import TensorDataset

from training.tasks.base import Task

OPTIONS = {"width": 3, "slope": 0.5, "bias": True, "title": "a line"}
raised = open(__file__ + ".ran", "a").write("x")  # only where it is run


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
