"""Saying what would run: for a layer or a problem, for its gradients, and for what double backward and forward mode take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import backward, execute
from .activation import kernel_applies
from .algorithms import REGISTRY
from .dispatch import Plan, current, plan, planned
from .geometry import InvalidArgument
from .problem import Activation, ActivationLike, Problem


@dataclass(frozen=True)
class Candidate:
    """One algorithm's answer: the plan it would run, or its refusal."""

    algorithm: str
    plan: Plan | None
    refusal: str | None


@dataclass(frozen=True)
class Explanation:
    """What runs for a problem, and what every algorithm says to it.

    `derivatives` says the same of each operator that training runs, where that was asked for (`explain`).
    """

    problem: Problem
    device: torch.device
    plan: Plan
    candidates: tuple[Candidate, ...]
    derivatives: Mapping[str, Explanation] = field(default_factory=dict)

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{p.operator.name.lower()} on {self.device}, {str(p.dtype).removeprefix('torch.')}: batch {p.batch}, "
            f"{p.in_channels} -> {p.out_channels} channels in {p.groups} group(s), {_sizes(p.in_size)} -> {_sizes(p.out_size)}, "
            f"kernel {_sizes(p.kernel_size)}, stride {_sizes(p.stride)}, padding {_sizes(p.padding)}, dilation "
            f"{_sizes(p.dilation)}",
            f"{p.flops / 1e9:.3g} GFLOP, {p.bytes / 1e6:.3g} MB",
            f"runs: {_plan_text(self.plan)}",
        ]
        for candidate in self.candidates:
            if candidate.plan is None:
                lines.append(f"  {candidate.algorithm}: refuses: {candidate.refusal}")
            else:
                scratch = candidate.plan.workspace_bytes / 2**20
                lines.append(f"  {candidate.algorithm}: accepts (config {candidate.plan.config}, {scratch:.3g} MiB workspace)")
        return "\n".join([*lines, *self._derivative_lines()])

    def _derivative_lines(self) -> Iterator[str]:
        """A paragraph for each answer, headed by those that it is the answer for."""
        answers: dict[str, list[str]] = {}
        for name, found in self.derivatives.items():
            refusals = [f"    {one.algorithm}: refuses: {one.refusal}" for one in found.candidates if one.plan is None]
            text = "\n".join([f"  runs: {_plan_text(found.plan)}", *refusals])
            answers.setdefault(f"{found.problem.operator.name.lower()}\n{text}", []).append(name)
        for text, names in answers.items():
            yield f"{', '.join(names)}: {text}"


def _plan_text(plan: Plan) -> str:
    return f"{plan.algorithm} (config {plan.config}, {plan.workspace_bytes / 2**20:.3g} MiB workspace; {plan.reason})"


def _sizes(axes: tuple[int, int, int]) -> str:
    return "x".join(str(size) for size in axes)


def explain(
    layer_or_problem: Any,
    input: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    gradients: bool = False,
) -> Explanation:
    """Say what would run for a layer and an input, or for a problem, and what every algorithm answers.

    Args:
        layer_or_problem: a transposed-convolution layer (torch's or upfold's), or a `Problem`.
        input: for a layer, the tensor it would get, of shape (batch, in_channels, spatial...) or without the batch.
        device: for a problem, where it would run (default: the CPU).
        gradients: for a layer, whether to say it of training too: `Explanation.derivatives` then has the forward that a
            backward follows (``forward``), ``grad_input`` and ``grad_weight``, the derivatives of these two that a double
            backward takes (``grad_input by grad`` and so on), the two terms of forward mode (``tangent by input``, ``tangent by
            weight``), and ``grad_input`` and ``grad_weight of both`` where a backward that asks for both does not run them
            apart: from one copy of the gradient with its channels innermost, or from one matrix of its columns. Gradients and
            tangents are taken to be laid out as what they belong to; their memory is taken for the moment.

    Returns:
        An `Explanation`; ``str()`` of it is made to be read.

    Raises:
        InvalidArgument: the arguments do not fit, or an algorithm asked for by name refuses.
    """
    if isinstance(layer_or_problem, Problem):
        if gradients:
            raise InvalidArgument("gradients = True; a Problem is one operator; pass explain(layer, input, gradients=True)")
        where = torch.device("cpu" if device is None else device)
        return _explained(layer_or_problem, where, current().algorithm)
    _check_layer(layer_or_problem, input)
    assert input is not None
    asked = getattr(layer_or_problem, "algorithm", None) or current().algorithm
    operands = execute.operands_of_layer(layer_or_problem, input)
    found = _explained(execute.describe(*operands), input.device, asked)
    if not gradients:
        return found
    derived = {name: _explained(problem, input.device, asked) for name, problem in _derivatives(*operands)}
    for name, problem, algorithm in _of_both(*operands, asked):
        derived[name] = _explained(problem, input.device, algorithm)
    return replace(found, derivatives=derived)


def _explained(problem: Problem, device: torch.device, asked: str | None) -> Explanation:
    candidates = []
    for name, algorithm in REGISTRY.items():
        refusal = algorithm.reject(problem, device)
        accepted = None if refusal is not None else planned(algorithm, problem, device, "")
        candidates.append(Candidate(name, accepted, refusal))
    return Explanation(problem, device, plan(problem, device, asked), tuple(candidates))


def _derivatives(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, arguments: execute.Arguments, activation: ActivationLike
) -> Iterator[tuple[str, Problem]]:
    """The problem of each operator that training runs, under the names of `explain`."""
    in_size, kernel_size = tuple(x.shape[2:]), tuple(w.shape[2:])
    in_kernel = kernel_applies(Activation.parse(activation), x.dtype)
    problem, result = execute.describe_conv_transpose(x, w, bias, arguments, activation if in_kernel else None)
    # Fresh memory stands in for gradients and tangents: a plan depends on device, strides and alignment, never on values.
    g = _fresh(result, x.device)
    grad_input, dx = execute.describe_conv(g, w, in_size, arguments)
    grad_weight, dw = execute.describe_conv_transpose_weight(x, g, kernel_size, arguments)
    dx, dw = _fresh(dx, x.device), _fresh(dw, x.device)
    yield "forward", problem
    yield "grad_input", grad_input
    yield "grad_weight", grad_weight
    yield "grad_input by grad", execute.describe(dx, w, None, arguments)
    yield "grad_input by weight", execute.describe_conv_transpose_weight(dx, g, kernel_size, arguments)[0]
    yield "grad_weight by input", execute.describe_conv(g, dw, in_size, arguments)[0]
    yield "grad_weight by grad", execute.describe(x, dw, None, arguments)
    yield "tangent by input", execute.describe(_fresh(x, x.device), w, bias, arguments)
    yield "tangent by weight", execute.describe(x, _fresh(w, x.device), None, arguments)


def _of_both(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: execute.Arguments,
    activation: ActivationLike,
    asked: str | None,
) -> Iterator[tuple[str, Problem, str | None]]:
    """The two operators that a backward does not run apart, and the algorithm that they are then run by."""
    g = _fresh(execute.describe_conv_transpose(x, w, bias, arguments, None)[1], x.device)
    found = backward.together(g, x, w, arguments, asked, bias is not None)
    if found is not None:
        algorithm = "gemm" if found.way == "shared" else asked
        yield f"grad_input of both, from {found.said}", found.problems[0], algorithm
        yield f"grad_weight of both, from {found.said}", found.problems[1], algorithm


def _fresh(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _check_layer(layer: Any, input: torch.Tensor | None) -> None:
    """Refuse what is no transposed-convolution layer, and an input that it could not take."""
    arguments = ("stride", "padding", "output_padding", "groups", "dilation", "weight", "bias")
    if not getattr(layer, "transposed", True) or not all(hasattr(layer, name) for name in arguments):
        raise InvalidArgument(
            f"layer_or_problem = {type(layer).__name__}; must be a transposed-convolution layer or a Problem; "
            f"fold and unfold have one method only"
        )
    if input is None:
        raise InvalidArgument("input = None; explaining a layer needs the tensor that it would get; pass explain(layer, input)")
    rank = layer.weight.dim()
    if input.dim() not in (rank, rank - 1):
        raise InvalidArgument(
            f"input.shape = {tuple(input.shape)}; the layer takes {rank} axes, or {rank - 1} without the batch; got {input.dim()}"
        )
