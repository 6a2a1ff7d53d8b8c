"""The layers that run inside a fused model: twins of its own, with what follows them taken in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import layout
from .crop import cropped_padding, parse_crop
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
    float64 and rounded once.

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
    return True


def add_crop(twin: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Let the twin leave out more of its result."""
    held = parse_crop(len(pairs), twin.crop or 0)
    twin.crop = tuple((before + b, after + a) for (before, after), (b, a) in zip(held, pairs))


def result_shape(twin: Any, x: Tensor, output_size: Sequence[int] | None) -> tuple[int, ...]:
    """The shape that the twin gives for a batched input."""
    ndim = len(twin.kernel_size)
    extra = twin.output_padding if output_size is None else twin._extra_for(x, output_size)
    padding = twin.padding if twin.crop is None else cropped_padding(ndim, twin.padding, twin.crop)
    geometry = cached_geometry(ndim, twin.stride, padding, extra, twin.groups, twin.dilation)
    return conv_transpose_shape(x.shape, twin.weight.shape, None, geometry)


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


class Concatenation(nn.Module):
    """``torch.cat(values, 1)`` where some values come from layers, which write into the result.

    Args:
        layers: one for each value: the layer that makes it, or None where it is at hand.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() if layer is None else layer for layer in layers)
        self._makers = tuple(layers)

    def forward(self, *values: Any) -> Tensor:
        """Concatenate along the channels.

        Args:
            values: for a layer its (input, output_size), else the tensor itself.
        """
        pairs = list(zip(self._makers, values))
        sources = [value if maker is None else value[0] for maker, value in pairs]
        if not _can_share(sources, self._makers):
            return torch.cat([value if maker is None else maker(*value) for maker, value in pairs], 1)
        plain = [maker.twin if isinstance(maker, Batched) else maker for maker in self._makers]
        shapes = [tuple(value.shape) if maker is None else result_shape(maker, *value) for maker, value in zip(plain, values)]
        if any((shape[0], *shape[2:]) != (shapes[0][0], *shapes[0][2:]) for shape in shapes):
            return torch.cat([value if maker is None else maker(*value) for maker, value in pairs], 1)  # torch's error
        widths = [shape[1] for shape in shapes]
        whole = (shapes[0][0], sum(widths), *shapes[0][2:])
        buffer = layout.empty_result(whole, sources[0], self._is_channels_last(plain, sources))
        begin = 0
        for maker, value, width in zip(plain, values, widths):
            part = buffer.narrow(1, begin, width)
            begin += width
            if maker is None:
                part.copy_(value)
            else:
                maker._run(*value, out=part)
        return buffer

    @staticmethod
    def _is_channels_last(makers: Sequence[Any], sources: Sequence[Tensor]) -> bool:
        """Whether torch would give such a concatenation channels_last: where every part has it."""
        if sources[0].dim() == 3:
            return False
        for maker, source in zip(makers, sources):
            if maker is None:
                found = layout.suggests_channels_last(tuple(source.shape), source.stride())
            else:
                geometry = cached_geometry(
                    source.dim() - 2, maker.stride, maker.padding, maker.output_padding, maker.groups, maker.dilation
                )
                found = layout.result_is_channels_last(source, maker.weight, geometry)
            if not found:
                return False
        return True


def _can_share(sources: Sequence[Tensor], makers: Sequence[Any]) -> bool:
    """Whether one buffer can be allocated and written piece by piece: plain tensors alike, nobody watching."""
    first = sources[0]
    if not nobody_intercepts(*sources) or first.device.type not in ("cpu", "cuda") or first.dtype.is_complex:
        return False
    ndim = next(len(getattr(maker, "twin", maker).kernel_size) for maker in makers if maker is not None)
    return all(one.dim() == ndim + 2 and one.dtype == first.dtype and one.device == first.device for one in sources)
