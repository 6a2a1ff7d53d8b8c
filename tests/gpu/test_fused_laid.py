"""The gradient of the input by taps that are laid out: exact, rounded once, alone in what it writes, the same on every run."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from test_fused_groups import (
    GUARD,
    _as_they_lie,
    _assert_a_bad_gradient_stays,
    _described,
    _layer,
    _operands,
    _result,
    _want,
)
from test_fused_small import assert_tiles_are_exact
from test_fused_weight import DTYPES, FUSED, shifted

from gpu import assert_repeats_under_load, missing
from test_rounding import backward_case, check
from upfold import modes
from upfold.algorithms import cuda, fused_heads, fused_laid
from upfold.problem import Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
# Segments that are words of 4, 8 and 16 bytes, and that lie partly beside the plane; tiles of some planes, of one and of part of
# one; reductions in parts; rows and pixels that fill no tile.
LAYERS = {
    "k2 s2": _layer((70, 32), (3, 6, 8), 2, 2),
    "k2 s2, 14 wide": _layer((130, 48), (5, 14, 14), 2, 2),
    "k2 s2, pairs of pixels": _layer((40, 16), (3, 5, 6), 2, 2),
    "k2 s2, odd map": _layer((40, 16), (5, 5, 7), 2, 2),
    "k2 s2, many chunks": _layer((64, 512), (2, 4, 8), 2, 2),
    "k2 s2, rows behind": _layer((33, 16), (3, 4, 8), 2, 2, output_padding=(1, 0)),
    "k4 s4, odd map": _layer((40, 8), (2, 37, 37), 4, 4),
    "k4 s4, odd map, in parts": _layer((136, 64), (2, 21, 21), 4, 4),
    "k4 s4": _layer((264, 12), (3, 5, 8), 4, 4),
    "k4 s2": _layer((70, 8), (3, 8, 6), 4, 2, 1),
    "k4 s2, 4x4": _layer((136, 16), (9, 4, 4), 4, 2, 1),
    "k2 s2, whole rows": _layer((70, 32), (3, 7, 24), 2, 2),
    "k2 s2, whole rows, in parts": _layer((64, 512), (3, 7, 24), 2, 2),
    "k4 s2, whole rows": _layer((40, 8), (3, 7, 24), 4, 2, 1),
    "k4 s2, long rows": _layer((40, 8), (2, 24, 32), 4, 2, 1),
    "k4 s2, many chunks": _layer((16, 160), (2, 8, 8), 4, 2, 1),
    "k4 s2, far padding": _layer((24, 8), (3, 6, 8), 4, 2, 3),
    "k4 s2, odd rows": _layer((24, 8), (3, 4, 6), 4, 2, 1, output_padding=(0, 1)),
    "k4 s2, two wide": _layer((24, 8), (9, 2, 2), 4, 2, 1),
    "k4 s2, rows behind": _layer((24, 8), (3, 7, 8), 4, 2, 1, output_padding=(1, 0)),
    "k4 s2, many tiles": _layer((300, 32), (40, 16, 16), 4, 2, 1),
    "planes": _layer((40, 32), (2, 3, 4, 8), (1, 2, 2), (1, 2, 2)),
    "one row": _layer((1, 32), (2, 4, 8), 2, 2),
}  # fmt: skip
# Pairs of pixels, as 16-bit values are laid out, they are none, or their planes are no whole vectors.
FLOATS = ("k4 s2, far padding", "k4 s2, odd rows", "k2 s2, odd map")


def _each(*names):
    """Layers and the types in which there are tiles for them."""
    of = [(name, dtype) for name in names for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    taken = [(name, dtype) for name, dtype in of if name not in FLOATS or dtype is torch.float32]
    return pytest.mark.parametrize(("name", "dtype"), taken)


OTHERS = {
    "kernel 3": _layer((16, 32), (2, 4, 8), 3, 2, 1),
    "unlike axes": _layer((16, 32), (2, 4, 8), (2, 4), (2, 4)),
    "1-D": _layer((16, 32), (2, 24), 2, 2),
    "even padding": _layer((16, 32), (2, 4, 8), 4, 2, 2),
    "far padding": LAYERS["k4 s2, far padding"],
    "padding": _layer((16, 32), (2, 4, 8), 2, 2, (0, 1)),
    "dilation": _layer((16, 32), (2, 4, 8), 2, 2, dilation=(1, 2)),
    "groups": _layer((16, 32), (2, 4, 8), 2, 2, groups=2),
    "channels that fill no chunk": _layer((16, 12), (2, 4, 8), 2, 2),
    "planes that are no whole vectors": _layer((16, 32), (2, 3, 3), 2, 2),
    "a stride along the depth": _layer((16, 32), (2, 3, 4, 8), 2, 2),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _tiles(problem, device):
    if cuda.module().code_capability(cuda.index(device)) != 90:
        pytest.skip("its tiles are for compute capability 9.0")
    return sorted(config for config in FUSED.configs(problem, device) if fused_laid.FIRST <= config < fused_heads.FIRST)


def _assert_exact(case, operands, want, device, what=""):
    """Of a problem whose strides are those of these very tensors, the written one too; nothing beside it changes."""
    problem, written = _as_they_lie(Operator.CONV, case, operands)
    tiles = _tiles(problem, device)
    assert tiles, what
    assert_tiles_are_exact(fused_laid, tiles, problem, operands, written, want, device, what)


@_each(*LAYERS)
def test_every_tile_is_exact_between_guard_bands(name, dtype, device):
    case = LAYERS[name]
    plain = _operands(Operator.CONV, case, dtype, device)
    _assert_exact(case, [shifted(t, GUARD) for t in plain], _want(Operator.CONV, case, *plain), device)


@_each("k2 s2, whole rows", "k2 s2, whole rows, in parts", "k4 s2, whole rows")
def test_tiles_have_whole_rows(name, dtype, device):
    """Of 128 pixels a tile has five rows of 24, so that 504 are five tiles, not four."""
    problem = _described(Operator.CONV, LAYERS[name], *_operands(Operator.CONV, LAYERS[name], dtype, device))
    pixels = dict(enumerate((pixels for _, pixels in cuda.module().fused_laid_tiles()), fused_laid.FIRST))
    narrow = [config for config in _tiles(problem, device) if pixels[config] == 128]
    assert narrow
    for config in narrow:
        tiles, _, splits, *_ = fused_laid.call(problem, config, cuda.index(device)).work
        assert tiles == 5 * splits, config
        assert (splits > 1) == name.endswith("in parts"), config


@_each("k2 s2", "k4 s4, odd map", "k4 s2", "k4 s2, 4x4", "planes")
def test_slices_are_exact(name, dtype, device):
    """Samples and channels of larger tensors, of whose neighbours, which are NaN, nothing is read."""
    case = LAYERS[name]
    x, w, y = _operands(Operator.CONV, case, dtype, device)
    want = _want(Operator.CONV, case, x, w, y)

    def sliced(t):
        room = torch.full((2 * t.shape[0], t.shape[1] + 32, *t.shape[2:]), math.nan, dtype=dtype, device=device)
        return room[::2, 16:-16].copy_(t)

    _assert_exact(case, (sliced(x), w, sliced(y)), want, device)


@_each("k2 s2", "k4 s4", "k4 s2", "k4 s2, 4x4", "k4 s2, far padding", "planes")
def test_a_bad_gradient_stays_where_taps_carry_it(name, dtype, device):
    case = LAYERS[name]
    operands = _operands(Operator.CONV, case, dtype, device)
    tiles = _tiles(_described(Operator.CONV, case, *operands), device)
    assert tiles
    _assert_a_bad_gradient_stays(Operator.CONV, case, operands, tiles)


@_each("k2 s2, 14 wide", "k2 s2, many chunks", "k4 s4, odd map", "k4 s4, odd map, in parts", "k4 s2, many tiles", "k4 s2, 4x4")
def test_results_keep_the_rounding_rule_and_repeat(name, dtype, device):
    case = LAYERS[name]
    (x, w, _), y, want, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
    tiles = _tiles(_described(Operator.CONV, case, x, w, y), device)
    assert tiles
    for config in tiles:
        compute = functools.partial(_result, Operator.CONV, case, x, w, y, config)
        check(compute(), want[0], oracles[0], magnitude[0], f"config {config}")
        assert_repeats_under_load(compute, device, f"config {config}")


@DTYPES
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_to_others(name, dtype, device):
    case = OTHERS[name]
    taken = name in ("even padding", "far padding") and dtype is torch.float32  # whose segments may begin anywhere
    taken |= name == "planes that are no whole vectors" and dtype is torch.float32
    assert bool(_tiles(_described(Operator.CONV, case, *_operands(Operator.CONV, case, dtype, device)), device)) == taken
    case = LAYERS["k2 s2"]
    x, w, y = _operands(Operator.CONV, case, dtype, device)
    assert not _tiles(_described(Operator.CONV, case, x, modes.in_layout(w, "channels_last"), y), device)
    assert not _tiles(_described(Operator.CONV, case, x, w, modes.in_layout(y, "channels_last")), device)
    assert not _tiles(_described(Operator.CONV, case, x, shifted(w, 1), y), device)
