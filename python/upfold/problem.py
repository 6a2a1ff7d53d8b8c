"""The description of one transposed convolution: the record that reaches the kernels, and that a plan depends on.

Sizes always name the transposed convolution ``y = conv_transpose(x, w)``: ``in_*`` belongs to x and ``out_*`` to y, whichever
of the three operators runs. The formulas and checks behind them are in `geometry.py`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from . import native
from .geometry import Geometry, InvalidArgument

ActivationLike = None | str | tuple[str, float]


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
    def has_slope(self) -> bool:
        """Whether the code alone does not say what is computed; without a slope it is what `encode` gives."""
        return self.code == ACTIVATION_CODES["leaky_relu"]

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
        """Read ``None``, a name, ``('leaky_relu', slope)``, or what this gave before."""
        if value is None:
            return NO_ACTIVATION
        if isinstance(value, Activation):
            return value
        name, slope = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
        if not isinstance(name, str) or name not in ACTIVATION_CODES:
            known = ", ".join(repr(known) for known in ACTIVATION_CODES)
            raise InvalidArgument(
                f"activation = {value!r}; must be None or one of {known}; use ('leaky_relu', slope) to set a slope"
            )
        if slope is not None and name != "leaky_relu":
            raise InvalidArgument(f"activation = {value!r}; only 'leaky_relu' takes a slope; pass {name!r} alone")
        if name != "leaky_relu":
            return Activation(ACTIVATION_CODES[name])
        try:
            return Activation(ACTIVATION_CODES[name], _DEFAULT_SLOPE if slope is None else float(slope))
        except (TypeError, ValueError):
            raise InvalidArgument(
                f"activation = {value!r}; the slope must be a number; pass for example ('leaky_relu', 0.2)"
            ) from None


NO_ACTIVATION = Activation()


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
    def in_full_float32(self) -> bool:
        """Whether values are float32 and TF32 is not allowed."""
        return self.dtype is torch.float32 and not self.allow_tf32

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


def pad_shape(shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """(batch, channels, spatial...) with depth, height and width, as `pad_strides` has its strides."""
    return shape[0], shape[1], *pad_axes(shape[2:], 1)


def pad_strides(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Strides of a batched tensor with 1 to 3 spatial axes as (n, c, d, h, w); an axis of size 1 gets 0, it is never stepped.

    The canonical 0 makes tensors that differ only in meaningless strides share one plan.
    """
    canonical = [0 if size == 1 else step for size, step in zip(shape, strides)]
    spatial = canonical[2:]
    spatial = [0] * (3 - len(spatial)) + spatial
    return canonical[0], canonical[1], spatial[0], spatial[1], spatial[2]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """The strides that `pad_strides` gives a contiguous tensor of this shape, (n, c, d, h, w)."""
    strides = [1] * 5
    for axis in range(3, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return pad_strides(strides, shape)


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
