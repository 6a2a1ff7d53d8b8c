"""The fused gradients of layers with few channels in a group, of the input and of the weight, on tensors as they lie."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from test_fused_weight import DTYPES, FUSED, arguments, gradient, layer, shapes, shifted

import upfold
from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, describe, exact_like, reference, reference_gradients
from test_rounding import backward_case, check
from upfold import cases, execute, modes
from upfold.algorithms import cuda, fused_groups, fused_point
from upfold.dispatch import use_config
from upfold.problem import Operator, pad_strides

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
# Which of x, w and y an operator writes.
WRITTEN = {Operator.CONV: 0, Operator.CONV_TRANSPOSE_WEIGHT: 1}
OPERATORS = pytest.mark.parametrize("operator", WRITTEN, ids=["input", "weight"])
GUARD = 256  # elements
MANY_TAPS = 64  # more need not fit: sums of the gradient of the weight in registers, else all weights in shared memory
SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))  # multiprocessors with 100 KiB of shared memory: too little for some tiles


def _layer(channels, size, kernel, stride=1, padding=0, dilation=1, output_padding=0, groups=1):
    """Channels of a group, then batch and map; of the others one number, or one for each axis."""
    axes = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    axes = {name: value if isinstance(value, tuple) else (value,) * len(size[1:]) for name, value in axes.items()}
    of_all = {"in_channels": channels[0] * groups, "out_channels": channels[1] * groups, "groups": groups}
    return layer(batch=size[0], in_size=size[1:], **of_all, **axes)


def _seed(batch, size):
    return dataclasses.replace(cases.find("seed0-grouped-dilated"), batch=batch, in_size=size)


LAYERS = {
    "seed 0": _seed(2, (9, 20)),
    "seed 0, odd map": _seed(1, (33, 70)),
    "seed 0, whole segments": _seed(3, (16, 64)),
    "width 1": _layer((2, 4), (3, 7, 1), 4, 2, 1),
    "width 7, stride 1": _layer((3, 5), (2, 9, 7), 3, padding=1, groups=3),
    "width 15, output padding": _layer((8, 16), (2, 6, 15), 3, 2, 1, output_padding=1),
    "width 17": _layer((16, 8), (2, 5, 17), 4, 2, 1, groups=3),
    "width 37, odd output": _layer((16, 16), (1, 5, 37), 3, 2, 1),
    "width 300": _layer((2, 4), (2, 3, 300), 3, 2, 1),
    "height 150": _layer((4, 2), (1, 150, 5), 4, 2, 1, groups=3),
    "stride 1": _layer((8, 16), (2, 10, 36), (3, 5), padding=(1, 2), groups=3),
    "stride 3, dilation 2": _layer((8, 8), (2, 5, 18), 3, 3, 1, 2, groups=8),
    "stride 2, dilation 2": _layer((4, 2), (2, 6, 21), 3, 2, 1, 2, groups=3),
    "stride 4": _layer((3, 5), (2, 5, 19), 3, 4, groups=3),
    "equal, output padding": _layer((16, 8), (2, 6, 16), 2, 2, output_padding=1),
    "large padding": _layer((8, 16), (2, 9, 20), 3, 2, (5, 7), groups=3),
    "unlike axes": _layer((2, 4), (2, 7, 18), (3, 4), (2, 3), (1, 2), (3, 2), (1, 0), groups=3),
    "one input channel": _layer((1, 16), (2, 6, 21), 4, 2, 1, groups=3),
    "one output channel": _layer((16, 1), (2, 6, 21), 4, 2, 1, groups=8),
    "depthwise": _layer((1, 1), (2, 6, 32), 4, 2, 1, groups=8),
    "one tap, stride 3": _layer((8, 16), (2, 6, 18), 1, 3, output_padding=2, groups=3),
    "one pixel": _layer((8, 16), (5, 1, 1), 4, groups=3),
    "1-D": _layer((8, 16), (3, 75), 16, 8, 4, groups=3),
    "1-D, odd channels": _layer((3, 5), (2, 41), 7, 3, 2, groups=3),
    "3-D": _layer((8, 16), (2, 3, 5, 9), 3, 2, 1, output_padding=1),
    "3-D, unlike axes": _layer((3, 5), (2, 4, 3, 17), (2, 3, 4), (1, 2, 3), (1, 0, 2), (2, 1, 1), groups=2),
    "11x11": _layer((4, 3), (1, 13, 22), 11, padding=5),
    "64 taps": _layer((4, 3), (1, 13, 22), 8, padding=3),
    "32 taps of 16 channels": _layer((16, 16), (1, 9, 20), (4, 8), padding=(1, 3)),
    "128 taps": _layer((3, 2), (2, 40), 128, padding=60, groups=3),
    "many tiles of rows": _seed(40, (20, 40)),
    "many small maps": _layer((8, 16), (700, 5, 6), 3, 2, 1, groups=3),
}


# More channels: those of x in whole vectors, for the gradient of the weight, and up to 64 of them for that alone.
WIDE = {
    "32 channels": _layer((32, 32), (2, 9, 24), 3),
    "width 72": _layer((32, 32), (2, 40, 72), 3, padding=1),
    "20 to 9": _layer((20, 9), (3, 5, 40), 3, 2, 1, groups=2),
    "9 to 20": _layer((9, 20), (3, 5, 16), (3, 5), (2, 3), (1, 2), (2, 1), groups=3),
    "64 to 32": _layer((64, 32), (2, 7, 48), 2, 2),
    "40 to 17": _layer((40, 17), (2, 5, 8), 4, 2, 1, groups=2),
    "one row": _layer((64, 5), (2, 1, 16), 4, 2, 1),
    "1-D, wide": _layer((24, 24), (3, 80), 16, 8, 4),
    "3-D, wide": _layer((64, 32), (1, 3, 4, 16), 2, 2),
    "many small maps, wide": _layer((32, 32), (300, 4, 8), 4, 2, 1),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _operands(operator, case, dtype, device):
    """x, w and y (its gradient), so few integers that every partial sum of the operator is exact."""
    x_shape, y_shape = shapes(case)
    w_shape = (case.in_channels, case.out_channels // case.groups, *case.kernel_size)
    terms = {
        Operator.CONV_TRANSPOSE: case.in_channels // case.groups * math.prod(case.kernel_size),
        Operator.CONV: math.prod(w_shape[1:]),
        Operator.CONV_TRANSPOSE_WEIGHT: case.batch * math.prod(case.in_size),
    }[operator]
    return tuple(exact_like(shape, terms, dtype, seed).to(device) for seed, shape in enumerate((x_shape, w_shape, y_shape)))


def _want(operator, case, x, w, y):
    return reference_gradients((x, w, None), y, case.geometry)[WRITTEN[operator]]


def _described(operator, case, x, w, y):
    """The problem that the package makes of the operands, with a result of its own."""
    if operator is Operator.CONV:
        return execute.describe_conv(y, w, case.in_size, arguments(case))[0]
    return execute.describe_conv_transpose_weight(x, y, case.kernel_size, arguments(case))[0]


def _of_groups(problem, device):
    return [config for config in FUSED.configs(problem, device) if fused_groups.CONFIG <= config < fused_point.FIRST]


def _tiles(problem, device):
    """Those of groups: there is one wherever the device has them, but for many taps."""
    found = _of_groups(problem, device)
    if not found and problem.taps <= MANY_TAPS:
        assert cuda.module().code_capability(cuda.index(device)) < 80 or torch.cuda.get_device_capability(device) in SMALL
    return found or pytest.skip("no tile of groups takes it here")


def _result(operator, case, x, w, y, config):
    """By the functions that a backward calls."""
    if operator is Operator.CONV_TRANSPOSE_WEIGHT:
        return gradient(case, x, y, config)
    with use_config(config):
        return execute.conv(y, w, case.in_size, arguments(case), "fused")


def _surroundings(t):
    """The elements of its memory that a tensor does not have."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(False)
    return memory[outside]


def _as_they_lie(operator, case, operands):
    """The problem whose strides are those of these very tensors, the written one too, and that one."""
    strides = {f"{letter}_strides": pad_strides(t.stride(), t.shape) for letter, t in zip("xwy", operands)}
    return dataclasses.replace(_described(operator, case, *operands), **strides), operands[WRITTEN[operator]]


def _assert_every_tile_is_exact(operator, case, operands, want, device, what=""):
    """Of a problem whose strides are those of these very tensors, the written one too."""
    problem, written = _as_they_lie(operator, case, operands)
    for config in _tiles(problem, device):
        call = fused_groups.call(problem, cuda.index(device))
        scratch = shifted(torch.full((-(-call.workspace_bytes // 4),), math.nan, device=device), GUARD)
        written.fill_(math.nan)
        x, w, y = (t.data_ptr() for t in operands)
        call.enqueue(x, w, 0, y, scratch.data_ptr(), torch.cuda.current_stream(device).cuda_stream)
        assert_exact(written, want, f"{what} config {config}")
        for t in (written, scratch):
            assert _surroundings(t).isnan().all(), f"{what} config {config}"


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", LAYERS)
def test_every_tile_is_exact_between_guard_bands(name, operator, dtype, device):
    """At aligned addresses, and with one of x, w and y or all of them one element behind."""
    case = LAYERS[name]
    plain = _operands(operator, case, dtype, device)
    want = _want(operator, case, *plain)
    for behind in ("", "x", "w", "y", "xwy"):
        operands = [shifted(t, GUARD + (one in behind)) for one, t in zip("xwy", plain)]
        _assert_every_tile_is_exact(operator, case, operands, want, device, behind)


def _part(t, first=8, steps=(), last=False):
    """The same numbers in a larger tensor of NaN: from index `first` of each axis, every one or, in `steps`, every so many."""
    taken = [(size, steps[axis] if axis < len(steps) else 1) for axis, size in enumerate(t.shape)]
    room = torch.full([size * step + 2 * first for size, step in taken], math.nan, dtype=t.dtype, device=t.device)
    room = modes.in_layout(room, "channels_last" if last else "contiguous")
    return room[tuple(slice(first, first + size * step, step) for size, step in taken)].copy_(t)


LAYOUTS = {
    "channels_last": lambda t: modes.in_layout(t, "channels_last"),
    "part": _part,
    "part of channels_last": functools.partial(_part, last=True),
    "odd part": functools.partial(_part, first=1),
    "every other row": functools.partial(_part, steps=(1, 1, 2)),
    "every other column": functools.partial(_part, steps=(1, 1, 1, 2)),
    "every third channel": functools.partial(_part, first=2, steps=(1, 3)),
    "every other of all": functools.partial(_part, first=1, steps=(2, 2, 2, 2, 2), last=True),
}


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 0", "many small maps", "width 7, stride 1", "width 37, odd output", "1-D", "3-D"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_strides_are_exact(layout, name, operator, dtype, device):
    """Each of x, w and y, then all; what lies beside them is NaN, and stays so."""
    case = LAYERS[name]
    plain = _operands(operator, case, dtype, device)
    want = _want(operator, case, *plain)
    for which in ("x", "w", "y", "xwy"):
        operands = [LAYOUTS[layout](t) if one in which else t for one, t in zip("xwy", plain)]
        _assert_every_tile_is_exact(operator, case, operands, want, device, which)


@DTYPES
@OPERATORS
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["stride 2, dilation 2", "stride 4", "equal, output padding", "one tap, stride 3"])
def test_what_no_tap_reaches_is_left_out(name, bad, operator, dtype, device):
    case = LAYERS[name]
    x, w, y = _operands(operator, case, dtype, device)
    want = _want(operator, case, x, w, y)
    missed = reference((torch.ones_like(x), torch.ones_like(w), None), case.geometry) == 0
    assert missed.any()
    y.masked_fill_(missed.to(device), bad)
    _assert_every_tile_is_exact(operator, case, (x, w, y), want, device)


def _assert_a_bad_gradient_stays(operator, case, operands, tiles):
    """At corners and in the middle of a channel a NaN reaches what taps carry it to, by every tile, and nothing else changes."""
    x, w, y = operands
    ones, last = (torch.ones_like(x), torch.ones_like(w)), [size - 1 for size in case.out_size]
    clean = {config: _result(operator, case, x, w, y, config).cpu() for config in tiles}
    for place in ([0] * len(last), last, [size // 2 for size in last], [0, *last[1:]], [*last[:-1], 0]):
        index = (case.batch - 1, case.out_channels // 2, *place)
        mark, poisoned = torch.zeros_like(y), y.clone()
        mark[index], poisoned[index] = 1, math.nan
        reached = _want(operator, case, *ones, mark) > 0
        for config in tiles:
            dirty = _result(operator, case, x, w, poisoned, config).cpu()
            assert torch.equal(dirty[~reached], clean[config][~reached]), f"config {config}, {place}"
            assert dirty[reached].isnan().all(), f"config {config}, {place}"


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 0", "width 17", "width 15, output padding", "stride 1", "1-D, odd channels", "3-D"])
def test_a_bad_gradient_stays_where_taps_carry_it(name, operator, dtype, device):
    """Behind the last inputs of a row there are none to multiply it."""
    case = LAYERS[name]
    operands = _operands(operator, case, dtype, device)
    _assert_a_bad_gradient_stays(operator, case, operands, _tiles(_described(operator, case, *operands), device))


@DTYPES
@OPERATORS
@pytest.mark.parametrize(
    "name", ["seed 0, odd map", "width 17", "one output channel", "3-D", "64 taps", "many small maps", "width 72", "20 to 9"]
)
def test_results_keep_the_rounding_rule(name, operator, dtype, device):
    case, index = (LAYERS | WIDE)[name], WRITTEN[operator]
    (x, w, _), y, want, magnitude, oracles = backward_case.__wrapped__(case, dtype, device)
    for config in _tiles(_described(operator, case, x, w, y), device):
        got = _result(operator, case, x, w, y, config)
        check(got, want[index], oracles[index], magnitude[index], f"config {config}")


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", ["seed 0", "many small maps"])
def test_results_repeat_bit_by_bit_under_load(name, operator, dtype, device):
    case = cases.find("seed0-grouped-dilated").scaled(2.0) if name == "seed 0" else LAYERS[name]
    x, w, _ = case.tensors(dtype, device, seed=3)
    y = torch.randn(shapes(case)[1], generator=torch.Generator().manual_seed(4)).to(device, dtype)
    for config in _tiles(_described(operator, case, x, w, y), device):
        compute = functools.partial(_result, operator, case, x, w, y, config)
        assert_repeats_under_load(compute, device, f"config {config}")


@DTYPES
@OPERATORS
@pytest.mark.parametrize("name", WIDE)
def test_wide_groups_are_exact_and_repeat(name, operator, dtype, device):
    case = WIDE[name]
    x, w, y = _operands(operator, case, dtype, device)
    want, problem = _want(operator, case, x, w, y), _described(operator, case, x, w, y)
    if operator is Operator.CONV and case.in_channels // case.groups > 32:
        assert not _of_groups(problem, device)
        return
    _assert_every_tile_is_exact(operator, case, [shifted(t, GUARD) for t in (x, w, y)], want, device)
    for config in _tiles(problem, device):
        rough = [torch.randn_like(t) for t in (x, w, y)]
        first = _result(operator, case, *rough, config)
        assert torch.equal(_result(operator, case, *rough, config), first), f"config {config}"


@DTYPES
def test_a_small_cap_leaves_fewer_parts_or_no_tile(dtype, device):
    case, operator = LAYERS["many small maps"], Operator.CONV_TRANSPOSE_WEIGHT
    x, w, y = _operands(operator, case, dtype, device)
    want, needed = _want(operator, case, x, w, y), []
    _tiles(_described(operator, case, x, w, y), device)
    for megabytes in (0.01, 0.05, 0.5, 64):  # a part takes 0.013
        with upfold.use(workspace_mb=megabytes):
            problem = _described(operator, case, x, w, y)
            needed.append([FUSED.workspace_bytes(problem, config, device) for config in _of_groups(problem, device)])
            assert all(0 < size <= megabytes * 2**20 for size in needed[-1])
            for config in _of_groups(problem, device):
                assert_exact(gradient(case, x, y, config), want, f"config {config}")
    assert needed[0] == []
    assert needed[1] < needed[2] < needed[3]


@OPERATORS
def test_an_empty_batch_is_left_to_others(operator, device):
    case = LAYERS["seed 0"]
    x, w, y = _operands(operator, dataclasses.replace(case, batch=0), torch.float32, device)
    problem = _described(operator, case, x, w, y)
    assert not _of_groups(problem, device)
    assert operator is Operator.CONV or "empty batch" in FUSED.reject(problem, device)
    got = _result(operator, case, x, w, y, None)
    assert got.shape == (x, w)[WRITTEN[operator]].shape
    assert not got.any()


@DTYPES
@OPERATORS
@pytest.mark.parametrize("channels, kernel", [((65, 8), 3), ((8, 33), 3), ((3, 2), (3, 43)), ((4, 3), (11, 12))], ids=str)
def test_larger_groups_and_kernels_have_no_tile(channels, kernel, operator, dtype, device):
    case = _layer(channels, (2, 9, 60), kernel, 2, 1, groups=3)
    assert not _of_groups(_described(operator, case, *_operands(operator, case, dtype, device)), device)


@OPERATORS
def test_full_float32_and_the_forward_have_no_tile(operator, device):
    case = LAYERS["seed 0"]
    x, w, y = _operands(operator, case, torch.float32, device)
    assert not _of_groups(dataclasses.replace(_described(operator, case, x, w, y), allow_tf32=False), device)
    assert not _of_groups(describe(x, w, None, arguments(case)), device)
