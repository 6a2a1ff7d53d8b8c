"""Tiles that read planes as they lie, for kernels as long as their stride: two or three warpgroups that take turns."""

from __future__ import annotations

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
from upfold.algorithms import REGISTRY, fused_last, fused_last_planes

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
_TILES = (*range(fused_last.FIRST + 22, fused_last.FIRST + 26), fused_last_planes.FIRST)

LAYERS = {
    "2 x 2": equal_layer((8, 16), (2, 2)),
    "2 x 2, rows that lanes store": equal_layer((8, 13), (2, 2)),
    "2 x 2, rows of 96 bytes": equal_layer((4, 12), (2, 2), out_channels=72),
    "2 x 2, of more channels than a tile": equal_layer((8, 8), (2, 2), in_channels=200, out_channels=136),
    "2 x 2, groups": equal_layer((8, 8), (2, 2), in_channels=128, out_channels=256, groups=2),
    "2 x 2, many samples": equal_layer((4, 4), (2, 2), batch=150),
    "3 x 2": equal_layer((4, 8), (3, 2)),
    "4 x 4": equal_layer((16, 8), (4, 4)),
    "4 x 4, rows that lanes store": equal_layer((8, 7), (4, 4)),
    "1d": equal_layer((72,), (2,)),
    "3d": equal_layer((2, 4, 6), (2, 2, 2)),
}  # fmt: skip
# Of several tiles for each multiprocessor; of weights that stay with their block, and that do not.
LOADED = {
    "stays": equal_layer((64, 96), (2, 2), in_channels=64, out_channels=64, batch=9),
    "streams": equal_layer((32, 40), (2, 2), in_channels=512, out_channels=256, batch=9),
    "lanes store": equal_layer((16, 14), (2, 2), in_channels=64, out_channels=64, batch=90),
}


def _expected(problem, device):
    """Those, of which there must be some on Hopper."""
    found = [config for config in FUSED.configs(problem, device) if config in _TILES]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


@TYPES
@pytest.mark.parametrize("name", LAYERS | LOADED)
def test_every_tile_is_there(name, dtype, device):
    """Three of two warpgroups and that of three where rows have two phases, one where they have four."""
    case = (LAYERS | LOADED)[name]
    problem = describe(*case.tensors(dtype, device, bias=True), tuple(geometry_arguments(case.geometry).values()))
    found = set(_expected(problem, device))
    assert not found or found == ({_TILES[3]} if case.stride[-1] == 4 else {*_TILES} - {_TILES[3]})


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_exact(name, dtype, device):
    forward_is_exact(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected)


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_slices_are_exact(name, dtype, device):
    """Beginning with whole vectors, in rows that are whole vectors or words."""
    places = ((0, 0, 8), (0, 8, 16), (0, 0, 2))
    slices_are_exact(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected, places)


@TYPES
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
@pytest.mark.parametrize("name", ["2 x 2", "2 x 2, rows that lanes store"])
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
    equals_gemm(LOADED[name], dtype, device, _expected)
