"""Sizes: the formula of the output size, and every check of an operator's arguments.

The only home of both. Sizes always name the transposed convolution ``y = conv_transpose(x, w)``. Every function works on symbolic
sizes too, so that fake tensors are checked exactly as real ones.
"""

from __future__ import annotations

import operator as _operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

IntOrInts = int | Sequence[int]
_ADDRESSABLE_BYTES = 2**63 - 1
_LARGEST_POSITION = 2**62


class InvalidArgument(ValueError, RuntimeError):
    """An argument that cannot be used; the text reads ``argument = value; rule; hint``.

    It is a ``ValueError`` and, because torch raises that one, a ``RuntimeError``.
    """


class Edges(NamedTuple):
    """A padding that differs at the two ends of an axis, one entry per spatial axis: what a crop makes of one (`crop.py`)."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Stride, padding, output padding and dilation, one entry per spatial axis, and the number of groups.

    `padding` is cut from the begin of each axis and, where `end_padding` says nothing else, from its end.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    end_padding: tuple[int, ...] | None = None

    @property
    def ndim(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.stride)

    @property
    def flat_padding(self) -> tuple[int, ...]:
        """The padding as integers alone: one for each axis, or all begins and then all ends."""
        return self.padding if self.end_padding is None else self.padding + self.end_padding

    def out_size(self, in_size: Sequence[int], kernel_size: Sequence[int]) -> tuple[int, ...]:
        """Spatial size of the output."""
        axes = zip(in_size, kernel_size, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        sizes = tuple(output_size(*axis) for axis in axes)
        if self.end_padding is None:
            return sizes
        return tuple(size + begin - end for size, begin, end in zip(sizes, self.padding, self.end_padding, strict=True))


def per_axis(name: str, value: IntOrInts, ndim: int) -> tuple[int, ...]:
    """Spread an integer, or a sequence of one or `ndim` integers, over the spatial axes.

    Args:
        name: what the caller calls the argument, for the error text.
        value: the argument.
        ndim: number of spatial axes.

    Returns:
        A tuple of `ndim` integers.

    Raises:
        InvalidArgument: the sequence has another length.
        TypeError: something in it is no integer.
    """
    if isinstance(value, (int, torch.SymInt)):
        return (value,) * ndim
    if isinstance(value, Sequence):
        entries = tuple(v if isinstance(v, (int, torch.SymInt)) else _operator.index(v) for v in value)
    else:
        entries = (_operator.index(value),)
    if len(entries) == 1:
        return entries * ndim
    if len(entries) != ndim:
        raise InvalidArgument(f"{name} = {entries}; must be an integer or {ndim} integers; got {len(entries)}")
    return entries


def make_geometry(
    ndim: int, stride: IntOrInts, padding: IntOrInts | Edges, output_padding: IntOrInts, groups: int, dilation: IntOrInts
) -> Geometry:
    """Normalise and check the arguments that do not depend on a tensor (torch's order of arguments).

    Raises:
        InvalidArgument: a stride, dilation or group count below 1, a negative padding, or an output padding that is not smaller
            than the larger of stride and dilation on its axis.
        TypeError: something is no integer.
    """
    padding, end_padding = padding if isinstance(padding, Edges) else (padding, None)
    geometry = Geometry(
        per_axis("stride", stride, ndim),
        per_axis("padding", padding, ndim),
        per_axis("output_padding", output_padding, ndim),
        per_axis("dilation", dilation, ndim),
        groups if isinstance(groups, torch.SymInt) else _operator.index(groups),
        end_padding,
    )
    for name, entries, least in (
        ("stride", geometry.stride, 1),
        ("dilation", geometry.dilation, 1),
        ("padding", geometry.padding, 0),
        ("output_padding", geometry.output_padding, 0),
    ):
        if any(entry < least for entry in entries):
            raise InvalidArgument(f"{name} = {entries}; must be at least {least} on every axis")
    if geometry.groups < 1:
        raise InvalidArgument(f"groups = {groups}; must be at least 1; in_channels groups make a depthwise layer")
    for extra, step, spread in zip(geometry.output_padding, geometry.stride, geometry.dilation):
        if extra >= max(step, spread):
            raise InvalidArgument(
                f"output_padding = {geometry.output_padding}; must be smaller than stride {geometry.stride} or dilation "
                f"{geometry.dilation} on each axis; a larger output needs a larger stride or kernel"
            )
    return geometry


cached_geometry = lru_cache(maxsize=4096)(make_geometry)


def output_size(in_size: int, kernel_size: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    """Size of the output on one axis, in elements: the formula of ``torch.nn.ConvTranspose2d``'s documentation."""
    return (in_size - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1


def conv_transpose_shape(
    x_shape: Sequence[int], w_shape: Sequence[int], bias_shape: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """Check the operands of a transposed convolution and return the shape of its result.

    Args:
        x_shape: (batch, in_channels, spatial...).
        w_shape: (in_channels, out_channels / groups, kernel...).
        bias_shape: (out_channels,) or None.
        geometry: checked arguments.

    Returns:
        (batch, out_channels, spatial...). Works on symbolic sizes too.

    Raises:
        InvalidArgument: ranks, channels, groups, kernel or sizes do not fit.
    """
    ndim, groups = geometry.ndim, geometry.groups
    _check_rank("input", x_shape, ndim)
    _check_weight(w_shape, ndim, groups)
    if w_shape[0] != x_shape[1]:
        raise InvalidArgument(
            f"weight.shape[0] = {w_shape[0]} but input has {x_shape[1]} channels; in_channels must match; "
            f"a transposed convolution's weight is (in_channels, out_channels / groups, kernel...)"
        )
    if any(size < 1 for size in x_shape[1:]):
        raise InvalidArgument(
            f"input.shape = {_show(x_shape)}; channels and spatial sizes must be at least 1; only the batch may be empty"
        )
    out_channels = w_shape[1] * groups
    if bias_shape is not None and tuple(bias_shape) != (out_channels,):
        raise InvalidArgument(
            f"bias.shape = {_show(bias_shape)}; must be ({out_channels},); weight.shape[1] * groups is the number "
            f"of output channels"
        )
    _check_positions(x_shape[2:], w_shape[2:], geometry)
    spatial = geometry.out_size(x_shape[2:], w_shape[2:])
    if any(size < 1 for size in spatial):
        cut = geometry.padding if geometry.end_padding is None else (*zip(geometry.padding, geometry.end_padding),)
        raise InvalidArgument(
            f"padding = {cut} gives output size {_show(spatial)} for input size {_show(x_shape[2:])}; "
            f"each must be at least 1; reduce the padding or enlarge the input"
        )
    shape = (x_shape[0], out_channels, *spatial)
    check_addressable("output", shape)
    return shape


def conv_shape(g_shape: Sequence[int], w_shape: Sequence[int], in_size: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """Check the operands of the adjoint in x and return the shape of its result, (batch, in_channels, in_size...).

    `geometry.output_padding` must be what makes the transposed convolution of `in_size` give the size of g.
    """
    _check_weight(w_shape, geometry.ndim, geometry.groups)
    x_shape = (g_shape[0] if len(g_shape) else 0, w_shape[0], *in_size)
    _check_output("grad", g_shape, conv_transpose_shape(x_shape, w_shape, None, geometry))
    return x_shape


def conv_transpose_weight_shape(
    x_shape: Sequence[int], g_shape: Sequence[int], kernel_size: Sequence[int], geometry: Geometry
) -> tuple[int, ...]:
    """Check the operands of the adjoint in w and return its shape, (in_channels, out_channels / groups, kernel_size...)."""
    _check_rank("grad", g_shape, geometry.ndim)
    if g_shape[1] % geometry.groups != 0:
        raise InvalidArgument(f"grad has {g_shape[1]} channels; must be divisible by groups = {geometry.groups}")
    _check_rank("input", x_shape, geometry.ndim)
    w_shape = (x_shape[1], g_shape[1] // geometry.groups, *kernel_size)
    _check_output("grad", g_shape, conv_transpose_shape(x_shape, w_shape, None, geometry))
    return w_shape


def unfold_shape(
    input_shape: Sequence[int], kernel_size: tuple[int, ...], geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check what `unfold` is given and return the shape of its result and the number of blocks on each axis.

    Args:
        input_shape: (batch, channels, spatial...).
        kernel_size: sizes of the sliding block.
        geometry: checked stride, padding and dilation.

    Returns:
        ((batch, channels * taps, blocks), blocks per axis).

    Raises:
        InvalidArgument: ranks do not fit, or no block fits the input.
    """
    ndim = geometry.ndim
    if len(input_shape) != ndim + 2:
        raise InvalidArgument(
            f"input.shape = {_show(input_shape)}; unfold with {ndim} kernel size(s) takes {ndim + 2} axes (batch, channels, "
            f"{ndim} spatial) or {ndim + 1} without the batch"
        )
    if any(size < 1 for size in input_shape[1:]):
        raise InvalidArgument(f"input.shape = {_show(input_shape)}; channels and spatial sizes must be at least 1")
    blocks = _block_counts(input_shape[2:], kernel_size, geometry)
    shape = (input_shape[0], input_shape[1] * _product(kernel_size), _product(blocks))
    check_addressable("output", shape)
    return shape, blocks


def fold_shape(
    columns_shape: Sequence[int], spatial: tuple[int, ...], kernel_size: tuple[int, ...], geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check what `fold` is given and return the shape of its result and the number of blocks on each axis.

    Args:
        columns_shape: (batch, channels * taps, blocks).
        spatial: output size per axis.
        kernel_size: sizes of the sliding block.
        geometry: checked stride, padding and dilation.

    Returns:
        ((batch, channels, spatial...), blocks per axis).

    Raises:
        InvalidArgument: the columns do not have the rows or the blocks that the sizes ask for.
    """
    if len(columns_shape) != 3:
        raise InvalidArgument(
            f"input.shape = {_show(columns_shape)}; fold takes (batch, channels * kernel taps, blocks) or two axes "
            f"without the batch"
        )
    taps = _product(kernel_size)
    if columns_shape[1] < 1 or columns_shape[1] % taps != 0:
        raise InvalidArgument(
            f"input.shape[1] = {columns_shape[1]}; must be a multiple of the {taps} taps of kernel_size {kernel_size}"
        )
    if any(size < 1 for size in spatial):
        raise InvalidArgument(f"output_size = {spatial}; must be at least 1 on every axis")
    blocks = _block_counts(spatial, kernel_size, geometry)
    if columns_shape[2] != _product(blocks):
        raise InvalidArgument(
            f"input.shape[2] = {columns_shape[2]}; output_size {spatial} has {_show(blocks)} = {_product(blocks)} blocks; "
            f"check stride, padding and dilation"
        )
    shape = (columns_shape[0], columns_shape[1] // taps, *spatial)
    check_addressable("output", shape)
    return shape, blocks


def block_geometry(
    ndim: int, kernel_size: IntOrInts, dilation: IntOrInts, padding: IntOrInts, stride: IntOrInts
) -> tuple[tuple[int, ...], Geometry]:
    """Normalise and check the arguments of `fold` and `unfold` (torch's order): (kernel_size, geometry)."""
    kernel = per_axis("kernel_size", kernel_size, ndim)
    if any(size < 1 for size in kernel):
        raise InvalidArgument(f"kernel_size = {kernel}; must be at least 1 on every axis")
    return kernel, make_geometry(ndim, stride, padding, 0, 1, dilation)


def _block_counts(spatial: Sequence[int], kernel_size: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Number of sliding blocks on each axis, the formula of ``torch.nn.Unfold``'s documentation."""
    _check_positions(spatial, kernel_size, geometry)
    counts = tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, dilation in zip(spatial, kernel_size, geometry.stride, geometry.padding, geometry.dilation)
    )
    if any(count < 1 for count in counts):
        raise InvalidArgument(
            f"kernel_size = {kernel_size} with dilation {geometry.dilation} gives {_show(counts)} blocks in size "
            f"{_show(spatial)} with padding {geometry.padding}; every axis needs at least one; enlarge the padding or shrink "
            f"the kernel"
        )
    return counts


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _check_positions(in_size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry) -> None:
    """Refuse arguments with which the position that a tap reaches, padding included, could leave a signed 64-bit integer."""
    g = geometry
    for axis in zip(in_size, kernel_size, g.stride, g.padding, g.dilation):
        if not all(isinstance(entry, int) for entry in axis):
            continue
        size, kernel, stride, pad, dilation = axis
        if size * stride + kernel * dilation + 2 * pad > _LARGEST_POSITION:
            raise InvalidArgument(
                f"stride = {g.stride}, padding = {g.padding}, dilation = {g.dilation}; positions must fit a 64-bit integer; "
                f"reduce the largest"
            )


def check_addressable(name: str, shape: Sequence[int], element_bytes: int = 16) -> None:
    """Refuse a tensor whose bytes do not fit a signed 64-bit integer (the widest element is 16 bytes)."""
    if all(isinstance(size, int) for size in shape):
        count = element_bytes
        for size in shape:
            count *= max(size, 1)
        if count > _ADDRESSABLE_BYTES:
            raise InvalidArgument(
                f"{name}.shape = {_show(shape)}; its bytes must fit a 64-bit integer; reduce stride, dilation or batch"
            )


def _show(shape: Sequence[int]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def _check_rank(name: str, shape: Sequence[int], ndim: int) -> None:
    if not 1 <= ndim <= 3:
        raise InvalidArgument(f"{name}.shape = {_show(shape)}; must have 1, 2 or 3 spatial axes behind batch and channels")
    if len(shape) != ndim + 2:
        raise InvalidArgument(
            f"{name}.shape = {_show(shape)}; conv_transpose{ndim}d takes {ndim + 2} axes (batch, channels, {ndim} spatial) "
            f"or {ndim + 1} without the batch; got {len(shape)}"
        )


def _check_weight(w_shape: Sequence[int], ndim: int, groups: int) -> None:
    if len(w_shape) != ndim + 2:
        raise InvalidArgument(
            f"weight.shape = {_show(w_shape)}; must have {ndim + 2} axes; (in_channels, out_channels / groups, "
            f"{ndim} kernel sizes)"
        )
    if any(size < 1 for size in w_shape):
        raise InvalidArgument(f"weight.shape = {_show(w_shape)}; every channel count and kernel size must be at least 1")
    if w_shape[0] % groups != 0:
        raise InvalidArgument(f"groups = {groups}; must divide in_channels = {w_shape[0]}")


def _check_output(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise InvalidArgument(
            f"{name}.shape = {_show(shape)}; must be {_show(expected)}, the shape of the transposed convolution's output"
        )
