"""Tiles of the fused forward for few channels: columns in shared memory (heads), units as rows (score maps of long strides)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from test_rounding import check, forward_case
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_columns, fused_units
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


def _head(channels, size, **changes):
    return _layer("dcgan-64-3@32", channels, size, **changes)


COLUMNS = {
    "rows that share a line": _head((64, 3), (3, 32, 32)),
    "rows of 8": _head((64, 3), (2, 13, 8)),
    "rows of 16, of many samples": _head((72, 3), (150, 5, 16)),
    "lines of a row": _head((24, 3), (2, 9, 40)),
    "one channel": _head((16, 1), (2, 9, 48)),
    "four channels of five samples": _head((136, 4), (5, 7, 96)),
    "wide rows": _head((8, 3), (1, 5, 520)),
    "parts of rows": _head((8, 3), (1, 6, 2048)),
    "long images": _head((32, 2), (2, 300, 16)),
    "one row": _head((32, 2), (2, 1, 64)),
    "output padding": _head((40, 3), (1, 7, 40), output_padding=(1, 1)),
    "stride 1": _layer("k5s3p1-64-64@128", (16, 3), (1, 12, 40), stride=(1, 1)),
    "stride 3": _layer("k5s3p1-64-64@128", (16, 3), (2, 12, 40)),
    "equal": _layer("k2s2", (24, 8), (2, 5, 72)),
    "stride beyond the kernel": _layer("k2s2", (8, 6), (2, 5, 72), stride=(3, 3), output_padding=(1, 1)),
    "unlike axes": _head((16, 3), (2, 7, 40), kernel_size=(3, 6), stride=(1, 4), padding=(0, 2)),
    "tiles of channels": _head((24, 21), (1, 16, 16), padding=(0, 0)),
    "groups": _head((128, 6), (2, 9, 40), groups=2),
    "many taps": _layer("k5s3p1-64-64@128", (8, 1), (1, 9, 40), kernel_size=(11, 10)),
}  # fmt: skip
UNITS = {
    "score map": _layer("fcn8s-21-21-k16@70", (21, 21), (1, 9, 11)),
    "score maps, padded": _layer("fcn8s-21-21-k16@70", (21, 21), (3, 20, 9), padding=(4, 4)),
    "pairs of pixels": _layer("fcn8s-21-21-k16@70", (21, 21), (2, 31, 70)),
    "pairs of pixels, padded": _layer("fcn8s-21-21-k16@70", (9, 4), (2, 12, 14), padding=(12, 20), output_padding=(0, 3)),
    "pairs of pixels of a group": _layer("fcn8s-21-21-k16@70", (20, 8), (2, 9, 16), groups=4, padding=(4, 4)),
    "stride 32": _layer("fcn32s-21-21-k64@16", (21, 5), (2, 6, 5), padding=(16, 16)),
    "one channel": _layer("fcn8s-21-21-k16@70", (3, 1), (2, 9, 40), padding=(3, 5)),
    "three shifts": _layer("fcn8s-21-21-k16@70", (5, 4), (2, 9, 13), kernel_size=(24, 24), output_padding=(3, 5)),
    "equal": _layer("fcn8s-21-21-k16@70", (30, 2), (2, 9, 13), kernel_size=(8, 8)),
    "unlike axes": _layer("fcn8s-21-21-k16@70", (21, 6), (2, 30, 13), kernel_size=(4, 16), stride=(2, 8)),
    "groups": _layer("fcn8s-21-21-k16@70", (20, 8), (2, 9, 13), groups=4, padding=(4, 4)),
    "one pixel": _layer("fcn8s-21-21-k16@70", (7, 3), (40, 1, 1)),
}
LAYERS = {("columns", name): layer for name, layer in COLUMNS.items()} | {("units", name): layer for name, layer in UNITS.items()}
MODULES = {"columns": fused_columns, "units": fused_units}


def _of(columns, units):
    """The named layers of both families, as the parameters of a test."""
    chosen = [("columns", name) for name in columns] + [("units", name) for name in units]
    return pytest.mark.parametrize(("family", "name"), chosen, ids=str)


def _operands(case, dtype, device, format, exact=True):
    x, w, b = case.tensors(dtype, device, exact=exact, bias=True)
    return x.contiguous(memory_format=FORMATS[format]), w, b


def _tiles(family, problem, device):
    mine = (
        range(fused_columns.FIRST, fused_units.FIRST) if family == "columns" else range(fused_units.FIRST, fused_units.FIRST + 10)
    )
    return [config for config in FUSED.configs(problem, device) if config in mine]


def _configs(family, problem, device):
    found = _tiles(family, problem, device)
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
@_of(COLUMNS, UNITS)
def test_results_are_exact_between_guard_bands(family, name, offset, format, dtype, device):
    case = LAYERS[family, name]
    x, w, b = _operands(case, dtype, device, format)
    problem, want = _problem((x, w, b), case), reference((x, w, b), case.geometry)
    like = ours((x, w, b), case.geometry)
    first, count = 256 + offset, like.numel()
    stream = torch.cuda.current_stream(device).cuda_stream
    for config in _configs(family, problem, device):
        guarded = torch.full((count + 512 + offset,), math.nan, dtype=dtype, device=device)
        y = guarded.as_strided(like.shape, like.stride(), first)
        call = MODULES[family].call(problem, config, cuda.index(device))
        call.enqueue(x.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), 0, stream)
        assert_exact(y, want, f"config {config}")
        assert guarded[:first].isnan().all(), f"config {config}"
        assert guarded[first + count :].isnan().all(), f"config {config}"


@TYPES
@_of(
    ["rows that share a line", "lines of a row", "groups", "unlike axes"],
    ["score maps, padded", "pairs of pixels, padded", "groups", "unlike axes"],
)
def test_slices_and_other_weights_are_exact(family, name, dtype, device):
    """Samples, channels and rows of larger tensors, and a weight that is channels_last."""
    case = LAYERS[family, name]
    for format in FORMATS:
        x, w, b = _operands(case, dtype, device, format)
        room = torch.zeros((x.shape[0], x.shape[1] + 64, x.shape[2] + 1, x.shape[3] + 64), dtype=dtype, device=device)
        room = room.contiguous(memory_format=FORMATS[format])
        part = room[:, 32 : 32 + x.shape[1], 1:, 16 : 16 + x.shape[3]].copy_(x)
        w = w.contiguous(memory_format=torch.channels_last)
        out = torch.full((x.shape[0], case.out_channels + 16, *case.out_size), math.nan, dtype=dtype, device=device)
        for config in _configs(family, _problem((part, w, b), case), device):
            with use_config(config):
                assert_exact(ours((part, w, b), case.geometry, "fused", out=out[:, 8:-8]), reference((x, w, b), case.geometry))
        assert out[:, :8].isnan().all()
        assert out[:, -8:].isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@_of(["dcgan-64-3@32", "pix2pix-128-3@128", "fcn8s-21-21-k4@16"], ["fcn8s-21-21-k16@70", "fcn32s-21-21-k64@16"])
def test_results_keep_the_rounding_rule(family, name, format, device):
    case = cases.find(name).scaled(LIMIT)
    (x, w, b), want, magnitude, oracle = forward_case.__wrapped__(case, torch.float32, device)
    x = x.contiguous(memory_format=FORMATS[format])
    # Rows of 21 channels are no multiples of 16 bytes.
    found = _configs if format == "contiguous" else _tiles
    for config in found(family, _problem((x, w, b), case), device):
        with use_config(config):
            check(ours((x, w, b), case.geometry, "fused"), want, oracle, magnitude, f"config {config}")


@TYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@_of(
    ["groups", "lines of a row", "rows of 8", "stride beyond the kernel", "stride 1"],
    ["groups", "score maps, padded", "three shifts", "unlike axes"],
)
def test_bad_inputs_stay_where_taps_carry_them(family, name, bad, format, dtype, device):
    case = LAYERS[family, name]
    x, w, b = _operands(case, dtype, device, format)
    index = (0, case.in_channels // 2, *(size // 2 for size in case.in_size))
    mark = torch.zeros(x.shape, dtype=torch.float64)
    mark[index] = 1
    ones = torch.ones(w.shape, dtype=torch.float64)
    reached = reference((mark, ones, None), case.geometry) > 0
    poisoned = x.clone()
    poisoned[index] = bad
    for config in _configs(family, _problem((x, w, b), case), device):
        with use_config(config):
            clean, dirty = (ours((values, w, b), case.geometry, "fused").cpu() for values in (x, poisoned))
        assert torch.equal(dirty[~reached], clean[~reached]), f"config {config}"
        assert not dirty[reached].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "sigmoid"])
@_of(["stride beyond the kernel"], ["score maps, padded"])
def test_activations(family, name, activation, format, device):
    case = LAYERS[family, name]
    x, w, b = _operands(case, torch.float32, device, format)
    want = getattr(torch.nn.functional, activation)(reference((x, w, b), case.geometry)).float()
    for config in _configs(family, _problem((x, w, b), case), device):
        with use_config(config):
            got = ours((x, w, b), case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
