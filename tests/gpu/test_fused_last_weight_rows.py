"""Tiles whose columns are a row of the weight as it lies, channels and taps: kernels as long as their stride, in planes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import (
    activation_is_close,
    bad_pixels_stay,
    equal_layer,
    equals_gemm,
    forward_is_exact,
    repeats_under_load,
    slices_are_exact,
)

from gpu import missing
from oracle import describe, geometry_arguments
from upfold.algorithms import REGISTRY, fused_last_weight_rows

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch."))

LAYERS = {
    "2 x 2": equal_layer((5, 8), (2, 2)),
    "2 x 2, odd rows": equal_layer((8, 13), (2, 2)),
    "2 x 2, of more channels than a tile": equal_layer((8, 8), (2, 2), in_channels=200, out_channels=136),
    "2 x 2, few channels": equal_layer((8, 12), (2, 2), in_channels=16, out_channels=6),
    "2 x 2, groups": equal_layer((8, 8), (2, 2), in_channels=128, out_channels=72, groups=2),
    "2 x 2, many samples": equal_layer((2, 4), (2, 2), batch=150),
    "1 x 2": equal_layer((4, 10), (1, 2)),
    "2 x 6": equal_layer((4, 6), (2, 6)),
    "3 x 4": equal_layer((6, 4), (3, 4), out_channels=22),
    "4 x 4": equal_layer((16, 9), (4, 4)),
    "1d": equal_layer((72,), (8,)),
    "3d": equal_layer((2, 4, 5), (2, 2, 2)),
    "3d, of one depth": equal_layer((3, 5, 8), (1, 2, 2)),
    "3d, of odd depths": equal_layer((2, 4, 4), (3, 1, 2)),
}  # fmt: skip
REFUSED = {
    "an odd row of taps": equal_layer((8, 8), (3, 3)),
    "planes of no whole vectors": equal_layer((5, 5), (2, 2)),
    "rows of the weight of no whole vectors": equal_layer((8, 8), (2, 2), out_channels=33 * 2 + 1, in_channels=16),
    "padding": equal_layer((8, 8), (2, 2), padding=(1, 0)),
    "a kernel beyond its stride": dataclasses.replace(equal_layer((8, 8), (4, 4)), stride=(2, 2)),
}
# Of several tiles for each multiprocessor; of weights that stay with their block, and that do not.
LOADED = {
    "stays": equal_layer((64, 96), (2, 2), in_channels=64, out_channels=64, batch=9),
    "streams": equal_layer((32, 40), (2, 2), in_channels=512, out_channels=256, batch=9),
}


def _configs(problem, device):
    first = fused_last_weight_rows.FIRST
    return [config for config in FUSED.configs(problem, device) if first <= config < first + fused_last_weight_rows.TILES]


def _expected(problem, device):
    """Those, which must be there on Hopper."""
    found = _configs(problem, device)
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _described(operands, case):
    return describe(*operands, tuple(geometry_arguments(case.geometry).values()))


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_exact(name, dtype, device):
    forward_is_exact(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected)


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_slices_are_exact(name, dtype, device):
    """Beginning with whole vectors, in rows that are whole vectors, whole words, or not."""
    places = ((0, 0, 8), (0, 8, 16), (0, 0, 2), (0, 0, 1))
    slices_are_exact(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected, places)


@TYPES
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name, dtype, device):
    case = REFUSED[name]
    assert not _configs(_described(case.tensors(dtype, device, bias=True), case), device)


@pytest.mark.parametrize("storage", ["float32", "channels innermost", "behind one", "weight behind one", "weight innermost"])
def test_other_layouts_are_refused(storage, device):
    case = LAYERS["2 x 2"]
    x, w, b = case.tensors(torch.float32 if storage == "float32" else torch.bfloat16, device, bias=True)

    def behind_one(t):
        return torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    if storage == "channels innermost":
        x = x.contiguous(memory_format=torch.channels_last)
    elif storage == "behind one":
        x = behind_one(x)
    elif storage == "weight behind one":
        w = behind_one(w)
    elif storage == "weight innermost":
        w = w.contiguous(memory_format=torch.channels_last)
    assert not _configs(_described((x, w, b), case), device)


@TYPES
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "tanh"])
@pytest.mark.parametrize("name", ["2 x 2", "3d"])
def test_activations(name, activation, dtype, device):
    activation_is_close(LAYERS[name], dtype, device, activation, _expected)


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_bad_pixels_stay_where_taps_carry_them(name, dtype, device):
    bad_pixels_stay(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected)


@TYPES
@pytest.mark.parametrize("name", LOADED)
def test_every_tile_repeats(name, dtype, device):
    repeats_under_load(LOADED[name], dtype, device, _expected)


@TYPES
@pytest.mark.parametrize("name", LOADED)
def test_many_tiles_are_exact(name, dtype, device):
    def without_scratch(problem, device):
        configs = _expected(problem, device)
        assert all(FUSED.workspace_bytes(problem, config, device) == 0 for config in configs)
        return configs

    equals_gemm(LOADED[name], dtype, device, without_scratch)
