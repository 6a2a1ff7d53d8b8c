"""Whether anything but plain eager execution would see an operator call.

A call may skip torch's dispatcher only when nobody would notice. This is the one place that decides it.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_functorch_level = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing_state = torch._C._get_tracing_state
_is_grad_enabled = torch.is_grad_enabled


def _two_device_autocast() -> bool:
    # The form that torch had before it asked for the device type.
    return bool(torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled())


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", _two_device_autocast)


def _never_compiling() -> bool:
    return False


# torch 2.0 has no cheap way to ask; its compiler then traces the eager path.
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", _never_compiling)


def transform_is_active() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp, functionalize) surrounds a call that runs now."""
    return not is_compiling() and _functorch_level() is not None


def nobody_intercepts(*tensors: torch.Tensor | None) -> bool:
    """Whether the call may skip the dispatcher, gradients aside.

    False while a graph is compiled, under a dispatch or function mode, a ``torch.func`` transform, tracing, autocast or
    forward-mode differentiation, and for tensor subclasses, unusual layouts, tensors without memory, and lazy conjugates or
    negations.
    """
    if is_compiling():
        return False
    if (
        _dispatch_modes()
        or _function_modes()
        or _functorch_level() is not None
        or _any_autocast()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    try:
        for tensor in tensors:
            if tensor is not None and (
                type(tensor) not in _PLAIN_TYPES
                or tensor.is_neg()
                or tensor.is_conj()
                or (tensor.data_ptr() == 0 and _lacks_memory(tensor))
            ):
                return False
    except RuntimeError:  # data_ptr: sparse and opaque layouts, and what torch.autograd.grad(is_grads_batched=True) passes
        return False
    return True


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor with a null address has entries nevertheless, or never has memory: zero tensors, meta tensors."""
    return tensor.is_meta or tensor.numel() > 0


def has_memory(tensor: torch.Tensor | None) -> bool:
    """Whether the tensor is None, or a plain one whose elements lie where its pointer and strides say, whoever watches."""
    if tensor is None:
        return True
    if is_compiling() or type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # the stand-ins of torch.func
        return False
    return True


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether reverse-mode differentiation will ask for a gradient with respect to one of the tensors."""
    if _is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_plain_inference(*tensors: torch.Tensor | None) -> bool:
    """Whether no derivative of any kind is taken: neither by a backward, nor forward mode, nor a transform."""
    return forward_ad._current_level < 0 and not transform_is_active() and not needs_gradient(*tensors)
