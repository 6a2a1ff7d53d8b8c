"""Activations as torch operators: applied where no kernel does it, and their derivatives where one did."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from .problem import ACTIVATION_CODES, Activation

_RELU, _TANH = ACTIVATION_CODES["relu"], ACTIVATION_CODES["tanh"]
_relu_backward = torch.ops.aten.threshold_backward.default
_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.default
_tanh_backward, _sigmoid_backward = torch.ops.aten.tanh_backward.default, torch.ops.aten.sigmoid_backward.default


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


@lru_cache(maxsize=256)
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
    if activation.code == _RELU:
        found = _relu_backward(grad, result.detach(), 0)
    elif activation.has_slope:
        found = _leaky_relu_backward(grad, result.detach(), activation.slope, True)
    else:
        found = (_tanh_backward if activation.code == _TANH else _sigmoid_backward)(grad, result)
    return found
