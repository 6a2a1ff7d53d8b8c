"""Tiles of the fused method for windows: small layers with a stride of 1, forward and gradient of the input, in one launch."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from test_fused_groups import GUARD, _as_they_lie, _assert_a_bad_gradient_stays, _layer, _operands, _part
from test_fused_small import assert_tiles_are_exact
from test_fused_weight import DTYPES, FUSED, arguments, shapes, shifted

from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, describe, geometry_arguments, ours, reference, reference_gradients
from test_rounding import backward_case, check, forward_case
from upfold import cases, execute, modes
from upfold.algorithms import cuda, fused_exact, fused_window
from upfold.dispatch import use_config
from upfold.problem import DTYPE_BYTES, Operator, pad_strides

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATORS = pytest.mark.parametrize("operator", [Operator.CONV_TRANSPOSE, Operator.CONV], ids=["forward", "input"])
# Rows of whole vectors and others; tiles of few channels and of many, of one chunk of channels and of several; more tiles than
# the blocks of any GPU take at a time.
LAYERS = {
    "seed 1": dataclasses.replace(cases.find("seed1-asymmetric"), batch=3),
    "3x3": _layer((40, 24), (3, 9, 16), 3, padding=1),
    "5x5, no padding": _layer((16, 70), (2, 7, 8), 5),
    "4x4": _layer((32, 33), (2, 6, 24), 4, padding=1),
    "4x4, padding 3": _layer((24, 40), (2, 9, 16), 4, padding=3),
    "1x1": _layer((64, 130), (2, 24, 16), 1),
    "1x1, padding": _layer((40, 32), (2, 9, 16), 1, padding=1),
    "1x1, one row": _layer((32, 48), (1, 1, 64), 1),
    "odd width": _layer((32, 40), (2, 9, 37), 3, padding=1),
    "odd channels": _layer((33, 21), (3, 5, 19), 3, padding=(0, 1)),
    "8 channels": _layer((8, 8), (3, 6, 8), (3, 5)),
    "many channels": _layer((100, 140), (2, 4, 8), (1, 3), padding=(0, 1)),
    "dilation": _layer((32, 16), (2, 9, 24), (3, 2), padding=(2, 1), dilation=(2, 3)),
    "unlike axes": _layer((16, 48), (2, 3, 40), (1, 7), padding=(0, 2)),
    "width 1": _layer((32, 24), (7, 12, 1), (3, 1)),
    "one pixel": _layer((64, 32), (9, 1, 1), 3),
    "large padding": _layer((16, 24), (2, 12, 20), 3, padding=(4, 5)),
    "64 taps": _layer((16, 16), (2, 10, 16), 8, padding=3),
    "groups": _layer((32, 24), (3, 6, 8), 3, padding=1, groups=3),
    "1-D": _layer((48, 40), (5, 100), 7, padding=3),
    "3-D": _layer((16, 24), (2, 3, 5, 8), 3, padding=1),
    "3-D, unlike axes": _layer((24, 16), (2, 4, 3, 16), (2, 1, 3), padding=(1, 0, 0), dilation=(1, 1, 2)),
    "many small maps": _layer((32, 32), (700, 4, 4), 3, padding=1),
    "many tiles": _layer((16, 300), (8, 30, 40), (3, 1)),
}  # fmt: skip
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
OTHERS = {
    "stride 2": _layer((32, 32), (2, 6, 8), 3, 2, 1),
    "a stride of one axis": _layer((32, 32), (2, 6, 8), 3, (1, 2), 1),
    "few channels": _layer((4, 4), (2, 6, 8), 3),
    "65 taps": _layer((16, 16), (2, 6, 80), (1, 65)),
    "no room": _layer((512, 512), (2, 6, 8), 3),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _want(operator, case, x, w, y):
    if operator is Operator.CONV:
        return reference_gradients((x, w, None), y, case.geometry)[0]
    return reference((x, w, None), case.geometry)


def _problem(operator, case, operands):
    """The problem whose strides are those of these very tensors, the written one too, and that one."""
    if operator is Operator.CONV:
        return _as_they_lie(operator, case, operands)
    x, w, y = operands
    return dataclasses.replace(_forward_problem(case, x, w, None), y_strides=pad_strides(y.stride(), y.shape)), y


def _forward_problem(case, x, w, b):
    return describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))


def _tiles(problem, device):
    return sorted(c for c in FUSED.configs(problem, device) if fused_window.FIRST <= c < fused_exact.FIRST)


def _expected_tiles(case, problem, device):
    """There are some where both forms of 32 channels' weight, in chunks of 64 bytes, leave room for the patch on Hopper."""
    found, size = _tiles(problem, device), DTYPE_BYTES[problem.dtype]
    channels = (case.out_channels if problem.operator is Operator.CONV else case.in_channels) // case.groups
    has_room = 2 * 32 * -(-channels * size // 64) * 64 * math.prod(case.kernel_size) < 160 * 1024
    assert found or not has_room or not _is_hopper(device)
    return found


def _is_hopper(device):
    return cuda.module().code_capability(cuda.index(device)) >= 80 and torch.cuda.get_device_capability(device) == (9, 0)


def _result(operator, case, x, w, y, config):
    """By the functions that layers and a backward call."""
    with use_config(config):
        if operator is Operator.CONV:
            return execute.conv(y, w, case.in_size, arguments(case), "fused")
        return ours((x, w, None), case.geometry, "fused")


def _assert_every_tile_is_exact(operator, case, operands, want, device, what=""):
    problem, written = _problem(operator, case, operands)
    tiles = _expected_tiles(case, problem, device)
    assert_tiles_are_exact(fused_window, tiles, problem, operands, written, want, device, what)


@DTYPES
@OPERATORS
@EVERY_LAYER
def test_every_tile_is_exact_between_guard_bands(name, operator, dtype, device):
    """At addresses of whole vectors, and one element behind them."""
    case = LAYERS[name]
    plain = _operands(operator, case, dtype, device)
    want = _want(operator, case, *plain)
    for behind in (0, 1):
        operands = [shifted(t, GUARD + behind) for t in plain]
        _assert_every_tile_is_exact(operator, case, operands, want, device, f"{behind}")


LAYOUTS = {
    "part": _part,
    "odd part": functools.partial(_part, first=1),
    "every other row": functools.partial(_part, steps=(1, 1, 2)),
    "every third channel": functools.partial(_part, steps=(1, 3)),
    "every other sample": functools.partial(_part, steps=(2,)),
}


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 1", "1x1", "odd channels", "groups", "3-D"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_other_strides_are_exact(layout, name, operator, dtype, device):
    case = LAYERS[name]
    x, w, y = _operands(operator, case, dtype, device)
    want, place = _want(operator, case, x, w, y), LAYOUTS[layout]
    _assert_every_tile_is_exact(operator, case, (place(x), w, place(y)), want, device)


@DTYPES
@EVERY_LAYER
def test_bias_and_output_padding_are_exact(name, dtype, device):
    case = LAYERS[name]
    dilated = tuple(dilation - 1 for dilation in case.geometry.dilation)
    for padding in {dilated, (0,) * len(dilated)}:
        case = dataclasses.replace(case, output_padding=padding)
        operands = case.tensors(dtype, device, exact=True, bias=True)
        want = reference(operands, case.geometry)
        for config in _expected_tiles(case, _forward_problem(case, *operands), device):
            with use_config(config):
                assert_exact(ours(operands, case.geometry, "fused"), want, f"config {config}, {padding}")


@DTYPES
@pytest.mark.parametrize("activation", ["relu", "silu", "tanh", "leaky_relu"])
def test_activations_follow(activation, dtype, device):
    case = LAYERS["odd channels"]
    operands = case.tensors(dtype, device, bias=True)
    want = ours(operands, case.geometry, "gemm", activation=activation)
    for config in _expected_tiles(case, _forward_problem(case, *operands), device):
        with use_config(config):
            got = ours(operands, case.geometry, "fused", activation=activation)
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-2, atol=1e-2)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 1", "odd channels", "large padding", "1-D", "3-D", "many small maps"])
def test_a_bad_value_stays_where_taps_carry_it(name, operator, dtype, device):
    """Positions behind the end of a row read those of the next one, and are not stored."""
    case = LAYERS[name]
    operands = _operands(operator, case, dtype, device)
    tiles = _expected_tiles(case, _problem(operator, case, operands)[0], device)
    if operator is Operator.CONV:
        _assert_a_bad_gradient_stays(operator, case, operands, tiles)
        return
    x, w, y = operands
    clean = {config: _result(operator, case, x, w, y, config).cpu() for config in tiles}
    last = [size - 1 for size in case.in_size]
    for place in ([0] * len(last), last, [size // 2 for size in last], [0, *last[1:]], [*last[:-1], 0]):
        index = (case.batch - 1, case.in_channels // 2, *place)
        mark, poisoned = torch.zeros_like(x), x.clone()
        mark[index], poisoned[index] = 1, math.nan
        reached = reference((mark, torch.ones_like(w), None), case.geometry) > 0
        for config in tiles:
            dirty = _result(operator, case, poisoned, w, y, config).cpu()
            assert torch.equal(dirty[~reached], clean[config][~reached]), f"config {config}, {place}"
            assert dirty[reached].isnan().all(), f"config {config}, {place}"


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 1", "1x1", "odd channels", "many channels", "many tiles"])
def test_results_keep_the_rounding_rule_and_repeat(name, operator, dtype, device):
    case = LAYERS[name]
    if operator is Operator.CONV:
        (x, w, _), y, want, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
        want, oracle, magnitude = want[0], oracles[0], magnitude[0]
    else:
        (x, w, _), want, magnitude, oracle = forward_case.__wrapped__(dataclasses.replace(case, bias=False), dtype, device)
        y = torch.empty(shapes(case)[1], dtype=dtype, device=device)
    for config in _expected_tiles(case, _problem(operator, case, (x, w, y))[0], device):
        got = _result(operator, case, x, w, y, config)
        check(got, want, oracle, magnitude, f"config {config}")
        assert_repeats_under_load(functools.partial(_result, operator, case, x, w, y, config), device, f"config {config}")


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_not_taken(name, operator, dtype, device):
    case = OTHERS[name]
    assert not _tiles(_problem(operator, case, _operands(operator, case, dtype, device))[0], device)


@DTYPES
@OPERATORS
def test_channels_that_are_innermost_are_left_to_others(operator, dtype, device):
    case = LAYERS["3x3"]
    operands = _operands(operator, case, dtype, device)
    for which in "xwy":
        laid = [modes.in_layout(t, "channels_last") if one == which else t for one, t in zip("xwy", operands)]
        assert not _tiles(_problem(operator, case, laid)[0], device), which


@DTYPES
@OPERATORS
def test_full_float32_is_left_to_others(operator, dtype, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    problem = _problem(operator, LAYERS["3x3"], _operands(operator, LAYERS["3x3"], dtype, device))[0]
    taken = FUSED.reject(problem, device) is None and bool(_tiles(problem, device))
    assert taken == (DTYPE_BYTES[dtype] == 2)


@DTYPES
def test_an_empty_batch_has_nothing_to_do(dtype, device):
    case = dataclasses.replace(LAYERS["3x3"], batch=0)
    x, w, b = case.tensors(dtype, device)
    for config in _expected_tiles(case, _forward_problem(case, x, w, b), device):
        with use_config(config):
            assert ours((x, w, b), case.geometry, "fused").shape == (0, case.out_channels, *case.out_size)
