"""Tiles of the fused forward whose rows are units: score maps of few channels and long strides, layouts, borders, groups."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_units
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
LIMIT = 0.02  # GFLOP
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _layer(like, channels, size, **changes):
    sizes = {"in_channels": channels[0], "out_channels": channels[1], "batch": size[0], "in_size": size[1:]}
    return dataclasses.replace(cases.find(like), **sizes, **changes)


LAYERS = {
    "score map": _layer("fcn8s-21-21-k16@70", (21, 21), (1, 9, 11)),
    "score maps, padded": _layer("fcn8s-21-21-k16@70", (21, 21), (3, 20, 9), padding=(4, 4)),
    "stride 32": _layer("fcn32s-21-21-k64@16", (21, 5), (2, 6, 5), padding=(16, 16)),
    "one channel": _layer("fcn8s-21-21-k16@70", (3, 1), (2, 9, 40), padding=(3, 5)),
    "three shifts": _layer("fcn8s-21-21-k16@70", (5, 4), (2, 9, 13), kernel_size=(24, 24), output_padding=(3, 5)),
    "equal": _layer("fcn8s-21-21-k16@70", (30, 2), (2, 9, 13), kernel_size=(8, 8)),
    "unlike axes": _layer("fcn8s-21-21-k16@70", (21, 6), (2, 30, 13), kernel_size=(4, 16), stride=(2, 8)),
    "groups": _layer("fcn8s-21-21-k16@70", (20, 8), (2, 9, 13), groups=4, padding=(4, 4)),
    "one pixel": _layer("fcn8s-21-21-k16@70", (7, 3), (40, 1, 1)),
}


def _operands(case, dtype, device, format, exact=True):
    x, w, b = case.tensors(dtype, device, exact=exact, bias=True)
    return x.contiguous(memory_format=FORMATS[format]), w, b


def _configs(problem, device):
    found = [config for config in FUSED.configs(problem, device) if config >= fused_units.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _problem(operands, case):
    return describe(*operands, tuple(geometry_arguments(case.geometry).values()))


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@TYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("offset", [0, 1], ids="{} behind a vector".format)
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_exact_between_guard_bands(name, offset, format, dtype, device):
    case = LAYERS[name]
    x, w, b = _operands(case, dtype, device, format)
    problem, want = _problem((x, w, b), case), reference((x, w, b), case.geometry)
    like = ours((x, w, b), case.geometry)
    first, count = 256 + offset, like.numel()
    stream = torch.cuda.current_stream(device).cuda_stream
    for config in _configs(problem, device):
        guarded = torch.full((count + 512 + offset,), math.nan, dtype=dtype, device=device)
        y = guarded.as_strided(like.shape, like.stride(), first)
        call = fused_units.call(problem, config, cuda.index(device))
        call.enqueue(x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), 0, stream)
        assert_exact(y, want, f"config {config}")
        assert guarded[:first].isnan().all(), f"config {config}"
        assert guarded[first + count :].isnan().all(), f"config {config}"


@TYPES
@pytest.mark.parametrize("name", ["score maps, padded", "groups", "unlike axes"])
def test_slices_and_other_weights_are_exact(name, dtype, device):
    """Samples, channels and rows of larger tensors, and a weight that is channels_last."""
    case = LAYERS[name]
    for format in FORMATS:
        x, w, b = _operands(case, dtype, device, format)
        room = torch.zeros((x.shape[0], x.shape[1] + 64, x.shape[2] + 1, x.shape[3] + 64), dtype=dtype, device=device)
        room = room.contiguous(memory_format=FORMATS[format])
        part = room[:, 32 : 32 + x.shape[1], 1:, 16 : 16 + x.shape[3]].copy_(x)
        w = w.contiguous(memory_format=torch.channels_last)
        out = torch.full((x.shape[0], case.out_channels + 16, *case.out_size), math.nan, dtype=dtype, device=device)
        for config in _configs(_problem((part, w, b), case), device):
            with use_config(config):
                assert_exact(ours((part, w, b), case.geometry, "fused", out=out[:, 8:-8]), reference((x, w, b), case.geometry))
        assert out[:, :8].isnan().all()
        assert out[:, -8:].isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["fcn8s-21-21-k16@70", "fcn32s-21-21-k64@16"])
def test_results_keep_the_rounding_rule(name, format, device):
    case = cases.find(name).scaled(LIMIT)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, torch.float32, device)
    x = x.contiguous(memory_format=FORMATS[format])
    for config in [config for config in FUSED.configs(_problem((x, w, b), case), device) if config >= fused_units.FIRST]:
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@TYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["groups", "score maps, padded", "three shifts", "unlike axes"])
def test_bad_inputs_stay_where_taps_carry_them(name, bad, format, dtype, device):
    case = LAYERS[name]
    x, w, b = _operands(case, dtype, device, format)
    index = (0, case.in_channels // 2, *(size // 2 for size in case.in_size))
    mark = torch.zeros(x.shape, dtype=torch.float64)
    mark[index] = 1
    ones = torch.ones(w.shape, dtype=torch.float64)
    reached = reference((mark, ones, None), case.geometry) > 0
    poisoned = x.clone()
    poisoned[index] = bad
    for config in _configs(_problem((x, w, b), case), device):
        with use_config(config):
            clean, dirty = (ours((values, w, b), case.geometry, "fused").cpu() for values in (x, poisoned))
        assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"
        assert not dirty[reached].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "sigmoid"])
def test_activations(activation, format, device):
    case = LAYERS["score maps, padded"]
    x, w, b = _operands(case, torch.float32, device, format)
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry)).float()
    for config in _configs(_problem((x, w, b), case), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
