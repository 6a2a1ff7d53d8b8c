"""The column kernels of the CUDA module against loops over taps in float64, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from column_layers import (
    CODES,
    EQUAL,
    GELU,
    GELU_TANH,
    LAYERS,
    LEAKY_RELU,
    RELU,
    SIGMOID,
    SILU,
    TANH,
    Layer,
    assert_same,
    col2im,
    columns_of,
    describe,
    im2col,
    image_of,
    integers,
    parametrize_layers,
    parametrize_pairs,
    whole_block,
)

pytestmark = pytest.mark.gpu


@parametrize_pairs
@parametrize_layers
def test_col2im_is_exact(cuda, layer, dtype, column_dtype):
    columns = integers(layer.column_shape, column_dtype)
    bias = integers((layer.channels,), dtype)
    y = torch.full(layer.image_shape, float("nan"), dtype=dtype, device="cuda")
    col2im(cuda, layer, columns, y, bias)
    assert_same(y, image_of(columns, layer) + bias.cpu().view(1, -1, 1, 1, 1))


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
