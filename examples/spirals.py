"""A small network classifies the points of two spirals: a complete custom task.

./launch_train.sh 2 --task=examples/spirals.py --device=auto --device_batch_size=64 --num_epochs=20
--eval_every=100
"""

import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from training.tasks.base import Task

# Also flags (--width=48) and config keys; the default determines the type.
OPTIONS = {"points": 4000, "noise": 0.05, "width": 64, "lr": 3e-3}
SIDE = 200  # pixels of the image


def spirals(count, noise, seed):
    random = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = 3 * torch.pi * torch.rand(count, generator=random).sqrt()
    turned = angle + torch.pi * label
    points = torch.stack((turned.cos(), turned.sin()), 1) * angle[:, None] / 10
    return TensorDataset(points + noise * torch.randn(count, 2, generator=random), label)


class Spirals(Task):
    def model(self):
        width = self.options.width
        return nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def train_data(self):
        return spirals(self.options.points, self.options.noise, seed=1)

    def val_data(self):
        return spirals(1000, self.options.noise, seed=2)

    def loss(self, model, batch):
        points, label = batch
        return nn.functional.cross_entropy(model(points), label)

    def metrics(self, model, batch):
        points, label = batch
        return {"accuracy": (model(points).argmax(1) == label).float()}

    def sample(self, model, folder):
        """Predicted class of each point, as an image in the report."""
        line = torch.linspace(-1, 1, SIDE, device=self.device)
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)
        belief = model(grid).float().softmax(1)[:, 1].reshape(SIDE, SIDE)
        Image.fromarray((255 * belief).byte().cpu().numpy()).resize((2 * SIDE, 2 * SIDE)).save(
            folder / "belief.png"
        )
