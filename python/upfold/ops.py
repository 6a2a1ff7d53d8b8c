"""The operators as torch's dispatcher knows them: schemas, kernels, fakes, autocast. The only file that knows the dispatcher.

Each operator exists twice. ``upfold::NAME_raw`` has CPU and CUDA kernels and a fake, and no derivative. ``upfold::NAME`` is
composed of it by an ``autograd.Function`` (`autograd.py`), so that every one of torch's transforms sees through it.
A forward without gradients whose arguments are plain numbers is composed of ``upfold::conv_transpose_static``, which takes them
as one text: torch makes lists of numbers anew in every call, which takes longer than all else of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from . import activation as activations
from . import autograd, columns, execute, fold_autograd, layout
from .columns import BlockArguments
from .dispatch import decode_algorithm
from .execute import Arguments
from .geometry import (
    Edges,
    block_geometry,
    conv_shape,
    conv_transpose_shape,
    conv_transpose_weight_shape,
    fold_shape,
    make_geometry,
    unfold_shape,
)
from .problem import Activation
from .watch import is_plain_inference, nobody_intercepts, transform_is_active

_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, SymInt groups, int algorithm"
_BLOCKS = "SymInt[] kernel_size, SymInt[] dilation, SymInt[] padding, SymInt[] stride"
_SCHEMAS = {
    "conv_transpose": f"(Tensor x, Tensor w, Tensor? bias, {_GEOMETRY}, int activation) -> Tensor",
    "conv": f"(Tensor g, Tensor w, SymInt[] in_size, {_GEOMETRY}) -> Tensor",
    "conv_transpose_weight": f"(Tensor x, Tensor g, SymInt[] kernel_size, {_GEOMETRY}) -> Tensor",
    "fold": f"(Tensor columns, SymInt[] output_size, {_BLOCKS}) -> Tensor",
    "unfold": f"(Tensor image, {_BLOCKS}) -> Tensor",
}
_STATIC_SCHEMA = "conv_transpose_static(Tensor x, Tensor w, Tensor? bias, str arguments) -> Tensor"
_AUTOCAST_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
_library = torch.library.Library("upfold", "DEF")


def _arguments(geometry: Sequence[Any]) -> Arguments:
    """stride, padding (`Geometry.flat_padding`), output_padding, dilation, groups of a schema as the arguments of `execute`."""
    stride, padding, output_padding, dilation, groups = geometry
    ndim, pads = len(stride), tuple(padding)
    edges = pads if len(pads) == ndim else Edges(pads[:ndim], pads[ndim:])
    return tuple(stride), edges, tuple(output_padding), groups, tuple(dilation)


def _block_arguments(blocks: Sequence[Any]) -> BlockArguments:
    kernel_size, dilation, padding, stride = blocks
    return tuple(kernel_size), tuple(dilation), tuple(padding), tuple(stride)


def _conv_transpose_kernel(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    *geometry, algorithm, activation = rest
    with torch.no_grad():
        name, decoded = decode_algorithm(algorithm), Activation.decode(activation)
        return execute.conv_transpose(x, w, bias, _arguments(geometry), name, decoded.as_argument())


def _static_text(rest: Sequence[Any]) -> str | None:
    """What follows the tensors in `conv_transpose`'s schema as one text, or None where a number is symbolic."""
    parts = [part if isinstance(part, (list, tuple)) else (part,) for part in rest]
    if any(type(number) is not int for part in parts for number in part):
        return None
    return ";".join(",".join(map(str, part)) for part in parts)


@lru_cache(maxsize=4096)
def _static_arguments(text: str) -> tuple[Arguments, str | None, Any]:
    """What such a text says, in the form that `execute.conv_transpose` takes."""
    *lists, groups, algorithm, activation = ([int(number) for number in part.split(",")] for part in text.split(";"))
    arguments = _arguments((*lists, groups[0]))
    return arguments, decode_algorithm(algorithm[0]), Activation.decode(activation[0]).as_argument()


def _conv_transpose_static_kernel(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, text: str) -> torch.Tensor:
    if not torch.is_grad_enabled():  # entering a block costs as much as looking the plan up
        return execute.conv_transpose(x, w, bias, *_static_arguments(text))
    with torch.no_grad():
        return execute.conv_transpose(x, w, bias, *_static_arguments(text))


def _conv_kernel(g: torch.Tensor, w: torch.Tensor, in_size: Sequence[int], *rest: Any) -> torch.Tensor:
    *geometry, algorithm = rest
    with torch.no_grad():
        return execute.conv(g, w, tuple(in_size), _arguments(geometry), decode_algorithm(algorithm))


def _conv_transpose_weight_kernel(x: torch.Tensor, g: torch.Tensor, kernel_size: Sequence[int], *rest: Any) -> torch.Tensor:
    *geometry, algorithm = rest
    with torch.no_grad():
        return execute.conv_transpose_weight(x, g, tuple(kernel_size), _arguments(geometry), decode_algorithm(algorithm))


def _fold_kernel(matrix: torch.Tensor, output_size: Sequence[int], *blocks: Any) -> torch.Tensor:
    return columns.fold(matrix.detach(), tuple(output_size), _block_arguments(blocks))


def _unfold_kernel(image: torch.Tensor, *blocks: Any) -> torch.Tensor:
    return columns.unfold(image.detach(), _block_arguments(blocks))


def _conv_transpose_fake(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    return _conv_transpose_result(x, w, bias, _arguments(rest[:5]))


def _conv_transpose_static_fake(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, text: str) -> torch.Tensor:
    return _conv_transpose_result(x, w, bias, _static_arguments(text)[0])


def _conv_transpose_result(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, arguments: Arguments) -> torch.Tensor:
    execute.check_operands(input=x, weight=w, bias=bias)
    geometry = make_geometry(x.dim() - 2, *arguments)
    shape = conv_transpose_shape(x.shape, w.shape, None if bias is None else bias.shape, geometry)
    return layout.empty_result(shape, x, layout.result_is_channels_last(x, w, geometry))


def _conv_fake(g: torch.Tensor, w: torch.Tensor, in_size: Sequence[int], *rest: Any) -> torch.Tensor:
    execute.check_operands(grad=g, weight=w)
    shape = conv_shape(g.shape, w.shape, in_size, make_geometry(g.dim() - 2, *_arguments(rest[:5])))
    return layout.empty_result(shape, g, layout.result_is_channels_last(g, w))


def _conv_transpose_weight_fake(x: torch.Tensor, g: torch.Tensor, kernel_size: Sequence[int], *rest: Any) -> torch.Tensor:
    execute.check_operands(input=x, grad=g)
    geometry = make_geometry(len(kernel_size), *_arguments(rest[:5]))
    return x.new_empty(conv_transpose_weight_shape(x.shape, g.shape, kernel_size, geometry))


def _fold_fake(matrix: torch.Tensor, output_size: Sequence[int], *blocks: Any) -> torch.Tensor:
    kernel_size, geometry = block_geometry(len(output_size), *_block_arguments(blocks))
    return matrix.new_empty(fold_shape(matrix.shape, tuple(output_size), kernel_size, geometry)[0])


def _unfold_fake(image: torch.Tensor, *blocks: Any) -> torch.Tensor:
    kernel_size, geometry = block_geometry(len(blocks[0]), *_block_arguments(blocks))
    return image.new_empty(unfold_shape(image.shape, kernel_size, geometry)[0])


def _conv_transpose_composite(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    *geometry, algorithm, activation = rest
    if is_plain_inference(x, w, bias):  # then the kernel applies the activation
        text = _static_text(rest)
        result: torch.Tensor
        if text is None:
            result = torch.ops.upfold.conv_transpose_raw(x, w, bias, *rest)
        else:
            result = torch.ops.upfold.conv_transpose_static(x, w, bias, text)
        return result
    arguments, name, decoded = _arguments(geometry), decode_algorithm(algorithm), Activation.decode(activation)
    if nobody_intercepts(x, w, bias):  # autocast has done its part
        return autograd.record_conv_transpose(x, w, bias, arguments, name, decoded)
    function = autograd.ConvTransposeTransformed if transform_is_active() else autograd.ConvTranspose
    y: torch.Tensor = function.apply(x, w, bias, arguments, name)
    return activations.apply(y, decoded)


def _conv_composite(g: torch.Tensor, w: torch.Tensor, in_size: Sequence[int], *rest: Any) -> Any:
    *geometry, algorithm = rest
    function = autograd.ConvTransformed if transform_is_active() else autograd.Conv
    return function.apply(g, w, tuple(in_size), _arguments(geometry), decode_algorithm(algorithm))


def _conv_transpose_weight_composite(x: torch.Tensor, g: torch.Tensor, kernel_size: Sequence[int], *rest: Any) -> Any:
    *geometry, algorithm = rest
    function = autograd.ConvTransposeWeightTransformed if transform_is_active() else autograd.ConvTransposeWeight
    return function.apply(x, g, tuple(kernel_size), _arguments(geometry), decode_algorithm(algorithm))


def _fold_composite(matrix: torch.Tensor, output_size: Sequence[int], *blocks: Any) -> Any:
    function = fold_autograd.FoldTransformed if transform_is_active() else fold_autograd.Fold
    return function.apply(matrix, tuple(output_size), _block_arguments(blocks))


def _unfold_composite(image: torch.Tensor, *blocks: Any) -> Any:
    function = fold_autograd.UnfoldTransformed if transform_is_active() else fold_autograd.Unfold
    return function.apply(image, _block_arguments(blocks))


def _autocast(name: str, device: str) -> Callable[..., Any]:
    """Cast float operands to the autocast type and call on with autocast off, as torch does for its convolutions."""

    def kernel(*operands: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.upfold, name)(*(_lowered(operand, device) for operand in operands))

    return kernel


def _lowered(operand: Any, device: str) -> Any:
    if isinstance(operand, torch.Tensor) and operand.device.type == device and operand.is_floating_point():
        return operand if operand.dtype is torch.float64 else operand.to(_autocast_dtype(device))
    return operand


def as_autocast_casts(operand: torch.Tensor) -> torch.Tensor:
    """What the kernels get for an operand here: the operand itself where autocast is off."""
    device = operand.device.type
    try:
        enabled = torch.is_autocast_enabled(device)
    except TypeError:  # before torch 2.4 it took no argument and meant GPUs
        enabled = torch.is_autocast_enabled() if device == "cuda" else torch.is_autocast_cpu_enabled()
    lowered: torch.Tensor = _lowered(operand, device) if enabled else operand
    return lowered


def _autocast_dtype(device: str) -> torch.dtype:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device)
    return torch.get_autocast_gpu_dtype() if device == "cuda" else torch.get_autocast_cpu_dtype()


def _register_fake(name: str, fake: Callable[..., torch.Tensor]) -> None:
    register = getattr(torch.library, "register_fake", None)
    if register is None:
        _library.impl(name, fake, "Meta")
    else:
        register(f"upfold::{name}", fake, lib=_library)


def _register() -> None:
    kernels: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
        "conv_transpose": (_conv_transpose_kernel, _conv_transpose_fake, _conv_transpose_composite),
        "conv": (_conv_kernel, _conv_fake, _conv_composite),
        "conv_transpose_weight": (_conv_transpose_weight_kernel, _conv_transpose_weight_fake, _conv_transpose_weight_composite),
        "fold": (_fold_kernel, _fold_fake, _fold_composite),
        "unfold": (_unfold_kernel, _unfold_fake, _unfold_composite),
    }
    for name, (kernel, fake, composite) in kernels.items():
        _library.define(name + _SCHEMAS[name])
        _library.define(f"{name}_raw{_SCHEMAS[name]}")
        for key in ("CPU", "CUDA"):
            _library.impl(f"{name}_raw", kernel, key)
        _register_fake(f"{name}_raw", fake)
        _library.impl(name, composite, "CompositeImplicitAutograd")
        if name not in ("fold", "unfold"):
            for key, device in _AUTOCAST_DEVICES.items():
                _library.impl(name, _autocast(name, device), key)
    _library.define(_STATIC_SCHEMA)
    for key in ("CPU", "CUDA"):
        _library.impl("conv_transpose_static", _conv_transpose_static_kernel, key)
    _register_fake("conv_transpose_static", _conv_transpose_static_fake)


_register()
