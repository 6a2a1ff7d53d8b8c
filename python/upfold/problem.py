"""The description of one transposed convolution: its sizes, what they must satisfy, and the record that reaches the kernels.

The only home of the output-size formula and of argument validation. Sizes always name the transposed convolution
``y = conv_transpose(x, w)``: ``in_*`` belongs to x and ``out_*`` to y, whichever of the three operators runs.
"""

from __future__ import annotations

import enum
import operator as _operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from . import native

IntOrInts = int | Sequence[int]
ActivationLike = None | str | tuple[str, float]


class InvalidArgument(ValueError, RuntimeError):
    """An argument that cannot be used; the text reads ``argument = value; rule; hint``.

    It is a ``ValueError`` and, because torch raises that one, a ``RuntimeError``.
    """


class Operator(enum.IntEnum):
    """Which of the three bilinear operators runs; the numbers are those of ``cpp/problem.h``."""

    CONV_TRANSPOSE = 0
    CONV = 1
    CONV_TRANSPOSE_WEIGHT = 2


# The numbers are those of `enum class Dtype` in cpp/problem.h.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
# The numbers are those of `enum class Activation` in cpp/problem.h.
ACTIVATION_CODES: dict[str, int] = {
    "relu": 1,
    "silu": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "tanh": 5,
    "sigmoid": 6,
    "leaky_relu": 7,
}
# torch.dtype.itemsize is younger than torch 2.0.
DTYPE_BYTES: dict[torch.dtype, int] = {
    torch.float32: 4,
    torch.float64: 8,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.complex64: 8,
    torch.complex128: 16,
}
_ADDRESSABLE_BYTES = 2**63 - 1
_DEFAULT_SLOPE = 0.01


@dataclass(frozen=True)
class Activation:
    """An element-wise function applied with the bias: its code and, for leaky_relu, its slope."""

    code: int = 0
    slope: float = 0.0

    def encode(self) -> int:
        """Pack into one non-negative integer: operator schemas take tensors and integers only."""
        bits: int = struct.unpack("<I", struct.pack("<f", self.slope))[0]
        return self.code | bits << 8

    @property
    def name(self) -> str | None:
        """The name that `Activation.parse` takes, or None."""
        return next((name for name, code in ACTIVATION_CODES.items() if code == self.code), None)

    def as_argument(self) -> ActivationLike:
        """What `Activation.parse` turns into this."""
        name = self.name
        return (name, self.slope) if name == "leaky_relu" else name

    @staticmethod
    def decode(value: int) -> Activation:
        """Undo `encode`."""
        slope: float = struct.unpack("<f", struct.pack("<I", value >> 8))[0]
        return Activation(value & 0xFF, slope)

    @staticmethod
    def parse(value: ActivationLike) -> Activation:
        """Read ``None``, a name, or ``('leaky_relu', slope)``."""
        if value is None:
            return NO_ACTIVATION
        name, slope = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(name, str) or name not in ACTIVATION_CODES:
            known = ", ".join(repr(known) for known in ACTIVATION_CODES)
            raise InvalidArgument(f"activation = {value!r}; must be None or one of {known}; use ('leaky_relu', slope) to set a slope")
        if slope is not None and name != "leaky_relu":
            raise InvalidArgument(f"activation = {value!r}; only 'leaky_relu' takes a slope; pass {name!r} alone")
        if name == "leaky_relu":
            return Activation(ACTIVATION_CODES[name], _DEFAULT_SLOPE if slope is None else float(slope))
        return Activation(ACTIVATION_CODES[name])


NO_ACTIVATION = Activation()


@dataclass(frozen=True)
class Geometry:
    """Stride, padding, output padding and dilation, one entry per spatial axis, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def ndim(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.stride)


def per_axis(name: str, value: IntOrInts, ndim: int) -> tuple[int, ...]:
    """Spread an integer, or a sequence of one or `ndim` integers, over the spatial axes.

    Args:
        name: what the caller calls the argument, for the error text.
        value: the argument.
        ndim: number of spatial axes.

    Returns:
        A tuple of `ndim` integers.

    Raises:
        InvalidArgument: the sequence has another length.
        TypeError: something in it is no integer.
    """
    if isinstance(value, (int, torch.SymInt)):
        return (value,) * ndim
    if isinstance(value, Sequence):
        entries = tuple(v if isinstance(v, (int, torch.SymInt)) else _operator.index(v) for v in value)
    else:
        entries = (_operator.index(value),)
    if len(entries) == 1:
        return entries * ndim
    if len(entries) != ndim:
        raise InvalidArgument(
            f"{name} = {entries}; must be an integer or {ndim} integers; got {len(entries)}"
        )
    return entries


def make_geometry(
    ndim: int, stride: IntOrInts, padding: IntOrInts, output_padding: IntOrInts, groups: int, dilation: IntOrInts
) -> Geometry:
    """Normalise and check the arguments that do not depend on a tensor (torch's order of arguments).

    Raises:
        InvalidArgument: a stride, dilation or group count below 1, a negative padding, or an output padding that is not smaller
            than the larger of stride and dilation on its axis.
    """
    geometry = Geometry(
        per_axis("stride", stride, ndim),
        per_axis("padding", padding, ndim),
        per_axis("output_padding", output_padding, ndim),
        per_axis("dilation", dilation, ndim),
        groups,
    )
    for name, entries, least in (
        ("stride", geometry.stride, 1),
        ("dilation", geometry.dilation, 1),
        ("padding", geometry.padding, 0),
        ("output_padding", geometry.output_padding, 0),
    ):
        if any(entry < least for entry in entries):
            raise InvalidArgument(f"{name} = {entries}; must be at least {least} on every axis")
    if groups < 1:
        raise InvalidArgument(f"groups = {groups}; must be at least 1; in_channels groups make a depthwise layer")
    for extra, step, spread in zip(geometry.output_padding, geometry.stride, geometry.dilation):
        if extra >= max(step, spread):
            raise InvalidArgument(
                f"output_padding = {geometry.output_padding}; must be smaller than stride {geometry.stride} or dilation "
                f"{geometry.dilation} on each axis; a larger output needs a larger stride or kernel"
            )
    return geometry


cached_geometry = lru_cache(maxsize=4096)(make_geometry)


def output_size(in_size: int, kernel_size: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    """Size of the output on one axis, in elements: the formula of ``torch.nn.ConvTranspose2d``'s documentation."""
    return (in_size - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1


def conv_transpose_shape(
    x_shape: Sequence[int], w_shape: Sequence[int], bias_shape: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """Check the operands of a transposed convolution and return the shape of its result.

    Args:
        x_shape: (batch, in_channels, spatial...).
        w_shape: (in_channels, out_channels / groups, kernel...).
        bias_shape: (out_channels,) or None.
        geometry: checked arguments.

    Returns:
        (batch, out_channels, spatial...). Works on symbolic sizes too.

    Raises:
        InvalidArgument: ranks, channels, groups, kernel or sizes do not fit.
    """
    ndim, groups = geometry.ndim, geometry.groups
    _check_rank("input", x_shape, ndim)
    _check_weight(w_shape, ndim, groups)
    if w_shape[0] != x_shape[1]:
        raise InvalidArgument(
            f"weight.shape[0] = {w_shape[0]} but input has {x_shape[1]} channels; in_channels must match; "
            f"a transposed convolution's weight is (in_channels, out_channels / groups, kernel...)"
        )
    if any(size < 1 for size in x_shape[1:]):
        raise InvalidArgument(f"input.shape = {_show(x_shape)}; channels and spatial sizes must be at least 1; only the batch may be empty")
    out_channels = w_shape[1] * groups
    if bias_shape is not None and tuple(bias_shape) != (out_channels,):
        raise InvalidArgument(
            f"bias.shape = {_show(bias_shape)}; must be ({out_channels},); weight.shape[1] * groups is the number of output channels"
        )
    spatial = tuple(
        output_size(*sizes)
        for sizes in zip(x_shape[2:], w_shape[2:], geometry.stride, geometry.padding, geometry.dilation, geometry.output_padding)
    )
    if any(size < 1 for size in spatial):
        raise InvalidArgument(
            f"padding = {geometry.padding} gives output size {_show(spatial)} for input size {_show(x_shape[2:])}; each must be at "
            f"least 1; reduce the padding or enlarge the input"
        )
    shape = (x_shape[0], out_channels, *spatial)
    check_addressable("output", shape)
    return shape


def conv_shape(g_shape: Sequence[int], w_shape: Sequence[int], in_size: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """Check the operands of the adjoint in x and return the shape of its result, (batch, in_channels, in_size...).

    `geometry.output_padding` must be what makes the transposed convolution of `in_size` give the size of g.
    """
    _check_weight(w_shape, geometry.ndim, geometry.groups)
    x_shape = (g_shape[0] if len(g_shape) else 0, w_shape[0], *in_size)
    _check_output("grad", g_shape, conv_transpose_shape(x_shape, w_shape, None, geometry))
    return x_shape


def conv_transpose_weight_shape(
    x_shape: Sequence[int], g_shape: Sequence[int], kernel_size: Sequence[int], geometry: Geometry
) -> tuple[int, ...]:
    """Check the operands of the adjoint in w and return its shape, (in_channels, out_channels / groups, kernel_size...)."""
    _check_rank("grad", g_shape, geometry.ndim)
    if g_shape[1] % geometry.groups != 0:
        raise InvalidArgument(f"grad has {g_shape[1]} channels; must be divisible by groups = {geometry.groups}")
    _check_rank("input", x_shape, geometry.ndim)
    w_shape = (x_shape[1], g_shape[1] // geometry.groups, *kernel_size)
    _check_output("grad", g_shape, conv_transpose_shape(x_shape, w_shape, None, geometry))
    return w_shape


def unfold_shape(
    input_shape: Sequence[int], kernel_size: tuple[int, ...], geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check what `unfold` is given and return the shape of its result and the number of blocks on each axis.

    Args:
        input_shape: (batch, channels, spatial...).
        kernel_size: sizes of the sliding block.
        geometry: checked stride, padding and dilation.

    Returns:
        ((batch, channels * taps, blocks), blocks per axis).

    Raises:
        InvalidArgument: ranks do not fit, or no block fits the input.
    """
    ndim = geometry.ndim
    if len(input_shape) != ndim + 2:
        raise InvalidArgument(
            f"input.shape = {_show(input_shape)}; unfold with {ndim} kernel size(s) takes {ndim + 2} axes (batch, channels, "
            f"{ndim} spatial) or {ndim + 1} without the batch"
        )
    if any(size < 1 for size in input_shape[1:]):
        raise InvalidArgument(f"input.shape = {_show(input_shape)}; channels and spatial sizes must be at least 1")
    blocks = _block_counts(input_shape[2:], kernel_size, geometry)
    shape = (input_shape[0], input_shape[1] * _product(kernel_size), _product(blocks))
    check_addressable("output", shape)
    return shape, blocks


def fold_shape(
    columns_shape: Sequence[int], spatial: tuple[int, ...], kernel_size: tuple[int, ...], geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check what `fold` is given and return the shape of its result and the number of blocks on each axis.

    Args:
        columns_shape: (batch, channels * taps, blocks).
        spatial: output size per axis.
        kernel_size: sizes of the sliding block.
        geometry: checked stride, padding and dilation.

    Returns:
        ((batch, channels, spatial...), blocks per axis).

    Raises:
        InvalidArgument: the columns do not have the rows or the blocks that the sizes ask for.
    """
    if len(columns_shape) != 3:
        raise InvalidArgument(
            f"input.shape = {_show(columns_shape)}; fold takes (batch, channels * kernel taps, blocks) or two axes without the batch"
        )
    taps = _product(kernel_size)
    if columns_shape[1] < 1 or columns_shape[1] % taps != 0:
        raise InvalidArgument(f"input.shape[1] = {columns_shape[1]}; must be a multiple of the {taps} taps of kernel_size {kernel_size}")
    if any(size < 1 for size in spatial):
        raise InvalidArgument(f"output_size = {spatial}; must be at least 1 on every axis")
    blocks = _block_counts(spatial, kernel_size, geometry)
    if columns_shape[2] != _product(blocks):
        raise InvalidArgument(
            f"input.shape[2] = {columns_shape[2]}; output_size {spatial} has {_show(blocks)} = {_product(blocks)} blocks; "
            f"check stride, padding and dilation"
        )
    shape = (columns_shape[0], columns_shape[1] // taps, *spatial)
    check_addressable("output", shape)
    return shape, blocks


def block_geometry(
    ndim: int, kernel_size: IntOrInts, dilation: IntOrInts, padding: IntOrInts, stride: IntOrInts
) -> tuple[tuple[int, ...], Geometry]:
    """Normalise and check the arguments of `fold` and `unfold` (torch's order): (kernel_size, geometry)."""
    kernel = per_axis("kernel_size", kernel_size, ndim)
    if any(size < 1 for size in kernel):
        raise InvalidArgument(f"kernel_size = {kernel}; must be at least 1 on every axis")
    return kernel, make_geometry(ndim, stride, padding, 0, 1, dilation)


def _block_counts(spatial: Sequence[int], kernel_size: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Number of sliding blocks on each axis, the formula of ``torch.nn.Unfold``'s documentation."""
    counts = tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, dilation in zip(spatial, kernel_size, geometry.stride, geometry.padding, geometry.dilation)
    )
    if any(count < 1 for count in counts):
        raise InvalidArgument(
            f"kernel_size = {kernel_size} with dilation {geometry.dilation} gives {_show(counts)} blocks in size {_show(spatial)} with "
            f"padding {geometry.padding}; every axis needs at least one; enlarge the padding or shrink the kernel"
        )
    return counts


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def check_addressable(name: str, shape: Sequence[int], element_bytes: int = 16) -> None:
    """Refuse a tensor whose bytes do not fit a signed 64-bit integer (the widest element is 16 bytes)."""
    if all(isinstance(size, int) for size in shape):
        count = element_bytes
        for size in shape:
            count *= max(size, 1)
        if count > _ADDRESSABLE_BYTES:
            raise InvalidArgument(f"{name}.shape = {_show(shape)}; its bytes must fit a 64-bit integer; reduce stride, dilation or batch")


def _show(shape: Sequence[int]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def _check_rank(name: str, shape: Sequence[int], ndim: int) -> None:
    if not 1 <= ndim <= 3:
        raise InvalidArgument(f"{name}.shape = {_show(shape)}; must have 1, 2 or 3 spatial axes behind batch and channels")
    if len(shape) != ndim + 2:
        raise InvalidArgument(
            f"{name}.shape = {_show(shape)}; conv_transpose{ndim}d takes {ndim + 2} axes (batch, channels, {ndim} spatial) "
            f"or {ndim + 1} without the batch; got {len(shape)}"
        )


def _check_weight(w_shape: Sequence[int], ndim: int, groups: int) -> None:
    if len(w_shape) != ndim + 2:
        raise InvalidArgument(
            f"weight.shape = {_show(w_shape)}; must have {ndim + 2} axes; (in_channels, out_channels / groups, {ndim} kernel sizes)"
        )
    if any(size < 1 for size in w_shape):
        raise InvalidArgument(f"weight.shape = {_show(w_shape)}; every channel count and kernel size must be at least 1")
    if w_shape[0] % groups != 0:
        raise InvalidArgument(f"groups = {groups}; must divide in_channels = {w_shape[0]}")


def _check_output(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise InvalidArgument(f"{name}.shape = {_show(shape)}; must be {_show(expected)}, the shape of the transposed convolution's output")


@dataclass(frozen=True)
class Problem:
    """All that a plan depends on. Spatial entries are always (depth, height, width); missing leading axes are 1.

    Strides are in elements, in the order (batch, channel, depth, height, width) for x and y and
    (in_channels, out_channels, depth, height, width) for w.
    """

    operator: Operator
    dtype: torch.dtype
    batch: int
    in_channels: int
    out_channels: int
    groups: int
    in_size: tuple[int, int, int]
    out_size: tuple[int, int, int]
    kernel_size: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    x_strides: tuple[int, int, int, int, int]
    w_strides: tuple[int, int, int, int, int]
    y_strides: tuple[int, int, int, int, int]
    spatial_ndim: int
    has_bias: bool = False
    activation: Activation = NO_ACTIVATION
    allow_tf32: bool = False
    alignment: int = 16  # bytes that divide the address of every operand, at most 16
    workspace_cap: int = 64 << 20  # bytes
    threads: int = 1  # of a CPU call; results do not depend on it, workspaces do

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans and blockings are looked up by problem on every call; hashing thirty numbers each time would show.
        return hash(tuple(getattr(self, field) for field in self.__dataclass_fields__))

    @cached_property
    def cpu(self) -> Any:
        """This problem as the CPU module's struct."""
        return native.cpu().Problem(**self.native_fields())

    @cached_property
    def cuda(self) -> Any:
        """This problem as the CUDA module's struct."""
        module, reason = native.load_cuda()
        if module is None:
            raise ImportError(reason)
        return module.Problem(**self.native_fields())

    @property
    def taps(self) -> int:
        """Number of taps of the kernel."""
        return self.kernel_size[0] * self.kernel_size[1] * self.kernel_size[2]

    @property
    def in_pixels(self) -> int:
        """Spatial positions of x."""
        return self.in_size[0] * self.in_size[1] * self.in_size[2]

    @property
    def out_pixels(self) -> int:
        """Spatial positions of y."""
        return self.out_size[0] * self.out_size[1] * self.out_size[2]

    @property
    def in_channels_per_group(self) -> int:
        """Input channels of one group."""
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def bytes(self) -> int:
        """Bytes of x, w and y, each counted once: the traffic that no method can avoid."""
        elements = (
            self.batch * self.in_channels * self.in_pixels
            + self.in_channels * self.out_channels_per_group * self.taps
            + self.batch * self.out_channels * self.out_pixels
            + (self.out_channels if self.has_bias else 0)
        )
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of the tap products that land inside the output (a complex product counts 8)."""
        landing = 1
        for axis in range(3):
            landing *= _landing_taps(
                self.in_size[axis],
                self.out_size[axis],
                self.kernel_size[axis],
                self.stride[axis],
                self.padding[axis],
                self.dilation[axis],
            )
        per_product = 8 if self.dtype.is_complex else 2
        return per_product * self.batch * self.in_channels * self.out_channels_per_group * landing

    def native_fields(self) -> dict[str, Any]:
        """Keyword arguments for the compiled modules' ``Problem``."""
        fields: dict[str, Any] = {
            "op": int(self.operator),
            "dtype": DTYPE_CODES[self.dtype],
            "activation": self.activation.code,
            "activation_slope": self.activation.slope,
            "batch": self.batch,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "groups": self.groups,
            "x_strides": self.x_strides,
            "w_strides": self.w_strides,
            "y_strides": self.y_strides,
        }
        for stem, entries in (
            ("in", self.in_size),
            ("out", self.out_size),
            ("kernel", self.kernel_size),
            ("stride", self.stride),
            ("pad", self.padding),
            ("dilation", self.dilation),
        ):
            fields.update({f"{stem}_{axis}": entry for axis, entry in zip("dhw", entries)})
        return fields


@lru_cache(maxsize=4096)
def _landing_taps(in_size: int, out_size: int, kernel_size: int, stride: int, padding: int, dilation: int) -> int:
    """Number of (input position, tap) pairs of one axis that land inside the output."""
    total = 0
    for tap in range(kernel_size):
        offset = tap * dilation - padding  # o = i * stride + offset
        first = max(0, -(offset // stride))  # ceil(-offset / stride)
        last = min(in_size - 1, (out_size - 1 - offset) // stride)
        total += max(0, last - first + 1)
    return total


def pad_axes(entries: Sequence[int], fill: int) -> tuple[int, int, int]:
    """Put 1, 2 or 3 spatial entries into (depth, height, width), `fill` on the axes that are absent."""
    padded = (fill,) * (3 - len(entries)) + tuple(entries)
    return padded[0], padded[1], padded[2]


def pad_strides(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Strides of a batched tensor with 1 to 3 spatial axes as (n, c, d, h, w); an axis of size 1 gets 0, it is never stepped.

    The canonical 0 makes tensors that differ only in meaningless strides share one plan.
    """
    canonical = [0 if size == 1 else step for size, step in zip(shape, strides)]
    spatial = canonical[2:]
    spatial = [0] * (3 - len(spatial)) + spatial
    return canonical[0], canonical[1], spatial[0], spatial[1], spatial[2]


def make_problem(
    operator: Operator, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, geometry: Geometry, **rest: Any
) -> Problem:
    """Describe one call. The tensors are batched, checked, of one dtype, and laid out as the kernel will see them."""
    return Problem(
        operator=operator,
        dtype=x.dtype,
        batch=x.shape[0],
        in_channels=x.shape[1],
        out_channels=y.shape[1],
        groups=geometry.groups,
        in_size=pad_axes(x.shape[2:], 1),
        out_size=pad_axes(y.shape[2:], 1),
        kernel_size=pad_axes(w.shape[2:], 1),
        stride=pad_axes(geometry.stride, 1),
        padding=pad_axes(geometry.padding, 0),
        dilation=pad_axes(geometry.dilation, 1),
        x_strides=pad_strides(x.stride(), x.shape),
        w_strides=pad_strides(w.stride(), w.shape),
        y_strides=pad_strides(y.stride(), y.shape),
        spatial_ndim=geometry.ndim,
        **rest,
    )
