"""From the rules of a derivative to torch's ``autograd.Function``, in the three kinds that the routes of `autograd.py` take.

Rules name how many `operands` lead the inputs and are saved, and have `kernel` (runs, where nothing intercepts), `compute` (runs
anywhere), `remember` (keeps the rest of the inputs), `backward`, `jvp` and `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from .dispatch import current, restored
from .watch import nobody_intercepts


def eager(rules: Any) -> Any:
    """The rules as a Function whose forward takes ctx: the kind that every torch since 2.0 differentiates in both modes."""

    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _save(rules, ctx, inputs)
        # A graph that is being recorded keeps the choice open: `use` is read when it runs.
        ctx.settings = current() if nobody_intercepts() else None
        result: torch.Tensor = rules.compute(*inputs)
        return result

    return _function(rules, forward=forward, backward=_backward(rules), jvp=rules.jvp)


def recorded(rules: Any) -> Callable[..., torch.Tensor]:
    """What applies the rules where the caller knows that nothing intercepts: no forward mode, no transform, plain tensors."""

    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(*inputs[: rules.operands])
        rules.remember(ctx, inputs)
        ctx.settings = current()
        result: torch.Tensor = rules.kernel(*inputs)
        return result

    function = _function(rules, forward=forward, backward=_backward(rules))
    # Past Function.apply, which looks for transforms and for tensors that outlived one.
    apply: Callable[..., torch.Tensor] = super(Function, function).apply
    return apply


def transformed(rules: Any) -> Any:
    """The rules as a Function with setup_context and a vmap rule: the kind that ``torch.func`` asks for."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(rules, ctx, inputs)

    rest = {"backward": rules.backward, "jvp": rules.jvp, "vmap": rules.vmap}
    return _function(rules, forward=rules.compute, setup_context=setup_context, **rest)


def _save(rules: Any, ctx: Any, inputs: tuple[Any, ...]) -> None:
    operands = inputs[: rules.operands]
    ctx.save_for_backward(*operands)
    ctx.save_for_forward(*operands)
    rules.remember(ctx, inputs)


def _backward(rules: Any) -> Callable[[Any, torch.Tensor], Any]:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.settings is None:
            return rules.backward(ctx, grad)
        if 0 in grad.stride():  # as below a sum: laid out once, not by each operator that reads it
            grad = grad.contiguous()
        if ctx.settings == current():
            return rules.backward(ctx, grad)
        with restored(ctx.settings):
            return rules.backward(ctx, grad)

    return backward


def _function(rules: Any, **members: Any) -> Any:
    return type(rules.__name__.strip("_"), (Function,), {name: staticmethod(member) for name, member in members.items()})
