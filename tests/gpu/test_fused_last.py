"""Tiles that read boxes of channels: tensors that are channels_last, packed first, or neither dense nor aligned."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import bad_pixels_stay, forward_is_exact, gradient_is_exact, slices_are_exact

import upfold
from gpu import missing
from oracle import assert_exact, describe, exact_like, geometry_arguments, loop_conv, ours, reference
from upfold import cases, execute, modes
from upfold.algorithms import REGISTRY, cuda, fused_columns, fused_last
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
LIMIT = 0.02
LAYERS = ["sam-64-32@128", "dcgan-128-64@16", "seed2-square", "k5s3p1-64-64@128", "nnunet3d-64-32@64", "k3s4d3-64-64@64"]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _expanded(x):
    return _last(x)[:1].expand_as(x)


def _of_more_channels(x):
    wide = torch.randint(-3, 4, (x.shape[0], x.shape[1] + 24, *x.shape[2:]), device=x.device).to(x.dtype)
    return _last(wide)[:, 8 : 8 + x.shape[1]].copy_(x)


def _behind_one(x):
    """Its address is no multiple of 16 bytes."""
    room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    order = (0, *range(2, x.dim()), 1)
    shape = [x.shape[axis] for axis in order]
    return room[1:].view(shape).permute(0, x.dim() - 1, *range(1, x.dim() - 1)).copy_(x)


def _planes_behind_one(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def _reversed_axes(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


STORAGES = {
    "channels_last": _last,
    "expanded": _expanded,
    "of more channels": _of_more_channels,
    "behind one": _behind_one,
    "reversed axes": _reversed_axes,
    "contiguous": torch.Tensor.contiguous,
    "planes behind one": _planes_behind_one,
}


def _configs(problem, device):
    """Those of boxes, which must be there on Hopper."""
    found = [config for config in FUSED.configs(problem, device) if fused_last.FIRST <= config < fused_columns.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_any_storage_is_exact(name, storage, dtype, device):
    forward_is_exact(cases.find(name).scaled(LIMIT), dtype, device, STORAGES[storage], _configs)


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_any_storage_are_exact(name, storage, dtype, device):
    gradient_is_exact(cases.find(name).scaled(LIMIT), dtype, device, STORAGES[storage], _configs)


# Results of every way in which turned tiles store: rows that are whole vectors or not, phases that are a row's, a part of one, or
# none; boxes in rows, beside one another, and of a few positions.
PLANES = {
    "stride 3, odd": dataclasses.replace(cases.find("k5s3p1-64-64@128"), in_size=(9, 21), batch=2),
    "stride 3": dataclasses.replace(cases.find("k5s3p1-64-64@128"), in_size=(9, 32), batch=1),
    "stride 3, k4": dataclasses.replace(cases.find("k5s3p1-64-64@128"), kernel_size=(4, 4), in_size=(9, 13), out_channels=72),
    "stride 1": dataclasses.replace(cases.find("seed4-wide-image"), in_size=(20, 60), batch=1),
    "stride 1, even": dataclasses.replace(cases.find("seed2-square"), in_size=(18, 64), batch=1),
    "stride 1, odd": dataclasses.replace(cases.find("seed2-square"), in_size=(9, 37), batch=2, out_channels=130),
    "stride 2": dataclasses.replace(cases.find("dcgan-128-64@16"), batch=2),
    "stride 2, 4x4": dataclasses.replace(cases.find("dcgan-512-256@4"), batch=3, out_channels=40),
    "stride 2, odd": dataclasses.replace(cases.find("dcgan-128-64@16"), in_size=(9, 11), batch=2),
    "stride 4": dataclasses.replace(cases.find("dpt-256-256@37"), in_size=(5, 37), batch=1),
    "stride 8": dataclasses.replace(cases.find("hifigan-512-256@64"), in_channels=64, batch=2),
    "stride 5": dataclasses.replace(cases.find("encodec-256-128@600"), in_size=(75,), batch=2),
    "split": dataclasses.replace(cases.find("k5s3p1-64-64@128"), in_channels=2048, in_size=(5, 7), batch=1),
    "3d": dataclasses.replace(cases.find("nnunet3d-64-32@64"), in_size=(3, 6, 10), batch=1),
}


@TYPES
@pytest.mark.parametrize("name", PLANES)
def test_slices_of_planes_are_exact(name, dtype, device):
    slices_are_exact(PLANES[name], dtype, device, torch.Tensor.contiguous, _configs, ((0, 0, 9), (1, 3, 9)))


@TYPES
@pytest.mark.parametrize("name", PLANES)
def test_planes_are_exact(name, dtype, device):
    """Of results and of gradients, which have strides of 1."""
    case = PLANES[name]
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    for config in _configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            assert_exact(ours((x, w, b), case.geometry, "fused"), want, f"config {config}")
    shape = (case.batch, case.out_channels, *case.out_size)
    g = exact_like(shape, case.out_channels // case.groups * w[0, 0].numel(), dtype).to(device)
    size, arguments = tuple(x.shape[2:]), modes.positional(case.geometry)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    for config in _configs(execute.describe_conv(g, w, size, arguments)[0], device):
        with use_config(config):
            assert_exact(execute.conv(g, w, size, arguments, "fused"), want, f"config {config}")


@TYPES
@pytest.mark.parametrize("storage", ["contiguous", "behind one", "reversed axes"])
def test_a_large_source_is_exact(storage, dtype, device):
    """Blocks that pack it take several steps."""
    layer = cases.find("sam-64-32@128")
    case = dataclasses.replace(layer, in_channels=32, out_channels=16, in_size=(384, 512), batch=1)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    x = {"contiguous": torch.clone, "behind one": _planes_behind_one, "reversed axes": _reversed_axes}[storage](x)
    configs = _configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device)
    for config in configs:
        with use_config(config):
            assert_exact(ours((x, w, b), case.geometry, "fused"), want, f"config {config}")


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "tanh"])
@pytest.mark.parametrize("name", ["sam-64-32@128", "dcgan-128-64@16", "seed3-wide-kernel"])
def test_activations(name, activation, last, device):
    case = cases.find(name).scaled(LIMIT)
    x, w, b = case.tensors(torch.bfloat16, device, exact=True, bias=True)
    x = _last(x) if last else x
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry)).to(torch.bfloat16)
    for config in _configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
            torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-2, atol=1e-2)


@TYPES
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["k5s3p1-64-64@128", "k3s4d3-64-64@64", "dcgan-128-64@16"])
def test_bad_pixels_stay_where_taps_carry_them(name, dtype, last, device):
    case = dataclasses.replace(cases.find(name).scaled(LIMIT), batch=1)
    bad_pixels_stay(case, dtype, device, _last if last else torch.Tensor.contiguous, _configs)


@TYPES
@pytest.mark.parametrize("megabytes", [1, 2, 4])
def test_a_source_beyond_the_cap_is_packed_in_parts(megabytes, dtype, device):
    case = dataclasses.replace(cases.find("seed2-square").scaled(0.2), batch=5)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    with upfold.use(workspace_mb=megabytes):
        problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
        for config in [config for config in FUSED.configs(problem, device) if fused_last.FIRST <= config < fused_columns.FIRST]:
            assert FUSED.workspace_bytes(problem, config, device) <= problem.workspace_cap
            with use_config(config):
                assert_exact(ours((x, w, b), case.geometry, "fused"), want)


# Gradients whose strides divide the result: a step of it is a pixel of more channels.
FOLDED = {
    "1d": dataclasses.replace(cases.find("hifigan-512-256@64"), batch=5, in_channels=72, out_channels=64, in_size=(5,)),
    "2d": dataclasses.replace(cases.find("dcgan-256-128@8"), batch=5, in_channels=72, out_channels=64, in_size=(5, 3)),
}


@TYPES
@pytest.mark.parametrize("megabytes", [0, 1])
@pytest.mark.parametrize("name", FOLDED)
def test_tiles_of_one_small_sample_are_exact(name, megabytes, dtype, device):
    """Below the smallest cap samples are packed one by one, so that a tile has more positions than there are."""
    case = FOLDED[name]
    x, w, _ = case.tensors(dtype, device, exact=True, bias=False)
    g = exact_like((case.batch, case.out_channels, *case.out_size), case.out_channels * w[0, 0].numel(), dtype).to(device)
    size, module, index = tuple(x.shape[2:]), cuda.module(), cuda.index(device)
    problem = execute.describe_conv(g, w, size, modes.positional(case.geometry))[0]
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    tiles = [tile for tile in range(len(module.fused_last_tiles())) if module.fused_last_fits(index, problem.cuda, tile, 16)]
    for tile in tiles:
        call = module.FusedLastCall(index, problem.cuda, tile, 16, megabytes << 20)
        scratch = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=device)
        got = torch.full_like(x, torch.nan)
        addresses = (g.data_ptr(), w.data_ptr(), 0, got.data_ptr(), scratch.data_ptr())
        call.enqueue(*addresses, torch.cuda.current_stream(device).cuda_stream)
        assert_exact(got, want, f"tile {tile}")
    assert tiles or torch.cuda.get_device_capability(device)[0] != 9
