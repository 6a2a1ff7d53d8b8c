"""Floating-point operations of this package's operators, for ``torch.utils.flop_counter``.

The counts follow torch's convention for ``aten::convolution``, every tap of every input position whether or not it
lands inside the output, so that a model shows the same count before and after `replace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch


def _products(x_shape: Sequence[int], w_shape: Sequence[int]) -> int:
    """Twice the number of products of a batched x with a weight (in_channels, out_channels / groups, kernel...)."""
    return 2 * x_shape[0] * prod(x_shape[2:]) * prod(w_shape)


def _conv_transpose(x_shape: Sequence[int], w_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return _products(x_shape, w_shape)


def _conv(g_shape: Sequence[int], w_shape: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return _products(out_shape, w_shape)


def _conv_transpose_weight(x_shape: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return _products(x_shape, out_shape)


def register() -> bool:
    """Tell torch's counter what the operators, which `ops` has defined before, cost; safe to repeat.

    Returns:
        Whether the installed torch has a counter that can be told (torch 2.0 has none).
    """
    try:
        from torch.utils.flop_counter import flop_registry, register_flop_formula
    except ImportError:
        return False
    operators = torch.ops.upfold
    for operator, formula in (
        (operators.conv_transpose_raw, _conv_transpose),
        (operators.conv_transpose_static, _conv_transpose),
        (operators.conv_raw, _conv),
        (operators.conv_transpose_weight_raw, _conv_transpose_weight),
    ):
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
    return True
