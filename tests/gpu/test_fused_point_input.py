"""The gradient of the input of maps of one pixel: exact, rounded once, alone in what it writes, the same on every run."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from test_fused_groups import GUARD, _as_they_lie, _described, _layer, _operands, _part, _result, _want
from test_fused_point import INNERMOST
from test_fused_small import assert_tiles_are_exact
from test_fused_weight import DTYPES, FUSED, shifted

from gpu import assert_repeats_under_load, missing
from test_rounding import backward_case, check
from upfold import modes
from upfold.algorithms import fused_point_input
from upfold.problem import Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
LAYERS = {
    "pix2pix": dataclasses.replace(INNERMOST, in_channels=130, out_channels=96),
    "pix2pix, some samples": dataclasses.replace(INNERMOST, in_channels=41, out_channels=40, batch=3),
    "many columns": dataclasses.replace(INNERMOST, in_channels=3, out_channels=1100, batch=2),
    "one channel": dataclasses.replace(INNERMOST, in_channels=1, out_channels=8),
    "groups": dataclasses.replace(INNERMOST, in_channels=66, out_channels=24, groups=3, batch=5),
    "3x3, rows of no whole channels": _layer((20, 8), (6, 1, 1), 3),
    "dilation": _layer((20, 16), (2, 1, 1), 4, dilation=2, padding=1),
    "padding": _layer((20, 16), (2, 1, 1), 4, padding=(0, 1)),
    "output padding": _layer((20, 16), (2, 1, 1), 2, 3, output_padding=2),
    "1-D": _layer((48, 24), (9, 1), 16, 8, 4),
    "3-D": _layer((40, 24), (2, 1, 1, 1), 2, 2),
    "many taps": _layer((6, 8), (1, 1, 1), (60, 50), padding=(3, 1)),
}  # fmt: skip
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def _fits(problem, device):
    return fused_point_input.FIRST in FUSED.configs(problem, device)


def _assert_exact(case, operands, want, device, what=""):
    """Of a problem whose strides are those of these very tensors, the written one too; nothing beside it changes."""
    problem, written = _as_they_lie(Operator.CONV, case, operands)
    assert _fits(problem, device), what
    tiles = [fused_point_input.FIRST]
    assert_tiles_are_exact(fused_point_input, tiles, problem, operands, written, want, device, what)


@DTYPES
@EVERY_LAYER
def test_every_layer_is_exact_between_guard_bands(name, dtype, device):
    case = LAYERS[name]
    plain = _operands(Operator.CONV, case, dtype, device)
    _assert_exact(case, [shifted(t, GUARD) for t in plain], _want(Operator.CONV, case, *plain), device)


@DTYPES
@pytest.mark.parametrize("name", ["pix2pix, some samples", "groups", "dilation", "1-D", "3-D"])
@pytest.mark.parametrize("last", [False, True], ids=["part", "part of channels_last"])
def test_parts_of_larger_tensors_are_exact(last, name, dtype, device):
    """x and y, of whose neighbours, which are NaN, nothing is read."""
    case = LAYERS[name]
    x, w, y = _operands(Operator.CONV, case, dtype, device)
    want = _want(Operator.CONV, case, x, w, y)
    _assert_exact(case, (_part(x, last=last), w, _part(y, last=last)), want, device)


@DTYPES
@pytest.mark.parametrize("name", ["pix2pix", "many columns", "groups", "3x3, rows of no whole channels"])
def test_results_keep_the_rounding_rule_and_repeat(name, dtype, device, monkeypatch):
    """As float32 rounds, whether TF32 is allowed or not."""
    case = LAYERS[name]
    for tf32 in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        (x, w, _), y, want, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
        assert _fits(_described(Operator.CONV, case, x, w, y), device)
        compute = functools.partial(_result, Operator.CONV, case, x, w, y, fused_point_input.FIRST)
        check(compute(), want[0], oracles[0], magnitude[0])
        assert_repeats_under_load(compute, device, f"tf32 {tf32}")


@DTYPES
def test_what_no_tap_reaches_is_left_out(dtype, device):
    """Outputs of the output padding have no tap."""
    case = LAYERS["output padding"]
    x, w, y = _operands(Operator.CONV, case, dtype, device)
    want = _want(Operator.CONV, case, x, w, y)
    y[..., 2:, :] = math.nan
    y[..., 2:] = math.inf
    _assert_exact(case, (x, w, y), want, device)


@DTYPES
def test_other_layers_are_left_to_others(dtype, device):
    case = LAYERS["pix2pix"]
    for other in (dataclasses.replace(case, in_size=(1, 2)), dataclasses.replace(case, out_channels=3, kernel_size=(3, 3))):
        assert not _fits(_described(Operator.CONV, other, *_operands(Operator.CONV, other, dtype, device)), device)
    x, w, y = _operands(Operator.CONV, case, dtype, device)
    assert not _fits(_described(Operator.CONV, case, x, modes.in_layout(w, "channels_last"), y), device)
    assert not _fits(_described(Operator.CONV, case, x, shifted(w, 1), y), device)
