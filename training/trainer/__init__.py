"""The training itself: model, optimizer, loop, evaluation, checkpoints, recording. Imports torch."""
