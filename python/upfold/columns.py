"""fold (col2im) and unfold (im2col) on plain batched tensors: the column kernels outside the registry of algorithms."""

from __future__ import annotations

from math import prod

import torch

from . import native
from .execute import check_operands
from .overlap import check_out
from .problem import (
    DTYPE_CODES,
    Geometry,
    InvalidArgument,
    IntOrInts,
    Operator,
    Problem,
    block_geometry,
    fold_shape,
    pad_axes,
    pad_strides,
    per_axis,
    unfold_shape,
)

# kernel_size, dilation, padding, stride, in torch's order
BlockArguments = tuple[IntOrInts, IntOrInts, IntOrInts, IntOrInts]
_NO_STRIDES = (0, 0, 0, 0, 0)


def fold(
    columns: torch.Tensor, output_size: IntOrInts, arguments: BlockArguments, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum sliding blocks, (batch, channels * taps, blocks), into (batch, channels, output_size...)."""
    ndim = axes_of(output_size)
    kernel, geometry = block_geometry(ndim, *arguments)
    shape, blocks = fold_shape(columns.shape, per_axis("output_size", output_size, ndim), kernel, geometry)
    check_operands(input=columns, out=out)
    y = _result(columns, shape, out)
    if columns.stride(2) != 1 and columns.shape[2] > 1:
        columns = columns.contiguous()
    _run("col2im", columns, y, blocks, kernel, geometry)
    return y


def unfold(image: torch.Tensor, arguments: BlockArguments, out: torch.Tensor | None = None) -> torch.Tensor:
    """Lay sliding blocks of (batch, channels, spatial...) out as (batch, channels * taps, blocks)."""
    kernel, geometry = block_geometry(axes_of(arguments[0]), *arguments)
    shape, blocks = unfold_shape(image.shape, kernel, geometry)
    check_operands(input=image, out=out)
    columns = _result(image, shape, out)
    if out is not None and out.stride(2) != 1 and out.shape[2] > 1:
        return out.copy_(unfold(image, arguments))
    _run("im2col", columns, image, blocks, kernel, geometry)
    return columns


def axes_of(sizes: IntOrInts) -> int:
    """Number of spatial axes that an `output_size` or a `kernel_size` speaks of: an integer means 2, as in torch."""
    ndim = 2 if isinstance(sizes, (int, torch.SymInt)) else len(sizes)
    if not 1 <= ndim <= 3:
        raise InvalidArgument(f"{sizes} names {ndim} axes; fold and unfold know 1, 2 and 3")
    return ndim


def _result(like: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return like.new_empty(shape)
    if tuple(out.shape) != shape:
        raise InvalidArgument(f"out.shape = {tuple(out.shape)}; must be {shape}; allocate it with that shape")
    check_out(out, like)
    return out


def _run(
    kernel_name: str,
    columns: torch.Tensor,
    y: torch.Tensor,
    blocks: tuple[int, ...],
    kernel: tuple[int, ...],
    geometry: Geometry,
) -> None:
    """Launch col2im (columns to y) or im2col (y to columns) over the whole matrix."""
    if y.shape[0] == 0:
        return
    threads = torch.get_num_threads()
    problem = Problem(
        operator=Operator.CONV_TRANSPOSE,
        dtype=y.dtype,
        batch=y.shape[0],
        in_channels=1,
        out_channels=y.shape[1],
        groups=1,
        in_size=pad_axes(blocks, 1),
        out_size=pad_axes(y.shape[2:], 1),
        kernel_size=pad_axes(kernel, 1),
        stride=pad_axes(geometry.stride, 1),
        padding=pad_axes(geometry.padding, 0),
        dilation=pad_axes(geometry.dilation, 1),
        x_strides=_NO_STRIDES,
        w_strides=_NO_STRIDES,
        y_strides=pad_strides(y.stride(), y.shape),
        spatial_ndim=len(blocks),
        threads=threads,
    )
    whole_in = [(0, size) for size in problem.in_size]
    whole_out = [(0, size) for size in problem.out_size]
    pixels = prod(blocks)
    block = native.cpu().ColumnBlock(
        n=(0, y.shape[0]),
        oc=(0, y.shape[1]),
        in_d=whole_in[0],
        in_h=whole_in[1],
        in_w=whole_in[2],
        out_d=whole_out[0],
        out_h=whole_out[1],
        out_w=whole_out[2],
        sample_stride=columns.stride(0) if columns.shape[0] > 1 else columns.shape[1] * pixels,
        row_stride=columns.stride(1) if columns.shape[1] > 1 else pixels,
    )
    code = DTYPE_CODES[y.dtype]
    if kernel_name == "col2im":
        native.cpu().col2im(problem.cpu, block, code, columns.data_ptr(), 0, y.data_ptr(), threads)
    else:
        native.cpu().im2col(problem.cpu, block, code, y.data_ptr(), columns.data_ptr(), threads)
