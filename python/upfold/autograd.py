"""Derivatives: the rules of the five operators, and the routes by which a call takes them.

conv_transpose, conv and conv_transpose_weight are bilinear, and the derivative of each is made of the other two; fold and
unfold are each other's derivative. So derivatives of every order, in reverse and in forward mode, need no further kernel.
Complex derivatives conjugate the operand that is held fixed (torch's convention: the gradient with respect to the conjugate).

The functions `conv_transpose`, `conv`, `conv_transpose_weight`, `fold` and `unfold` take the shortest route that nobody would
notice: straight to the kernel where nothing watches and no gradient is asked for, an ``autograd.Function`` where one is,
torch's dispatcher otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from . import activation as activations
from . import columns as column_kernels
from . import execute
from .batching import into_batch, into_channels, into_rows, more_groups, out_of_batch, out_of_channels, out_of_rows
from .columns import BlockArguments
from .dispatch import encode_algorithm
from .execute import Arguments
from .functions import eager, recorded, transformed
from .geometry import block_geometry, make_geometry
from .problem import NO_ACTIVATION, Activation
from .watch import is_plain_inference, needs_gradient, nobody_intercepts, transform_is_active

Sizes = tuple[int, ...]


def schema_geometry(ndim: int, arguments: Arguments, algorithm: str | None) -> tuple[Any, ...]:
    """`arguments` and `algorithm` in the order and form of the operators' schemas."""
    g = make_geometry(ndim, *arguments)
    padding = list(g.flat_padding)
    return list(g.stride), padding, list(g.output_padding), list(g.dilation), g.groups, encode_algorithm(algorithm)


def schema_blocks(ndim: int, arguments: BlockArguments) -> tuple[Any, ...]:
    """The arguments of fold and unfold in the order and form of their schemas."""
    kernel, g = block_geometry(ndim, *arguments)
    return list(kernel), list(g.dilation), list(g.padding), list(g.stride)


def conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    algorithm: str | None = None,
    activation: Activation = NO_ACTIVATION,
) -> torch.Tensor:
    """Differentiable transposed convolution of batched tensors; the arguments are those of `execute.conv_transpose`."""
    if nobody_intercepts(x, w, bias):
        run = recorded_conv_transpose if needs_gradient(x, w, bias) else execute.conv_transpose
        y = run(x, w, bias, arguments, algorithm)
    elif transform_is_active():
        y = _apply(ConvTransposeTransformed, x, w, bias, arguments, algorithm)
    else:
        # A slope stays outside: a schema holds it in float32, too short for float64, and torch.compile cannot always encode it.
        fused = activation.code and not activation.has_slope and is_plain_inference(x, w, bias)
        code = activation.code if fused else 0
        y = _op("conv_transpose", x, w, bias, *schema_geometry(x.dim() - 2, arguments, algorithm), code)
        activation = NO_ACTIVATION if fused else activation
    return activations.apply(y, activation)


def conv(g: torch.Tensor, w: torch.Tensor, in_size: Sizes, arguments: Arguments, algorithm: str | None = None) -> torch.Tensor:
    """Differentiable adjoint in x; the arguments are those of `execute.conv`."""
    if nobody_intercepts(g, w):
        run = _recorded_conv if needs_gradient(g, w) else execute.conv
        return run(g, w, in_size, arguments, algorithm)
    if transform_is_active():
        return _apply(ConvTransformed, g, w, in_size, arguments, algorithm)
    return _op("conv", g, w, list(in_size), *schema_geometry(g.dim() - 2, arguments, algorithm))


def conv_transpose_weight(
    x: torch.Tensor, g: torch.Tensor, kernel_size: Sizes, arguments: Arguments, algorithm: str | None = None
) -> torch.Tensor:
    """Differentiable adjoint in w; the arguments are those of `execute.conv_transpose_weight`."""
    if nobody_intercepts(x, g):
        run = _recorded_conv_transpose_weight if needs_gradient(x, g) else execute.conv_transpose_weight
        return run(x, g, kernel_size, arguments, algorithm)
    if transform_is_active():
        return _apply(ConvTransposeWeightTransformed, x, g, kernel_size, arguments, algorithm)
    return _op("conv_transpose_weight", x, g, list(kernel_size), *schema_geometry(x.dim() - 2, arguments, algorithm))


def fold(columns: torch.Tensor, output_size: Sizes, arguments: BlockArguments) -> torch.Tensor:
    """Differentiable fold of batched columns; the arguments are those of `columns.fold`."""
    if nobody_intercepts(columns):
        run = _recorded_fold if needs_gradient(columns) else column_kernels.fold
        return run(columns, output_size, arguments)
    if transform_is_active():
        return _apply(FoldTransformed, columns, output_size, arguments)
    return _op("fold", columns, list(output_size), *schema_blocks(len(output_size), arguments))


def unfold(image: torch.Tensor, arguments: BlockArguments) -> torch.Tensor:
    """Differentiable unfold of a batched tensor; the arguments are those of `columns.unfold`."""
    if nobody_intercepts(image):
        return (_recorded_unfold if needs_gradient(image) else column_kernels.unfold)(image, arguments)
    if transform_is_active():
        return _apply(UnfoldTransformed, image, arguments)
    return _op("unfold", image, *schema_blocks(image.dim() - 2, arguments))


def _apply(function: type[Function], *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*inputs)
    return result


def _op(name: str, *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.upfold, name)(*inputs)
    return result


def _channels(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the bias: the sum over batch and space."""
    return grad.sum(dim=[0, *range(2, grad.dim())])


class _ConvTransposeRules:
    """y = conv_transpose(x, w) + bias."""

    operands = 2
    kernel = staticmethod(execute.conv_transpose)

    @staticmethod
    def compute(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, arguments: Arguments, algorithm: str | None
    ) -> torch.Tensor:
        if nobody_intercepts(x, w, bias):
            return execute.conv_transpose(x, w, bias, arguments, algorithm)
        return _op("conv_transpose_raw", x, w, bias, *schema_geometry(x.dim() - 2, arguments, algorithm), 0)

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, _, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        return (
            conv(grad, w.conj(), tuple(x.shape[2:]), arguments, algorithm) if wants_x else None,
            conv_transpose_weight(x.conj(), grad, tuple(w.shape[2:]), arguments, algorithm) if wants_w else None,
            _channels(grad) if wants_bias else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, x_t: torch.Tensor | None, w_t: torch.Tensor | None, bias_t: torch.Tensor | None, *_: None) -> Any:
        x, w = ctx.saved_tensors
        result = None
        if x_t is not None:
            result = conv_transpose(x_t, w, bias_t, ctx.arguments, ctx.algorithm)
        if w_t is not None:
            part = conv_transpose(x, w_t, bias_t if result is None else None, ctx.arguments, ctx.algorithm)
            result = part if result is None else result + part
        if result is None and bias_t is not None:
            like = conv_transpose(x, w, None, ctx.arguments, ctx.algorithm)
            result = bias_t.reshape(1, -1, *[1] * (x.dim() - 2)).expand_as(like).clone()
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        x, w, bias, arguments, algorithm = inputs
        x_dim, w_dim, bias_dim = in_dims[:3]
        size: int = info.batch_size
        if w_dim is None and x_dim is not None:
            rows, _ = into_batch(x, x_dim)
            y = conv_transpose(rows, w, None if bias_dim is not None else bias, arguments, algorithm)
            y = out_of_batch(y, size)
        else:
            wide = into_channels(x, x_dim, size)
            shared = bias.repeat(size) if bias is not None and bias_dim is None else None
            y = conv_transpose(wide, into_rows(w, w_dim, size), shared, more_groups(arguments, size), algorithm)
            y = out_of_channels(y, size).transpose(0, 1)
        if bias_dim is not None:
            y = y + bias.movedim(bias_dim, 0).reshape(size, 1, y.shape[2], *[1] * (y.dim() - 3))
        return y, 0


class _ConvRules:
    """x = conv(g, w), the adjoint in x."""

    operands = 2
    kernel = staticmethod(execute.conv)

    @staticmethod
    def compute(g: torch.Tensor, w: torch.Tensor, in_size: Sizes, arguments: Arguments, algorithm: str | None) -> torch.Tensor:
        if nobody_intercepts(g, w):
            return execute.conv(g, w, in_size, arguments, algorithm)
        return _op("conv_raw", g, w, list(in_size), *schema_geometry(g.dim() - 2, arguments, algorithm))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, ctx.in_size, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, w = ctx.saved_tensors
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_g, wants_w = ctx.needs_input_grad[:2]
        return (
            conv_transpose(grad, w.conj(), None, arguments, algorithm) if wants_g else None,
            conv_transpose_weight(grad, g.conj(), tuple(w.shape[2:]), arguments, algorithm) if wants_w else None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, g_t: torch.Tensor | None, w_t: torch.Tensor | None, *_: None) -> Any:
        g, w = ctx.saved_tensors
        return _sum(
            None if g_t is None else conv(g_t, w, ctx.in_size, ctx.arguments, ctx.algorithm),
            None if w_t is None else conv(g, w_t, ctx.in_size, ctx.arguments, ctx.algorithm),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        g, w, in_size, arguments, algorithm = inputs
        size: int = info.batch_size
        if in_dims[1] is None:
            rows, _ = into_batch(g, in_dims[0] or 0)
            x = conv(rows, w, in_size, arguments, algorithm)
            return out_of_batch(x, size), 0
        wide = into_channels(g, in_dims[0], size)
        x = conv(wide, into_rows(w, in_dims[1], size), in_size, more_groups(arguments, size), algorithm)
        return out_of_channels(x, size), 1


class _ConvTransposeWeightRules:
    """w = conv_transpose_weight(x, g), the adjoint in w."""

    operands = 2
    kernel = staticmethod(execute.conv_transpose_weight)

    @staticmethod
    def compute(
        x: torch.Tensor, g: torch.Tensor, kernel_size: Sizes, arguments: Arguments, algorithm: str | None
    ) -> torch.Tensor:
        if nobody_intercepts(x, g):
            return execute.conv_transpose_weight(x, g, kernel_size, arguments, algorithm)
        return _op("conv_transpose_weight_raw", x, g, list(kernel_size), *schema_geometry(x.dim() - 2, arguments, algorithm))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, ctx.kernel_size, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, g = ctx.saved_tensors
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_x, wants_g = ctx.needs_input_grad[:2]
        return (
            conv(g.conj(), grad, tuple(x.shape[2:]), arguments, algorithm) if wants_x else None,
            conv_transpose(x.conj(), grad, None, arguments, algorithm) if wants_g else None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, x_t: torch.Tensor | None, g_t: torch.Tensor | None, *_: None) -> Any:
        x, g = ctx.saved_tensors
        return _sum(
            None if x_t is None else conv_transpose_weight(x_t, g, ctx.kernel_size, ctx.arguments, ctx.algorithm),
            None if g_t is None else conv_transpose_weight(x, g_t, ctx.kernel_size, ctx.arguments, ctx.algorithm),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        x, g, kernel_size, arguments, algorithm = inputs
        size: int = info.batch_size
        wide_x, wide_g = into_channels(x, in_dims[0], size), into_channels(g, in_dims[1], size)
        w = conv_transpose_weight(wide_x, wide_g, kernel_size, more_groups(arguments, size), algorithm)
        return out_of_rows(w, size), 0


class _FoldRules:
    """image = fold(columns)."""

    operands = 0
    kernel = staticmethod(column_kernels.fold)

    @staticmethod
    def compute(columns: torch.Tensor, output_size: Sizes, arguments: BlockArguments) -> torch.Tensor:
        if nobody_intercepts(columns):
            return column_kernels.fold(columns, output_size, arguments)
        return _op("fold_raw", columns, list(output_size), *schema_blocks(len(output_size), arguments))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, ctx.output_size, ctx.arguments = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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

    operands = 0
    kernel = staticmethod(column_kernels.unfold)

    @staticmethod
    def compute(image: torch.Tensor, arguments: BlockArguments) -> torch.Tensor:
        if nobody_intercepts(image):
            return column_kernels.unfold(image, arguments)
        return _op("unfold_raw", image, *schema_blocks(image.dim() - 2, arguments))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        image, ctx.arguments = inputs
        ctx.output_size = tuple(image.shape[2:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


ConvTranspose, ConvTransposeTransformed = eager(_ConvTransposeRules), transformed(_ConvTransposeRules)
Conv, ConvTransformed = eager(_ConvRules), transformed(_ConvRules)
ConvTransposeWeight, ConvTransposeWeightTransformed = eager(_ConvTransposeWeightRules), transformed(_ConvTransposeWeightRules)
Fold, FoldTransformed = eager(_FoldRules), transformed(_FoldRules)
Unfold, UnfoldTransformed = eager(_UnfoldRules), transformed(_UnfoldRules)
# Where the caller knows that nothing intercepts and that a gradient is needed.
recorded_conv_transpose = recorded(_ConvTransposeRules)
_recorded_conv = recorded(_ConvRules)
_recorded_conv_transpose_weight = recorded(_ConvTransposeWeightRules)
_recorded_fold, _recorded_unfold = recorded(_FoldRules), recorded(_UnfoldRules)
