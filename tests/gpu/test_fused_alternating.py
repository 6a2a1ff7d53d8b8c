"""Tiles whose warpgroups take turns, and whose results the copy engine stores: many tiles of a block, of every kind of row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import forward_is_exact, gradient_is_exact

from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from upfold import cases, execute, modes
from upfold.algorithms import REGISTRY, cuda, fused_alternating, fused_columns, fused_last
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
FIRST = fused_last.FIRST + fused_alternating.FIRST
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def _like(name, **changes):
    return dataclasses.replace(cases.find(name), **changes)


# Results in planes. Kernel and stride equal: more tiles than the blocks of any GPU take at a time, rows of results of 128
# bytes, of 64, and of others (runs of 20, 12 and 4 pixels), some of 64 pixels left over, and rows of no whole sectors; then
# taps of several phases, and dense layers.
PLANES = {
    "many tiles": _like("sam-64-32@128", batch=7),
    "more tiles of a block than it keeps positions of": _like("sam-64-32@128", in_channels=32, batch=24),
    "rows of 16": _like("sam-64-32@128", in_size=(21, 16), batch=40),
    "rows of 14": _like("sam-64-32@128", in_size=(14, 14), batch=90, out_channels=72),
    "rows of 20": _like("sam-256-64@64", in_size=(30, 20), batch=30),
    "rows of 12": _like("sam-256-64@64", in_channels=72, in_size=(14, 12), batch=50),
    "rows of 4": _like("sam-64-32@128", in_size=(4, 4), batch=60),
    "four phases": _like("dpt-256-256@37", in_channels=96, out_channels=72, in_size=(24, 16), batch=12),
    # Of 54 pixels those that are whole sectors and those that are whole vectors differ.
    "four phases, rows of 54": _like("pointpillars-256-128-k4", in_channels=64, out_channels=72, in_size=(9, 54), batch=5),
    "rows of 54": _like("sam-64-32@128", in_size=(9, 54), batch=9),
    "groups": _like("sam-64-32@128", in_channels=128, out_channels=128, groups=2, in_size=(16, 32), batch=9),
    "3d": _like("nnunet3d-64-32@64", in_size=(6, 10, 16), batch=9),
    "4x4": _like("dcgan-128-64@16", batch=50),
    "4x4, 64 wide": _like("dcgan-128-64@16", in_size=(30, 64), out_channels=72, batch=5),
    "stride 1": _like("seed2-square", padding=(1, 1), in_size=(40, 64), batch=9),
    "stride 1, many channels": _like("seed4-wide-image", padding=(1, 2), in_size=(20, 72), batch=3),
    "odd rows of 14": _like("maskrcnn-256-256@14", in_channels=64, out_channels=72, batch=9),
    "dense, rows of 66": _like("seed2-square", in_size=(40, 64), batch=9),
    "dense, rows of 75": _like("seed4-wide-image", kernel_size=(3, 4), in_size=(20, 72), batch=3),
    "dense, dilated": _like("seed2-square", dilation=(2, 3), in_size=(24, 40), batch=5),
    "one tap, cropped": _like("pointpillars-64-128-k1", padding=(1, 1), in_size=(9, 304)),
    "dense, groups": _like("seed4-wide-image", in_channels=128, groups=2, in_size=(20, 72), batch=3),
    "unlike sets": _like("k3s2p1op1-128-64@256", in_size=(20, 48), batch=5),
    "unlike sets, many channels": _like("cyclegan-256-128@64", in_channels=136, in_size=(9, 16), batch=30),
    "stride 3": _like("k5s3p1-64-64@128", in_size=(20, 32), batch=3),
    "stride 3, odd rows": _like("k5s3p1-64-64@128", output_padding=(0, 1), in_size=(20, 32), batch=3),
    "stride 4, empty phases": _like("k3s4d3-64-64@64", in_size=(12, 40), batch=5),
    "seven taps": _like("k7s2p3op1-32-64@128", in_size=(20, 40), batch=4),
    "3d, unlike sets": _like(
        "nnunet3d-64-32@64", kernel_size=(3, 3, 3), padding=(1, 1, 1), output_padding=(1, 1, 1), in_size=(6, 10, 16), batch=4
    ),
    # Results that lanes store: runs of one row longer and shorter than a warp stores, and of all rows of a plane.
    "odd long rows, empty phases": _like("k3s4d3-64-64@64", in_size=(6, 70), batch=5),
    "odd long rows, unlike sets": _like("k3s2p1op1-128-64@256", output_padding=(1, 0), in_size=(9, 150), batch=5),
    "even long rows": _like("k3s2p1op1-128-64@256", padding=(1, 0), output_padding=(1, 1), in_size=(9, 150), batch=5),
    "rows of 14, 3d": _like("nnunet3d-64-32@64", in_channels=64, out_channels=72, in_size=(3, 6, 14), batch=5),
    "odd planes": _like("sam-64-32@128", in_size=(7, 7), out_channels=72, batch=90),
    "odd planes, wide": _like("sam-64-32@128", in_size=(5, 21), out_channels=72, batch=90),
    "four phases, odd rows": _like("dpt-256-256@37", in_channels=64, out_channels=72, in_size=(9, 37), batch=12),
    "dense, odd long rows": _like("seed2-square", in_size=(24, 131), batch=5),
    "dense, odd planes": _like("seed2-square", padding=(1, 1), in_size=(11, 13), batch=40),
    # Positions that are counted through a plane, whose packed rows have zeros behind them.
    "counted, padded height": _like("seed2-square", padding=(1, 0), in_size=(40, 75), batch=9),
    "counted, flat kernel": _like("seed4-wide-image", kernel_size=(3, 1), in_size=(20, 75), batch=3),
    "counted, small planes": _like("seed1-asymmetric", in_size=(5, 6), batch=40),
    "counted, 3d": _like("nnunet3d-64-32@64", kernel_size=(2, 3, 3), stride=(1, 1, 1), in_size=(6, 10, 12), batch=4),
    "4x4, odd rows": _like("dcgan-128-64@16", padding=(1, 0), in_size=(10, 75), batch=9),
    "3d, odd rows": _like("nnunet3d-64-32@64", in_size=(5, 6, 7), batch=30),
    "flat kernel": _like("nnunet3d-64-32@64", kernel_size=(1, 2, 2), stride=(1, 2, 2), in_size=(6, 10, 24), batch=7),
}
# Channels innermost: tiles of many samples and of parts of one, taps of several phases, planes of a box, and dense layers.
INNERMOST = {
    "many tiles": _like("sam-64-32@128", batch=7),
    "more tiles of a block than it keeps positions of": _like("sam-64-32@128", in_channels=32, batch=24),
    "odd rows": _like("dpt-256-256@37", in_channels=64, out_channels=64, in_size=(9, 37), batch=20),
    "small maps": _like("dcgan-256-128@8", in_channels=64, in_size=(4, 4), batch=300),
    "4x4": _like("dcgan-128-64@16", batch=50),
    "stride 1": _like("seed2-square", in_size=(40, 60), out_channels=64, batch=9),
    "stride 3": _like("k5s3p1-64-64@128", in_size=(20, 30), batch=3),
    "unlike sets": _like("k3s2p1op1-128-64@256", in_size=(20, 48), batch=5),
    "groups": _like("dcgan-128-64@16", groups=2, out_channels=128, batch=9),
    "3d": _like("nnunet3d-64-32@64", in_size=(6, 10, 12), batch=9),
    "planes": _like("nnunet3d-64-32@64", kernel_size=(1, 2, 2), stride=(1, 2, 2), in_size=(6, 5, 8), batch=9),
    "cropped": _like("seed2-square", padding=(2, 2), in_size=(40, 60), out_channels=64, batch=9),
}

# What is rounded once or twice differs by as much as a rounding.
_CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 0.02, "atol": 1e-3},
}
FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh, "leaky_relu": torch.nn.functional.leaky_relu}


def _tiles(problem, device):
    return [config for config in FUSED.configs(problem, device) if FIRST <= config < fused_columns.FIRST]


def _configs(problem, device):
    """Those that take the problem; where none does nothing is tested, and the test says so."""
    return _tiles(problem, device) or pytest.skip("none of these tiles takes the layer")


def _problem(x, w, b, case):
    return describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@TYPES
@pytest.mark.parametrize("name", PLANES)
def test_planes_are_exact(name, dtype, device):
    forward_is_exact(PLANES[name], dtype, device, torch.Tensor.contiguous, _configs)


@pytest.mark.parametrize("name", [name for name in PLANES if name.startswith("counted") and PLANES[name].kernel_size[-1] > 1])
def test_packed_rows_are_as_long_as_the_results(name, device):
    problem = _problem(*PLANES[name].tensors(torch.bfloat16, device), PLANES[name])
    rows, pixel = problem.batch * problem.in_size[0] * problem.in_size[1], 16 * -(-problem.in_channels // 8)
    packed = {fused_last.call(problem, config, cuda.index(device)).work[6] for config in _configs(problem, device)}
    assert rows * problem.out_size[2] * pixel in packed


@TYPES
@pytest.mark.parametrize("name", INNERMOST)
def test_channels_last_is_exact(name, dtype, device):
    forward_is_exact(INNERMOST[name], dtype, device, _last, _configs)


@TYPES
@pytest.mark.parametrize("storage", [torch.Tensor.contiguous, _last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", INNERMOST)
def test_gradients_are_exact(name, storage, dtype, device):
    gradient_is_exact(INNERMOST[name], dtype, device, storage, _configs)


@TYPES
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "odd rows"])
def test_activations_are_those_of_the_layer_alone(layout, activation, dtype, device):
    case = PLANES["odd long rows, empty phases" if layout == "odd rows" else "many tiles"]
    x, w, b = case.tensors(dtype, device, bias=True)
    x = _last(x) if layout == "channels_last" else x
    arguments = modes.positional(case.geometry)
    function = FUNCTIONS[activation]
    for config in _configs(_problem(x, w, b, case), device):
        with use_config(config):
            plain = execute.conv_transpose(x, w, b, arguments, "fused").float()
            got = execute.conv_transpose(x, w, b, arguments, "fused", activation).float()
        torch.testing.assert_close(got, function(plain), **_CLOSE[dtype])


@TYPES
@pytest.mark.parametrize(
    "name", ["rows of 16", "dense, rows of 66", "dense, rows of 75", "odd long rows, empty phases", "odd planes"]
)
def test_slices_leave_what_lies_beside_them(name, dtype, device):
    """`out=` into channels of a larger tensor, in either layout."""
    case = dataclasses.replace(PLANES[name], out_channels=64)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    for layout in (torch.contiguous_format, torch.channels_last):
        own = x.contiguous(memory_format=layout)
        big = torch.empty((x.shape[0], 3 * want.shape[1], *want.shape[2:]), dtype=dtype, device=device, memory_format=layout)
        inside = big[:, want.shape[1] : 2 * want.shape[1]]
        problem = execute.describe_conv_transpose(own, w, b, modes.positional(case.geometry), None, inside)[0]
        for config in _configs(problem, device):
            big.fill_(torch.nan)
            with use_config(config):
                ours((own, w, b), case.geometry, "fused", out=inside)
            assert_exact(inside, want, f"config {config}")
            assert big[:, : want.shape[1]].isnan().all(), config
            assert big[:, 2 * want.shape[1] :].isnan().all(), config


def test_every_tile_is_reached(device):
    """By one of the layers above, in one of their types."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("tiles of Hopper's")
    found = set()
    for case, layout in [*((case, False) for case in PLANES.values()), *((case, True) for case in INNERMOST.values())]:
        for dtype in (torch.float32, torch.bfloat16):
            x, w, b = case.tensors(dtype, device, exact=True, bias=True)
            found.update(_tiles(_problem(_last(x) if layout else x, w, b, case), device))
    assert found == set(range(FIRST, fused_last.FIRST + fused_last.TILES))
