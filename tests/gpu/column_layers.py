"""Layers for the column kernels of the CUDA module, their definitions in float64, and how the tests launch them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
NONE, RELU, SILU, GELU, GELU_TANH, TANH, SIGMOID, LEAKY_RELU = range(8)


@dataclass(frozen=True)
class Layer:
    """Sizes of one column problem; every tuple is (depth, height, width)."""

    batch: int
    channels: int
    size: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    pad: tuple[int, int, int] = (0, 0, 0)
    dilation: tuple[int, int, int] = (1, 1, 1)
    extra: tuple[int, int, int] = (0, 0, 0)

    @property
    def out(self) -> tuple[int, ...]:
        axes = zip(self.size, self.kernel, self.stride, self.pad, self.dilation, self.extra)
        return tuple((i - 1) * s - 2 * p + d * (k - 1) + e + 1 for i, k, s, p, d, e in axes)

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    @property
    def column_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels * self.taps, *self.size)

    @property
    def image_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.out)


LAYERS = {
    "k2s2": Layer(2, 3, (1, 5, 7), (1, 2, 2), (1, 2, 2)),
    "k4s2p1": Layer(2, 5, (1, 6, 9), (1, 4, 4), (1, 2, 2), (0, 1, 1)),
    "k3s1p1": Layer(2, 4, (1, 8, 8), (1, 3, 3), pad=(0, 1, 1)),
    "k3s2p1op1": Layer(1, 4, (1, 5, 6), (1, 3, 3), (1, 2, 2), (0, 1, 1), extra=(0, 1, 1)),
    "asymmetric": Layer(2, 3, (1, 6, 11), (1, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2, 1)),
    "empty phases": Layer(1, 2, (1, 4, 5), (1, 2, 2), (1, 3, 5)),
    "shared divisor": Layer(1, 2, (1, 5, 6), (1, 3, 4), (1, 4, 6), (0, 2, 1), (1, 6, 4)),
    "negative halo": Layer(1, 3, (1, 9, 9), (1, 2, 2), pad=(0, 3, 2)),
    "rows without taps": Layer(1, 2, (1, 3, 3), (1, 2, 2), (1, 2, 2), extra=(0, 1, 1)),
    "three axes": Layer(2, 3, (3, 4, 5), (2, 3, 2), (2, 1, 3), (0, 1, 1), (1, 2, 1), (1, 0, 1)),
    "one axis": Layer(3, 4, (1, 1, 37), (1, 1, 16), (1, 1, 8), (0, 0, 4)),
    "wide rows": Layer(1, 2, (1, 3, 300), (1, 4, 4), (1, 2, 2), (0, 1, 1)),
    "wide rows of stride 1": Layer(1, 2, (1, 3, 300), (1, 3, 3), pad=(0, 1, 1)),
    "wide rows of stride 4": Layer(1, 2, (1, 2, 150), (1, 4, 4), (1, 4, 4)),
    "stride above four": Layer(2, 2, (1, 3, 70), (1, 1, 7), (1, 1, 5), (0, 0, 2)),
    "many channels": Layer(2, 71, (1, 4, 5), (1, 3, 2), (1, 2, 3), (0, 1, 0)),
    "one pixel": Layer(1, 21, (1, 1, 1), (1, 1, 1)),
    "wide stride": Layer(1, 1, (1, 2, 2), (1, 3, 3), (1, 50_000, 7)),
    "many samples": Layer(70_000, 1, (1, 2, 2), (1, 2, 2), (1, 2, 2)),
}
# One tap along w for every output: kernel_w == stride_w.
EQUAL = {
    "one pixel k2s2": Layer(3, 5, (1, 1, 1), (1, 2, 2), (1, 2, 2)),
    "narrow k2s2": Layer(5, 9, (1, 7, 7), (1, 2, 2), (1, 2, 2)),
    "even k2s2": Layer(3, 9, (1, 14, 14), (1, 2, 2), (1, 2, 2)),
    "odd k2s2": Layer(2, 3, (1, 37, 37), (1, 2, 2), (1, 2, 2)),
    "wide k2s2": Layer(1, 2, (1, 5, 512), (1, 2, 2), (1, 2, 2)),
    "k2s2 without its border": Layer(2, 3, (1, 9, 12), (1, 2, 2), (1, 2, 2), (0, 1, 1)),
    "k2s2 with output padding": Layer(2, 3, (1, 9, 75), (1, 2, 2), (1, 2, 2), extra=(0, 1, 1)),
    "k2s2 on three axes": Layer(2, 3, (3, 5, 7), (2, 2, 2), (2, 2, 2)),
    "k4s4": Layer(1, 3, (1, 37, 37), (1, 4, 4), (1, 4, 4)),
    "k16s16": Layer(1, 2, (1, 14, 14), (1, 16, 16), (1, 16, 16)),
    "taps on h": Layer(2, 3, (1, 8, 16), (1, 7, 3), (1, 2, 3), (0, 3, 0)),
    "taps on h, odd rows": Layer(2, 3, (1, 8, 37), (1, 3, 5), (1, 1, 5), (0, 1, 2)),
    "taps on h, rows of one": Layer(2, 3, (1, 9, 1), (1, 3, 6), (1, 1, 6), (0, 0, 1)),
    "dilated taps on d and h": Layer(2, 2, (4, 6, 20), (2, 3, 8), (1, 2, 8), (1, 2, 0), (2, 3, 1)),
    "wide rows of stride 10": Layer(1, 2, (1, 3, 700), (1, 2, 10), (1, 2, 10), (0, 0, 3)),
    "wide rows of stride 14": Layer(1, 1, (1, 2, 1024), (1, 5, 14), (1, 1, 14), extra=(0, 0, 9)),
    "cropped rows": Layer(1, 2, (1, 3, 9), (1, 1, 4), (1, 1, 4), (0, 0, 7)),
    "one axis of stride 7": Layer(3, 4, (1, 1, 75), (1, 1, 7), (1, 1, 7)),
    "widest stride": Layer(1, 2, (1, 2, 8), (1, 32, 32), (1, 32, 32)),
    "many small maps": Layer(40, 61, (1, 3, 5), (1, 2, 2), (1, 2, 2)),
    "large maps": Layer(4, 40, (1, 60, 80), (1, 2, 2), (1, 2, 2)),
}
LAYERS |= EQUAL
parametrize_layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
PAIRS = [(dtype, dtype) for dtype in CODES] + [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
parametrize_pairs = pytest.mark.parametrize("dtype, column_dtype", PAIRS, ids=lambda d: str(d).removeprefix("torch."))


def tap_views(image: torch.Tensor, layer: Layer, kd: int, kh: int, kw: int):
    """Yield (input slices, output slices) that one tap joins, without the positions outside the image."""
    inputs, outputs = [], []
    for axis, k in enumerate((kd, kh, kw)):
        stride, offset = layer.stride[axis], k * layer.dilation[axis] - layer.pad[axis]
        reached = [i for i in range(layer.size[axis]) if 0 <= i * stride + offset < layer.out[axis]]
        if not reached:
            return None
        inputs.append(slice(reached[0], reached[-1] + 1))
        outputs.append(slice(reached[0] * stride + offset, reached[-1] * stride + offset + 1, stride))
    return (slice(None), slice(None), *inputs), (slice(None), slice(None), *outputs)


def image_of(columns: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return col2im by its definition, in double precision."""
    wide = torch.complex128 if columns.is_complex() else torch.float64
    image = torch.zeros(layer.image_shape, dtype=wide)
    columns = columns.to("cpu", wide).view(layer.batch, layer.channels, layer.taps, *layer.size)
    for tap, (kd, kh, kw) in enumerate(itertools.product(*map(range, layer.kernel))):
        joined = tap_views(image, layer, kd, kh, kw)
        if joined:
            image[joined[1]] += columns[:, :, tap][joined[0]]
    return image


def columns_of(image: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return im2col by its definition, in double precision."""
    wide = torch.complex128 if image.is_complex() else torch.float64
    columns = torch.zeros(layer.batch, layer.channels, layer.taps, *layer.size, dtype=wide)
    image = image.to("cpu", wide)
    for tap, (kd, kh, kw) in enumerate(itertools.product(*map(range, layer.kernel))):
        joined = tap_views(image, layer, kd, kh, kw)
        if joined:
            columns[:, :, tap][joined[0]] = image[joined[1]]
    return columns.view(layer.column_shape)


def describe(cuda, layer: Layer, y: torch.Tensor, activation: int = NONE, slope: float = 0.0):
    """Return the module's Problem for an image of a layer."""
    names = ("d", "h", "w")
    axes = {"in": layer.size, "out": layer.out, "kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    axes["dilation"] = layer.dilation
    sizes = {f"{field}_{name}": values[i] for field, values in axes.items() for i, name in enumerate(names)}
    return cuda.Problem(
        op=0,
        dtype=CODES[y.dtype],
        activation=activation,
        activation_slope=slope,
        batch=layer.batch,
        in_channels=1,
        out_channels=layer.channels,
        groups=1,
        x_strides=(0,) * 5,
        w_strides=(0,) * 5,
        y_strides=y.stride(),
        **sizes,
    )


def whole_block(cuda, layer: Layer, columns: torch.Tensor, **ranges):
    """Return the block of all columns; `ranges` narrow it."""
    fields = {"n": (0, layer.batch), "oc": (0, layer.channels)}
    fields |= {f"in_{name}": (0, layer.size[i]) for i, name in enumerate("dhw")}
    fields |= {f"out_{name}": (0, layer.out[i]) for i, name in enumerate("dhw")}
    return cuda.ColumnBlock(**(fields | ranges), sample_stride=columns.stride(0), row_stride=columns.stride(1))


def col2im(cuda, layer, columns, y, bias=None, activation=NONE, slope=0.0, **ranges):
    """Launch col2im on the current stream."""
    problem = describe(cuda, layer, y, activation, slope)
    block = whole_block(cuda, layer, columns, **ranges)
    pointers = columns.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
    cuda.col2im(problem, block, CODES[columns.dtype], *pointers, y.device.index, torch.cuda.current_stream().cuda_stream)


def im2col(cuda, layer, y, columns):
    """Launch im2col on the current stream."""
    problem, block = describe(cuda, layer, y), whole_block(cuda, layer, columns)
    pointers = y.data_ptr(), columns.data_ptr()
    cuda.im2col(problem, block, CODES[columns.dtype], *pointers, y.device.index, torch.cuda.current_stream().cuda_stream)


def integers(shape, dtype: torch.dtype) -> torch.Tensor:
    """Return values of -1, 0 and 1, whose sums every dtype holds exactly."""
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randint(-1, 2, shape, generator=generator).double() for _ in range(2)]
    values = torch.complex(*parts) if dtype.is_complex else parts[0]
    return values.to(dtype).cuda()


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """The values are equal, bit for bit, once the exact reference is given the result's dtype."""
    assert torch.equal(result.cpu(), expected.to(result.dtype))
