"""How far a whole model may be off: at most twice as far as torch, which the layers' own rule allows as well."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..precision import float32_precision
from ..reference import round_to_tf32

# A result may be this many times as far off as torch's.
ALLOWANCE = 2.0
# What tensor cores compute, by torch's names, and how its operands are called.
_PRODUCTS = (*(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)), "linear", "matmul", "bmm", "__matmul__")
_OPERANDS = ("input", "weight", "other", "mat2")


def in_double(model: nn.Module, *inputs: Any) -> Tensor:
    """What the model computes in float64, from the weights and inputs that it has."""
    wide = [value.double() if torch.is_tensor(value) and value.is_floating_point() else value for value in inputs]
    with torch.no_grad():
        exact: Tensor = copy.deepcopy(model).double()(*wide)
    return exact


def error_norm(y: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the result; one wrong pixel is far above the rounding of all the others."""
    error, size = float((y.double() - exact).norm()), float(exact.norm())
    return error / size if size else error


def allowed_error(torchs: Tensor, exact: Tensor) -> float:
    """The largest `error_norm` that a model may show: twice that of torch's result, and at least one unit of the dtype.

    A whole model rounds so often that luck evens out, so torch's own result serves as the oracle.
    """
    return ALLOWANCE * max(error_norm(torchs, exact), torch.finfo(torchs.dtype).eps / 2)


class _Rounded(TorchFunctionMode):
    """Rounds the operands of every convolution and matrix product to TF32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in _PRODUCTS:
            args = (*map(_round, args[:2]), *args[2:])
            kwargs = {name: _round(value) if name in _OPERANDS else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _round(value: Any) -> Any:
    return round_to_tf32(value) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def in_tf32(model: nn.Module, *inputs: Tensor) -> Tensor:
    """What the model computes if every product rounds its operands to TF32.

    In TF32 torch's own result is no oracle: which of cuDNN's kernels it takes, some of which do not round, would decide.
    """
    with torch.no_grad(), float32_precision(False), _Rounded():
        rounded: Tensor = model(*inputs)
    return rounded
