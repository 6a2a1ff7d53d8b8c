"""What a model's transposed convolutions get: operators that can be run again, on operands like those of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import dispatch, execute, observe, ops, plans, timing
from .activation import kernel_applies
from .crop import cropped_padding
from .geometry import InvalidArgument
from .modes import FORWARD, GRAD_INPUT, GRAD_WEIGHT
from .problem import ActivationLike, Problem

# An algorithm and one of its configs.
Way = tuple[str, int]


@dataclass(frozen=True)
class Subject:
    """One operator on operands of given shapes and strides; `layers` are the modules that call it."""

    mode: str
    problem: Problem
    device: torch.device
    x: Tensor  # x and y on the meta device: shapes and strides
    y: Tensor
    w: Tensor
    bias: Tensor | None
    arguments: execute.Arguments
    activation: ActivationLike
    algorithm: str | None  # asked for by name
    layers: list[str]

    def calls(self, way: Way, operands: Sequence[tuple[Tensor, Tensor]]) -> list[timing.Call]:
        """The operator by one algorithm and config, on several data sets."""
        return [lambda x=x, g=g: self._run(way, x, g) for x, g in operands]  # type: ignore[misc]

    def _run(self, way: Way, x: Tensor, g: Tensor) -> Tensor:
        name, config = way
        with dispatch.use_config(config):
            if self.mode == FORWARD:
                return execute.conv_transpose(x, self.w, self.bias, self.arguments, name, self.activation)
            if self.mode == GRAD_INPUT:
                return execute.conv(g, self.w, tuple(x.shape[2:]), self.arguments, name)
            return execute.conv_transpose_weight(x, g, tuple(self.w.shape[2:]), self.arguments, name)

    def operands(self, sets: int) -> list[tuple[Tensor, Tensor]]:
        """Random x and gradients, laid out and aligned as they came; an operand that the mode does not read has no memory."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = []
        for _ in range(sets):
            x = self.x if self.mode == GRAD_INPUT else self._random(self.x, generator)
            made.append((x, self.y if self.mode == FORWARD else self._random(self.y, generator)))
        return made

    def _random(self, like: Tensor, generator: torch.Generator) -> Tensor:
        reach = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride()))
        offset = self.problem.alignment % 16 // like.element_size()  # in elements: fresh memory is aligned
        drawn = like.dtype if like.dtype.is_complex or like.dtype == torch.float64 else torch.float32
        values = torch.randn(reach + offset, generator=generator, dtype=drawn, device=self.device).to(like.dtype)
        return values.as_strided(like.shape, like.stride(), offset)

    def text(self) -> str:
        """Shapes, kernel, type and activation."""
        shapes = (self.x.shape, self.y.shape)
        sizes = " -> ".join("x".join(map(str, shape)) for shape in shapes)
        kernel = "x".join(map(str, self.w.shape[2:]))
        name = self.problem.activation.name
        return f"{sizes}, kernel {kernel}, {str(self.problem.dtype).removeprefix('torch.')}" + (f", {name}" if name else "")


def subjects_of(model: nn.Module, inputs: tuple[Any, ...], gradients: bool) -> list[Subject]:
    """What one run of the model computes, one subject for each class of problems; calls with `out=` are passed over."""
    found: dict[Any, Subject] = {}

    def see(path: str, name: str, bound: Any, result: Tensor) -> None:
        for subject in _described(path, int(name[-2]), bound, result, gradients):
            key = plans.problem_key(subject.problem, subject.device), subject.device, subject.algorithm
            first = found.setdefault(key, subject)
            if path not in first.layers:
                first.layers.append(path)

    observe.visit_operators(model, (inputs, {}), see)
    return list(found.values())


def _described(path: str, ndim: int, bound: Any, y: Tensor, gradients: bool) -> Iterator[Subject]:
    """The operators behind one call, as upfold would run them: the forward and, where asked for, its gradients."""
    operands = [bound["input"], bound["weight"], bound["bias"]]
    if any(t is not None and type(t) not in (Tensor, nn.Parameter) for t in operands) or type(y) is not Tensor:
        return  # a subclass has its own way
    if y.device.type not in ("cpu", "cuda") or y.numel() == 0 or bound.get("out") is not None:
        return
    plain: Any = (t if t is None else ops.as_autocast_casts(t.detach().resolve_conj().resolve_neg()) for t in operands)
    x, w, bias = plain
    x, y = (t if t.dim() == ndim + 2 else t.unsqueeze(0) for t in (x, y.detach()))
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    arguments: Any = tuple(tuple(value) if isinstance(value := bound[name], list) else value for name in names)
    if bound.get("crop") is not None:
        arguments = (arguments[0], cropped_padding(ndim, arguments[1], bound["crop"]), *arguments[2:])
    activation = bound.get("activation")
    activation = tuple(activation) if isinstance(activation, list) else activation
    try:
        problem = execute.describe(x, w, bias, arguments, activation)
    except InvalidArgument:  # a type without kernels
        return
    asked = bound.get("algorithm")
    asked = None if asked == "auto" else asked
    like_x, like_y = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (x, y))
    forward = Subject(FORWARD, problem, y.device, like_x, like_y, w, bias, arguments, activation, asked, [])
    yield forward
    if not gradients:
        return
    if problem.activation.code and not kernel_applies(problem.activation, x.dtype):  # a recorded forward applies it apart
        yield replace(forward, problem=execute.describe(x, w, bias, arguments), activation=None, layers=[])
    input_gradient = execute.describe_conv(y, w, tuple(x.shape[2:]), arguments)[0]
    weight_gradient = execute.describe_conv_transpose_weight(x, y, tuple(w.shape[2:]), arguments)[0]
    yield replace(forward, mode=GRAD_INPUT, problem=input_gradient, bias=None, activation=None, layers=[])
    yield replace(forward, mode=GRAD_WEIGHT, problem=weight_gradient, bias=None, activation=None, layers=[])
