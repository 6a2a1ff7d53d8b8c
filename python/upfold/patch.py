"""Torch's own functions, run by this package inside a block: for models that call them instead of layers.

The block is one of torch's function modes rather than an assignment to ``torch.nn.functional``: a mode is asked at each call, so
it sees functions that a model imported by name long before, other threads go on as they were, and there is nothing to put back.
Torch sets a mode aside while it answers, so what runs inside an answer, torch's own operator included, is not redirected again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from . import functional
from .dispatch import current, fallback_allowed
from .geometry import InvalidArgument
from .nn import answers_with_torch

_CONV_TRANSPOSE: dict[Any, Callable[..., Tensor]] = {
    F.conv_transpose1d: functional.conv_transpose1d,
    F.conv_transpose2d: functional.conv_transpose2d,
    F.conv_transpose3d: functional.conv_transpose3d,
}
_FOLD: dict[Any, Callable[..., Tensor]] = {F.fold: functional.fold, F.unfold: functional.unfold}


@contextlib.contextmanager
def patch(*, conv_transpose: bool = True, fold: bool = True) -> Iterator[None]:
    """Make torch's functions run on upfold inside a ``with`` block or a decorated function.

    Reached are calls of ``torch.nn.functional.conv_transpose1d/2d/3d`` (those of ``torch`` are the same functions), ``fold`` and
    ``unfold``, under whatever name and whenever they were imported, so the layers of ``torch.nn`` too. ``upfold.use`` sets the
    algorithm. Torch's modules stay as they are; the block belongs to the running thread, and an exception ends it too. Blocks
    nest, and an inner one adds to what the outer ones redirect. Inside, every call of torch's, of whatever function, passes
    through Python first and takes a few microseconds longer; `replace` costs nothing.

    Torch itself runs

    - what upfold refuses: torch's error is raised, or its result returned after a ``RuntimeWarning``;
    - while a file or graph is recorded by ``torch.jit.trace``, ``torch.onnx.export`` or ``torch.fx.symbolic_trace``;
    - for tensor subclasses with ``__torch_function__`` or ``__tensor_flatten__``, which know torch's functions alone;
    - in TorchScript, in threads that the block starts (``nn.DataParallel``), in what a checkpoint computes again for a backward.

    A function that ``torch.compile`` made is compiled once for inside, with upfold's operators, and once for outside; torch
    before 2.6 does not tell the two apart and keeps what it compiled first. A program of ``torch.export`` made inside holds
    upfold's operators. As with every such block, a generator that opens it leaves it open for its caller while it waits, and
    the body of a decorated generator function runs outside.

    Args:
        conv_transpose: whether ``conv_transpose1d/2d/3d`` are redirected.
        fold: whether ``fold`` and ``unfold`` are.

    Raises:
        InvalidArgument: a call inside that upfold refuses raises it where an algorithm was asked for by name or falling back to
            torch is off (`use`).
    """
    with _Redirection({**(_CONV_TRANSPOSE if conv_transpose else {}), **(_FOLD if fold else {})}):
        yield


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Set the open blocks of `patch` aside: what measures torch's functions must run torch's."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    others = [mode for mode in modes if not isinstance(mode, _Redirection)]
    for mode in reversed(others):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


class _Redirection(TorchFunctionMode):
    """Answers calls of some of torch's functions with others that take the same arguments."""

    def __init__(self, functions: dict[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = self._functions.get(function)
        if ours is None or _is_for_torch(types, (*args, *kwargs.values())):
            return function(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except (InvalidArgument, TypeError) as refusal:  # torch has read the arguments, so a type that it takes too is a refusal
            if current().algorithm is not None or not fallback_allowed():
                raise
            result = function(*args, **kwargs)  # or torch's error
            warnings.warn(f"upfold refuses, so torch's own operator runs: {refusal}", RuntimeWarning, stacklevel=2)
            return result


def _is_for_torch(types: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether somebody waits for torch's function itself: a recorder, or a subclass that knows functions by torch's names."""
    if any(overriding is not Tensor for overriding in types):
        return True
    # Wrappers such as distributed tensors answer operators, not functions, by tables that hold torch's alone.
    return (
        any(isinstance(argument, Tensor) and hasattr(argument, "__tensor_flatten__") for argument in arguments)
        or answers_with_torch()
    )
