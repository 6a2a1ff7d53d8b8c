"""Derivatives: the rules of the three bilinear operators, and the routes by which a call takes them.

conv_transpose, conv and conv_transpose_weight are bilinear, and the derivative of each is made of the other two. So derivatives
of every order, in reverse and in forward mode, need no further kernel. (Those of fold and unfold: `fold_autograd.py`.)
Complex derivatives conjugate the operand that is held fixed (torch's convention: the gradient with respect to the conjugate).

The functions `conv_transpose`, `conv` and `conv_transpose_weight` take the shortest route that nobody would notice: straight to
the kernel where nothing watches and no gradient is asked for, an ``autograd.Function`` where one is, else torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from . import activation as activations
from . import backward, execute
from .batching import into_batch, into_channels, into_rows, more_groups, out_of_batch, out_of_channels, out_of_rows
from .channel_sums import summed_by_torch
from .dispatch import encode_algorithm
from .execute import Arguments
from .functions import Wanted, applied, dispatched, eager, recorded, transformed
from .geometry import make_geometry
from .problem import NO_ACTIVATION, Activation
from .watch import is_compiling, needs_gradient, nobody_intercepts, transform_is_active

Sizes = tuple[int, ...]


def schema_geometry(ndim: int, arguments: Arguments, algorithm: str | None) -> tuple[Any, ...]:
    """`arguments` and `algorithm` in the order and form of the operators' schemas."""
    g = make_geometry(ndim, *arguments)
    padding = list(g.flat_padding)
    return list(g.stride), padding, list(g.output_padding), list(g.dilation), g.groups, encode_algorithm(algorithm)


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
        if needs_gradient(x, w, bias):
            return record_conv_transpose(x, w, bias, arguments, algorithm, activation)
        return execute.conv_transpose(x, w, bias, arguments, algorithm, activation.as_argument())
    if transform_is_active():
        return activations.apply(applied(ConvTransposeTransformed, x, w, bias, arguments, algorithm), activation)
    # The schema holds a slope in float32, too short for float64, and torch.compile cannot always encode it.
    outside = activation.has_slope and (x.dtype is torch.float64 or is_compiling())
    code = 0 if outside else activation.encode() if activation.has_slope else activation.code
    y = dispatched("conv_transpose", x, w, bias, *schema_geometry(x.dim() - 2, arguments, algorithm), code)
    return activations.apply(y, activation) if outside else y


def record_conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: Activation,
) -> torch.Tensor:
    """`conv_transpose` where the caller knows that nothing intercepts and that a gradient is needed."""
    if not activation.code:
        return _recorded_conv_transpose(x, w, bias, arguments, algorithm)
    if activations.kernel_applies(activation, x.dtype):
        return _recorded_activated(x, w, bias, arguments, algorithm, activation)
    return activations.apply(_recorded_conv_transpose(x, w, bias, arguments, algorithm), activation)


def conv(g: torch.Tensor, w: torch.Tensor, in_size: Sizes, arguments: Arguments, algorithm: str | None = None) -> torch.Tensor:
    """Differentiable adjoint in x; the arguments are those of `execute.conv`."""
    if nobody_intercepts(g, w):
        run = _recorded_conv if needs_gradient(g, w) else execute.conv
        return run(g, w, in_size, arguments, algorithm)
    if transform_is_active():
        return applied(ConvTransformed, g, w, in_size, arguments, algorithm)
    return dispatched("conv", g, w, list(in_size), *schema_geometry(g.dim() - 2, arguments, algorithm))


def conv_transpose_weight(
    x: torch.Tensor, g: torch.Tensor, kernel_size: Sizes, arguments: Arguments, algorithm: str | None = None
) -> torch.Tensor:
    """Differentiable adjoint in w; the arguments are those of `execute.conv_transpose_weight`."""
    if nobody_intercepts(x, g):
        run = _recorded_conv_transpose_weight if needs_gradient(x, g) else execute.conv_transpose_weight
        return run(x, g, kernel_size, arguments, algorithm)
    if transform_is_active():
        return applied(ConvTransposeWeightTransformed, x, g, kernel_size, arguments, algorithm)
    return dispatched("conv_transpose_weight", x, g, list(kernel_size), *schema_geometry(x.dim() - 2, arguments, algorithm))


def _sizes(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[Sizes, Sizes]:
    """The spatial sizes of the two operands, of which one may not have been kept."""
    return ctx.sizes or (tuple(a.shape[2:]), tuple(b.shape[2:]))


class _ConvTransposeRules:
    """y = conv_transpose(x, w) + bias."""

    operands, keep_result = 2, False
    kernel = staticmethod(execute.conv_transpose)

    @staticmethod
    def compute(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, arguments: Arguments, algorithm: str | None
    ) -> torch.Tensor:
        if nobody_intercepts(x, w, bias):
            return execute.conv_transpose(x, w, bias, arguments, algorithm)
        return dispatched("conv_transpose_raw", x, w, bias, *schema_geometry(x.dim() - 2, arguments, algorithm), 0)

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, _, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        return _ConvTransposeRules.gradients(ctx, grad, wanted, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        ctx: Any, grad: torch.Tensor, wanted: Wanted, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_x, wants_w, wants_bias = wanted[:3]
        in_size, kernel_size = _sizes(ctx, x, w)
        if not grad.is_complex() and nobody_intercepts(grad, x, w) and not needs_gradient(grad, x, w):
            # As nearly every backward: asked once, not by each operator.
            found = backward.gradients(grad, (x, w), (in_size, kernel_size), wanted, arguments, algorithm)
            x_grad, w_grad, bias_grad = found
        else:
            x_grad = conv(grad, w.conj(), in_size, arguments, algorithm) if wants_x else None
            w_grad = conv_transpose_weight(x.conj(), grad, kernel_size, arguments, algorithm) if wants_w else None
            bias_grad = summed_by_torch(grad) if wants_bias else None
        return x_grad, w_grad, bias_grad, None, None

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


class _ActivatedRules(_ConvTransposeRules):
    """y = activation(conv_transpose(x, w) + bias), for an activation whose derivative follows from y."""

    keep_result = True

    @staticmethod
    def kernel(*inputs: Any) -> torch.Tensor:
        x, w, bias, arguments, algorithm, activation = inputs
        return execute.conv_transpose(x, w, bias, arguments, algorithm, activation)

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        *others, ctx.activation = inputs
        _ConvTransposeRules.remember(ctx, tuple(others))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        x, w, y = ctx.saved_tensors
        return *_ConvTransposeRules.gradients(ctx, activations.gradient(grad, y, ctx.activation), wanted, x, w), None


class _ConvRules:
    """x = conv(g, w), the adjoint in x."""

    operands, keep_result = 2, False
    kernel = staticmethod(execute.conv)

    @staticmethod
    def compute(g: torch.Tensor, w: torch.Tensor, in_size: Sizes, arguments: Arguments, algorithm: str | None) -> torch.Tensor:
        if nobody_intercepts(g, w):
            return execute.conv(g, w, in_size, arguments, algorithm)
        return dispatched("conv_raw", g, w, list(in_size), *schema_geometry(g.dim() - 2, arguments, algorithm))

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, ctx.in_size, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        g, w = ctx.saved_tensors
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_g, wants_w = wanted[:2]
        return (
            conv_transpose(grad, w.conj(), None, arguments, algorithm) if wants_g else None,
            conv_transpose_weight(grad, g.conj(), _sizes(ctx, g, w)[1], arguments, algorithm) if wants_w else None,
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

    operands, keep_result = 2, False
    kernel = staticmethod(execute.conv_transpose_weight)

    @staticmethod
    def compute(
        x: torch.Tensor, g: torch.Tensor, kernel_size: Sizes, arguments: Arguments, algorithm: str | None
    ) -> torch.Tensor:
        if nobody_intercepts(x, g):
            return execute.conv_transpose_weight(x, g, kernel_size, arguments, algorithm)
        return dispatched(
            "conv_transpose_weight_raw", x, g, list(kernel_size), *schema_geometry(x.dim() - 2, arguments, algorithm)
        )

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
        _, _, ctx.kernel_size, ctx.arguments, ctx.algorithm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
        x, g = ctx.saved_tensors
        arguments, algorithm = ctx.arguments, ctx.algorithm
        wants_x, wants_g = wanted[:2]
        return (
            conv(g.conj(), grad, _sizes(ctx, x, g)[0], arguments, algorithm) if wants_x else None,
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


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


ConvTranspose, ConvTransposeTransformed = eager(_ConvTransposeRules), transformed(_ConvTransposeRules)
Conv, ConvTransformed = eager(_ConvRules), transformed(_ConvRules)
ConvTransposeWeight, ConvTransposeWeightTransformed = eager(_ConvTransposeWeightRules), transformed(_ConvTransposeWeightRules)
# Where nothing intercepts and a gradient is needed.
_recorded_conv_transpose, _recorded_activated = recorded(_ConvTransposeRules), recorded(_ActivatedRules)
_recorded_conv = recorded(_ConvRules)
_recorded_conv_transpose_weight = recorded(_ConvTransposeWeightRules)
