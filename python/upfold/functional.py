"""The operators under torch's names, with torch's arguments in torch's order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import activation as activations
from . import autograd, columns, execute, fold_autograd
from .crop import Crop, cropped, cropped_padding
from .dispatch import FALLBACK, check_name, current, fallback_allowed
from .execute import Arguments
from .geometry import IntOrInts, InvalidArgument, conv_transpose_shape, make_geometry, per_axis
from .overlap import check_like, check_out
from .problem import NO_ACTIVATION, Activation, ActivationLike
from .watch import has_memory, needs_gradient, nobody_intercepts

__all__ = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "fold", "unfold"]

_OUR_DEVICES = frozenset({"cpu", "cuda", "meta"})


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    algorithm: str | None = None,
    activation: ActivationLike = None,
    crop: Crop = None,
    out: Tensor | None = None,
) -> Tensor:
    """Transposed convolution over one spatial axis; see `conv_transpose2d`."""
    arguments = (stride, padding, output_padding, groups, dilation)
    return _conv_transpose(1, input, weight, bias, arguments, algorithm, activation, out, crop)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    algorithm: str | None = None,
    activation: ActivationLike = None,
    crop: Crop = None,
    out: Tensor | None = None,
) -> Tensor:
    """Transposed convolution over two spatial axes, equivalent to ``torch.nn.functional.conv_transpose2d``.

    On each axis ``out = (in - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1``, the formula of
    ``torch.nn.ConvTranspose2d``.

    Args:
        input: (batch, in_channels, height, width) or (in_channels, height, width); float32, float64, float16, bfloat16,
            complex64 or complex128; any strides.
        weight: (in_channels, out_channels / groups, kernel_h, kernel_w), of the same dtype and device; the kernel is not flipped.
        bias: (out_channels,) or None.
        stride: distance, in output pixels, between the outputs of neighbouring inputs.
        padding: output pixels cut from both ends of each axis.
        output_padding: output pixels added at the end of each axis; smaller than stride or dilation.
        groups: number of groups of channels that do not mix; divides in_channels.
        dilation: distance, in output pixels, between neighbouring taps.
        algorithm: one of ``upfold.algorithms()``; None leaves the choice to ``upfold.use`` and, without it, to upfold.
        activation: None, 'relu', 'silu', 'gelu', 'gelu_tanh', 'tanh', 'sigmoid', 'leaky_relu' or ('leaky_relu', slope); applied
            with the bias, in the same pass (where a gradient is asked for, 'silu' and 'gelu' in one of torch's). Not for
            complex numbers.
        crop: output pixels to leave out, which are not computed: at both ends of every axis, or a pair (before, after) for each
            axis, as ((0, 1), (2, 2)). Padding cuts alike; a crop may differ at the two ends.
        out: a tensor of the result's shape, dtype and device, of any strides, that shares no memory with the operands; refused
            where a gradient is needed.

    Returns:
        (batch, out_channels, out_h, out_w), without the batch if the input has none; in torch's memory format for these operands.

    Raises:
        InvalidArgument: a ``ValueError`` and ``RuntimeError``; an argument does not fit, or the algorithm refuses.
        TypeError: a size is no integer, or an operand no tensor.
    """
    arguments = (stride, padding, output_padding, groups, dilation)
    return _conv_transpose(2, input, weight, bias, arguments, algorithm, activation, out, crop)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
    *,
    algorithm: str | None = None,
    activation: ActivationLike = None,
    crop: Crop = None,
    out: Tensor | None = None,
) -> Tensor:
    """Transposed convolution over three spatial axes; see `conv_transpose2d`."""
    arguments = (stride, padding, output_padding, groups, dilation)
    return _conv_transpose(3, input, weight, bias, arguments, algorithm, activation, out, crop)


_PUBLIC: dict[int, Callable[..., Tensor]] = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}
_TORCH: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _conv_transpose(
    ndim: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: ActivationLike,
    out: Tensor | None,
    crop: Crop = None,
) -> Tensor:
    given = x is not None and w is not None
    if given and nobody_intercepts(x, w, bias, out) and x.dim() == ndim + 2 and _kernels_may_run(x):
        if crop is not None:
            arguments = _with_crop(ndim, arguments, crop)
        if needs_gradient(x, w, bias):
            if out is not None:
                raise _out_with_gradient()
            parsed = NO_ACTIVATION if activation is None else _check_activation(x, activation)
            return autograd.record_conv_transpose(x, w, bias, _hashable(arguments), algorithm, parsed)
        try:
            return execute.conv_transpose(x, w, bias, arguments, algorithm, activation, out)
        except TypeError:  # a list among the arguments
            return execute.conv_transpose(x, w, bias, _hashable(arguments), algorithm, _hashable_activation(activation), out)
    return _intercepted(ndim, x, w, bias, arguments, algorithm, activation, out, crop)


def _with_crop(ndim: int, arguments: Arguments, crop: Crop) -> Arguments:
    stride, padding, *rest = arguments
    assert crop is not None
    return (stride, cropped_padding(ndim, padding, crop), *rest)  # type: ignore[return-value, arg-type]


def _kernels_may_run(t: Tensor) -> bool:
    # Quicker than the name of t.device, which is made anew in each call; a compiler that traces knows the name alone.
    return t.is_cuda or t.is_cpu


def _intercepted(
    ndim: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: ActivationLike,
    out: Tensor | None,
    crop: Crop,
) -> Tensor:
    """The way through torch's machinery: subclasses, modes, transforms, tracing, other devices, and inputs without a batch."""
    operands = tuple(t for t in (x, w, bias, out) if t is not None)
    if has_torch_function(operands):
        names = ("stride", "padding", "output_padding", "groups", "dilation")
        keywords = {"algorithm": algorithm, "activation": activation, "crop": crop, "out": out}
        result: Tensor = handle_torch_function(_PUBLIC[ndim], operands, x, w, bias, **dict(zip(names, arguments)), **keywords)
        return result
    _check_tensors(input=x, weight=w, bias=bias, out=out)
    arguments = _hashable(arguments)
    if x.dim() == ndim + 1:
        batched_out = None if out is None else out.unsqueeze(0)
        y = _conv_transpose(ndim, x.unsqueeze(0), w, bias, arguments, algorithm, activation, batched_out, crop)
        return y.squeeze(0) if out is None else out
    if x.dim() != ndim + 2:
        raise InvalidArgument(
            f"input.shape = {tuple(x.shape)}; conv_transpose{ndim}d takes {ndim + 2} axes (batch, channels, {ndim} spatial) "
            f"or {ndim + 1} without the batch; got {x.dim()}"
        )
    parsed = _check_activation(x, activation)
    if out is not None and needs_gradient(x, w, bias):
        raise _out_with_gradient()
    whole = arguments
    if crop is not None:
        arguments = _with_crop(ndim, arguments, crop)
    if x.device.type in _OUR_DEVICES:
        y = autograd.conv_transpose(x, w, bias, arguments, algorithm, parsed)
    else:
        bias_shape = None if bias is None else bias.shape
        conv_transpose_shape(x.shape, w.shape, bias_shape, make_geometry(ndim, *arguments))
        _announce_fallback(x.device, algorithm or current().algorithm)
        y = activations.apply(cropped(_TORCH[ndim](x, w, bias, *whole), crop, ndim), parsed)
    return y if out is None else _written(out, y, x, w, bias)


def _written(out: Tensor, y: Tensor, *operands: Tensor | None) -> Tensor:
    """Copy a result into `out`, checked as the kernels' own output is: where torch looks on, or `out` is a lazy view."""
    check_like(out, y)
    if all(map(has_memory, (out, *operands))):
        check_out(out, *operands)
    return out.copy_(y)


def _check_tensors(*, bias: Tensor | None = None, out: Tensor | None = None, **required: Tensor) -> None:
    """Refuse what is no tensor, layouts without strides, and an `out` elsewhere than the input."""
    for name, value in (*required.items(), ("bias", bias), ("out", out)):
        if value is None and name not in required:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} = {type(value).__name__}; must be a torch.Tensor")
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else value.layout
            raise InvalidArgument(f"{name}.layout = {layout}; must be torch.strided; convert it with .to_dense() or padding")
    device = required["input"].device
    if out is not None and out.device != device:
        raise InvalidArgument(f"out.device = {out.device} but input is on {device}; they must match; move one with .to()")


def _announce_fallback(device: torch.device, asked: str | None) -> None:
    """Say that torch's operator runs, where it was not asked for by name; refuse where another was, or none may stand in."""
    if asked == FALLBACK:
        return
    reason = f"upfold has no kernels for {device.type}"
    if asked is not None and asked != "auto":
        check_name(asked)
        raise InvalidArgument(f"algorithm = {asked!r}; it refuses this problem: {reason}; {FALLBACK} accepts it")
    if not fallback_allowed():
        raise InvalidArgument(
            f"input is on {device}; {reason}, and falling back to torch is off; move it to a CPU or a CUDA device"
        )
    warnings.warn(f"{reason}; torch's own operator runs", RuntimeWarning, stacklevel=4)


def _check_activation(x: Tensor, activation: ActivationLike) -> Activation:
    parsed = Activation.parse(_hashable_activation(activation))
    if parsed.code and x.dtype.is_complex:
        raise InvalidArgument(
            f"activation = {activation!r}; the input is {x.dtype}; activations of complex numbers are not defined"
        )
    return parsed


def _hashable(arguments: Arguments) -> Arguments:
    """The same with tuples for lists, so that launches and geometries can be looked up by it."""
    stride, padding, output_padding, groups, dilation = arguments
    return _entries(stride), _entries(padding), _entries(output_padding), groups, _entries(dilation)


def _entries(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _hashable_activation(activation: Any) -> ActivationLike:
    return tuple(activation) if isinstance(activation, list) else activation


def fold(
    input: Tensor,
    output_size: IntOrInts,
    kernel_size: IntOrInts,
    dilation: IntOrInts = 1,
    padding: IntOrInts = 0,
    stride: IntOrInts = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Sum sliding blocks into an image (col2im), equivalent to ``torch.nn.functional.fold`` and for 1 to 3 axes.

    Args:
        input: (batch, channels * taps, blocks) or (channels * taps, blocks), taps being the product of the kernel size; rows in
            the order channel, then tap; blocks in row-major order.
        output_size: spatial size of the result; its length is the number of axes, an integer means 2.
        kernel_size: size of a block.
        dilation: distance between neighbouring taps.
        padding: pixels of zeros that `unfold` would have added at both ends.
        stride: distance between neighbouring blocks.
        out: a tensor of the result's shape, dtype and device that shares no memory with the input; refused where a
            gradient is needed.

    Returns:
        (batch, channels, output_size...), without the batch if the input has none.

    Raises:
        InvalidArgument: the sizes do not fit each other.
    """
    ndim = columns.axes_of("output_size", output_size)
    size = per_axis("output_size", output_size, ndim)
    blocks = (_entries(kernel_size), _entries(dilation), _entries(padding), _entries(stride))
    operands = (input,) if out is None else (input, out)
    if has_torch_function(operands):
        keywords: dict[str, Any] = {"dilation": dilation, "padding": padding, "stride": stride, "out": out}
        result: Tensor = handle_torch_function(fold, operands, input, output_size, kernel_size, **keywords)
        return result
    _check_tensors(input=input, out=out)
    if input.dim() == 2:
        y = fold(input.unsqueeze(0), size, *blocks, out=None if out is None else out.unsqueeze(0))
        return y.squeeze(0) if out is None else out
    if out is None:
        return fold_autograd.fold(input, size, blocks)
    _refuse_gradient(input)
    if nobody_intercepts(input, out):
        return columns.fold(input, size, blocks, out)
    return _written(out, fold_autograd.fold(input, size, blocks), input)


def unfold(
    input: Tensor,
    kernel_size: IntOrInts,
    dilation: IntOrInts = 1,
    padding: IntOrInts = 0,
    stride: IntOrInts = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Lay the sliding blocks of an image out as columns (im2col), as ``torch.nn.functional.unfold`` does, for 1 to 3 axes.

    Args:
        input: (batch, channels, spatial...) or (channels, spatial...), any strides.
        kernel_size: size of a block; its length is the number of axes, an integer means 2.
        dilation: distance between neighbouring taps.
        padding: pixels of zeros added at both ends of each axis.
        stride: distance between neighbouring blocks.
        out: a tensor of the result's shape, dtype and device that shares no memory with the input; refused where a
            gradient is needed.

    Returns:
        (batch, channels * taps, blocks), without the batch if the input has none; rows in the order channel, then tap.

    Raises:
        InvalidArgument: no block fits the input, or the ranks do not agree.
    """
    ndim = columns.axes_of("kernel_size", kernel_size)
    blocks = (per_axis("kernel_size", kernel_size, ndim), _entries(dilation), _entries(padding), _entries(stride))
    operands = (input,) if out is None else (input, out)
    if has_torch_function(operands):
        keywords: dict[str, Any] = {"dilation": dilation, "padding": padding, "stride": stride, "out": out}
        result: Tensor = handle_torch_function(unfold, operands, input, kernel_size, **keywords)
        return result
    _check_tensors(input=input, out=out)
    if input.dim() == ndim + 1:
        y = unfold(input.unsqueeze(0), *blocks, out=None if out is None else out.unsqueeze(0))
        return y.squeeze(0) if out is None else out
    if out is None:
        return fold_autograd.unfold(input, blocks)
    _refuse_gradient(input)
    if nobody_intercepts(input, out):
        return columns.unfold(input, blocks, out)
    return _written(out, fold_autograd.unfold(input, blocks), input)


def _refuse_gradient(input: Tensor) -> None:
    if needs_gradient(input):
        raise _out_with_gradient()


def _out_with_gradient() -> InvalidArgument:
    return InvalidArgument(
        "out is given but a gradient is needed; they exclude each other; use torch.no_grad() or leave out away"
    )
