"""Tiles whose columns are channels and phases of the width: strides of every kind, cut rows, slices, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import (
    activation_is_close,
    bad_pixels_stay,
    equals_gemm,
    forward_is_exact,
    repeats_under_load,
    slices_are_exact,
)

import upfold
from gpu import missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference
from upfold import cases
from upfold.algorithms import REGISTRY, fused_last_runs
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
_VOCODER, _IMAGE, _VOLUME = cases.find("hifigan-512-256@64"), cases.find("dcgan-128-64@16"), cases.find("nnunet3d-64-32@64")


def _row(width, stride, kernel, **changes):
    """A layer of one axis, 48 to 40 channels."""
    own = {"batch": 3, "in_channels": 48, "out_channels": 40, "padding": (0,)}
    return dataclasses.replace(_VOCODER, in_size=(width,), stride=(stride,), kernel_size=(kernel,), **(own | changes))


LAYERS = {
    "stride 2": _row(37, 2, 4, padding=(1,)),
    "stride 2, equal": _row(130, 2, 2),
    "stride 3, equal": _row(21, 3, 3),
    "stride 3, three taps": _row(70, 3, 9, padding=(4,), output_padding=(1,)),
    "stride 4, padding beyond it": _row(33, 4, 8, padding=(6,)),
    "stride 5": _row(75, 5, 10),
    "stride 5, cut": _row(66, 5, 10, padding=(3,), output_padding=(1,), out_channels=72),
    "stride 6": _row(200, 6, 12, out_channels=20),
    "stride 7, few channels": _row(9, 7, 14, out_channels=9, batch=19),
    "stride 8": _row(64, 8, 16, padding=(4,), out_channels=64),
    "stride 8, groups": _row(40, 8, 16, padding=(4,), in_channels=128, out_channels=36, groups=2),
    "stride 10": _row(13, 10, 20, padding=(2,)),
    "stride 16": _row(11, 16, 32, padding=(8,), in_channels=272),
    "stride 48, equal": _row(9, 48, 48),
    "stride 256, in sets": _row(9, 256, 512, padding=(100,), out_channels=3),
    "stride 165, in odd sets": _row(4, 165, 330, out_channels=5),
    "one channel": _row(30, 64, 128, padding=(32,), out_channels=1),
    "one position": _row(1, 8, 16, padding=(4,), batch=5),
    "many samples": _row(7, 4, 8, padding=(2,), batch=150),
    "2d": dataclasses.replace(
        _IMAGE, batch=2, in_size=(5, 19), kernel_size=(3, 8), stride=(1, 4), padding=(1, 2), dilation=(2, 1)
    ),
    "2d, one row": dataclasses.replace(_IMAGE, batch=2, in_size=(6, 70), kernel_size=(1, 6), stride=(1, 3), padding=(0, 1)),
    "3d": dataclasses.replace(
        _VOLUME, batch=2, in_size=(3, 4, 9), kernel_size=(2, 1, 4), stride=(1, 1, 2), padding=(1, 0, 1)
    ),
}  # fmt: skip
REFUSED = {
    "taps that some phases lack": _row(37, 4, 7),
    "dilation": _row(37, 4, 8, dilation=(3,)),
    "rows": dataclasses.replace(_IMAGE, batch=2),
    "stride 1": _row(37, 1, 3),
    "more phases than columns, of a prime": _row(9, 167, 167),
}
# Weights from 4 MiB on, whose rows are turned in shared memory.
LARGE = {
    "stride 8, large": _row(30, 8, 16, padding=(4,), in_channels=256, out_channels=264, batch=2),
    "stride 5, large": _row(30, 5, 10, in_channels=512, out_channels=424, batch=1),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _configs(problem, device):
    return [config for config in FUSED.configs(problem, device) if 0 <= config - fused_last_runs.FIRST < fused_last_runs.TILES]


def _expected(problem, device):
    """Those, which must be there on Hopper."""
    found = _configs(problem, device)
    assert found or torch.cuda.get_device_capability(device)[0] != 9
    return found


def _described(operands, case):
    return describe(*operands, tuple(geometry_arguments(case.geometry).values()))


def _behind_one(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def _last(x):
    return x.transpose(1, -1).contiguous().transpose(1, -1)


STORAGES = {"contiguous": torch.Tensor.contiguous, "behind one": _behind_one, "channels innermost": _last}


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS | LARGE)
def test_runs_are_exact(name, storage, dtype, device):
    """In the layout that y gets: where its channels are innermost none of these tiles is there."""
    case = (LAYERS | LARGE)[name]
    forward_is_exact(case, dtype, device, STORAGES[storage], _expected if storage == "contiguous" else _configs)


@TYPES
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name, dtype, device):
    case = REFUSED[name]
    assert not _configs(_described(case.tensors(dtype, device, bias=True), case), device)


@TYPES
@pytest.mark.parametrize("source", ["contiguous", "channels innermost"])
@pytest.mark.parametrize("name", LAYERS)
def test_slices_are_exact(name, source, dtype, device):
    """Beginning with and without whole words, in rows that are whole words or not."""
    slices_are_exact(LAYERS[name], dtype, device, STORAGES[source], _expected, ((1, 0, 8), (1, 1, 9), (1, 2, 7)))


@TYPES
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "tanh"])
@pytest.mark.parametrize("name", ["stride 5", "stride 8"])
def test_activations(name, activation, dtype, device):
    activation_is_close(LAYERS[name], dtype, device, activation, _expected)


@TYPES
@pytest.mark.parametrize("name", LAYERS)
def test_bad_pixels_stay_where_taps_carry_them(name, dtype, device):
    bad_pixels_stay(LAYERS[name], dtype, device, torch.Tensor.contiguous, _expected)


@TYPES
def test_samples_in_parts_are_exact(dtype, device):
    """Under a small cap the packed source has room for some samples at a time."""
    case = _row(300, 4, 8, padding=(2,), batch=40, in_channels=64)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    want = reference((x, w, b), case.geometry)
    with upfold.use(workspace_mb=1):
        problem = _described((x, w, b), case)
        for config in _expected(problem, device):
            assert FUSED.workspace_bytes(problem, config, device) <= 1 << 20
            with use_config(config):
                assert_exact(ours((x, w, b), case.geometry, "fused"), want, f"config {config}")


# Of several tiles for each multiprocessor: an even number, whose weights blocks share, an odd one, which is made even for that,
# and weights that stay.
LOADED = {
    "shared": _row(1200, 8, 16, padding=(4,), in_channels=1024, out_channels=128, batch=16),
    "shared, stride 5": _row(1279, 5, 10, in_channels=1024, out_channels=128, batch=16),
    "shared, odd": _row(1100, 8, 16, padding=(4,), in_channels=1024, out_channels=128, batch=9),
    "resident": _row(40000, 4, 8, padding=(2,), in_channels=32, out_channels=32, batch=4),
}


@TYPES
@pytest.mark.parametrize("name", LOADED)
def test_every_tile_repeats(name, dtype, device):
    repeats_under_load(LOADED[name], dtype, device, _expected)


@TYPES
@pytest.mark.parametrize("name", LOADED)
def test_many_tiles_are_exact(name, dtype, device):
    equals_gemm(LOADED[name], dtype, device, _expected)
