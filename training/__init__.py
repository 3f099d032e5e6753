"""Duet: a launcher and trainer for PyTorch DDP that checks first, never hangs in silence and names
the cause."""

__version__ = "0.1.0"
