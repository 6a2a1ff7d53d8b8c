"""From checked or unchecked tensors to a kernel launch: builds the problem, cached by key, allocates, and runs the plan.

Everything here works on plain tensors below autograd; `ops.py` and the fast path of `functional.py` both end here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import layout
from .algorithms import REGISTRY, Algorithm, Packing, Tensors
from .crop import cropped_padding
from .dispatch import current, plan, sums_in_its_pass, workspace_cap
from .geometry import (
    Edges,
    IntOrInts,
    InvalidArgument,
    cached_geometry,
    conv_shape,
    conv_transpose_shape,
    conv_transpose_weight_shape,
)
from .overlap import check_out
from .precision import convolutions_take_tf32
from .problem import DTYPE_BYTES, DTYPE_CODES, Activation, ActivationLike, Operator, Problem, make_problem

# stride, padding, output_padding, groups, dilation, in torch's order; hashable; a crop is part of the padding
Arguments = tuple[IntOrInts, IntOrInts | Edges, IntOrInts, int, IntOrInts]
_MOST_LAUNCHES = 4096
MOST_ALIGNMENT = 16  # bytes; no access of the kernels is wider
_DENSE = (1,)
_threads = torch.get_num_threads
_launches: dict[Any, Any] = {}
Kept = TypeVar("Kept")


class Launch:
    """One planned call: everything about it that does not change from call to call with the same key."""

    __slots__ = (
        *("algorithm", "config", "copies", "elements", "empty", "enqueue", "index"),
        *("packing", "problem", "shape", "strides", "sums", "workspace_bytes"),
    )

    def __init__(self, problem: Problem, device: torch.device, algorithm: str | None, result: torch.Tensor, copies: bool) -> None:
        self.problem = problem
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.copies = copies  # whether an operand must be made contiguous first
        self.empty = problem.batch == 0
        chosen = plan(problem, device, algorithm)
        self.algorithm: Algorithm = REGISTRY[chosen.algorithm]
        self.config = chosen.config
        self.workspace_bytes = chosen.workspace_bytes
        # The same in the operands' type: of torch's allocating calls the one that takes no type is the quickest.
        self.elements = (-(-chosen.workspace_bytes // DTYPE_BYTES[problem.dtype]),)
        self.index = device.index if device.type == "cuda" else None
        self.enqueue = None if self.empty else self.algorithm.prepare(problem, self.config, device)
        self.sums = sums_in_its_pass(problem, self.algorithm.sums_channels(problem, self.config, device), algorithm is not None)
        self.packing: Packing | str | None = None  # asked for when first needed (`frozen.py`)

    def run(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Run on tensors that the caller keeps alive; the problem's operator says which of x, w, y is written."""
        index, enqueue = self.index, self.enqueue
        stream = 0 if index is None else raw_stream(index)
        if enqueue is None:
            scratch = x.new_empty(self.workspace_bytes, dtype=torch.uint8) if self.workspace_bytes else None
            self.algorithm.run(self.problem, Tensors(x, w, bias, y), self.config, scratch, stream)
            return
        workspace = x.new_empty_strided(self.elements, _DENSE) if self.workspace_bytes else None
        enqueue(
            x.data_ptr(),
            w.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
            stream,
        )

    def readable(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The operands of a transposed convolution as the kernels read them, where `copies` says that they do not."""
        return _readable(x), None if bias is None else bias.contiguous()

    @property
    def stream(self) -> int:
        """The handle of the CUDA stream that a call made now would run on, 0 on a CPU."""
        return 0 if self.index is None else raw_stream(self.index)


def _stream_of_device(index: int) -> int:
    # What torch offers on every version; it builds a Stream object first.
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_device)


def tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on of a tensor beside its address."""
    return t.shape, t.stride(), t.dtype, t.device


def environment(t: torch.Tensor, addresses: int) -> tuple[Any, ...]:
    """What a plan depends on beside shapes: the settings, and the threads, or TF32 and the low bits of all addresses."""
    if t.is_cuda:
        return current(), t.dtype is torch.float32 and convolutions_take_tf32(), addresses & (MOST_ALIGNMENT - 1)
    return current(), _threads()


def alignment_of(*tensors: torch.Tensor | None) -> int:
    """The largest power of two, at most 16, that divides every address."""
    addresses = MOST_ALIGNMENT
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses & -addresses


def remembered(key: Any) -> Any:
    """What `remember` kept by this key, or None."""
    return _launches.get(key)


def remember(key: Any, launch: Kept) -> Kept:
    """Keep a launch, or what holds some, until plans change."""
    if len(_launches) >= _MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = launch
    return launch


def forget() -> None:
    """Plan every call anew."""
    _launches.clear()


def conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    algorithm: str | None = None,
    activation: ActivationLike = None,
    out: torch.Tensor | None = None,
    out_is_fresh: bool = False,
) -> torch.Tensor:
    """Run a transposed convolution on batched tensors.

    Args:
        x: (batch, in_channels, spatial...), any strides.
        w: (in_channels, out_channels / groups, kernel...), of x's dtype and device.
        bias: (out_channels,) or None.
        arguments: stride, padding, output_padding, groups, dilation, as torch takes them, hashable.
        algorithm: a name, or None for what `use` or the heuristic says.
        activation: applied with the bias.
        out: written in place of a fresh tensor.
        out_is_fresh: whether `out` lies in memory that only the caller knows, so that there is nothing to check.

    Returns:
        (batch, out_channels, spatial...), in the memory format that torch would choose.

    Raises:
        InvalidArgument: the arguments do not fit.
    """
    launch = launch_of(x, w, bias, arguments, algorithm, activation, out)
    if out is None:
        y = x.new_empty_strided(launch.shape, launch.strides)
    else:
        if not out_is_fresh:
            check_out(out, x, w, bias)
        y = out
    if launch.empty:
        return y
    if launch.copies:
        x, bias = launch.readable(x, bias)
    launch.run(x, w, bias, y)
    return y


def launch_of(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: ActivationLike,
    out: torch.Tensor | None,
) -> Launch:
    """What `conv_transpose` runs for these operands, planned or remembered."""
    addresses, bias_key, out_key = x.data_ptr() | w.data_ptr(), None, None
    if bias is not None:
        addresses |= bias.data_ptr()
        bias_key = bias.shape, bias.stride(), bias.dtype, bias.device
    if out is not None:
        addresses |= out.data_ptr()
        out_key = tensor_key(out)
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        w.shape,
        w.stride(),
        w.dtype,
        w.device,
        bias_key,
        arguments,
        algorithm,
        activation,
        out_key,
        environment(x, addresses),
    )
    launch: Launch | None = _launches.get(key)
    if launch is None:
        launch = remember(key, _plan_conv_transpose(x, w, bias, arguments, algorithm, activation, out))
    return launch


def _plan_conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: ActivationLike,
    out: torch.Tensor | None,
) -> Launch:
    problem, y = describe_conv_transpose(x, w, bias, arguments, activation, out)
    copies = not layout.has_dense_rows(x) or (bias is not None and not bias.is_contiguous())
    return Launch(problem, x.device, algorithm or current().algorithm, y, copies)


def describe_conv_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    activation: ActivationLike,
    out: torch.Tensor | None = None,
) -> tuple[Problem, torch.Tensor]:
    """Check the operands of a transposed convolution; return its problem and the result, or a stand-in without memory."""
    geometry = cached_geometry(x.dim() - 2, *arguments)
    check_operands(input=x, weight=w, bias=bias, out=out)
    shape = conv_transpose_shape(x.shape, w.shape, None if bias is None else bias.shape, geometry)
    parsed = Activation.parse(activation)
    if parsed.code and x.dtype.is_complex:
        raise InvalidArgument(
            f"activation = {activation!r}; the input is {x.dtype}; activations of complex numbers are not defined"
        )
    if out is not None and tuple(out.shape) != shape:
        raise InvalidArgument(f"out.shape = {tuple(out.shape)}; must be {shape}; allocate it with that shape")
    y = out
    if y is None:
        y = layout.empty_result(shape, x, layout.result_is_channels_last(x, w, geometry), device="meta")
    surroundings = _surroundings(x, alignment_of(x, w, bias, out))
    problem = make_problem(
        Operator.CONV_TRANSPOSE, _as_read(x), w, y, geometry, has_bias=bias is not None, activation=parsed, **surroundings
    )
    return problem, y


def conv(
    g: torch.Tensor, w: torch.Tensor, in_size: tuple[int, ...], arguments: Arguments, algorithm: str | None = None
) -> torch.Tensor:
    """Run the adjoint in x of a transposed convolution: an ordinary convolution of g, (batch, out_channels, spatial...), with w.

    `in_size` is the spatial size of the result; with output padding it cannot be inferred.
    """
    key = (tensor_key(g), tensor_key(w), in_size, arguments, algorithm, environment(g, g.data_ptr() | w.data_ptr()))
    launch: Launch | None = _launches.get(key)
    if launch is None:
        problem, x = describe_conv(g, w, in_size, arguments)
        copies = not layout.has_dense_rows(g)
        launch = remember(key, Launch(problem, g.device, algorithm or current().algorithm, x, copies))
    x = g.new_empty_strided(launch.shape, launch.strides)
    if launch.empty:
        return x
    if launch.copies:
        g = _readable(g)
    launch.run(x, w, None, g)
    return x


def conv_transpose_weight(
    x: torch.Tensor, g: torch.Tensor, kernel_size: tuple[int, ...], arguments: Arguments, algorithm: str | None = None
) -> torch.Tensor:
    """Run the adjoint in w of a transposed convolution; the result is (in_channels, out_channels / groups, kernel_size...)."""
    launch = weight_launch(x, g, kernel_size, arguments, algorithm)
    if launch.empty:
        return x.new_zeros(launch.shape)
    w = x.new_empty_strided(launch.shape, launch.strides)
    if launch.copies:
        x, g = _readable(x), _readable(g)
    launch.run(x, w, None, g)
    return w


def weight_launch(
    x: torch.Tensor, g: torch.Tensor, kernel_size: tuple[int, ...], arguments: Arguments, algorithm: str | None
) -> Launch:
    """What `conv_transpose_weight` runs for these operands, planned or remembered."""
    key = (
        *(tensor_key(x), tensor_key(g), kernel_size, arguments, algorithm),
        environment(g, g.data_ptr() | x.data_ptr()),
        Operator.CONV_TRANSPOSE_WEIGHT,  # or the key could be that of `conv`
    )
    launch: Launch | None = _launches.get(key)
    if launch is None:
        problem, w = describe_conv_transpose_weight(x, g, kernel_size, arguments)
        copies = not (layout.has_dense_rows(x) and layout.has_dense_rows(g))
        launch = remember(key, Launch(problem, g.device, algorithm or current().algorithm, w, copies))
    return launch


def describe(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Arguments,
    activation: ActivationLike = None,
) -> Problem:
    """The problem of a transposed convolution of batched tensors, without running it (arguments as in `conv_transpose`)."""
    return describe_conv_transpose(x, w, bias, arguments, activation)[0]


def describe_conv(
    g: torch.Tensor, w: torch.Tensor, in_size: tuple[int, ...], arguments: Arguments
) -> tuple[Problem, torch.Tensor]:
    """The problem of `conv` for these operands, and a stand-in for its result, without memory."""
    geometry = cached_geometry(g.dim() - 2, *arguments)
    check_operands(grad=g, weight=w)
    shape = conv_shape(g.shape, w.shape, in_size, geometry)
    x = layout.empty_result(shape, g, layout.result_is_channels_last(g, w), device="meta")
    return make_problem(Operator.CONV, x, w, _as_read(g), geometry, **_surroundings(g, alignment_of(g, w))), x


def describe_conv_transpose_weight(
    x: torch.Tensor, g: torch.Tensor, kernel_size: tuple[int, ...], arguments: Arguments
) -> tuple[Problem, torch.Tensor]:
    """The problem of `conv_transpose_weight` for these operands, and a stand-in for its result, without memory."""
    geometry = cached_geometry(len(kernel_size), *arguments)
    check_operands(input=x, grad=g)
    shape = conv_transpose_weight_shape(x.shape, g.shape, kernel_size, geometry)
    w = torch.empty(shape, dtype=x.dtype, device="meta")
    surroundings = _surroundings(g, alignment_of(x, g))
    return make_problem(Operator.CONV_TRANSPOSE_WEIGHT, _as_read(x), w, _as_read(g), geometry, **surroundings), w


def operands_of_layer(
    layer: Any, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Arguments, ActivationLike]:
    """What `describe` takes, for a transposed-convolution layer and an input, batched or not."""
    crop, padding = getattr(layer, "crop", None), layer.padding
    if crop is not None:
        padding = cropped_padding(layer.weight.dim() - 2, padding, crop)
    arguments = (layer.stride, padding, layer.output_padding, layer.groups, layer.dilation)
    batched = x if x.dim() == layer.weight.dim() else x.unsqueeze(0)
    return batched, layer.weight, layer.bias, arguments, getattr(layer, "activation", None)


def check_operands(**tensors: torch.Tensor | None) -> None:
    """Refuse operands that differ in dtype or device, or whose dtype no kernel knows."""
    (first_name, first), *others = tensors.items()
    assert first is not None
    if first.dtype not in DTYPE_CODES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        raise InvalidArgument(f"{first_name}.dtype = {first.dtype}; must be one of {known}; convert it with .to()")
    for name, tensor in others:
        if tensor is None:
            continue
        if tensor.dtype != first.dtype:
            raise InvalidArgument(
                f"{name}.dtype = {tensor.dtype} but {first_name} is {first.dtype}; they must match; convert one with .to()"
            )
        if tensor.device != first.device:
            raise InvalidArgument(
                f"{name}.device = {tensor.device} but {first_name} is on {first.device}; they must match; move one with .to()"
            )


def _as_read(t: torch.Tensor) -> torch.Tensor:
    """A stand-in with the layout in which the kernels will read `t`."""
    return t if layout.has_dense_rows(t) else torch.empty(t.shape, dtype=t.dtype, device="meta")


def _readable(t: torch.Tensor) -> torch.Tensor:
    return t if layout.has_dense_rows(t) else t.contiguous()


def _surroundings(t: torch.Tensor, alignment: int) -> dict[str, Any]:
    """What a problem holds beside its operands' shapes."""
    return {
        "allow_tf32": t.is_cuda and t.dtype is torch.float32 and convolutions_take_tf32(),
        "alignment": alignment,
        "workspace_cap": workspace_cap(t.device),
        "threads": 1 if t.is_cuda else _threads(),
    }
