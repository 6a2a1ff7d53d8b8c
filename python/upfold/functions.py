"""From the rules of a derivative to torch's ``autograd.Function``, in the three kinds that the routes of `autograd.py` take.

Rules name how many `operands` lead the inputs and are saved, and have `kernel` (runs, where nothing intercepts), `compute` (runs
anywhere), `remember` (keeps the rest of the inputs), `backward`, `jvp` and `vmap`. Two operands are those of a bilinear operator:
the derivative in either needs the other alone, so where one is not kept, `ctx.sizes` has the spatial sizes of both. Rules that
`keep_result` save the result behind the operands. A `backward` is told for each input whether its gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from .dispatch import current, restored
from .watch import nobody_intercepts

Wanted = Sequence[bool]
# Not public, but what torch's own hooks on several gradients ask.
_will_run: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


def eager(rules: Any) -> Any:
    """The rules as a Function whose forward takes ctx: the kind that every torch since 2.0 differentiates in both modes."""

    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _save(rules, ctx, inputs)
        # A graph that is being recorded keeps the choice open: `use` is read when it runs.
        ctx.settings = current() if nobody_intercepts() else None
        result: torch.Tensor = rules.compute(*inputs)
        return result

    return _function(rules, forward=forward, backward=_backward(rules, _needing), jvp=rules.jvp)


def recorded(rules: Any) -> Callable[..., torch.Tensor]:
    """What applies the rules where the caller knows that nothing intercepts: no forward mode, no transform, plain tensors."""

    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        rules.remember(ctx, inputs)
        ctx.settings, ctx.sizes = current(), None
        result: torch.Tensor = rules.kernel(*inputs)
        saved = inputs[: rules.operands]
        if saved and False in ctx.needs_input_grad[:2]:
            ctx.sizes = tuple(saved[0].shape[2:]), tuple(saved[1].shape[2:])
            saved = _needed(ctx.needs_input_grad, saved)
        ctx.save_for_backward(*saved, result) if rules.keep_result else ctx.save_for_backward(*saved)
        return result

    function = _function(rules, forward=forward, backward=_backward(rules, _asked_for))
    # Past Function.apply, which looks for transforms and for tensors that outlived one.
    apply: Callable[..., torch.Tensor] = super(Function, function).apply
    return apply


def transformed(rules: Any) -> Any:
    """The rules as a Function with setup_context and a vmap rule: the kind that ``torch.func`` asks for."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(rules, ctx, inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return rules.backward(ctx, grad, ctx.needs_input_grad)

    rest = {"backward": backward, "jvp": rules.jvp, "vmap": rules.vmap}
    return _function(rules, forward=rules.compute, setup_context=setup_context, **rest)


def applied(function: type[Function], *inputs: Any) -> torch.Tensor:
    """The result of a Function."""
    result: torch.Tensor = function.apply(*inputs)
    return result


def dispatched(name: str, *inputs: Any) -> torch.Tensor:
    """The result of one of upfold's operators, by way of torch's dispatcher."""
    result: torch.Tensor = getattr(torch.ops.upfold, name)(*inputs)
    return result


def _needed(wanted: Wanted, inputs: tuple[Any, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of two operands, those that the wanted gradients need: a frozen weight holds no input alive."""
    return inputs[0] if wanted[1] else None, inputs[1] if wanted[0] else None


def _save(rules: Any, ctx: Any, inputs: tuple[Any, ...]) -> None:
    operands, ctx.sizes = inputs[: rules.operands], None
    ctx.save_for_backward(*operands)
    ctx.save_for_forward(*operands)
    rules.remember(ctx, inputs)


def _needing(ctx: Any) -> Wanted:
    wanted: Wanted = ctx.needs_input_grad
    return wanted


def _asked_for(ctx: Any) -> Wanted:
    """Which of the needed gradients this backward asks for: ``torch.autograd.grad`` names some."""
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if _will_run is None or needed.count(True) == 1:
        return needed
    pairs = zip(needed, ctx.next_functions)  # of the tensors alone, which lead the inputs
    asked = []
    try:
        for needs, (node, _) in pairs:
            asked.append(needs and _will_run(node))
    except RuntimeError:  # this leaf is named, and others behind it may be: torch takes 12 us to say so of each
        asked.append(True)
        asked += [needs and _is_asked_for(node) for needs, (node, _) in pairs]
    asked.append(False)  # for a bias of None
    return asked


def _is_asked_for(node: Any) -> bool:
    assert _will_run is not None
    try:
        return bool(_will_run(node))
    except RuntimeError:  # this very leaf is named
        return True


def _backward(rules: Any, choose: Callable[[Any], Wanted]) -> Callable[[Any, torch.Tensor], Any]:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wanted = choose(ctx)
        if ctx.settings is None:
            return rules.backward(ctx, grad, wanted)
        if 0 in grad.stride():  # as below a sum: laid out once, not by each operator that reads it
            grad = grad.contiguous()
        now = current()
        if ctx.settings is now or ctx.settings == now:
            return rules.backward(ctx, grad, wanted)
        with restored(ctx.settings):
            return rules.backward(ctx, grad, wanted)

    return backward


def _function(rules: Any, **members: Any) -> Any:
    return type(rules.__name__.strip("_"), (Function,), {name: staticmethod(member) for name, member in members.items()})
