"""Learning rates of the task gpt."""

from __future__ import annotations

# Learning rate of the blocks if the configuration has auto, by optimizer.
MATRIX_LR = {"muon": 0.02, "adamw": 0.0015}
