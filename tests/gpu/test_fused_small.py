"""The fused gradients of small layers whose kernel and stride are equal, two along the width: one launch, nothing packed."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from test_fused_groups import (
    GUARD,
    OPERATORS,
    WRITTEN,
    _as_they_lie,
    _assert_a_bad_gradient_stays,
    _described,
    _layer,
    _operands,
    _part,
    _result,
    _surroundings,
    _want,
)
from test_fused_weight import DTYPES, FUSED, shapes, shifted

from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, reference
from test_rounding import backward_case, check
from upfold import cases, modes
from upfold.algorithms import cuda, fused_small, fused_window
from upfold.problem import DTYPE_BYTES, Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
LAYERS = {
    "nnU-Net, 3-D": _layer((40, 24), (2, 4, 4, 4), 2, 2),
    "anisotropic": _layer((36, 20), (2, 3, 4, 8), (1, 2, 2), (1, 2, 2)),
    "odd channels": _layer((33, 7), (3, 3, 8), 2, 2),
    "one channel": _layer((1, 1), (1, 1, 4), 2, 2),
    "one input channel": _layer((1, 48), (2, 3, 8), 2, 2),
    "one output channel": _layer((48, 1), (2, 3, 8), 2, 2),
    "1-D": _layer((20, 10), (2, 24), 2, 2),
    "1-D, odd rows of the kernel": _layer((8, 5), (2, 16), 2, 2),
    "unlike axes": _layer((9, 6), (2, 4, 12), (3, 2), (3, 2)),
    "3-D, unlike axes": _layer((17, 10), (1, 3, 2, 8), (2, 3, 2), (2, 3, 2)),
    "width 2": _layer((16, 8), (3, 5, 2), 2, 2),
    "width 6": _layer((16, 8), (2, 5, 6), 2, 2),
    "width 7": _layer((16, 8), (2, 5, 7), 2, 2),
    "output padding": _layer((16, 12), (2, 5, 8), 2, 2, output_padding=(1, 0)),
    "many samples": _layer((24, 40), (70, 2, 4), 2, 2),
    "many tiles": _layer((300, 90), (3, 12, 16), 2, 2),
    "few positions": _layer((200, 130), (1, 1, 4), 2, 2),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
# Layers of every kind that it does not take.
OTHERS = {
    "kernel 4": _layer((16, 8), (2, 4, 8), 4, 2, 1),
    "stride 3": _layer((16, 8), (2, 4, 8), (2, 3), (2, 3)),
    "padding": _layer((16, 8), (2, 4, 8), 2, 2, (0, 1)),
    "padding of height": _layer((16, 8), (2, 4, 8), 2, 2, (1, 0)),
    "dilation": _layer((16, 8), (2, 4, 8), (2, 2), (2, 2), dilation=(2, 1)),
    "groups": _layer((16, 8), (2, 4, 8), 2, 2, groups=2),
    "rows of y that are no whole vectors": _layer((16, 8), (2, 4, 8), 2, 2, output_padding=(0, 1)),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _tiles(problem, device):
    return sorted(config for config in FUSED.configs(problem, device) if fused_small.FIRST <= config < fused_window.FIRST)


def _is_taken(operator, case, dtype):
    """Whole vectors of 8 bytes in a row of x and, of the weight, in a row of what follows a channel."""
    each = 8 // DTYPE_BYTES[dtype]
    rows = case.out_channels * math.prod(case.kernel_size[:-1])
    return case.in_size[-1] % each == 0 and (operator is not Operator.CONV or rows % (each // 2) == 0)


def assert_tiles_are_exact(kernel, tiles, problem, operands, written, want, device, what=""):
    """The calls of a module of kernels, on these very tensors; nothing beside the result and what they say they need changes."""
    for config in tiles:
        needed = FUSED.workspace_bytes(problem, config, device)
        scratch = shifted(torch.full((-(-needed // 4),), math.nan, device=device), GUARD)
        written.fill_(math.nan)
        x, w, y = (t.data_ptr() for t in operands)
        call = kernel.call(problem, config, cuda.index(device))
        call.enqueue(x, w, 0, y, scratch.data_ptr() if needed else 0, torch.cuda.current_stream(device).cuda_stream)
        assert_exact(written, want, f"{what} config {config}")
        for t in (written, scratch):
            assert _surroundings(t).isnan().all(), f"{what} config {config}"


def _assert_every_tile_is_exact(operator, case, operands, want, device, what=""):
    """Of a problem whose strides are those of these very tensors, the written one too; nothing beside it changes."""
    problem, written = _as_they_lie(operator, case, operands)
    tiles = _tiles(problem, device)
    assert len(tiles) == 3, what
    assert_tiles_are_exact(fused_small, tiles, problem, operands, written, want, device, what)


@DTYPES
@OPERATORS
@EVERY_LAYER
def test_every_tile_is_exact_between_guard_bands(name, operator, dtype, device):
    """At addresses of whole vectors; elsewhere there is none."""
    case = LAYERS[name]
    plain = _operands(operator, case, dtype, device)
    if _is_taken(operator, case, dtype):
        operands = [shifted(t, GUARD) for t in plain]
        _assert_every_tile_is_exact(operator, case, operands, _want(operator, case, *plain), device)
        reads = {Operator.CONV: "wy", Operator.CONV_TRANSPOSE_WEIGHT: "xy"}[operator]
        for behind in reads:
            operands = [shifted(t, GUARD + (one == behind)) for one, t in zip("xwy", plain)]
            assert not _tiles(_described(operator, case, *operands), device), behind
    else:
        assert not _tiles(_described(operator, case, *plain), device)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_not_taken(name, operator, dtype, device):
    case = OTHERS[name]
    problem = _described(operator, case, *_operands(operator, case, dtype, device))
    assert not _tiles(problem, device)


LAYOUTS = {
    "part": _part,
    "every other row": functools.partial(_part, steps=(1, 1, 2)),
    "every third channel": functools.partial(_part, steps=(1, 3)),
    "every other sample": functools.partial(_part, steps=(2,)),
}


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["anisotropic", "odd channels", "nnU-Net, 3-D", "many samples"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_other_strides_are_exact(layout, name, operator, dtype, device):
    """Of pixels that lie next to one another: x and y, and the gradient of the weight in any strides."""
    case = LAYERS[name]
    x, w, y = _operands(operator, case, dtype, device)
    want, place = _want(operator, case, x, w, y), LAYOUTS[layout]
    of_w = w if operator is Operator.CONV else place(w)
    _assert_every_tile_is_exact(operator, case, (place(x), of_w, place(y)), want, device)
    if operator is Operator.CONV_TRANSPOSE_WEIGHT:
        _assert_every_tile_is_exact(operator, case, (x, modes.in_layout(w, "channels_last"), y), want, device)
        _assert_every_tile_is_exact(operator, case, (x, _part(w, first=1, steps=(1, 1, 1, 2)), y), want, device)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_no_tap_reaches_is_left_out(bad, operator, dtype, device):
    case = LAYERS["output padding"]
    x, w, y = _operands(operator, case, dtype, device)
    want = _want(operator, case, x, w, y)
    missed = reference((torch.ones_like(x), torch.ones_like(w), None), case.geometry) == 0
    assert missed.any()
    y.masked_fill_(missed.to(device), bad)
    _assert_every_tile_is_exact(operator, case, (x, w, y), want, device)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["odd channels", "nnU-Net, 3-D", "unlike axes", "few positions"])
def test_a_bad_gradient_stays_where_taps_carry_it(name, operator, dtype, device):
    case = LAYERS[name]
    operands = _operands(operator, case, dtype, device)
    tiles = _tiles(_described(operator, case, *operands), device)
    assert tiles
    _assert_a_bad_gradient_stays(operator, case, operands, tiles)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["anisotropic", "many tiles", "few positions", "one output channel"])
def test_results_keep_the_rounding_rule_and_repeat(name, operator, dtype, device):
    case, index = LAYERS[name], WRITTEN[operator]
    (x, w, _), y, want, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
    tiles = _tiles(_described(operator, case, x, w, y), device)
    assert tiles
    for config in tiles:
        got = _result(operator, case, x, w, y, config)
        check(got, want[index], oracles[index], magnitude[index], f"config {config}")
        assert_repeats_under_load(functools.partial(_result, operator, case, x, w, y, config), device, f"config {config}")


@DTYPES
@OPERATORS
def test_full_float32_is_left_to_others(operator, dtype, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = LAYERS["anisotropic"]
    problem = _described(operator, case, *_operands(operator, case, dtype, device))
    taken = FUSED.reject(problem, device) is None and bool(_tiles(problem, device))
    assert taken == (dtype is not torch.float32)


@pytest.mark.parametrize("name", ["nnunet3d-320-320@4", "nnunet2d-512-512@8", "nnunet3d-anisotropic"])
@DTYPES
@OPERATORS
def test_published_layers_have_its_tiles(name, operator, dtype, device):
    case = dataclasses.replace(cases.find(name), in_channels=64, out_channels=48)
    x_shape, y_shape = shapes(case)
    x, y = (torch.empty(shape, dtype=dtype, device=device) for shape in (x_shape, y_shape))
    w = torch.empty((64, 48, *case.kernel_size), dtype=dtype, device=device)
    assert len(_tiles(_described(operator, case, x, w, y), device)) == 3
