"""The column kernels of the CUDA module against loops over taps in float64, on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from upfold import native

pytestmark = pytest.mark.gpu
CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
NONE, RELU, SILU, GELU, GELU_TANH, TANH, SIGMOID, LEAKY_RELU = range(8)


@pytest.fixture(scope="module")
def cuda():
    """Return the compiled module, or skip with the reason why it cannot run here."""
    module, reason = native.load_cuda()
    if module is None:
        pytest.skip(reason)
    if not torch.cuda.is_available():
        pytest.skip("torch finds no usable GPU")
    if not module.info()["devices"]:
        pytest.skip(module.info()["no_device_reason"])
    return module


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


@parametrize_pairs
@parametrize_layers
def test_col2im_is_exact(cuda, layer, dtype, column_dtype):
    columns = integers(layer.column_shape, column_dtype)
    bias = integers((layer.channels,), dtype)
    y = torch.full(layer.image_shape, float("nan"), dtype=dtype, device="cuda")
    col2im(cuda, layer, columns, y, bias)
    assert_same(y, image_of(columns, layer) + bias.cpu().view(1, -1, 1, 1, 1))


@parametrize_pairs
@parametrize_layers
def test_im2col_is_exact(cuda, layer, dtype, column_dtype):
    y = integers(layer.image_shape, dtype)
    columns = torch.full(layer.column_shape, float("nan"), dtype=column_dtype, device="cuda")
    im2col(cuda, layer, y, columns)
    assert_same(columns, columns_of(y, layer))


@pytest.mark.parametrize("layout", ["channels_last", "padded rows", "every second channel"])
@pytest.mark.parametrize("name", ["three axes", "many channels", "wide rows", "k3s1p1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides_of_the_image(cuda, layout, name, dtype):
    layer = LAYERS[name]
    n, c, *spatial = layer.image_shape
    y = {
        "channels_last": lambda: torch.zeros(n, *spatial, c, dtype=dtype, device="cuda").permute(0, 4, 1, 2, 3),
        "padded rows": lambda: torch.zeros(n, c, *spatial[:2], spatial[2] + 3, dtype=dtype, device="cuda")[..., : spatial[2]],
        "every second channel": lambda: torch.zeros(n, 2 * c, *spatial, dtype=dtype, device="cuda")[:, ::2],
    }[layout]()
    columns = integers(layer.column_shape, dtype)
    col2im(cuda, layer, columns, y)
    expected = image_of(columns, layer)
    assert_same(y, expected)
    back = torch.empty(layer.column_shape, dtype=dtype, device="cuda")
    im2col(cuda, layer, y, back)
    assert_same(back, columns_of(expected, layer))


@pytest.mark.parametrize("name", ["narrow k2s2", "odd k2s2", "k2s2 with output padding", "taps on h", "k16s16", "cropped rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", range(4))
def test_any_alignment_of_columns_and_image(cuda, name, dtype, shift):
    layer = LAYERS[name]
    n, c, *spatial = layer.image_shape
    columns = integers((torch.Size(layer.column_shape).numel() + shift,), dtype)[shift:].view(layer.column_shape)
    store = torch.full((n * c * torch.Size(spatial).numel() + 32,), float("nan"), dtype=dtype, device="cuda")
    y = store[8 + shift : shift - 24].view(layer.image_shape)
    col2im(cuda, layer, columns, y)
    assert_same(y, image_of(columns, layer))
    assert store[: 8 + shift].isnan().all()
    assert store[shift - 24 :].isnan().all()


@pytest.mark.parametrize("name", ["odd k2s2", "taps on h", "wide rows of stride 10", "k16s16"])
@pytest.mark.parametrize("gap", [1, 4])
def test_rows_of_the_image_apart(cuda, name, gap):
    layer = LAYERS[name]
    n, c, *spatial = layer.image_shape
    y = torch.zeros(n, c, *spatial[:2], spatial[2] + gap, device="cuda")
    columns = integers(layer.column_shape, torch.float32)
    col2im(cuda, layer, columns, y[..., : spatial[2]])
    assert_same(y[..., : spatial[2]], image_of(columns, layer))
    assert not y[..., spatial[2] :].any()


@pytest.mark.parametrize("name", ["even k2s2", "taps on h", "k16s16"])
@pytest.mark.parametrize("lines", [(0, 5), (3, 11), (5, 6)])
def test_a_block_of_lines(cuda, name, lines):
    layer = LAYERS[name]
    columns = integers(layer.column_shape, torch.float32)
    y = torch.full(layer.image_shape, 99.0, device="cuda")
    col2im(cuda, layer, columns, y, out_h=lines)
    expected = torch.full(layer.image_shape, 99.0, dtype=torch.float64)
    expected[..., slice(*lines), :] = image_of(columns, layer)[..., slice(*lines), :]
    assert_same(y, expected)


def test_a_block_writes_its_outputs_alone(cuda):
    layer = LAYERS["k4s2p1"]
    columns = integers(layer.column_shape, torch.float32)
    y = torch.full(layer.image_shape, 99.0, device="cuda")
    part = columns[1:, 2 * layer.taps : 4 * layer.taps]  # sample 1, channels 2 and 3
    col2im(cuda, layer, part, y, n=(1, 2), oc=(2, 4), out_h=(3, 9))
    expected = torch.full(layer.image_shape, 99.0, dtype=torch.float64)
    expected[1:, 2:4, :, 3:9] = image_of(columns, layer)[1:, 2:4, :, 3:9]
    assert_same(y, expected)


def col2im_strided(cuda, layer, columns, y, bias=None, order=(0, 1, 2, 3)):
    """Launch col2im on columns whose rows (channel, kd, kh, kw) lie in another order; `order` names the axes, slowest first."""
    rows = columns.view(layer.batch, layer.channels, *layer.kernel, -1)
    moved = rows.permute(0, *(1 + axis for axis in order), 5).contiguous()
    strides = tuple(moved.stride(1 + order.index(axis)) for axis in range(4))
    block = whole_block(cuda, layer, columns)
    addresses = moved.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
    place = y.device.index, torch.cuda.current_stream().cuda_stream
    cuda.col2im_strided(describe(cuda, layer, y), block, strides, CODES[columns.dtype], addresses, *place)


@parametrize_pairs
@pytest.mark.parametrize("order", [(3, 0, 1, 2), (1, 2, 3, 0), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ["three axes", "many channels", "wide rows", "empty phases", "one axis", "wide stride", *EQUAL])
def test_rows_of_columns_in_any_order(cuda, name, order, dtype, column_dtype):
    layer = LAYERS[name]
    columns, bias = integers(layer.column_shape, column_dtype), integers((layer.channels,), dtype)
    y = torch.full(layer.image_shape, float("nan"), dtype=dtype, device="cuda")
    col2im_strided(cuda, layer, columns, y, bias, order)
    assert_same(y, image_of(columns, layer) + bias.cpu().view(1, -1, 1, 1, 1))


@pytest.mark.parametrize("channel", [0, 3])
def test_a_block_of_one_channel_in_a_channels_last_image(cuda, channel):
    layer = LAYERS["k3s1p1"]
    columns = integers(layer.column_shape, torch.float32)
    n, c, *spatial = layer.image_shape
    y = torch.full((n, *spatial, c), 99.0, device="cuda").permute(0, 4, 1, 2, 3)
    col2im(cuda, layer, columns[:, channel * layer.taps :], y, oc=(channel, channel + 1))
    expected = torch.full(layer.image_shape, 99.0, dtype=torch.float64)
    expected[:, channel] = image_of(columns, layer)[:, channel]
    assert_same(y, expected)


@pytest.mark.parametrize("dtype", CODES, ids=lambda d: str(d).removeprefix("torch."))
@parametrize_layers
def test_atomic_additions_are_exact(cuda, layer, dtype):
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    columns, bias = integers(layer.column_shape, wide), integers((layer.channels,), dtype)
    y = torch.full(layer.image_shape, float("nan"), dtype=dtype, device="cuda")
    staging = torch.full(layer.image_shape, float("nan"), device="cuda")
    problem, block = describe(cuda, layer, y), whole_block(cuda, layer, columns)
    pointers = columns.data_ptr(), bias.data_ptr(), y.data_ptr(), staging.data_ptr()
    cuda.col2im_atomic(problem, block, *pointers, y.device.index, torch.cuda.current_stream().cuda_stream)
    assert_same(y, image_of(columns, layer) + bias.cpu().view(1, -1, 1, 1, 1))


def test_guard_bands_stay_untouched(cuda):
    layer = LAYERS["asymmetric"]
    columns = integers(layer.column_shape, torch.float32)
    count = torch.Size(layer.image_shape).numel()
    store = torch.full((count + 128,), float("nan"), device="cuda")
    col2im(cuda, layer, columns, store[64 : 64 + count].view(layer.image_shape))
    assert store[:64].isnan().all()
    assert store[64 + count :].isnan().all()
    assert not store[64 : 64 + count].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", range(1, 8))
def test_activations_follow_torch(cuda, activation, dtype):
    functions = {
        RELU: torch.relu,
        SILU: torch.nn.functional.silu,
        GELU: torch.nn.functional.gelu,
        GELU_TANH: lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        TANH: torch.tanh,
        SIGMOID: torch.sigmoid,
        LEAKY_RELU: lambda v: torch.nn.functional.leaky_relu(v, 0.125),
    }
    layer = LAYERS["one axis"]
    column_dtype = dtype if dtype == torch.float64 else torch.float32
    columns = torch.randn(layer.column_shape, dtype=torch.float64).to("cuda", column_dtype)
    bias = torch.randn(layer.channels, dtype=torch.float64).to("cuda", dtype)
    y = torch.empty(layer.image_shape, dtype=dtype, device="cuda")
    col2im(cuda, layer, columns, y, bias, activation, 0.125)
    exact = functions[activation](image_of(columns, layer) + bias.cpu().double().view(1, -1, 1, 1, 1))
    # Sums of a few taps near 1 in the compute type, then one rounding to the dtype.
    unit = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(column_dtype).eps
    assert (y.cpu().double() - exact).abs().max() <= unit * exact.abs().max().clamp(min=1)


def test_nan_passes_through_relu(cuda):
    layer = LAYERS["one pixel"]
    columns = torch.full(layer.column_shape, float("nan"), device="cuda")
    y = torch.zeros(layer.image_shape, device="cuda")
    col2im(cuda, layer, columns, y, activation=RELU)
    assert y.isnan().all()


def test_infinite_pixels_stay_where_they_reach(cuda):
    layer = LAYERS["k3s2p1op1"]
    columns = torch.zeros(layer.column_shape, device="cuda")
    columns[..., 2, 3] = float("inf")
    y = torch.zeros(layer.image_shape, device="cuda")
    col2im(cuda, layer, columns, y)
    assert torch.equal(y.isinf().cpu(), image_of(columns, layer).isinf())
    assert not y.isnan().any()


def test_the_same_bits_again(cuda):
    layer = LAYERS["three axes"]
    columns = torch.randn(layer.column_shape, device="cuda")
    first, second = (torch.empty(layer.image_shape, device="cuda") for _ in range(2))
    col2im(cuda, layer, columns, first)
    col2im(cuda, layer, columns, second)
    assert torch.equal(first, second)


def test_capture_and_side_stream(cuda):
    layer = LAYERS["k4s2p1"]
    columns = integers(layer.column_shape, torch.float32)
    y = torch.zeros(layer.image_shape, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        col2im(cuda, layer, columns, y)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    assert not y.any()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(y, image_of(columns, layer))


def test_the_current_device_is_restored(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    layer = LAYERS["k2s2"]
    columns = integers(layer.column_shape, torch.float32).to("cuda:1")
    y = torch.zeros(layer.image_shape, device="cuda:1")
    block, problem = whole_block(cuda, layer, columns), describe(cuda, layer, y)
    stream = torch.cuda.current_stream("cuda:1").cuda_stream
    torch.cuda.set_device(0)
    cuda.col2im(problem, block, 0, columns.data_ptr(), 0, y.data_ptr(), 1, stream)
    assert torch.cuda.current_device() == 0
    assert_same(y, image_of(columns, layer))


def test_more_than_two_to_the_31_elements(cuda):
    layer = Layer(1, 1, (1, 1 << 15, 1 << 14), (1, 2, 2), (1, 2, 2), extra=(0, 1, 1))
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of GPU memory are free")
    columns = torch.randint(-1, 2, layer.column_shape, device="cuda", dtype=torch.int8).to(torch.float16)
    y = torch.full(layer.image_shape, float("nan"), device="cuda", dtype=torch.float16)
    assert y.numel() > 1 << 31
    col2im(cuda, layer, columns, y)
    for tap, (kh, kw) in enumerate(itertools.product(range(2), range(2))):
        assert torch.equal(y[0, 0, 0, kh : 1 << 16 : 2, kw : 1 << 15 : 2], columns[0, tap, 0])
    assert not y[..., -1].any()
    assert not y[..., -1, :].any()


def test_types_that_do_not_belong_together_are_refused(cuda):
    layer = LAYERS["k2s2"]
    columns = torch.zeros(layer.column_shape, device="cuda", dtype=torch.float64)
    y = torch.zeros(layer.image_shape, device="cuda")
    with pytest.raises(ValueError, match="columns have the dtype of the problem"):
        col2im(cuda, layer, columns, y)


def test_a_block_outside_the_problem_is_refused(cuda):
    layer = LAYERS["k2s2"]
    columns = torch.zeros(layer.column_shape, device="cuda")
    y = torch.zeros(layer.image_shape, device="cuda")
    with pytest.raises(ValueError, match=r"block\.n = \[0, 9\); must lie in \[0, 2\)"):
        col2im(cuda, layer, columns, y, n=(0, 9))


TILED = {
    "groups of odd planes": Layer(64, 160, (1, 7, 7), (1, 2, 2), (1, 2, 2)),
    "groups of planes of stride 1": Layer(16, 400, (1, 9, 14), (1, 3, 3), pad=(0, 1, 1)),
    "kernel in runs": Layer(2, 21, (1, 20, 33), (1, 16, 16), (1, 8, 8), (0, 4, 4)),
    "few pixels, many taps": Layer(1, 3, (1, 9, 16), (1, 64, 64), (1, 32, 32)),
    "odd stride": Layer(2, 5, (1, 10, 41), (1, 7, 7), (1, 5, 5), (0, 2, 2)),
    "wide rows in parts": Layer(1, 2, (1, 3, 3001), (1, 4, 4), (1, 3, 3), (0, 1, 1)),
    "a long axis": Layer(2, 3, (1, 1, 5000), (1, 1, 16), (1, 1, 8), (0, 0, 4)),
    "three axes": Layer(2, 3, (5, 6, 14), (3, 3, 3), pad=(1, 1, 1)),
    "three strided axes": Layer(2, 5, (3, 5, 12), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "dilation beside stride": Layer(2, 3, (1, 13, 22), (1, 3, 3), (1, 2, 2), (0, 2, 2), (1, 3, 5)),
    "stride above kernel": Layer(2, 3, (1, 11, 30), (1, 2, 2), (1, 3, 5), extra=(0, 1, 3)),
    "lines of multiples of four": Layer(3, 7, (1, 12, 40), (1, 3, 3), (1, 2, 2), (0, 1, 1), extra=(0, 1, 1)),
    "a line too long for a tile": Layer(1, 2, (1, 2, 10), (1, 1, 4), dilation=(1, 1, 9000)),
}
parametrize_tiled = pytest.mark.parametrize("layer", TILED.values(), ids=TILED)
COMMON = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
parametrize_common = pytest.mark.parametrize("dtype, column_dtype", COMMON, ids=lambda d: str(d).removeprefix("torch."))


@parametrize_common
@parametrize_tiled
def test_im2col_by_tiles_is_exact(cuda, layer, dtype, column_dtype):
    y = integers(layer.image_shape, dtype)
    columns = torch.full(layer.column_shape, float("nan"), dtype=column_dtype, device="cuda")
    im2col(cuda, layer, y, columns)
    assert_same(columns, columns_of(y, layer))


@parametrize_common
@parametrize_tiled
def test_im2col_at_odd_addresses(cuda, layer, dtype, column_dtype):
    y_count, count = torch.Size(layer.image_shape).numel(), torch.Size(layer.column_shape).numel()
    y = torch.empty(y_count + 1, dtype=dtype, device="cuda")[1:].view(layer.image_shape)
    y.copy_(integers(layer.image_shape, dtype))
    store = torch.full((count + 128,), float("nan"), dtype=column_dtype, device="cuda")
    columns = store[63 : 63 + count].view(layer.column_shape)
    im2col(cuda, layer, y, columns)
    assert_same(columns, columns_of(y, layer))
    assert store[:63].isnan().all()
    assert store[63 + count :].isnan().all()


@parametrize_common
@pytest.mark.parametrize("name", ["groups of odd planes", "kernel in runs", "three strided axes"])
def test_im2col_into_samples_side_by_side(cuda, name, dtype, column_dtype):
    layer = TILED[name]
    y = integers(layer.image_shape, dtype)
    n, rows, *size = layer.column_shape
    columns = torch.full((rows, n, *size), float("nan"), dtype=column_dtype, device="cuda").transpose(0, 1)
    im2col(cuda, layer, y, columns)
    assert_same(columns, columns_of(y, layer))


@parametrize_common
@pytest.mark.parametrize("name", ["kernel in runs", "odd stride", "three strided axes"])
def test_im2col_of_a_block(cuda, name, dtype, column_dtype):
    layer = TILED[name]
    y = integers(layer.image_shape, dtype)
    n, _, depth, height, width = layer.column_shape
    shape = (n - 1, 2 * layer.taps, depth, height - 3, width - 5)
    columns = torch.full(shape, float("nan"), dtype=column_dtype, device="cuda")
    ranges = {"n": (1, n), "oc": (1, 3), "in_h": (2, height - 1), "in_w": (5, width)}
    problem, block = describe(cuda, layer, y), whole_block(cuda, layer, columns, **ranges)
    pointers = y.data_ptr(), columns.data_ptr()
    cuda.im2col(problem, block, CODES[column_dtype], *pointers, y.device.index, torch.cuda.current_stream().cuda_stream)
    assert_same(columns, columns_of(y, layer)[1:, layer.taps : 3 * layer.taps, :, 2 : height - 1, 5:])
