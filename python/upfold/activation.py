"""Activations as torch operators, for the paths that do not apply them inside a kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .problem import Activation


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
