"""Activations as torch operators: applied where no kernel does it, and their derivatives where one did."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .problem import Activation

_aten = torch.ops.aten


def apply(t: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of `t`, differentiable, by torch's own element-wise operators."""
    name = activation.name
    if name is None:
        return t
    if name == "leaky_relu":
        return F.leaky_relu(t, activation.slope)
    if name == "gelu_tanh":
        return F.gelu(t, approximate="tanh")
    if name == "gelu":
        return F.gelu(t)
    if name == "silu":
        return F.silu(t)
    function = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[name]
    return function(t)


def kernel_applies(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether the kernel applies it in a forward that a backward follows: the derivative must follow from the result alone.

    Otherwise torch applies it, and keeps what it was given. Kernels take a slope in float32, too short for float64.
    """
    if activation.has_slope:
        return activation.slope >= 0 and dtype is not torch.float64
    return activation.name in ("relu", "tanh", "sigmoid")


def gradient(grad: torch.Tensor, result: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gradient of what an activation was given, from that of its result and the result (`kernel_applies`).

    Differentiable in both. The derivatives of the two with a corner are constant next to it, so their graph ends here.
    """
    found: torch.Tensor
    if activation.name == "relu":
        found = _aten.threshold_backward(grad, result.detach(), 0)
    elif activation.name == "leaky_relu":
        found = _aten.leaky_relu_backward(grad, result.detach(), activation.slope, True)
    elif activation.name == "tanh":
        found = _aten.tanh_backward(grad, result)
    else:
        found = _aten.sigmoid_backward(grad, result)
    return found
