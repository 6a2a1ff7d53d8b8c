"""How the axis of a ``torch.func.vmap`` is folded into the axes that the operators have: batch, channels or groups."""

from __future__ import annotations

import torch

from .execute import Arguments


def into_batch(t: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """Fold the vmapped axis into the batch: (n * size, ...) and size."""
    moved = t.movedim(dim, 0)
    return moved.reshape(moved.shape[0] * moved.shape[1], *moved.shape[2:]), moved.shape[0]


def out_of_batch(t: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `into_batch` for a result: (size, n, ...)."""
    return t.reshape(size, t.shape[0] // max(size, 1), *t.shape[1:])


def into_channels(t: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Fold the vmapped axis of an image into its channels, repeating an image that has none: (n, size * channels, ...)."""
    moved = t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return moved.transpose(0, 1).reshape(moved.shape[1], size * moved.shape[2], *moved.shape[3:])


def out_of_channels(t: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `into_channels`: (n, size, channels, ...)."""
    return t.reshape(t.shape[0], size, t.shape[1] // size, *t.shape[2:])


def into_rows(w: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Fold the vmapped axis of a weight into its in_channels, repeating a weight that has none: (size * in_channels, ...)."""
    moved = w.unsqueeze(0).expand(size, *w.shape) if dim is None else w.movedim(dim, 0)
    return moved.reshape(size * moved.shape[1], *moved.shape[2:])


def out_of_rows(w: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `into_rows`: (size, in_channels, ...)."""
    return w.reshape(size, w.shape[0] // size, *w.shape[1:])


def more_groups(arguments: Arguments, size: int) -> Arguments:
    """The arguments of the operator whose channels hold `size` vmapped ones side by side."""
    stride, padding, output_padding, groups, dilation = arguments
    return stride, padding, output_padding, groups * size, dilation
