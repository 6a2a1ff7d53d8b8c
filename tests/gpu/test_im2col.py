"""im2col of the CUDA module against a loop over taps in float64, on a GPU: every layer, and those that its tiles are made for."""

from __future__ import annotations

import pytest
import torch
from column_layers import (
    CODES,
    Layer,
    assert_same,
    columns_of,
    describe,
    im2col,
    integers,
    parametrize_layers,
    parametrize_pairs,
    whole_block,
)

pytestmark = pytest.mark.gpu


@parametrize_pairs
@parametrize_layers
def test_im2col_is_exact(cuda, layer, dtype, column_dtype):
    y = integers(layer.image_shape, dtype)
    columns = torch.full(layer.column_shape, float("nan"), dtype=column_dtype, device="cuda")
    im2col(cuda, layer, y, columns)
    assert_same(columns, columns_of(y, layer))


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
