"""The layers that run inside a fused model: twins of its own, with what follows them taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import execute, frozen, layout, parts
from .crop import parse_crop
from .geometry import InvalidArgument, cached_geometry, conv_transpose_shape
from .nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .watch import nobody_intercepts

_OURS: dict[int, Any] = {1: ConvTranspose1d, 2: ConvTranspose2d, 3: ConvTranspose3d}


def twin_of(layer: nn.Module) -> Any:
    """A layer that computes with the parameters of `layer`, but whose settings can differ."""
    cls = type(layer)
    twin = cls.__new__(cls)  # parametrized layers refuse copy.copy
    twin.__dict__.update(layer.__dict__)
    for name, value in layer.__dict__.items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = value.copy()  # who listens to one does not listen to the other
    return twin


def fold_batch_norm(twin: Any, norm: Any) -> bool:
    """Give the twin a weight and bias of its own, which scale and shift as the batch norm does in evaluation mode.

    ``(y - mean) / sqrt(var + eps) * gamma + beta`` is one factor and one summand for each output channel. They are computed in
    float64 and rounded once. What a kernel packs of that weight is kept, as by `freeze`.

    Returns:
        Whether that was done: not where the rounded weights would leave the range in which their type keeps all its digits.
    """
    weight = twin.weight.detach()
    wide: Any = (
        None if t is None else t.detach().double() for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    mean, variance, gamma, beta = wide
    factor = (variance + norm.eps).rsqrt()
    factor = factor if gamma is None else factor * gamma
    bias = -mean if twin.bias is None else twin.bias.detach().double() - mean
    bias = bias * factor if beta is None else bias * factor + beta
    per_group = factor.view(twin.groups, 1, -1, *[1] * (weight.dim() - 2))
    exact = (weight.double().unflatten(0, (twin.groups, -1)) * per_group).flatten(0, 1)
    folded = torch.empty_like(weight).copy_(exact)  # channels_last stays so
    roundoff = torch.finfo(weight.dtype).eps / 2
    if not (folded.double() - exact).norm() <= roundoff * exact.norm() or not bias.to(weight.dtype).isfinite().all():
        return False
    entries = {"weight": folded, "bias": bias.to(weight.dtype)}
    twin._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in entries.items()}
    twin.__dict__["_frozen"] = frozen.Copies(twin.weight)  # nobody else has this weight: it cannot be stale
    return True


def add_crop(twin: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Let the twin leave out more of its result."""
    held = parse_crop(len(pairs), twin.crop or 0)
    twin.crop = tuple((before + b, after + a) for (before, after), (b, a) in zip(held, pairs))


class Batched(nn.Module):
    """Runs a twin that took in something meant for batched results only."""

    def __init__(self, twin: Any) -> None:
        super().__init__()
        self.twin = twin

    def forward(self, input: Tensor, output_size: Any = None) -> Any:
        """The twin's result."""
        if input.dim() != len(self.twin.kernel_size) + 2:
            raise InvalidArgument(
                f"input.shape = {tuple(input.shape)}; this layer was fused for inputs with a batch; upfold.restore(model) first"
            )
        return self.twin(input, output_size)


@dataclass(frozen=True)
class _Layout:
    """How the parts lie in a concatenation of sources of certain shapes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Part:
    """One part: of what a layer makes its arguments, and of what is at hand how it is copied."""

    shape: tuple[int, ...]
    first: int  # element of the buffer
    arguments: execute.Arguments | None
    rows: parts.Rows | None


_MOST_LAYOUTS = 64


class Concatenation(nn.Module):
    """``torch.cat(values, 1)`` where some values come from layers, which write into the result, and ReLU of it where asked for.

    Compilers, modes and subclasses get the parts and ``torch.cat``.

    Args:
        layers: one for each value: the layer that makes it, or None where it is at hand.
        relu: whether values at hand pass through ReLU; the layers bring their own.
    """

    def __init__(self, layers: Sequence[Any], relu: bool = False) -> None:
        super().__init__()
        self.relu = relu
        self.layers = nn.ModuleList(nn.Identity() if layer is None else layer for layer in layers)
        self._makers = tuple(layers)
        self._twins = tuple(layer.twin if isinstance(layer, Batched) else layer for layer in layers)
        self._layouts: dict[Any, _Layout | None] = {}

    def forward(self, *values: Any) -> Tensor:
        """Concatenate along the channels.

        Args:
            values: for a layer its (input, output_size), else the tensor itself.
        """
        sources: list[Tensor] = []
        operands: list[Tensor | None] = []
        key: list[Any] = []
        for twin, value in zip(self._twins, values):
            source = value
            if twin is not None:
                source, size = value
                operands += (twin.weight, twin.bias)
                key.append(size if size is None else tuple(size))
            key += (source.shape, source.stride(), source.dtype, source.device)
            sources.append(source)
        found = self._found(tuple(key), sources, values) if nobody_intercepts(*sources, *operands) else None
        if found is None:
            return torch.cat([self._made(maker, value) for maker, value in zip(self._makers, values)], 1)
        buffer = sources[0].new_empty_strided(found.shape, found.strides)
        left = iter(operands)
        for twin, source, planned in zip(self._twins, sources, found.parts):
            part = buffer.as_strided(planned.shape, found.strides, planned.first)
            if planned.arguments is None:
                parts.copy(source, part, planned.rows, self.relu)
            else:
                weight, bias = next(left), next(left)
                settings = planned.arguments, twin.algorithm, twin.activation
                copies = twin._frozen
                if copies is not None and copies.fit(weight):
                    frozen.conv_transpose(source, weight, bias, *settings, copies, part)  # type: ignore[arg-type]
                else:
                    execute.conv_transpose(source, weight, bias, *settings, part, True)  # type: ignore[arg-type]
        return buffer

    def _made(self, maker: Any, value: Any) -> Tensor:
        made: Tensor = maker(*value) if maker is not None else torch.relu(value) if self.relu else value
        return made

    def _found(self, key: Any, sources: Sequence[Tensor], values: Sequence[Any]) -> _Layout | None:
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._layout(sources, values)
        return self._layouts[key]

    def _layout(self, sources: Sequence[Tensor], values: Sequence[Any]) -> _Layout | None:
        """How one buffer can hold the parts, or None where they differ in type or place, or do not fit: torch then says so."""
        first = sources[0]
        dims = next(twin.weight.dim() for twin in self._twins if twin is not None)
        alike = all((one.dim(), one.dtype, one.device) == (dims, first.dtype, first.device) for one in sources)
        if not alike or first.device.type not in ("cpu", "cuda") or first.dtype.is_complex:
            return None
        arguments = [None if twin is None else twin._arguments(*value) for twin, value in zip(self._twins, values)]
        shapes, channels_last = [], dims > 3  # as torch.cat: where every part is
        for twin, source, given in zip(self._twins, sources, arguments):
            if twin is None or given is None:
                shapes.append(tuple(source.shape))
                channels_last = channels_last and layout.suggests_channels_last(shapes[-1], source.stride())
                continue
            geometry = cached_geometry(dims - 2, *given)
            shapes.append(conv_transpose_shape(source.shape, twin.weight.shape, None, geometry))
            channels_last = channels_last and layout.result_is_channels_last(source, twin.weight, geometry)
        if any((shape[0], *shape[2:]) != (shapes[0][0], *shapes[0][2:]) for shape in shapes):
            return None
        whole = (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])
        strides = layout.empty_result(whole, first, channels_last, device="meta").stride()
        planned, channels = [], 0
        for source, shape, given in zip(sources, shapes, arguments):
            part = torch.empty_strided(whole, strides, device="meta").narrow(1, channels, shape[1])
            rows = parts.rows_between(source, part) if given is None else None
            planned.append(_Part(shape, strides[1] * channels, given, rows))
            channels += shape[1]
        return _Layout(whole, strides, tuple(planned))
