"""The derivatives of fold and unfold, which are each other's, and the routes by which a call takes them (as in `autograd.py`)."""

from __future__ import annotations

from typing import Any

import torch

from . import columns as column_kernels
from .batching import into_batch, out_of_batch
from .columns import BlockArguments
from .functions import Wanted, applied, dispatched, eager, recorded, transformed
from .geometry import block_geometry
from .watch import needs_gradient, nobody_intercepts, transform_is_active

Sizes = tuple[int, ...]


def schema_blocks(ndim: int, arguments: BlockArguments) -> tuple[Any, ...]:
    """The arguments of fold and unfold in the order and form of their schemas."""
    kernel, g = block_geometry(ndim, *arguments)
    return list(kernel), list(g.dilation), list(g.padding), list(g.stride)


def fold(columns: torch.Tensor, output_size: Sizes, arguments: BlockArguments) -> torch.Tensor:
    """Differentiable fold of batched columns; the arguments are those of `columns.fold`."""
    if nobody_intercepts(columns):
        run = _recorded_fold if needs_gradient(columns) else column_kernels.fold
        return run(columns, output_size, arguments)
    if transform_is_active():
        return applied(FoldTransformed, columns, output_size, arguments)
    return dispatched("fold", columns, list(output_size), *schema_blocks(len(output_size), arguments))


def unfold(image: torch.Tensor, arguments: BlockArguments) -> torch.Tensor:
    """Differentiable unfold of a batched tensor; the arguments are those of `columns.unfold`."""
    if nobody_intercepts(image):
        return (_recorded_unfold if needs_gradient(image) else column_kernels.unfold)(image, arguments)
    if transform_is_active():
        return applied(UnfoldTransformed, image, arguments)
    return dispatched("unfold", image, *schema_blocks(image.dim() - 2, arguments))


class _FoldRules:
    """image = fold(columns)."""

    operands, keep_result = 0, False
    kernel = staticmethod(column_kernels.fold)

    @staticmethod
    def compute(columns: torch.Tensor, output_size: Sizes, arguments: BlockArguments) -> torch.Tensor:
        if nobody_intercepts(columns):
            return column_kernels.fold(columns, output_size, arguments)
        return dispatched("fold_raw", columns, list(output_size), *schema_blocks(len(output_size), arguments))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, ctx.output_size, ctx.arguments = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        return unfold(grad, ctx.arguments), None, None

    @staticmethod
    def jvp(ctx: Any, columns_t: torch.Tensor, *_: None) -> Any:
        return fold(columns_t, ctx.output_size, ctx.arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        columns, output_size, arguments = inputs
        rows, size = into_batch(columns, in_dims[0] or 0)
        image = fold(rows, output_size, arguments)
        return out_of_batch(image, size), 0


class _UnfoldRules:
    """columns = unfold(image)."""

    operands, keep_result = 0, False
    kernel = staticmethod(column_kernels.unfold)

    @staticmethod
    def compute(image: torch.Tensor, arguments: BlockArguments) -> torch.Tensor:
        if nobody_intercepts(image):
            return column_kernels.unfold(image, arguments)
        return dispatched("unfold_raw", image, *schema_blocks(image.dim() - 2, arguments))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        image, ctx.arguments = inputs
        ctx.output_size = tuple(image.shape[2:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        return fold(grad, ctx.output_size, ctx.arguments), None

    @staticmethod
    def jvp(ctx: Any, image_t: torch.Tensor, *_: None) -> Any:
        return unfold(image_t, ctx.arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        image, arguments = inputs
        rows, size = into_batch(image, in_dims[0] or 0)
        columns = unfold(rows, arguments)
        return out_of_batch(columns, size), 0


Fold, FoldTransformed = eager(_FoldRules), transformed(_FoldRules)
Unfold, UnfoldTransformed = eager(_UnfoldRules), transformed(_UnfoldRules)
_recorded_fold, _recorded_unfold = recorded(_FoldRules), recorded(_UnfoldRules)
