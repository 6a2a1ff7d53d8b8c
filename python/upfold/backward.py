"""The gradients of a backward: each by its operator, or what reads the same gradient together.

Tensor cores want the channels of a gradient innermost. Where both operators would lay a contiguous one out so, each for itself,
a backward that asks for both copies it once, and hands both the copy. Where both are matrix products, they take one matrix of
its columns. The gradient of the bias comes with that of the weight where its kernel reads every element once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import execute, layout, native
from .algorithms import REGISTRY
from .channel_sums import channel_sums
from .dispatch import current, way_of_backward
from .execute import Arguments, Launch
from .problem import DTYPE_BYTES, DTYPE_CODES, Problem, pad_shape, pad_strides

Sizes = tuple[int, ...]
_VECTOR_BYTES = 16  # of a pixel's channels, of which there must be whole ones
# Float32 is left as it lies: the gradient of the weight takes planes as fast as pixels.
_TURNED = frozenset({torch.float16, torch.bfloat16})


class Turned(NamedTuple):
    """A backward from one copy of the gradient: how it is made, how it lies, and the two launches that read it."""

    copy: Any
    strides: tuple[int, ...]
    conv: Launch
    weight: Launch

    def run(self, g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients in x and in w."""
        pixels = g.new_empty_strided(g.shape, self.strides)
        self.copy.run(g.data_ptr(), pixels.data_ptr(), self.conv.stream)
        x_grad, w_grad = _run_both(self.conv, self.weight, pixels, x, w, _weight_alone)
        return x_grad, w_grad


class Shared(NamedTuple):
    """A backward from one matrix of columns of the gradient: the call, what it takes beside, and how its results lie."""

    call: Any
    elements: tuple[int, ...]  # of the workspace, in the operands' type
    shapes: tuple[Sizes, Sizes]
    strides: tuple[Sizes, Sizes]
    device: int

    def run(self, g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients in x and in w."""
        x_grad, w_grad = (x.new_empty_strided(shape, strides) for shape, strides in zip(self.shapes, self.strides))
        workspace = x.new_empty_strided(self.elements, (1,))
        addresses = (t.data_ptr() for t in (x, w, g, x_grad, w_grad, workspace))
        self.call.run(*addresses, execute.raw_stream(self.device))
        return x_grad, w_grad


class Apart(NamedTuple):
    """A backward of two operators, each by itself: their launches, which read what they are given."""

    conv: Launch
    weight: Launch

    def run(self, g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients in x and in w."""
        x_grad, w_grad = _run_both(self.conv, self.weight, g, x, w, _weight_alone)
        return x_grad, w_grad

    def run_with_bias(self, g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, and the gradient in the bias."""
        x_grad, w_grad, bias_grad = _run_both(self.conv, self.weight, g, x, w, _weight_and_bias)
        return x_grad, w_grad, bias_grad


def gradients(
    g: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[Sizes, Sizes],
    wanted: Sequence[bool],
    arguments: Arguments,
    algorithm: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients in x, in w and in the bias of ``y = conv_transpose(x, w) + bias``, where nothing watches.

    Args:
        g: (batch, out_channels, spatial...), the gradient of y.
        operands: x, (batch, in_channels, spatial...), and w, (in_channels, out_channels / groups, kernel...), of g's dtype and
            device; the gradient in one needs the other alone.
        sizes: the spatial sizes of both.
        wanted: which of the three to compute; the others are None.
        arguments: those of `execute.conv_transpose`.
        algorithm: a name, or None for what `use` or the heuristic says.
    """
    (x, w), (in_size, kernel_size) = operands, sizes
    wants_x, wants_w, wants_bias = wanted[:3]
    x_grad = w_grad = bias_grad = None
    both = _remembered(g, x, w, arguments, algorithm, bool(wants_bias)) if wants_x and wants_w else None
    if wants_bias and isinstance(both, Apart):
        return both.run_with_bias(g, x, w)
    if both is not None:
        x_grad, w_grad = both.run(g, x, w)
    else:
        if wants_x:
            x_grad = execute.conv(g, w, in_size, arguments, algorithm)
        if wants_w and wants_bias:
            launch = execute.weight_launch(x, g, kernel_size, arguments, algorithm)
            if not launch.empty and not launch.copies:
                return x_grad, *_weight_and_bias(launch, g, x)
        if wants_w:
            w_grad = execute.conv_transpose_weight(x, g, kernel_size, arguments, algorithm)
    if wants_bias:
        bias_grad = channel_sums(g)
    return x_grad, w_grad, bias_grad


def _weight_and_bias(launch: Launch, g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one pass over `g`, by tiles that sum its channels on the way, or each by itself."""
    if not launch.sums:
        return _run_weight(launch, g, x, None), channel_sums(g)
    bias_grad = g.new_empty(g.shape[1])
    return _run_weight(launch, g, x, bias_grad), bias_grad


def _weight_alone(launch: Launch, g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (_run_weight(launch, g, x, None),)


def _run_both(
    conv: Launch,
    weight: Launch,
    g: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    run_weight: Callable[..., tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """The gradient in x and what `run_weight` gives, the one with more scratch first: that lies where the other's result will."""
    first = run_weight(weight, g, x) if weight.workspace_bytes > conv.workspace_bytes else ()
    x_grad = x.new_empty_strided(conv.shape, conv.strides)
    conv.run(x_grad, w, None, g)
    return x_grad, *(first or run_weight(weight, g, x))


def _run_weight(launch: Launch, g: torch.Tensor, x: torch.Tensor, bias_grad: torch.Tensor | None) -> torch.Tensor:
    w_grad = x.new_empty_strided(launch.shape, launch.strides)
    launch.run(x, w_grad, bias_grad, g)
    return w_grad


def _remembered(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments: Arguments, algorithm: str | None, with_bias: bool
) -> Turned | Shared | Apart | None:
    """What a backward of both operators runs, planned or remembered; None where there is nothing, or something to copy first."""
    addresses = (g.data_ptr(), x.data_ptr(), w.data_ptr()) if g.is_cuda else ()
    key = (
        *(gradients, *map(execute.tensor_key, (g, x, w)), arguments, algorithm, with_bias),
        # Of each: an operator's plan asks for the alignment of its own operands.
        *(execute.environment(g, 0), *(address & (execute.MOST_ALIGNMENT - 1) for address in addresses)),
    )
    kept: list[Turned | Shared | Apart | None] | None = execute.remembered(key)
    if kept is None:
        kept = execute.remember(key, [_planned(g, x, w, arguments, algorithm, with_bias)])
    return kept[0]


def _planned(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments: Arguments, algorithm: str | None, with_bias: bool
) -> Turned | Shared | Apart | None:
    found = together(g, x, w, arguments, algorithm, with_bias)
    if found is None:
        return _planned_apart(g, x, w, arguments, algorithm)
    if found.way == "shared":
        elements = -(-found.call.workspace_bytes // DTYPE_BYTES[g.dtype])
        dx, dw = found.results
        return Shared(found.call, (elements,), (dx.shape, dw.shape), (dx.stride(), dw.stride()), g.get_device())
    copy = _copy_call(g.get_device(), DTYPE_CODES[g.dtype], pad_shape(g.shape), pad_strides(g.stride(), g.shape))
    if copy is None:
        return _planned_apart(g, x, w, arguments, algorithm)
    conv, weight = (Launch(problem, g.device, None, result, False) for problem, result in zip(found.problems, found.results))
    return Turned(copy, _turned_strides(g), conv, weight)


def _planned_apart(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments: Arguments, algorithm: str | None
) -> Apart | None:
    if not layout.has_dense_rows(g) or not layout.has_dense_rows(x) or x.shape[0] == 0:
        return None
    problem, x_grad = execute.describe_conv(g, w, tuple(x.shape[2:]), arguments)
    conv = Launch(problem, g.device, algorithm or current().algorithm, x_grad, False)
    return Apart(conv, execute.weight_launch(x, g, tuple(w.shape[2:]), arguments, algorithm))


class Together(NamedTuple):
    """How `gradients` runs two operators that it does not run apart, their problems, and stand-ins for their results."""

    way: str  # "turned": from a copy of the gradient, as which the problems have it; "shared": `gemm`, from one matrix of columns
    problems: tuple[Problem, Problem]
    results: tuple[torch.Tensor, torch.Tensor]
    call: Any = None  # of both products

    @property
    def said(self) -> str:
        """What both are from, in words."""
        return "one copy of y's" if self.way == "turned" else "one matrix of columns"


def together(
    g: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    arguments: Arguments,
    algorithm: str | None = None,
    with_bias: bool = False,
) -> Together | None:
    """What `gradients` runs where both operators are asked for, with that of the bias or not, and not run apart, else None."""
    asked = algorithm or current().algorithm or "auto"
    if not g.is_cuda or asked != "auto" or g.dtype.is_complex or g.numel() == 0 or x.numel() == 0:
        return None
    if not layout.has_dense_rows(g) or not layout.has_dense_rows(x):
        return None
    conv, dx = execute.describe_conv(g, w, tuple(x.shape[2:]), arguments)
    weight, dw = execute.describe_conv_transpose_weight(x, g, tuple(w.shape[2:]), arguments)
    turned = None
    if _can_turn(g):
        y_strides = pad_strides(_turned_strides(g), g.shape)
        turned = (
            replace(conv, y_strides=y_strides, alignment=execute.alignment_of(w)),
            replace(weight, y_strides=y_strides, alignment=execute.alignment_of(x)),
        )
    shared = _shared_call(conv, weight, g.get_device())
    way = way_of_backward((conv, weight), turned, shared is not None, g.device, with_bias)
    if way == "turned" and turned is not None:
        return Together(way, turned, (dx, dw))
    return Together(way, (conv, weight), (dx, dw), shared) if way == "shared" else None


def _shared_call(conv: Problem, weight: Problem, device: int) -> Any:
    """Both products from one matrix of columns, or None where they do not read the same."""
    if REGISTRY["gemm"].reject(conv, torch.device("cuda", device)) is not None:
        return None
    module, _ = native.load_cuda()
    assert module is not None
    call = module.GemmGradientsCall(device, conv.cuda, weight.cuda, conv.workspace_cap, conv.allow_tf32)
    return call if call.shares else None


def _can_turn(g: torch.Tensor) -> bool:
    """Whether planes are dense, and the channels of a pixel whole vectors, of a type that gains by it."""
    pixels = g.shape[2:].numel()
    whole = g.shape[1] * DTYPE_BYTES[g.dtype] % _VECTOR_BYTES == 0
    return g.dtype in _TURNED and g.is_contiguous() and pixels > 1 and g.numel() > 0 and whole


def _copy_call(device: int, dtype: int, sizes: Sizes, strides: Sizes) -> Any:
    """The kernel that copies planes which lie so as pixels whose channels are innermost, or None."""
    module, _ = native.load_cuda()
    copy = None if module is None else module.ToPixelsCall(device, dtype, sizes, strides)
    return copy if copy is not None and copy.fits else None


def _turned_strides(g: torch.Tensor) -> tuple[int, ...]:
    """How the copy lies."""
    return layout.empty_result(g.shape, g, channels_last=True, device="meta").stride()
