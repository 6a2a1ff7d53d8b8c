"""The gradient of the weight by taps that are laid out: exact, rounded once, alone in what it writes, the same on every run."""

from __future__ import annotations

import dataclasses
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
    _surroundings,
    _want,
)
from test_fused_small import assert_tiles_are_exact
from test_fused_weight import FUSED, gradient, shifted, want

from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, exact_like
from test_rounding import backward_case, check
from upfold.algorithms import cuda, fused_groups, fused_weight_laid
from upfold.problem import Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
WEIGHT = Operator.CONV_TRANSPOSE_WEIGHT
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# Segments of two and of four values and pairs of pixels; chunks of part of a row, of some rows, of some planes; x as it lies and
# packed first, planes in rows of their own or one behind the other, also where a vector has pixels of two samples or of some, and
# many vectors; rows, columns and chunks that fill no tile; parts.
LAYERS = {
    "k2 s2": (_layer((70, 34), (3, 8, 16), 2, 2), False),
    "k2 s2, one chunk": (_layer((70, 32), (1, 8, 8), 2, 2), False),
    "k2 s2, 14 wide": (_layer((130, 48), (5, 14, 14), 2, 2), True),
    "k2 s2, many vectors": (_layer((256, 16), (96, 14, 14), 2, 2), True),
    "k2 s2, wide": (_layer((40, 16), (2, 5, 80), 2, 2), True),
    "k2 s2, long rows": (_layer((300, 52), (2, 3, 128), 2, 2), False),
    "k2 s2, few pixels of a vector": (_layer((40, 16), (7, 2, 6), 2, 2), True),
    "k2 s2, fewer than a vector": (_layer((40, 16), (7, 1, 6), 2, 2), True),
    "k2 s2, many chunks": (_layer((40, 16), (40, 16, 24), 2, 2), False),
    "k2 s2, rows behind": (_layer((33, 16), (3, 4, 8), 2, 2, output_padding=(1, 0)), True),
    "k2 s2, planes in rows of their own": (_layer((40, 16), (3, 3, 84), 2, 2), True),
    "k2 s2, whole vectors": (_layer((40, 16), (5, 6, 8), 2, 2), True),
    "k4 s4, odd map": (_layer((40, 9), (2, 37, 37), 4, 4), True),
    "k4 s4": (_layer((264, 13), (3, 8, 8), 4, 4), False),
    "k4 s2": (_layer((70, 9), (3, 8, 8), 4, 2, 1), False),
    "k4 s2, whole vectors": (_layer((24, 13), (5, 8, 6), 4, 2, 1), True),
    "k4 s2, planes in rows of their own": (_layer((24, 13), (5, 6, 42), 4, 2, 1), True),
    "k4 s2, 4x4": (_layer((136, 20), (9, 4, 4), 4, 2, 1), True),
    "k4 s2, some rows": (_layer((40, 13), (2, 8, 24), 4, 2, 1), False),
    "k4 s2, ends within a row": (_layer((40, 8), (3, 7, 10), 4, 2, 1), True),
    "k4 s2, long rows": (_layer((40, 8), (2, 3, 128), 4, 2, 1), False),
    "k4 s2, two wide": (_layer((24, 8), (9, 2, 2), 4, 2, 1), True),
    "k4 s2, many chunks": (_layer((16, 24), (130, 8, 8), 4, 2, 1), False),
    "planes": (_layer((40, 32), (2, 3, 8, 8), (1, 2, 2), (1, 2, 2)), False),
    "planes, packed": (_layer((40, 32), (2, 3, 4, 6), (1, 2, 2), (1, 2, 2)), True),
    "one row": (_layer((1, 32), (2, 4, 8), 2, 2), True),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
OTHERS = {
    "kernel 3": _layer((16, 32), (2, 4, 8), 3, 2, 1),
    "unlike axes": _layer((16, 32), (2, 4, 8), (2, 4), (2, 4)),
    "1-D": _layer((16, 32), (2, 24), 2, 2),
    "even padding": _layer((16, 32), (2, 4, 8), 4, 2, 2),
    "odd rows": _layer((24, 8), (3, 4, 6), 4, 2, 1, output_padding=(0, 1)),
    "rows behind windows": _layer((24, 8), (3, 7, 8), 4, 2, 1, output_padding=(1, 0)),
    "padding": _layer((16, 32), (2, 4, 8), 2, 2, (0, 1)),
    "dilation": _layer((16, 32), (2, 4, 8), 2, 2, dilation=(1, 2)),
    "groups": _layer((16, 32), (2, 4, 8), 2, 2, groups=2),
    "planes that are no whole vectors": _layer((16, 32), (2, 3, 3), 2, 2),
    "a stride along the depth": _layer((16, 32), (2, 3, 4, 8), 2, 2),
    "columns that are no whole vectors": _layer((16, 3), (2, 4, 8), 2, 2),
}


def _laid(problem, device):
    return sorted(config for config in FUSED.configs(problem, device) if fused_weight_laid.FIRST <= config < fused_groups.CONFIG)


def _tiles(problem, device):
    """Of a problem that has some on a GPU for which they were made."""
    if cuda.module().code_capability(cuda.index(device)) != 90:
        pytest.skip("its tiles are for compute capability 9.0")
    return _laid(problem, device)


def _assert_exact(case, operands, expected, packs, device):
    """Of a problem whose strides are those of these very tensors, the written one too; nothing beside it changes."""
    problem, written = _as_they_lie(WEIGHT, case, operands)
    tiles = _tiles(problem, device)
    assert tiles
    packed = [fused_weight_laid.call(problem, config, cuda.index(device)).work[7] > 0 for config in tiles]
    assert packed == [packs] * len(tiles)
    assert_tiles_are_exact(fused_weight_laid, tiles, problem, operands, written, expected, device)


@HALVES
@EVERY_LAYER
def test_every_tile_is_exact_between_guard_bands(name, dtype, device):
    case, packs = LAYERS[name]
    plain = _operands(WEIGHT, case, dtype, device)
    operands = [shifted(t, GUARD) for t in plain]
    _assert_exact(case, operands, _want(WEIGHT, case, *plain), packs, device)


@HALVES
@pytest.mark.parametrize("name", ["k2 s2", "k2 s2, 14 wide", "k4 s4, odd map", "k4 s2", "k4 s2, 4x4", "planes", "planes, packed"])
def test_slices_are_exact(name, dtype, device):
    """Samples and channels of larger tensors, of whose neighbours, which are NaN, nothing is read."""
    case, packs = LAYERS[name]
    x, w, y = _operands(WEIGHT, case, dtype, device)
    expected = _want(WEIGHT, case, x, w, y)

    def sliced(t):
        room = torch.full((2 * t.shape[0], t.shape[1] + 32, *t.shape[2:]), math.nan, dtype=dtype, device=device)
        return room[::2, 16:-16].copy_(t)

    _assert_exact(case, (sliced(x), w, sliced(y)), expected, packs, device)


@HALVES
@pytest.mark.parametrize(
    "name", ["k2 s2, 14 wide", "k2 s2, long rows", "k4 s4", "k4 s2", "k4 s2, 4x4", "k4 s2, two wide", "planes"]
)
def test_a_bad_gradient_stays_where_taps_carry_it(name, dtype, device):
    case, _ = LAYERS[name]
    operands = _operands(WEIGHT, case, dtype, device)
    tiles = _tiles(_described(WEIGHT, case, *operands), device)
    assert tiles
    _assert_a_bad_gradient_stays(WEIGHT, case, operands, tiles)


@HALVES
@pytest.mark.parametrize("name", ["k2 s2, 14 wide", "k2 s2, many chunks", "k4 s4, odd map", "k4 s2, many chunks", "k4 s2, 4x4"])
def test_results_keep_the_rounding_rule_and_repeat(name, dtype, device):
    case, _ = LAYERS[name]
    (x, w, _), y, expected, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
    tiles = _tiles(_described(WEIGHT, case, x, w, y), device)
    assert tiles
    for config in tiles:
        compute = functools.partial(_result, WEIGHT, case, x, w, y, config)
        check(compute(), expected[1], oracles[1], magnitude[1], f"config {config}")
        assert_repeats_under_load(compute, device, f"config {config}")


@HALVES
@pytest.mark.parametrize("name", ["k2 s2, many chunks", "k4 s2, many chunks"])
def test_parts_of_the_reduction_are_clusters_and_several(name, dtype, device):
    """Of few tiles and many chunks; under a cap that partial sums do not fit clusters alone add up."""
    case, _ = LAYERS[name]
    x, w, y = _operands(WEIGHT, case, dtype, device)
    problem = _described(WEIGHT, case, x, w, y)
    expected = _want(WEIGHT, case, x, w, y)
    for config in _tiles(problem, device):
        _, splits, clusters, *_ = fused_weight_laid.call(problem, config, cuda.index(device)).work
        assert splits * clusters > 8, f"config {config}"
        capped = fused_weight_laid.call(dataclasses.replace(problem, workspace_cap=1), config, cuda.index(device))
        assert (capped.workspace_bytes, capped.work[2], capped.sums) == (0, 1, 0), f"config {config}"
        result = torch.full_like(w, math.nan)
        capped.enqueue(x.data_ptr(), result.data_ptr(), 0, y.data_ptr(), 0, torch.cuda.current_stream(device).cuda_stream)
        assert_exact(result, expected, f"config {config}")


@HALVES
@pytest.mark.parametrize("name", LAYERS)
def test_channels_of_y_are_summed_in_the_same_pass(name, dtype, device):
    """Where kernel and stride are equal and all of y is met; exact in float32, and rounded once. A NaN stays in its channel."""
    case, _ = LAYERS[name]
    x, w, y = _operands(WEIGHT, case, dtype, device)
    expected, clean = _want(WEIGHT, case, x, w, y), y.double().sum(tuple(range(2, y.dim()))).sum(0).to(dtype)
    problem = _described(WEIGHT, case, x, w, y)
    stream = torch.cuda.current_stream(device).cuda_stream
    poisoned = y.clone()
    poisoned[-1, 1] = math.nan
    for config in _tiles(problem, device):
        call = fused_weight_laid.call(problem, config, cuda.index(device))
        covered = all(out == size * step for out, size, step in zip(case.out_size, case.in_size, case.stride))
        assert (call.sums > 0) == (covered and case.kernel_size == case.stride), f"config {config}"
        if call.sums == 0:
            continue
        scratch = torch.full((call.workspace_bytes // 4,), math.nan, device=device)
        for of_y in (y, poisoned):
            result, bias = torch.full_like(w, math.nan), shifted(torch.full_like(clean, math.nan), GUARD)
            call.enqueue(*(t.data_ptr() for t in (x, result, bias, of_y, scratch)), stream)
            assert _surroundings(bias).isnan().all(), f"config {config}"
            bad = of_y.isnan().flatten(2).any(2).any(0)
            assert torch.equal(bias.isnan(), bad), f"config {config}"
            assert torch.equal(bias[~bad], clean[~bad]), f"config {config}"
            assert_exact(result[:, ~bad], expected[:, ~bad.to(expected.device)], f"config {config}")


@HALVES
def test_tiles_beyond_one_round_are_exact(dtype, device):
    """More tiles than multiprocessors, all channels of a real layer."""
    case = _layer((2048, 256), (6, 8, 6), 4, 2, 1)
    x, _, y = (exact_like(shape, 6 * 48, dtype, seed).to(device) for seed, shape in enumerate(_shapes(case)))
    expected = want(case, x, y)
    tiles = _tiles(_described(WEIGHT, case, x, None, y), device)
    assert tiles
    for config in tiles:
        assert_exact(gradient(case, x, y, config), expected, f"config {config}")


def _shapes(case):
    return (
        (case.batch, case.in_channels, *case.in_size),
        (case.in_channels, case.out_channels, *case.kernel_size),
        (case.batch, case.out_channels, *case.out_size),
    )


@HALVES
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_to_others(name, dtype, device):
    case = OTHERS[name]
    assert not _tiles(_described(WEIGHT, case, *_operands(WEIGHT, case, dtype, device)), device)


@pytest.mark.parametrize("behind", "xy")
def test_addresses_within_a_vector_are_left_to_others(behind, device):
    case, _ = LAYERS["k2 s2"]
    x, w, y = (shifted(t, GUARD + (one == behind)) for one, t in zip("xwy", _operands(WEIGHT, case, torch.float16, device)))
    assert not _tiles(_described(WEIGHT, case, x, w, y), device)


def test_floats_are_left_to_others(device):
    case, _ = LAYERS["k2 s2"]
    assert not _tiles(_described(WEIGHT, case, *_operands(WEIGHT, case, torch.float32, device)), device)
