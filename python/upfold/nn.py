"""Layers: torch's own, with the work done by this package.

Each class is a subclass of the layer of the same name in ``torch.nn``: same arguments, initialisation, parameters and
``state_dict``. While torch records a file that must load elsewhere (``torch.jit`` tracing and scripting,
``torch.onnx.export``) a layer answers with torch's operator, so that the file does not need this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, List, Optional  # noqa: UP035 - torch 2.0's TorchScript reads these alone

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from . import dispatch, frozen, functional
from .crop import Crop, cropped, cropped_padding, parse_crop
from .execute import Arguments
from .geometry import IntOrInts, InvalidArgument, block_geometry, make_geometry, output_size, per_axis
from .problem import Activation, ActivationLike

_tracing_state = torch._C._get_tracing_state


def answers_with_torch() -> bool:
    """Whether torch is recording a file that must load without this package."""
    if _tracing_state() is not None:
        return True
    # An exporter that nobody imported is not running; asking it would import it, which takes long.
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def _record_in_fx(layer: nn.Module, input: Any, arguments: dict[str, Any]) -> Any:
    """Give symbolic tracing one call of the whole layer, as it does by itself for the layers of ``torch.nn``.

    Returns:
        What tracing goes on with, or None where `input` is no stand-in or `layer` is what is being traced.
    """
    from torch.fx import Proxy

    if not isinstance(input, Proxy):
        return None
    tracer: Any = input.tracer
    if getattr(tracer, "root", layer) is layer:
        return None
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (input,), arguments)


def _activate(t: Tensor, code: int, slope: float) -> Tensor:
    """Apply the activation of that code (problem.ACTIVATION_CODES) in words that TorchScript understands."""
    if code == 1:
        return torch.relu(t)
    if code == 2:
        return F.silu(t)
    if code == 3:
        return F.gelu(t)
    if code == 4:
        return F.gelu(t, approximate="tanh")
    if code == 5:
        return torch.tanh(t)
    if code == 6:
        return torch.sigmoid(t)
    if code == 7:
        return F.leaky_relu(t, slope)
    return t


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise InvalidArgument(f"{name} = {tuple(sizes)}; must be at least 1 on every axis")


def _check_channels(in_channels: int, out_channels: int, groups: int) -> None:
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels < 1:
            raise InvalidArgument(f"{name} = {channels}; must be at least 1")
        if channels % groups != 0:
            raise InvalidArgument(f"{name} = {channels}; must be divisible by groups = {groups}")


class _TransposedConvolution(frozen.Freezable, _ConvTransposeNd):
    """What the three layers share; a replaced layer lives on the class-level defaults, so it gains no attribute."""

    # Typed by comments: annotations here would hide torch's own, which scripting reads.
    algorithm = None  # type: str | None
    activation = None  # type: ActivationLike
    crop = None  # type: Crop
    _activation_code = 0
    _activation_slope = 0.0
    __constants__ = [*_ConvTransposeNd.__constants__, "_activation_code", "_activation_slope"]  # noqa: RUF012

    _ndim = 0
    _operator = None  # type: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrInts,
        stride: IntOrInts = 1,
        padding: IntOrInts = 0,
        output_padding: IntOrInts = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrInts = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        algorithm: str | None = None,
        activation: ActivationLike = None,
        crop: Crop = None,
    ) -> None:
        ndim = self._ndim
        geometry = make_geometry(ndim, stride, padding, output_padding, groups, dilation)
        kernel_size = per_axis("kernel_size", kernel_size, ndim)
        _check_sizes("kernel_size", kernel_size)
        _check_channels(in_channels, out_channels, groups)
        Activation.parse(activation)
        if crop is not None:
            parse_crop(ndim, crop)
        if algorithm is not None:
            dispatch.check_name(algorithm)
        sizes = (geometry.stride, geometry.padding, geometry.output_padding, geometry.groups)
        rest: Any = (*sizes, bias, geometry.dilation, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, kernel_size, *rest)
        if algorithm is not None:
            self.algorithm = algorithm
        if activation is not None:
            self.activation = activation
        if crop is not None:
            self.crop = crop

    def _run(self, input: Tensor, output_size: Sequence[int] | None) -> Tensor:
        if type(input) is not Tensor or _tracing_state() is not None:
            recorded = _record_in_fx(self, input, {} if output_size is None else {"output_size": output_size})
            if recorded is not None:
                return recorded  # type: ignore[no-any-return]
            if answers_with_torch():
                activation = Activation.parse(self.activation)
                y = cropped(super().forward(input, output_size), self.crop, self._ndim)
                return _activate(y, activation.code, activation.slope)
        if self._frozen is not None:
            kept: Tensor | None = frozen.run(self, input, output_size)
            if kept is not None:
                return kept
        result: Tensor = self._operator(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding if output_size is None else self._extra_for(input, output_size),
            self.groups,
            self.dilation,
            algorithm=self.algorithm,
            activation=self.activation,
            crop=self.crop,
        )
        return result

    def _arguments(self, input: Tensor, output_size: Sequence[int] | None) -> Arguments:
        """The settings as `execute` takes them, for an input and the size that is asked for."""
        extra: Any = self.output_padding if output_size is None else self._extra_for(input, output_size)
        padding: Any = self.padding
        if self.crop is not None:
            padding = cropped_padding(self._ndim, padding, self.crop)
        return self.stride, padding, extra, self.groups, self.dilation

    def _extra_for(self, input: Tensor, requested: Sequence[int]) -> tuple[int, ...]:
        """The output padding that gives the requested size, which names the spatial axes alone, or all."""
        ndim = self._ndim
        leading = input.dim() - ndim
        spatial = tuple(requested[leading:]) if len(requested) == ndim + leading else tuple(requested)
        if len(spatial) != ndim:
            raise InvalidArgument(
                f"output_size = {tuple(requested)}; must have {ndim} entries, or {ndim + leading} as the shape of the "
                f"result; only the spatial sizes can be chosen"
            )
        in_size = tuple(input.shape[leading:])
        arguments: Any = (in_size, self.kernel_size, self.stride, self.padding, self.dilation, (0,) * ndim)
        least = tuple(output_size(*axis) for axis in zip(*arguments, strict=True))
        most = tuple(size + step - 1 for size, step in zip(least, self.stride, strict=True))
        if any(not low <= size <= high for size, low, high in zip(spatial, least, most, strict=True)):
            raise InvalidArgument(
                f"output_size = {spatial}; must lie between {least} and {most} for input size {in_size}; a stride of s "
                f"reaches s sizes on an axis, one for each output_padding below it"
            )
        return tuple(size - low for size, low in zip(spatial, least, strict=True))

    def __prepare_scriptable__(self) -> nn.Module:
        """Put what TorchScript must know of the activation into plain numbers, just before a layer is scripted."""
        if self.crop is not None:
            raise InvalidArgument(f"crop = {self.crop}; TorchScript can't read it; crop the result outside of the layer")
        activation = Activation.parse(self.activation)
        if (activation.code, activation.slope) != (self._activation_code, self._activation_slope):
            self._activation_code, self._activation_slope = activation.code, activation.slope
        return self

    def extra_repr(self) -> str:
        """Torch's text, with the algorithm, activation and crop where they were set."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        for name in ("algorithm", "activation", "crop"):
            value = getattr(self, name)
            text += f", {name}={value!r}" if value is not None else ""
        return text


class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """Transposed convolution along one axis: ``torch.nn.ConvTranspose1d``, computed by upfold.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode,
            device, dtype: as in torch; sizes are in elements, integers or one-entry tuples.
        algorithm: None or "auto" to let upfold choose, or one of ``upfold.algorithms()``.
        activation: None, 'relu', 'silu', 'gelu', 'gelu_tanh', 'tanh', 'sigmoid', 'leaky_relu' or ('leaky_relu', slope).
        crop: output pixels that are left out and not computed: at both ends of every axis, or a pair (before, after) for each
            axis. The `output_size` of a call is the size before the crop.

    Raises:
        InvalidArgument: an argument, or a combination, that no input could satisfy.
    """

    _ndim = 1
    _operator = staticmethod(functional.conv_transpose1d)

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:  # noqa: UP006, UP045
        """Map (batch, in_channels, l) to a longer signal, with or without the batch; `output_size` picks the length."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            stride, padding = self.stride, self.padding
            size = self.kernel_size
            extra = self._output_padding(input, output_size, stride, padding, size, 1, self.dilation)  # type: ignore[arg-type]
            groups, dilation = self.groups, self.dilation
            y = F.conv_transpose1d(input, self.weight, self.bias, stride, padding, extra, groups, dilation)  # type: ignore[arg-type]
            return _activate(y, self._activation_code, self._activation_slope)
        else:  # noqa: RET505 - scripting skips a branch that it does not take, but not what follows a return
            return self._run(input, output_size)


class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """Transposed convolution of images: ``torch.nn.ConvTranspose2d``, computed by upfold.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode,
            device, dtype: as in torch; sizes are in elements, integers or (height, width).
        algorithm: None or "auto" to let upfold choose, or one of ``upfold.algorithms()``.
        activation: None, 'relu', 'silu', 'gelu', 'gelu_tanh', 'tanh', 'sigmoid', 'leaky_relu' or ('leaky_relu', slope).
        crop: output pixels that are left out and not computed: at both ends of every axis, or a pair (before, after) for each
            axis. The `output_size` of a call is the size before the crop.

    Raises:
        InvalidArgument: an argument, or a combination, that no input could satisfy.
    """

    _ndim = 2
    _operator = staticmethod(functional.conv_transpose2d)

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:  # noqa: UP006, UP045
        """Map (batch, in_channels, h, w) to larger maps, with or without the batch; `output_size` picks the size."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            stride, padding = self.stride, self.padding
            size = self.kernel_size
            extra = self._output_padding(input, output_size, stride, padding, size, 2, self.dilation)  # type: ignore[arg-type]
            groups, dilation = self.groups, self.dilation
            y = F.conv_transpose2d(input, self.weight, self.bias, stride, padding, extra, groups, dilation)  # type: ignore[arg-type]
            return _activate(y, self._activation_code, self._activation_slope)
        else:  # noqa: RET505 - scripting skips a branch that it does not take, but not what follows a return
            return self._run(input, output_size)


class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """Transposed convolution of volumes: ``torch.nn.ConvTranspose3d``, computed by upfold.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode,
            device, dtype: as in torch; sizes are in elements, integers or (depth, height, width).
        algorithm: None or "auto" to let upfold choose, or one of ``upfold.algorithms()``.
        activation: None, 'relu', 'silu', 'gelu', 'gelu_tanh', 'tanh', 'sigmoid', 'leaky_relu' or ('leaky_relu', slope).
        crop: output pixels that are left out and not computed: at both ends of every axis, or a pair (before, after) for each
            axis. The `output_size` of a call is the size before the crop.

    Raises:
        InvalidArgument: an argument, or a combination, that no input could satisfy.
    """

    _ndim = 3
    _operator = staticmethod(functional.conv_transpose3d)

    def forward(self, input: Tensor, output_size: Optional[List[int]] = None) -> Tensor:  # noqa: UP006, UP045
        """Map (batch, in_channels, d, h, w) to larger volumes, with or without the batch; `output_size` picks one."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            stride, padding = self.stride, self.padding
            size = self.kernel_size
            extra = self._output_padding(input, output_size, stride, padding, size, 3, self.dilation)  # type: ignore[arg-type]
            groups, dilation = self.groups, self.dilation
            y = F.conv_transpose3d(input, self.weight, self.bias, stride, padding, extra, groups, dilation)  # type: ignore[arg-type]
            return _activate(y, self._activation_code, self._activation_slope)
        else:  # noqa: RET505 - scripting skips a branch that it does not take, but not what follows a return
            return self._run(input, output_size)


def _axes(value: IntOrInts) -> int:
    """Number of spatial axes that a size speaks of; an integer means two, as in torch."""
    return len(value) if isinstance(value, Sequence) else 2


class _Windows(nn.Module):
    """What `Fold` and `Unfold` share."""

    def _run(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor or _tracing_state() is not None:
            recorded = _record_in_fx(self, input, {})
            if recorded is not None:
                return recorded  # type: ignore[no-any-return]
            if answers_with_torch():
                return super().forward(input)  # type: ignore[no-any-return]
        return self._compute(input)

    def _compute(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class Fold(_Windows, nn.Fold):
    """Sum overlapping blocks into maps: ``torch.nn.Fold`` computed by upfold, for one to three axes.

    Args:
        output_size: spatial size of the result; its length is the number of axes, an integer means two equal ones.
        kernel_size, dilation, padding, stride: as in torch, in elements.

    Raises:
        InvalidArgument: an argument that no input could satisfy.
    """

    def __init__(
        self,
        output_size: IntOrInts,
        kernel_size: IntOrInts,
        dilation: IntOrInts = 1,
        padding: IntOrInts = 0,
        stride: IntOrInts = 1,
    ) -> None:
        ndim = _axes(output_size)
        _check_sizes("output_size", per_axis("output_size", output_size, ndim))
        block_geometry(ndim, kernel_size, dilation, padding, stride)
        arguments: Any = (output_size, kernel_size, dilation, padding, stride)
        super().__init__(*arguments)

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, channels * kernel taps, blocks) to (batch, channels, *output_size), with or without the batch."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.fold(input, self.output_size, self.kernel_size, self.dilation, self.padding, self.stride)
        else:  # noqa: RET505
            return self._run(input)

    def _compute(self, input: Tensor) -> Tensor:
        arguments: Any = (self.output_size, self.kernel_size, self.dilation, self.padding, self.stride)
        y: Tensor = functional.fold(input, *arguments)
        return y


class Unfold(_Windows, nn.Unfold):
    """Gather sliding blocks into columns: ``torch.nn.Unfold`` computed by upfold, for one to three axes.

    Args:
        kernel_size: size of a block; its length is the number of axes, an integer means two equal ones.
        dilation, padding, stride: as in torch, in elements.

    Raises:
        InvalidArgument: an argument that no input could satisfy.
    """

    def __init__(self, kernel_size: IntOrInts, dilation: IntOrInts = 1, padding: IntOrInts = 0, stride: IntOrInts = 1) -> None:
        block_geometry(_axes(kernel_size), kernel_size, dilation, padding, stride)
        arguments: Any = (kernel_size, dilation, padding, stride)
        super().__init__(*arguments)

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, channels, spatial...) to (batch, channels * kernel taps, blocks), with or without the batch."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.unfold(input, self.kernel_size, self.dilation, self.padding, self.stride)
        else:  # noqa: RET505
            return self._run(input)

    def _compute(self, input: Tensor) -> Tensor:
        arguments: Any = (self.kernel_size, self.dilation, self.padding, self.stride)
        y: Tensor = functional.unfold(input, *arguments)
        return y
