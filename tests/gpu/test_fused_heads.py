"""Tiles of the fused forward for heads: rows of planes, of which each warp takes its own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_heads
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _head(channels, size, **changes):
    sizes = {"in_channels": channels[0], "out_channels": channels[1], "batch": size[0], "in_size": size[1:]}
    return dataclasses.replace(cases.find("dcgan-64-3@32"), **sizes, **changes)


# Runs of one unit and of many, several runs of a warp, slots that wrap around; each padding and output padding there is.
LAYERS = {
    "one sample": _head((64, 3), (1, 32, 32)),
    "many samples": _head((64, 3), (150, 32, 32)),
    "several turns": _head((16, 3), (700, 24, 8)),
    "few slots": _head((128, 3), (300, 20, 32)),
    "rows of 8": _head((16, 1), (3, 9, 8)),
    "rows of 16": _head((48, 2), (5, 13, 16)),
    "rows of 24": _head((80, 4), (2, 30, 24)),
    "one row": _head((32, 4), (2, 1, 32)),
    "256 channels": _head((256, 3), (9, 12, 32)),
    "no padding": _head((32, 3), (2, 7, 24), padding=(0, 0)),
    "no padding, full rows": _head((32, 3), (2, 7, 32), padding=(0, 0)),
    "padding of 2": _head((32, 3), (2, 7, 24), padding=(2, 2)),
    "padding of 3": _head((32, 3), (2, 7, 32), padding=(3, 3)),
    "large padding": _head((32, 3), (2, 17, 32), padding=(9, 12)),
    "unlike paddings": _head((32, 3), (2, 7, 24), padding=(0, 1)),
    "output padding": _head((32, 3), (2, 7, 32), output_padding=(1, 1)),
    "output padding of rows": _head((32, 3), (2, 7, 16), padding=(2, 1), output_padding=(1, 0)),
}  # fmt: skip
# Rows of up to 64 pixels of 16-bit types.
WIDE = {
    "wide rows": _head((64, 3), (40, 20, 64)),
    "rows of 40": _head((16, 4), (3, 9, 40)),
    "rows of 56, no padding": _head((32, 2), (3, 9, 56), padding=(0, 0)),
    "wide, few slots": _head((256, 1), (30, 20, 64)),
}
ALL = [(name, dtype) for name in LAYERS for dtype in DTYPES] + [(name, dtype) for name in WIDE for dtype in DTYPES[1:]]
EVERY = pytest.mark.parametrize(("name", "dtype"), ALL, ids=str)


def _operands(name, dtype, device, exact=True):
    case = (LAYERS | WIDE)[name]
    return case, case.tensors(dtype, device, exact=exact, bias=True)


def _tiles(operands, case, device):
    problem = describe(*operands, tuple(geometry_arguments(case.geometry).values()))
    found = [config for config in FUSED.configs(problem, device) if config >= fused_heads.FIRST]
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return problem, found


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@EVERY
@pytest.mark.parametrize("offset", [0, 1], ids="{} behind a vector".format)
def test_results_are_exact_between_guard_bands(name, dtype, offset, device):
    case, (x, w, b) = _operands(name, dtype, device)
    want = reference((x, w, b), case.geometry)
    first, count = 256 + offset, want.numel()
    stream = torch.cuda.current_stream(device).cuda_stream
    problem, found = _tiles((x, w, b), case, device)
    for config in found:
        guarded = torch.full((count + 512 + offset,), math.nan, dtype=dtype, device=device)
        y = guarded[first : first + count].view(want.shape)
        call = fused_heads.call(problem, config, cuda.index(device))
        call.enqueue(x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), 0, stream)
        assert_exact(y, want, f"config {config}")
        assert guarded[:first].isnan().all(), f"config {config}"
        assert guarded[first + count :].isnan().all(), f"config {config}"


@EVERY
def test_slices_and_other_weights_are_exact(name, dtype, device):
    """Samples, channels and rows of larger tensors, results that are channels_last, a weight that is, and no bias."""
    case, (x, w, _) = _operands(name, dtype, device)
    room = torch.zeros((2 * x.shape[0], x.shape[1] + 64, x.shape[2] + 1, x.shape[3] + 64), dtype=dtype, device=device)
    part = room[::2, 32 : 32 + x.shape[1], 1:, 16 : 16 + x.shape[3]].copy_(x)
    w = w.contiguous(memory_format=torch.channels_last)
    for format in (torch.contiguous_format, torch.channels_last):
        out = torch.full((x.shape[0], case.out_channels + 16, *case.out_size), math.nan, dtype=dtype, device=device)
        out = out.contiguous(memory_format=format)
        for config in _tiles((part, w, None), case, device)[1]:
            with use_config(config):
                assert_exact(
                    ours((part, w, None), case.geometry, "fused", out=out[:, 8:-8]), reference((x, w, None), case.geometry)
                )
        assert out[:, :8].isnan().all()
        assert out[:, -8:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_results_keep_the_rounding_rule(batch, dtype, device):
    case = dataclasses.replace(cases.find("dcgan-64-3@32"), batch=batch)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, dtype, device)
    for config in _tiles((x, w, b), case, device)[1]:
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_bad_values_stay_where_taps_carry_them(name, dtype, bad, device):
    """Of an input at each edge and in the middle, and of a weight."""
    case, (x, w, b) = _operands(name, dtype, device)
    rows, pixels = case.in_size
    for row, pixel in {(0, 0), (rows // 2, pixels // 2), (rows - 1, pixels - 1), (rows // 2, 7), (rows // 2, 0)}:
        index = (0, case.in_channels // 2, row, pixel)
        mark = torch.zeros(x.shape, dtype=torch.float64)
        mark[index] = 1
        reached = reference((mark, torch.ones(w.shape, dtype=torch.float64), None), case.geometry) > 0
        poisoned = x.clone()
        poisoned[index] = bad
        for config in _tiles((x, w, b), case, device)[1]:
            with use_config(config):
                clean, dirty = (ours((values, w, b), case.geometry, "fused").cpu() for values in (x, poisoned))
            assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"
            assert not reached.any() or not dirty[reached].isfinite().all()
    poisoned = w.clone()
    poisoned[0, 0, 0, 3] = bad
    mark = torch.zeros(w.shape, dtype=torch.float64)
    mark[0, 0, 0, 3] = 1
    reached = reference((torch.ones(x.shape, dtype=torch.float64), mark, None), case.geometry) > 0
    for config in _tiles((x, w, b), case, device)[1]:
        with use_config(config):
            clean, dirty = (ours((x, values, b), case.geometry, "fused").cpu() for values in (w, poisoned))
        assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"
        assert not reached.any() or not dirty[reached].isfinite().all()


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "tanh", "sigmoid"])
@pytest.mark.parametrize("name", ["one sample", "no padding, full rows", "output padding", "large padding"])
def test_activations(name, activation, device):
    case, (x, w, b) = _operands(name, torch.float32, device)
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry)).float()
    for config in _tiles((x, w, b), case, device)[1]:
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


@TYPES
@pytest.mark.parametrize("name", ["many samples", "several turns", "few slots"])
def test_results_repeat_bit_by_bit_under_load(name, dtype, device):
    case, (x, w, b) = _operands(name, dtype, device, exact=False)
    for config in _tiles((x, w, b), case, device)[1]:
        with use_config(config):
            assert_repeats_under_load(lambda: ours((x, w, b), case.geometry, "fused"), device, f"config {config}")
