"""Every tile choice of the fused gradient of the weight on a GPU, against torch in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import upfold
from gpu import missing
from oracle import assert_exact, dtype_name, error_figure, exact_like, geometry_arguments, reference_gradients
from test_rounding import compute_type
from upfold import cases, dispatch, execute, modes
from upfold.algorithms import REGISTRY, cuda, fused_weight, fused_weight_last
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
# Cut to a size that the reference computes in no time.
LIMIT = 0.02
LAYOUTS = ("contiguous", "channels_last")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def arguments(case):
    return tuple(geometry_arguments(case.geometry).values())


def describe(case, x, g):
    return execute.describe_conv_transpose_weight(x, g, case.kernel_size, arguments(case))[0]


def gradient(case, x, g, config=None):
    if config is None:
        return execute.conv_transpose_weight(x, g, case.kernel_size, arguments(case), "fused")
    with use_config(config):
        return execute.conv_transpose_weight(x, g, case.kernel_size, arguments(case), "fused")


def shapes(case):
    return (case.batch, case.in_channels, *case.in_size), (case.batch, case.out_channels, *case.out_size)


def exact_operands(case, dtype, device):
    """x and the gradient of the output, so few integers that every partial sum is exact."""
    x_shape, g_shape = shapes(case)
    terms = case.batch * math.prod(case.in_size)
    return exact_like(x_shape, terms, dtype, 1).to(device), exact_like(g_shape, terms, dtype, 2).to(device)


def want(case, x, g):
    w = torch.zeros(case.in_channels, case.out_channels // case.groups, *case.kernel_size)
    return reference_gradients((x, w, None), g, case.geometry)[1]


def configs(case, x, g, device):
    """The tiles of these operands; refusals skip the test."""
    problem = describe(case, x, g)
    refusal = FUSED.reject(problem, device)
    if refusal is not None:
        pytest.skip(refusal)
    return FUSED.configs(problem, device)


def shifted(t, elements):
    """The same tensor, so many elements behind an aligned address, between numbers that no sum may meet."""
    memory = torch.full((t.numel() + elements + 64,), math.nan, dtype=t.dtype, device=t.device)
    moved = memory[elements : elements + t.numel()].view(t.shape)
    return moved.copy_(t)


@DTYPES
@pytest.mark.parametrize("layouts", [(x, g) for x in LAYOUTS for g in LAYOUTS], ids="{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_tile_is_exact(case, layouts, dtype, device):
    """Of tensors whose channels are innermost copies as planes are made first, where there are tiles for planes alone."""
    case = case.scaled(LIMIT)
    x, g = exact_operands(case, dtype, device)
    if "channels_last" in layouts and case.ndim == 1:
        pytest.skip("tensors with one spatial axis have no channels_last")
    x, g = (modes.in_layout(t, layout) for t, layout in zip((x, g), layouts))
    tiles, expected = configs(case, x, g, device), want(case, x, g)
    for config in tiles:
        assert_exact(gradient(case, x, g, config), expected, f"config {config}")


@DTYPES
@pytest.mark.parametrize(
    "name", ["unet-128-64@256", "maskrcnn-256-256@14", "dcgan-128-64@16", "seed3-wide-kernel", "dpt-256-256@37"]
)
@pytest.mark.parametrize("elements", [1, 2, 4])
def test_any_alignment(elements, name, dtype, device):
    """Copies are of 2 to 16 bytes, by the address; what lies before and behind the operands is not read."""
    case = cases.find(name).scaled(LIMIT)
    x, g = (shifted(t, elements) for t in exact_operands(case, dtype, device))
    expected = want(case, x, g)
    for config in configs(case, x, g, device):
        assert_exact(gradient(case, x, g, config), expected, f"config {config}")


def layer(**fields):
    """A small layer, 2-D unless its fields say otherwise."""
    plain = {"batch": 2, "padding": (0, 0), "output_padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return dataclasses.replace(cases.find("k2s2"), **{**plain, **fields})


def box_tiles(case, x, g, device):
    """The tiles whose operands the copy engine brings, with the bytes that they pack first; skips where there is none."""
    if cuda.module().code_capability(cuda.index(device)) < 90:
        pytest.skip("compute capability 9.0 brought the copy engine")
    problem = describe(case, x, g)
    own = [config for config in FUSED.configs(problem, device) if config < fused_weight_last.FIRST]
    tiles = [config for config in own if cuda.module().fused_weight_tiles()[config][4]]
    return {config: fused_weight.call(problem, config, cuda.index(device)).work[4] for config in tiles}


# Rows of x and y at multiples of 16 bytes, in pieces of some boxes and of one; rows of x as one run of pixels; x, y, both packed,
# of which rows of 16-bit y also begin at multiples of 4 or 8 bytes, in wide and narrow maps, with taps that overlap. Where those
# that a row of x meets are whole vectors together, they are one to the copy engine, and narrow maps are: x alone is packed, if at
# all, by wide tiles (None: by others both).
BOXED = {
    "rows": (layer(in_channels=130, out_channels=40, in_size=(3, 48), kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)), False),
    "narrow": (layer(in_channels=64, out_channels=20, in_size=(5, 8), kernel_size=(2, 2), stride=(2, 2)), False),
    "run": (layer(in_channels=160, out_channels=40, in_size=(6, 28), kernel_size=(2, 2), stride=(2, 2)), False),
    "x": (layer(in_channels=24, out_channels=16, in_size=(5, 37), kernel_size=(8, 8), stride=(8, 8)), True),
    "y": (layer(in_channels=24, out_channels=16, in_size=(5, 16), kernel_size=(3, 3), stride=(1, 1)), True),
    "both": (layer(in_channels=70, out_channels=3, in_size=(4, 13), kernel_size=(3, 3), stride=(2, 2)), True),
    "columns": (layer(in_channels=70, out_channels=40, in_size=(5, 14), kernel_size=(2, 2), stride=(2, 2)), True),
    "narrow columns": (layer(in_channels=150, out_channels=20, in_size=(5, 6), kernel_size=(2, 2), stride=(2, 2)), True),
    "odd columns": (layer(in_channels=40, out_channels=70, in_size=(5, 37), kernel_size=(4, 4), stride=(4, 4)), True),
    "wide columns": (layer(in_channels=40, out_channels=20, in_size=(3, 150), kernel_size=(2, 2), stride=(2, 2)), True),
    "fours": (layer(in_channels=140, out_channels=40, in_size=(4, 30), kernel_size=(4, 4), stride=(4, 4)), False),
    "twice fours": (
        layer(in_channels=70, out_channels=24, in_size=(4, 25), kernel_size=(8, 8), stride=(4, 4), padding=(4, 4)),
        True,
    ),
    "fours far apart": (
        layer(in_channels=24, out_channels=70, in_size=(5, 16), kernel_size=(3, 7), stride=(4, 8), output_padding=(0, 1)),
        False,
    ),
    "maps of fours": (layer(in_channels=150, out_channels=40, in_size=(6, 8), kernel_size=(4, 4), stride=(4, 4)), False),
    "cut maps of fours": (
        layer(in_channels=40, out_channels=40, in_size=(9, 7), kernel_size=(4, 4), stride=(4, 4), batch=9),
        True,
    ),
    "columns behind": (
        layer(in_channels=70, out_channels=40, in_size=(5, 16), kernel_size=(4, 4), stride=(4, 4), output_padding=(0, 2)),
        None,
    ),
    "maps": (layer(in_channels=150, out_channels=40, in_size=(6, 16), kernel_size=(2, 2), stride=(2, 2)), False),
    "tall maps": (layer(in_channels=70, out_channels=70, in_size=(61, 8), kernel_size=(2, 2), stride=(2, 2)), False),
    "dilated maps": (
        layer(in_channels=64, out_channels=40, in_size=(5, 16), kernel_size=(2, 2), stride=(3, 3), dilation=(2, 2)),
        False,
    ),
    "cut maps": (layer(in_channels=64, out_channels=40, in_size=(9, 14), kernel_size=(2, 2), stride=(2, 2), batch=9), True),
    "columns apart": (layer(in_channels=40, out_channels=40, in_size=(4, 13), kernel_size=(2, 1), stride=(2, 2)), True),
    "columns of depth": (
        dataclasses.replace(cases.find("3d-k2s2"), batch=2, in_channels=70, out_channels=20, in_size=(3, 3, 14)),
        True,
    ),
    "overlapping columns": (
        layer(in_channels=33, out_channels=17, in_size=(3, 13), kernel_size=(3, 3), stride=(2, 2), output_padding=(1, 1)),
        True,
    ),
}

# Of two axes, kernel and stride equal: elsewhere pixels behind a row, which are zeros, meet columns that exist.
EQUAL = [what for what, (case, _) in BOXED.items() if case.kernel_size == case.stride and case.ndim == 2]


@DTYPES
@pytest.mark.parametrize("what", BOXED)
def test_boxes_are_exact(what, dtype, device):
    case, packs = BOXED[what]
    x, g = exact_operands(case, dtype, device)
    tiles, expected = box_tiles(case, x, g, device), want(case, x, g)
    assert tiles
    for config, packed in tiles.items():
        wide = cuda.module().fused_weight_tiles()[config][2] >= fused_weight.WIDE_CHANNELS
        assert (packed > 0) == (not wide if packs is None else packs), f"config {config}"
        assert_exact(gradient(case, x, g, config), expected, f"config {config}")


def test_a_nan_stays_in_its_channel_where_boxes_end_in_neighbours(device):
    """In a run of rows a box holds pixels of the rows before and behind."""
    case = BOXED["run"][0]
    case = dataclasses.replace(case, in_size=(6, 14))
    x, g = exact_operands(case, torch.float32, device)
    expected = want(case, x, g)
    x[1, 5, 2, 13] = x[0, 9, 3, 0] = math.nan
    for config in box_tiles(case, x, g, device):
        got = gradient(case, x, g, config).cpu()
        assert got[[5, 9]].isnan().all(), config
        rest = [channel for channel in range(case.in_channels) if channel not in (5, 9)]
        assert torch.equal(got[rest].double(), expected[rest]), config


@pytest.mark.parametrize("what", EQUAL)
def test_a_nan_of_the_gradient_stays_with_its_tap(what, device):
    """Rows of the gradient that are no whole vectors are packed by words that hold columns of other rows too, or cut."""
    case = BOXED[what][0]
    x, g = exact_operands(case, torch.bfloat16, device)
    expected = want(case, x, g)
    reached = torch.zeros(expected.shape, dtype=torch.bool)
    for sample, channel, row, column in (
        (0, 3, 0, 0),
        (1, 5, 2, 0),
        (1, 7, 3, case.out_size[1] - 1),
        (0, 9, case.out_size[0] - 1, 1),
    ):
        g[sample, channel, row, column] = math.nan
        for kh in range(case.kernel_size[0]):
            for kw in range(case.kernel_size[1]):
                ih, iw = (row - kh) / case.stride[0], (column - kw) / case.stride[1]
                inside = 0 <= ih < case.in_size[0] and 0 <= iw < case.in_size[1]
                if inside and ih == int(ih) and iw == int(iw):
                    reached[:, channel, kh, kw] = True
    assert reached.any()
    for config in box_tiles(case, x, g, device):
        got = gradient(case, x, g, config).cpu()
        assert got[reached].isnan().all(), config
        assert torch.equal(got[~reached].double(), expected[~reached]), config


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["k2s2", "unet-128-64@256", "dcgan-256-128@8", "seed1-asymmetric", "seed0-grouped-dilated"])
def test_nothing_is_written_round_the_result_and_the_workspace(name, layout, dtype, device):
    case = cases.find(name).scaled(LIMIT)
    x, g = (modes.in_layout(t, layout) for t in exact_operands(case, dtype, device))
    expected, problem = want(case, x, g), describe(case, x, g)
    guard = 256  # elements on each side
    for config in configs(case, x, g, device):
        needed = FUSED.workspace_bytes(problem, config, device)
        result = torch.full((expected.numel() + 2 * guard,), math.nan, dtype=dtype, device=device)
        scratch = torch.full((-(-needed // 4) + 2 * guard,), math.nan, device=device)
        inner, stream = slice(guard, guard + expected.numel()), torch.cuda.current_stream(device).cuda_stream
        addresses = (x.data_ptr(), result[guard:].data_ptr(), 0, g.data_ptr(), scratch[guard:].data_ptr())
        FUSED.prepare(problem, config, device)(*addresses, stream)
        torch.cuda.synchronize(device)
        assert_exact(result[inner].view(expected.shape), expected, f"config {config}")
        for t, last in ((result, guard + expected.numel()), (scratch, guard + -(-needed // 4))):
            assert t[:guard].isnan().all()
            assert t[last:].isnan().all()


@DTYPES
@pytest.mark.parametrize(
    "name", ["unet-128-64@256", "pose-256-256@32x24", "seed3-wide-kernel", "seed0-grouped-dilated", "dpt-256-256@37"]
)
def test_rounding(name, dtype, device):
    """At most twice the error of operands rounded to what is multiplied, float32 sums and one rounding."""
    case = cases.find(name).scaled(0.5)
    generator = torch.Generator(device).manual_seed(3)
    x, g = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes(case))
    exact, magnitude = want(case, x, g), want(case, x.abs(), g.abs())
    oracle = want(case, compute_type(x), compute_type(g)).float().to(dtype).double()
    allowed = 2 * max(error_figure(oracle - exact, magnitude), torch.finfo(torch.float32).eps)
    for config in configs(case, x, g, device):
        got = gradient(case, x, g, config).cpu().double()
        assert error_figure(got - exact, magnitude) <= allowed, config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", ["unet-256-128@128", "seed3-wide-kernel", "pose-256-256@32x24", "sam-64-32@128"])
def test_every_tile_repeats_its_bits_while_the_device_is_busy(name, dtype, device):
    """What hands stages from warp to warp must not depend on their speed, which other work on the device changes."""
    case = cases.find(name).scaled(2.0)
    generator = torch.Generator(device).manual_seed(4)
    x, g = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes(case))
    other, stream = torch.randn(2048, 2048, device=device), torch.cuda.Stream(device)
    for config in configs(case, x, g, device):
        first = gradient(case, x, g, config)
        torch.cuda.synchronize(device)
        for _ in range(12):
            with torch.cuda.stream(stream):
                other = (other @ other).clamp(-1, 1)
            assert torch.equal(gradient(case, x, g, config), first), config
        torch.cuda.synchronize(device)


def test_offsets_beyond_2_31(device):
    """The last of 2 x 32800 x 32800 outputs; nearly all of both operands is zero."""
    case = cases.find("output-over-2^31")
    x_shape, g_shape = shapes(case)
    if torch.cuda.mem_get_info()[0] < (8 << 30):
        pytest.skip("needs 8 GiB of free GPU memory")
    x = torch.zeros(x_shape, dtype=torch.bfloat16, device=device)
    g = torch.zeros(g_shape, dtype=torch.bfloat16, device=device)
    expected = torch.zeros(2, 2, 2, 2)
    for ih, iw, value in ((16399, 16399, 1), (16399, 0, 2), (16398, 8200, 3), (0, 16399, 1)):
        x[0, :, ih, iw] = torch.tensor([value, -1.0], device=device)
        window = torch.arange(8.0).reshape(2, 2, 2) - value
        g[0, :, 2 * ih : 2 * ih + 2, 2 * iw : 2 * iw + 2] = window.to(device)
        expected += torch.tensor([value, -1.0]).reshape(2, 1, 1, 1) * window
    for config in configs(case, x, g, device):
        assert torch.equal(gradient(case, x, g, config).float().cpu(), expected), config


def test_a_small_cap_leaves_fewer_parts(device):
    case = cases.find("unet-128-64@256").scaled(0.3)
    x, g = exact_operands(case, torch.float32, device)
    free = {config: FUSED.workspace_bytes(describe(case, x, g), config, device) for config in configs(case, x, g, device)}
    smaller, expected = 0, want(case, x, g)
    for megabytes in (0.5, 1, 4):
        with upfold.use(workspace_mb=megabytes):
            for config in configs(case, x, g, device):
                needed = FUSED.workspace_bytes(describe(case, x, g), config, device)
                assert needed <= megabytes * 2**20
                smaller += needed < free[config]
                assert_exact(gradient(case, x, g, config), expected, f"config {config}")
    assert smaller > 0


def test_a_step_takes_it_where_it_leads(device):
    case = cases.find("unet-128-64@256")
    problem = describe(case, *(torch.empty(shape, device=device) for shape in shapes(case)))
    assert dispatch.plan(problem, device).algorithm == "fused"


def test_what_it_refuses(device):
    case = dataclasses.replace(cases.find("k4s2p1"), batch=2)
    x, g = exact_operands(case, torch.float32, device)
    last = [modes.in_layout(t, "channels_last") for t in (x, g)]
    apart = [torch.empty((*t.shape, 2), device=device)[..., 0].copy_(t) for t in (x, g)]
    assert FUSED.reject(describe(case, *last), device) is None
    assert "empty batch" in FUSED.reject(describe(case, x[:0], g[:0]), device)
    assert_exact(gradient(case, *last), want(case, x, g))
    assert_exact(gradient(case, *apart), want(case, x, g))  # of which a copy is made
    assert not gradient(case, x[:0], g[:0]).any()


def test_copies_as_planes_stay_below_the_cap(device):
    """Of 20 and 30 channels in a group, which no tile takes as they lie."""
    case = cases.find("groups-of-20-and-30")
    x, g = (modes.in_layout(t, "channels_last") for t in exact_operands(case, torch.float32, device))
    copied = 4 * (x.numel() + g.numel())
    assert min(FUSED.workspace_bytes(describe(case, x, g), c, device) for c in configs(case, x, g, device)) > copied
    with upfold.use(workspace_mb=copied / 2**20):
        assert "raise UPFOLD_WORKSPACE_MB" in FUSED.reject(describe(case, x, g), device)
