"""A transposed-convolution layer with its input size and operands, and how a row of a table describes one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .geometry import Geometry, cached_geometry, output_size
from .problem import Operator, Problem, pad_axes

_NO_STRIDES = (0, 0, 0, 0, 0)
# Mean number of non-zero products in an output of exact operands: sums stay far below the 256 that bfloat16 counts to.
_MEAN_PRODUCTS = 24.0


@dataclass(frozen=True)
class Case:
    """One layer with its input size; `bias` is the flag of the published model, `source` says which model that is."""

    name: str
    tier: str
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    source: str = ""
    cut_from: str = ""  # batch and input size of the case that this one was scaled down from

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.in_size)

    @property
    def geometry(self) -> Geometry:
        """The checked arguments, as the operators take them."""
        return cached_geometry(self.ndim, self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    @property
    def out_size(self) -> tuple[int, ...]:
        """Spatial size of the output."""
        arguments = self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding
        return tuple(output_size(*axis) for axis in zip(self.in_size, *arguments, strict=True))

    @property
    def gflop(self) -> float:
        """Billions of floating-point operations in the tap products that land inside the output, for real numbers."""
        return self._problem(torch.float32).flops / 1e9

    @property
    def size_text(self) -> str:
        """Batch and input size, as ``n4 64x64``; a scaled case also names the size it was cut from."""
        text = _size_text(self.batch, self.in_size)
        return f"{text} (cut from {self.cut_from})" if self.cut_from else text

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of x, w, bias and y, each counted once, in `dtype`."""
        return self._problem(dtype).bytes

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``conv_transpose1d/2d/3d``, torch's or ours."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "dilation": self.dilation,
        }

    def scaled(self, max_gflop: float) -> Case:
        """Cut the batch, then halve the longest spatial axes, until at most `max_gflop` remain, and nothing else."""
        case = self
        if case.gflop > max_gflop:
            case = replace(case, batch=max(1, int(case.batch * max_gflop / case.gflop)))
        while case.gflop > max_gflop:
            smaller = case._halve_longest_axis()
            if smaller is None:
                break
            case = smaller
        return case if case is self else replace(case, cut_from=self.cut_from or _size_text(self.batch, self.in_size))

    def tensors(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        memory_format: torch.memory_format | None = None,
        exact: bool = False,
        bias: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Make operands for this case.

        Args:
            dtype: of all three; values are drawn on the CPU, so every device sees the same.
            device: where they go.
            seed: of the random numbers.
            memory_format: of x, for example ``torch.channels_last``; None leaves it contiguous.
            exact: integers so few and so small that every partial sum is exact in every dtype.
            bias: whether to make one; None takes the published flag.

        Returns:
            x (batch, in_channels, spatial...), w (in_channels, out_channels / groups, kernel...), and the bias
            (out_channels,) or None.
        """
        generator = torch.Generator().manual_seed(seed)
        x_shape = (self.batch, self.in_channels, *self.in_size)
        w_shape = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        # The products in one output: a tap is skipped unless its division by the stride is exact.
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        taps = math.prod(math.ceil(kernel * math.gcd(stride, dilation) / stride) for kernel, stride, dilation in axes)
        products = self.in_channels // self.groups * taps
        if exact:
            density = min(2 / 3, math.sqrt(_MEAN_PRODUCTS / products))
            x = sparse_integers(x_shape, density, generator, complex_values=dtype.is_complex)
            w = sparse_integers(w_shape, density, generator, complex_values=dtype.is_complex)
            b = torch.randint(-3, 4, (self.out_channels,), generator=generator, dtype=torch.float32)
        else:
            drawn = torch.complex64 if dtype.is_complex else torch.float64 if dtype == torch.float64 else torch.float32
            x = torch.randn(x_shape, generator=generator, dtype=drawn)
            w = torch.randn(w_shape, generator=generator, dtype=drawn) / math.sqrt(products)
            b = torch.randn((self.out_channels,), generator=generator, dtype=drawn)
        x, w, b = (tensor.to(device=device, dtype=dtype) for tensor in (x, w, b))
        if memory_format is not None:
            x = x.contiguous(memory_format=memory_format)
        return x, w, b if (self.bias if bias is None else bias) else None

    def _problem(self, dtype: torch.dtype) -> Problem:
        """The Problem of this case, whose counts of bytes and operations do not depend on the strides left out here."""
        return Problem(
            operator=Operator.CONV_TRANSPOSE,
            dtype=dtype,
            batch=self.batch,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            groups=self.groups,
            in_size=pad_axes(self.in_size, 1),
            out_size=pad_axes(self.out_size, 1),
            kernel_size=pad_axes(self.kernel_size, 1),
            stride=pad_axes(self.stride, 1),
            padding=pad_axes(self.padding, 0),
            dilation=pad_axes(self.dilation, 1),
            x_strides=_NO_STRIDES,
            w_strides=_NO_STRIDES,
            y_strides=_NO_STRIDES,
            spatial_ndim=self.ndim,
            has_bias=self.bias,
        )

    def _halve_longest_axis(self) -> Case | None:
        """The same layer on half of the longest axis that may still shrink, or None when none may."""
        for axis in sorted(range(self.ndim), key=lambda axis: -self.in_size[axis]):
            if self.in_size[axis] > 1:
                half = tuple(-(-size // 2) if index == axis else size for index, size in enumerate(self.in_size))
                smaller = replace(self, in_size=half)
                if smaller.out_size[axis] >= 1:
                    return smaller
        return None


def sparse_integers(
    shape: tuple[int, ...], density: float, generator: torch.Generator, complex_values: bool = False
) -> torch.Tensor:
    """Draw -1, 0 and 1 (times 1 or the imaginary unit), non-zero with probability `density`.

    Returns:
        A contiguous tensor of int8, or of complex64 where `complex_values`, on the generator's device.
    """
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1
    values = signs * (torch.rand(shape, generator=generator) < density)
    if not complex_values:
        return values
    turned = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
    return torch.complex((values * (1 - turned)).float(), (values * turned).float())


def _size_text(batch: int, in_size: tuple[int, ...]) -> str:
    return f"n{batch} " + "x".join(str(size) for size in in_size)


def read_case(tier: str, name: str, channels: str, size: str, kernel: str, source: str = "", **options: Any) -> Case:
    """Read a table row: "in>out", "n x size", and a kernel such as "3x5 s2 p1x2": one number, or one for each axis."""
    batch, *in_size = (int(entry) for entry in size.split("x"))
    in_channels, out_channels = (int(entry) for entry in channels.split(">"))
    kernel_size, *letters = kernel.split()
    values = {"s": "1", "p": "0", "o": "0", "d": "1", "g": "1"}
    values.update({letter[0]: letter[1:] for letter in letters})
    axes = {key: tuple(int(entry) for entry in value.split("x")) for key, value in values.items()}
    ndim = len(in_size)
    stride, padding, output_padding, dilation = (axes[key] * (ndim // len(axes[key])) for key in "spod")
    kernels = tuple(int(entry) for entry in kernel_size.split("x"))
    return Case(
        name=name,
        tier=tier,
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        in_size=tuple(in_size),
        kernel_size=kernels * (ndim // len(kernels)),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=axes["g"][0],
        bias=options.pop("bias", False),
        source=source,
    )
