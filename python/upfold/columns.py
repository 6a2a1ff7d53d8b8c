"""fold (col2im) and unfold (im2col) on plain batched tensors: the column kernels outside the registry of algorithms."""

from __future__ import annotations

import warnings
from math import prod

import torch
import torch.nn.functional as F

from . import native
from .dispatch import fallback_allowed
from .execute import check_operands
from .geometry import Geometry, IntOrInts, InvalidArgument, block_geometry, fold_shape, per_axis, unfold_shape
from .overlap import check_out
from .problem import DTYPE_CODES, Operator, Problem, pad_axes, pad_strides

# kernel_size, dilation, padding, stride, in torch's order
BlockArguments = tuple[IntOrInts, IntOrInts, IntOrInts, IntOrInts]
_NO_STRIDES = (0, 0, 0, 0, 0)


def fold(
    columns: torch.Tensor, output_size: IntOrInts, arguments: BlockArguments, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum sliding blocks, (batch, channels * taps, blocks), into (batch, channels, output_size...)."""
    ndim = axes_of("output_size", output_size)
    kernel, geometry = block_geometry(ndim, *arguments)
    shape, blocks = fold_shape(columns.shape, per_axis("output_size", output_size, ndim), kernel, geometry)
    check_operands(input=columns, out=out)
    y = _result(columns, shape, out)
    missing = _missing(columns)
    if missing is not None:
        kernel_size, spatial = _two_axes(kernel, missing), shape[2:]
        return y.copy_(F.fold(columns, spatial, kernel_size, geometry.dilation, geometry.padding, geometry.stride))
    if columns.stride(2) != 1 and columns.shape[2] > 1:
        columns = columns.contiguous()
    _run("col2im", columns, y, blocks, kernel, geometry)
    return y


def unfold(image: torch.Tensor, arguments: BlockArguments, out: torch.Tensor | None = None) -> torch.Tensor:
    """Lay sliding blocks of (batch, channels, spatial...) out as (batch, channels * taps, blocks)."""
    kernel, geometry = block_geometry(axes_of("kernel_size", arguments[0]), *arguments)
    shape, blocks = unfold_shape(image.shape, kernel, geometry)
    check_operands(input=image, out=out)
    columns = _result(image, shape, out)
    missing = _missing(image)
    if missing is not None:
        return columns.copy_(F.unfold(image, _two_axes(kernel, missing), geometry.dilation, geometry.padding, geometry.stride))
    if out is not None and out.stride(2) != 1 and out.shape[2] > 1:
        return out.copy_(unfold(image, arguments))
    _run("im2col", columns, image, blocks, kernel, geometry)
    return columns


def axes_of(name: str, sizes: IntOrInts) -> int:
    """Number of spatial axes that an `output_size` or a `kernel_size` speaks of: an integer means 2, as in torch."""
    ndim = 2 if isinstance(sizes, (int, torch.SymInt)) else len(sizes)
    if not 1 <= ndim <= 3:
        raise InvalidArgument(f"{name} = {sizes}; must name 1, 2 or 3 axes; got {ndim}")
    return ndim


def _missing(t: torch.Tensor) -> str | None:
    """Why no kernel of ours runs where `t` lies, or None."""
    if t.is_cuda:
        return native.load_cuda()[1]
    return None if t.device.type == "cpu" else f"upfold has no kernels for {t.device.type}"


def _two_axes(kernel_size: tuple[int, ...], reason: str) -> tuple[int, ...]:
    """Announce that torch's operator stands in, or refuse: it knows two axes only."""
    if len(kernel_size) != 2 or not fallback_allowed():
        raise InvalidArgument(
            f"kernel_size = {kernel_size}; no kernel runs on this device: {reason}; torch's own stands in for two axes only"
        )
    warnings.warn(f"upfold runs torch's own fold and unfold: {reason}", RuntimeWarning, stacklevel=3)
    return kernel_size


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
    module = native.load_cuda()[0] if y.is_cuda else native.cpu()
    assert module is not None, "callers ask _missing() first"
    block = module.ColumnBlock(
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
    described = problem.cuda if y.is_cuda else problem.cpu
    place = (y.get_device(), torch.cuda.current_stream(y.device).cuda_stream) if y.is_cuda else (threads,)
    code = DTYPE_CODES[y.dtype]
    if kernel_name == "col2im":
        module.col2im(described, block, code, columns.data_ptr(), 0, y.data_ptr(), *place)
    else:
        module.im2col(described, block, code, y.data_ptr(), columns.data_ptr(), *place)
