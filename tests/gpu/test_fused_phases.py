"""Tiles of the fused forward whose rows are pairs of a channel and a phase: layouts, odd sizes, few channels, groups."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
LIMIT = 0.02  # GFLOP
_PHASES = 4  # the kind of these tiles, as `fused_tiles()` says it
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _layer(like, channels, size, **changes):
    sizes = {"in_channels": channels[0], "out_channels": channels[1], "batch": size[0], "in_size": size[1:]}
    return dataclasses.replace(cases.find(like), **sizes, **changes)


LAYERS = {
    "head": _layer("dcgan-64-3@32", (64, 3), (3, 9, 13)),
    "head of five": _layer("dcgan-64-3@32", (20, 5), (1, 7, 33), output_padding=(1, 1)),
    "one channel": _layer("dcgan-64-3@32", (16, 1), (1, 7, 33)),
    "parts of 21 channels": _layer("fcn8s-21-21-k16@70", (21, 21), (1, 9, 11)),
    "parts of 37 channels": _layer("k5s3p1-64-64@128", (12, 37), (1, 6, 19)),
    "parts of vectors": _layer("dcgan-64-3@32", (12, 80), (1, 6, 19), groups=2),
    "groups": _layer("seed0-grouped-dilated", (32, 64), (2, 20, 40)),
    "groups of two": _layer("dcgan-64-3@32", (9, 6), (2, 12, 37), groups=3),
    "long rows": _layer("seed0-grouped-dilated", (8, 16), (1, 3, 256), groups=1),
    "empty phases": _layer("k3s4d3-64-64@64", (6, 5), (2, 9, 10)),
    "empty phases of groups": _layer("k3s4d3-64-64@64", (12, 24), (2, 9, 10), groups=3, output_padding=(2, 2)),
    "stride beyond the kernel": _layer("k2s2", (8, 6), (2, 5, 70), stride=(3, 3), kernel_size=(2, 2), output_padding=(1, 1)),
    "stride 1": _layer("k5s3p1-64-64@128", (10, 3), (1, 12, 37), stride=(1, 1)),
    "16 channels, stride 1": _layer("k5s3p1-64-64@128", (10, 16), (2, 12, 37), stride=(1, 1), kernel_size=(5, 4)),
    "16 channels, stride 4": _layer("k5s3p1-64-64@128", (10, 16), (2, 5, 70), stride=(4, 4), kernel_size=(8, 8), padding=(2, 2)),
}


def _operands(case, dtype, device, format, exact=True):
    x, w, b = case.tensors(dtype, device, exact=exact, bias=True)
    return x.contiguous(memory_format=FORMATS[format]), w, b


def _tiles(problem, device):
    refusal = FUSED.reject(problem, device)
    if refusal is not None:
        pytest.skip(refusal)
    phases = {config for config, tile in enumerate(cuda.module().fused_tiles()) if tile[5] == _PHASES}
    return [config for config in FUSED.configs(problem, device) if config in phases]


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("offset", [0, 1, 4, 8], ids="{} behind a vector".format)
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_exact_between_guard_bands(name, offset, dtype, format, device):
    """Results at any multiple of their size, in runs whose ends are no vectors: nothing beside them is written."""
    case = LAYERS[name]
    x, w, b = _operands(case, dtype, device, format)
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    want = reference((x, w, b), case.geometry)
    like = ours((x, w, b), case.geometry)
    first, count = 256 + offset, like.numel()
    alignment = math.gcd(offset * x.element_size(), 16)
    module, stream = cuda.module(), torch.cuda.current_stream(device).cuda_stream
    number, tried = cuda.index(device), 0
    for config in _tiles(problem, device):
        if not module.fused_fits(number, problem.cuda, config, alignment, False):
            continue
        guarded = torch.full((count + 512 + offset,), math.nan, dtype=dtype, device=device)
        y = guarded.as_strided(like.shape, like.stride(), first)
        call = module.FusedCall(number, problem.cuda, config, alignment, problem.workspace_cap, False)
        call.enqueue(x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), 0, stream)
        assert_exact(y, want, f"config {config}")
        assert guarded[:first].isnan().all(), f"config {config}"
        assert guarded[first + count :].isnan().all(), f"config {config}"
        tried += 1
    assert tried


@pytest.mark.parametrize("exact", [False, True], ids=["tf32", "ieee"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["seed0-grouped-dilated", "dcgan-64-3@32", "fcn8s-21-21-k16@70"])
def test_results_keep_the_rounding_rule(name, format, exact, device, monkeypatch):
    """Rounded to nearest as it is read, in one way or another by layout."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not exact)
    case = cases.find(name).scaled(LIMIT)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, torch.float32, device)
    x = x.contiguous(memory_format=FORMATS[format])
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    for config in _tiles(problem, device):
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["groups", "parts of 37 channels", "empty phases", "stride 1"])
def test_bad_inputs_stay_where_taps_carry_them(name, bad, dtype, device):
    """Channels that are padded, and shifts that a phase has no tap at, multiply no bad value, where channels are neighbours."""
    case = LAYERS[name]
    x, w, b = _operands(case, dtype, device, "channels_last")
    index = (0, case.in_channels // 2, *(size // 2 for size in case.in_size))
    mark = torch.zeros(x.shape, dtype=torch.float64)
    mark[index] = 1
    reached = reference((mark, torch.ones(w.shape, dtype=torch.float64), None), case.geometry) > 0
    poisoned = x.clone()
    poisoned[index] = bad
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    for config in _tiles(problem, device):
        with use_config(config):
            clean, dirty = (ours((values, w, b), case.geometry, "fused").cpu() for values in (x, poisoned))
        assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"
        assert not dirty[reached].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_activations_reach_outputs_without_a_tap(format, device):
    """What such outputs hold is made once for all of them, by line or by channel."""
    case = LAYERS["empty phases of groups"]
    x, w, b = _operands(case, torch.float32, device, format)
    want = torch.tanh(reference((x, w, b), case.geometry)).float()
    for config in _tiles(describe(x, w, b, tuple(geometry_arguments(case.geometry).values())), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation="tanh")
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
