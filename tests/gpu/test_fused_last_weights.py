"""Tiles that read boxes of channels: weights copied as they lie, and reductions split among the blocks of a cluster."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _last(t):
    """Channels innermost, in any number of axes."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def _of_more_channels(w):
    wide = torch.full((w.shape[0], w.shape[1] + 24, *w.shape[2:]), torch.nan, device=w.device, dtype=w.dtype)
    return _last(wide)[:, 8 : 8 + w.shape[1]].copy_(w)


def _of_more_taps(w):
    wide = torch.full((*w.shape[:-1], w.shape[-1] + 1), torch.nan, device=w.device, dtype=w.dtype)
    return _last(wide)[..., 1:].copy_(w)


def _behind_one(w):
    """Its address is no multiple of 16 bytes."""
    room = torch.zeros(w.numel() + 1, dtype=w.dtype, device=w.device)
    return room[1:].view(w.movedim(1, -1).shape).movedim(-1, 1).copy_(w)


def _expanded(w):
    return _last(w)[:1].expand_as(w)


STORAGES = {
    "channels_last": _last,
    "of more channels": _of_more_channels,
    "of more taps": _of_more_taps,
    "behind one": _behind_one,
    "expanded": _expanded,
    "contiguous": torch.Tensor.contiguous,
}
_K4S2 = cases.find("dcgan-128-64@16")
LAYERS = {
    "k4s2": dataclasses.replace(_K4S2, batch=2),
    "k4s2, 40 of 80": dataclasses.replace(_K4S2, in_channels=80, out_channels=40, in_size=(5, 9), batch=1),
    "k4s2, groups": dataclasses.replace(_K4S2, groups=2, out_channels=128, in_size=(9, 7), batch=1),
    "k2s2": dataclasses.replace(cases.find("sam-64-32@128"), in_size=(11, 13), batch=2),
    "k2s2, groups": dataclasses.replace(
        cases.find("sam-64-32@128"), in_channels=128, out_channels=192, groups=2, in_size=(9, 8), batch=1
    ),
    "k2s2, 24 of 72": dataclasses.replace(cases.find("sam-64-32@128"), in_channels=72, out_channels=24, in_size=(8, 9), batch=1),
    "k4s2, 200": dataclasses.replace(_K4S2, in_channels=200, out_channels=200, in_size=(6, 7), batch=1),
    "k4s4": dataclasses.replace(cases.find("dpt-256-256@37"), in_size=(5, 7), batch=1),
    "k3s1": dataclasses.replace(cases.find("seed2-square"), in_size=(9, 20), batch=2),
    "k3x7s1": dataclasses.replace(cases.find("seed3-wide-kernel"), in_size=(9, 20), batch=1),
    "k5s3": dataclasses.replace(cases.find("k5s3p1-64-64@128"), in_size=(9, 7), batch=1),
    "k3s4d3": dataclasses.replace(cases.find("k3s4d3-64-64@64"), in_size=(6, 7), batch=2),
    "1d": dataclasses.replace(cases.find("hifigan-512-256@64"), in_channels=64, batch=2),
    "3d": dataclasses.replace(cases.find("nnunet3d-64-32@64"), in_size=(3, 6, 5), batch=1),
}
# Few positions and many channels: each block of a cluster reduces some.
SPLIT = {
    "k4s2@4": dataclasses.replace(cases.find("dcgan-512-256@4"), batch=8),
    "k4s2@1": dataclasses.replace(cases.find("pix2pix-512-512@1"), out_channels=72),
    "k4s2@8x6": dataclasses.replace(cases.find("pose-2048-256@8x6"), batch=1, out_channels=136),
    "k2s2@5": dataclasses.replace(cases.find("sam-64-32@128"), in_channels=1000, in_size=(5, 5), batch=1),
    "k5s3@5x7": dataclasses.replace(cases.find("k5s3p1-64-64@128"), in_channels=1024, out_channels=512, in_size=(5, 7), batch=1),
    "k3s1@4": dataclasses.replace(cases.find("seed2-square"), in_channels=640, out_channels=320, in_size=(4, 4), batch=3),
    "k16s8": dataclasses.replace(cases.find("hifigan-512-256@64"), in_size=(12,), batch=1),
}


def _configs(problem, device):
    """Those of boxes, which must be there on Hopper."""
    found = [config for config in FUSED.configs(problem, device) if fused_last.FIRST <= config < fused_columns.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _packed(problem, config, device):
    return fused_last.call(problem, config, cuda.index(device)).packed_bytes


def _splits(problem, config, device):
    return fused_last.call(problem, config, cuda.index(device)).work[4]


def _forward(case, x, w, b, device):
    """Every tile on these operands; the problem and its tiles."""
    want = reference((x, w, b), case.geometry)
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    configs = _configs(problem, device)
    for config in configs:
        with use_config(config):
            assert_exact(ours((x, w, b), case.geometry, "fused"), want, f"config {config}")
    return problem, configs


def _gradient(case, x, w, device, arrange):
    g = exact_like((case.batch, case.out_channels, *case.out_size), case.out_channels // case.groups * w[0, 0].numel(), w.dtype)
    g = arrange(g.to(device))
    size, arguments = tuple(x.shape[2:]), modes.positional(case.geometry)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    problem = execute.describe_conv(g, w, size, arguments)[0]
    configs = _configs(problem, device)
    for config in configs:
        with use_config(config):
            assert_exact(execute.conv(g, w, size, arguments, "fused"), want, f"config {config}")
    return problem, configs


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_any_storage_are_exact(name, storage, dtype, device):
    case = LAYERS[name]
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    x, w = _last(x), STORAGES[storage](w)
    forward, of_forward = _forward(case, x, w, b, device)
    gradient, of_gradient = _gradient(case, x, w, device, _last)
    # Of 16 bits and whole vectors nothing is packed, but where columns are taps times channels that are not dense.
    dense = storage == "channels_last" or (storage.startswith("of more") and case.kernel_size != case.stride)
    if dtype != torch.float32 and dense:
        for problem, configs in ((forward, of_forward), (gradient, of_gradient)):
            results = (case.out_channels if problem is forward else case.in_channels) // case.groups
            channels_innermost = (problem.y_strides if problem is forward else problem.x_strides)[1] == 1
            lie = [config for config in configs if _packed(problem, config, device) == 0]
            assert bool(lie) == (channels_innermost and results % 8 == 0)


@TYPES
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", SPLIT)
def test_split_reductions_are_exact(name, last, dtype, device):
    case = SPLIT[name]
    arrange = _last if last else torch.Tensor.contiguous
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    problem, configs = _forward(case, arrange(x), arrange(w), b, device)
    assert any(_splits(problem, config, device) > 1 for config in configs)
    _gradient(case, x, arrange(w), device, arrange)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_split_reductions_repeat_their_bits(dtype, last, device):
    """While other kernels keep multiprocessors busy."""
    case = SPLIT["k4s2@4"]
    x, w, b = case.tensors(dtype, device, bias=True)
    x, w = (_last(t) if last else t for t in (x, w))
    beside, busy = torch.cuda.Stream(device), torch.randn(2048, 2048, device=device)
    for config in _configs(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            first = ours((x, w, b), case.geometry, "fused")
            torch.cuda.synchronize(device)
            with torch.cuda.stream(beside):
                for _ in range(8):
                    busy = torch.mm(busy, busy).clamp_(-1, 1)
            for _ in range(20):
                assert torch.equal(ours((x, w, b), case.geometry, "fused"), first), f"config {config}"
