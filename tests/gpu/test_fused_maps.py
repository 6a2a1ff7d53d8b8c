"""Tiles of the fused forward for whole maps: columns of w and x as they lie, summed by the warps that hold them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_heads, fused_maps
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
DTYPES = [torch.float16, torch.bfloat16]
TYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _layer(like, channels, size, **changes):
    sizes = {"in_channels": channels[0], "out_channels": channels[1], "batch": size[0], "in_size": size[1:]}
    return dataclasses.replace(cases.find(like), **sizes, **changes)


def _square(channels, size, **changes):
    return _layer("dcgan-64-3@32", channels, size, **changes)


# Segments of 64, 32 and 16 pixels, and whole vectors that lanes copy; tiles of some samples and of one; more tiles than the
# blocks of any GPU take at a time.
LAYERS = {
    "4x4": _square((128, 24), (13, 4, 4)),
    "8x8": _square((64, 16), (5, 8, 8)),
    "8x6": _square((96, 20), (7, 8, 6)),
    "4x8": _square((136, 9), (6, 4, 8)),
    "12x8": _square((72, 11), (3, 12, 8)),
    "8x16, one sample": _square((200, 8), (1, 8, 16)),
    "16x12, one sample of a tile": _square((136, 12), (5, 16, 12)),
    "2x4, by lanes alone": _square((72, 20), (27, 2, 4)),
    "4x6, by lanes alone": _square((100, 24), (18, 4, 6)),
    "8x6, many tiles": _square((160, 72), (150, 8, 6)),
    "16 channels": _square((16, 40), (9, 4, 4)),
    "many tiles": _square((128, 96), (600, 4, 4)),
    "many chunks": _square((1100, 8), (20, 4, 4)),
    "many tiles of many chunks": _square((520, 96), (500, 4, 4)),
    "no padding": _square((64, 8), (9, 4, 4), padding=(0, 0)),
    "padding beyond a stride": _square((64, 8), (9, 8, 8), padding=(3, 2)),
    "output padding": _square((64, 8), (9, 8, 8), output_padding=(1, 1)),
    "odd output": _square((64, 8), (9, 8, 8), padding=(1, 2), output_padding=(0, 1)),
    "equal": _layer("k2s2", (64, 40), (9, 8, 8)),
    "equal, 4x4": _layer("k2s2", (64, 10), (9, 4, 4), kernel_size=(4, 4), stride=(4, 4)),
    "1x1": _layer("k2s2", (64, 40), (9, 4, 8), kernel_size=(1, 1), stride=(1, 1)),
    "unlike axes": _square((64, 12), (5, 4, 8), kernel_size=(2, 4), stride=(1, 4), padding=(1, 0)),
    "two taps": _square((64, 12), (5, 4, 8), kernel_size=(1, 2), stride=(1, 1), padding=(0, 1)),
    "stride 1": _square((64, 12), (5, 4, 8), kernel_size=(2, 2), stride=(1, 1)),
    "groups": _square((256, 48), (7, 4, 4), groups=4),
    "1d": _layer("hifigan-512-256@64", (128, 24), (5, 64)),
    "1d, 4 and 2": _layer("hifigan-128-64@4096", (80, 24), (5, 48), kernel_size=(4,), stride=(2,), padding=(1,)),
    "3d": _layer("nnunet3d-320-320@4", (96, 24), (3, 4, 4, 4)),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", LAYERS)


def _tiles(problem, device):
    found = [config for config in FUSED.configs(problem, device) if fused_maps.FIRST <= config < fused_heads.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _problem(operands, case):
    return describe(*operands, tuple(geometry_arguments(case.geometry).values()))


@TYPES
@ALL
def test_results_are_exact_between_guard_bands(name, dtype, device):
    case = LAYERS[name]
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    problem, want = _problem((x, w, b), case), reference((x, w, b), case.geometry)
    count = want.numel()
    stream = torch.cuda.current_stream(device).cuda_stream
    for config in _tiles(problem, device):
        guarded = torch.full((count + 512,), math.nan, dtype=dtype, device=device)
        y = guarded[256 : 256 + count].view(want.shape)
        call = fused_maps.call(problem, config, cuda.index(device))
        call.enqueue(x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), 0, stream)
        assert_exact(y, want, f"config {config}")
        assert guarded[:256].isnan().all(), f"config {config}"
        assert guarded[256 + count :].isnan().all(), f"config {config}"


@TYPES
@pytest.mark.parametrize("name", ["4x4", "8x6", "equal", "groups", "odd output"])
def test_slices_are_exact(name, dtype, device):
    """Samples and channels of larger tensors, and results that are channels_last; no bias."""
    case = LAYERS[name]
    x, w, _ = case.tensors(dtype, device, exact=True)
    room = torch.zeros((2 * x.shape[0], x.shape[1] + 64, *x.shape[2:]), dtype=dtype, device=device)
    part = room[::2, 32 : 32 + x.shape[1]].copy_(x)
    for format in (torch.contiguous_format, torch.channels_last):
        out = torch.full((x.shape[0], case.out_channels + 16, *case.out_size), math.nan, dtype=dtype, device=device)
        out = out.contiguous(memory_format=format)
        for config in _tiles(_problem((part, w, None), case), device):
            with use_config(config):
                assert_exact(
                    ours((part, w, None), case.geometry, "fused", out=out[:, 8:-8]), reference((x, w, None), case.geometry)
                )
        assert out[:, :8].isnan().all()
        assert out[:, -8:].isnan().all()


@pytest.mark.parametrize("name", ["dcgan-512-256@4", "dcgan-256-128@8", "pose-2048-256@8x6", "hifigan-512-256@64"])
def test_results_keep_the_rounding_rule(name, device):
    case = dataclasses.replace(cases.find(name), batch=3)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, torch.bfloat16, device)
    for config in _tiles(_problem((x, w, b), case), device):
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@TYPES
def test_infinity_stays_where_taps_carry_it(dtype, device):
    case = LAYERS["4x4"]
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    x[2, 3, 1, 1] = math.inf
    w[:, :, :, :] = w.abs() + 1
    for config in _tiles(_problem((x, w, b), case), device):
        with use_config(config):
            y = ours((x, w, b), case.geometry, "fused")
        reached = torch.zeros(case.out_size, dtype=torch.bool, device=device)
        reached[1:5, 1:5] = True
        assert torch.equal(y[2].isinf().all(0), reached), f"config {config}"
        assert torch.equal(y[2].isfinite().all(0), ~reached), f"config {config}"
        assert y[:2].isfinite().all(), f"config {config}"
        assert y[3:].isfinite().all(), f"config {config}"


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "tanh"])
@pytest.mark.parametrize("name", ["4x4", "equal", "1d", "odd output"])
def test_activations(name, activation, device):
    case = LAYERS[name]
    x, w, b = case.tensors(torch.bfloat16, device, exact=True, bias=True)
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry)).to(torch.bfloat16)
    for config in _tiles(_problem((x, w, b), case), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["many tiles", "many chunks"])
def test_results_repeat_bit_by_bit_under_load(name, device):
    case = LAYERS[name]
    x, w, b = case.tensors(torch.bfloat16, device, bias=True)
    for config in _tiles(_problem((x, w, b), case), device):
        with use_config(config):
            assert_repeats_under_load(lambda: ours((x, w, b), case.geometry, "fused"), device, f"config {config}")
