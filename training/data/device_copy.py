"""Copies of tensors on the device."""

from __future__ import annotations

import torch

# A larger tensor outside of training is one of an evaluation (a whole clip). torch takes the next
# power of two bytes for it and keeps them until the end of the run.
PINNED_MOST = 256 << 20
_refused = False  # pinned memory, by the driver: where a process may have little, as under WSL


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory, without waiting, where that is possible."""
    global _refused
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    dense = tensor.layout == torch.strided
    if dense and tensor.is_pinned():
        return tensor.to(device, non_blocking=True)
    wanted = torch.is_grad_enabled() or tensor.numel() * tensor.element_size() <= PINNED_MOST
    if wanted and not _refused:
        try:
            pinned = tensor.pin_memory()
        except RuntimeError:  # an error of the GPU itself is raised again below
            _refused = dense  # others may lack the operation
        else:
            return pinned.to(device, non_blocking=True)
    return tensor.to(device)
