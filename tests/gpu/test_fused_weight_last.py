"""The fused gradient of the weight whose channels are innermost, on a GPU, against torch in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_fused_weight import DTYPES, FUSED, describe, exact_operands, gradient, layer, shapes, want

import upfold
from gpu import missing
from oracle import assert_exact, dtype_name, error_figure
from test_rounding import compute_type
from upfold import cases
from upfold.algorithms import cuda, fused_weight_laid, fused_weight_last

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FORMATS = {"contiguous": False, "channels_last": True}

LAYERS = {
    # Kernel and stride equal: taps along w are channels; rows of samples follow one another; none of that.
    "equal": layer(in_channels=136, out_channels=72, in_size=(6, 14), batch=3, kernel_size=(2, 2), stride=(2, 2)),
    "equal, larger output": layer(
        in_channels=64, out_channels=32, in_size=(5, 9), kernel_size=(2, 2), stride=(2, 2), output_padding=(1, 1)
    ),
    "one tap": layer(in_channels=70, out_channels=200, in_size=(9, 11), kernel_size=(1, 1), stride=(1, 1)),
    # Patches that taps share, along both axes, in residues and without.
    "doubled": layer(in_channels=136, out_channels=200, in_size=(9, 33), kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)),
    "small maps": layer(
        in_channels=64, out_channels=64, in_size=(4, 4), batch=9, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)
    ),
    # Packed in squares, where y is contiguous; channel sets of which the last has fewer channels.
    "squares": layer(
        in_channels=136, out_channels=80, in_size=(5, 7), batch=3, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)
    ),
    "many squares": layer(
        in_channels=72, out_channels=560, in_size=(3, 9), batch=2, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)
    ),
    # Rows of x that are read as planes where it is contiguous and large: more than one in a tile, such as end within a box.
    "planes": layer(
        in_channels=72, out_channels=40, in_size=(10, 128), batch=24, kernel_size=(3, 5), stride=(1, 1), padding=(1, 2)
    ),
    "planes, few channels": layer(
        in_channels=24, out_channels=16, in_size=(8, 504), batch=40, kernel_size=(3, 3), stride=(1, 1), padding=(0, 1)
    ),
    "planes and squares": layer(
        in_channels=520, out_channels=48, in_size=(20, 64), batch=3, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)
    ),
    "planes, 3-D": layer(
        in_channels=72,
        out_channels=40,
        in_size=(6, 10, 128),
        batch=6,
        kernel_size=(3, 3, 3),
        stride=(1, 1, 1),
        padding=(1, 1, 1),
        output_padding=(0, 0, 0),
        dilation=(1, 1, 1),
    ),
    "stride 1": layer(in_channels=72, out_channels=40, in_size=(7, 35), kernel_size=(3, 5), stride=(1, 1), padding=(1, 2)),
    "dilated": layer(in_channels=32, out_channels=96, in_size=(12, 20), kernel_size=(3, 7), stride=(1, 1), dilation=(2, 1)),
    "dilated and strided": layer(
        in_channels=40, out_channels=64, in_size=(6, 17), kernel_size=(3, 3), stride=(2, 3), dilation=(3, 2), padding=(2, 1)
    ),
    "odd output": layer(in_channels=64, out_channels=64, in_size=(8, 16), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)),
    "asymmetric": layer(
        in_channels=64, out_channels=128, in_size=(5, 6), batch=7, kernel_size=(5, 3), stride=(3, 2), padding=(1, 1)
    ),
    "groups": layer(
        in_channels=128, out_channels=64, in_size=(6, 10), groups=2, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1)
    ),
    "odd channels": layer(in_channels=21, out_channels=35, in_size=(6, 10), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)),
    "1-D": layer(
        in_channels=64,
        out_channels=48,
        in_size=(75,),
        kernel_size=(16,),
        stride=(8,),
        padding=(4,),
        output_padding=(0,),
        dilation=(1,),
    ),
    "3-D": layer(
        in_channels=64,
        out_channels=32,
        in_size=(3, 5, 8),
        kernel_size=(2, 2, 2),
        stride=(2, 2, 2),
        padding=(0, 0, 0),
        output_padding=(0, 0, 0),
        dilation=(1, 1, 1),
    ),
    "3-D with a halo": layer(
        in_channels=40,
        out_channels=64,
        in_size=(3, 5, 9),
        kernel_size=(3, 4, 3),
        stride=(1, 2, 1),
        padding=(1, 1, 0),
        output_padding=(0, 0, 0),
        dilation=(1, 1, 2),
    ),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def formatted(t, format):
    if not FORMATS[format] or t.dim() == 3:
        return t.contiguous()
    return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def by_boxes(problem, device):
    """What can run of them: taps that are laid out have their numbers behind theirs."""
    return [config for config in FUSED.configs(problem, device) if fused_weight_last.FIRST <= config < fused_weight_laid.FIRST]


def tiles(case, x, g, device):
    """The tiles by boxes of channels; skips where the device has none."""
    if cuda.module().code_capability(cuda.index(device)) < 90:
        pytest.skip("compute capability 9.0 brought the copy engine")
    found = by_boxes(describe(case, x, g), device)
    assert found
    return found


@EVERY_LAYER
@EVERY_FORMAT
@DTYPES
def test_every_tile_is_exact(dtype, format, name, device):
    case = LAYERS[name]
    x, g = (formatted(t, format) for t in exact_operands(case, dtype, device))
    expected = want(case, x, g)
    for config in tiles(case, x, g, device):
        assert_exact(gradient(case, x, g, config), expected, f"config {config}")


@DTYPES
@pytest.mark.parametrize("name", ["equal", "doubled", "squares", "odd channels", "groups"])
def test_slices_are_exact(name, dtype, device):
    """Samples, channels, rows and columns of larger tensors, whose other values are NaN."""
    case = LAYERS[name]
    x, g = exact_operands(case, dtype, device)
    expected, parts = want(case, x, g), []
    for t in (x, g):
        n, c, h, w = t.shape
        room = torch.full((n, c + 64, h + 1, w + 16), math.nan, dtype=dtype, device=device)
        room = room.contiguous(memory_format=torch.channels_last)
        parts.append(room[:, 32 : 32 + c, 1:, 8 : 8 + w].copy_(t))
    for config in tiles(case, *parts, device):
        assert_exact(gradient(case, *parts, config), expected, f"config {config}")


@EVERY_LAYER
@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_a_nan_stays_in_its_channel(dtype, format, name, device):
    case = LAYERS[name]
    x, g = (formatted(t, format) for t in exact_operands(case, dtype, device))
    expected = want(case, x, g)
    x[-1, 5, ..., -1], g[0, 3, ..., 0], g[-1, 7, ..., -1] = math.nan, math.inf, math.nan
    rows = [c for c in range(case.in_channels) if c != 5]
    columns = [c for c in range(case.out_channels // case.groups) if c not in (3, 7)]
    for config in tiles(case, x, g, device):
        got = gradient(case, x, g, config).cpu().double()
        assert got[5].isnan().any(), config
        assert torch.equal(got[rows][:, columns], expected[rows][:, columns]), config


@EVERY_FORMAT
@DTYPES
@pytest.mark.parametrize("name", ["equal", "doubled", "squares", "stride 1", "3-D"])
def test_nothing_is_written_round_the_result_and_the_workspace(name, dtype, format, device):
    case = LAYERS[name]
    x, g = (formatted(t, format) for t in exact_operands(case, dtype, device))
    expected, problem = want(case, x, g), describe(case, x, g)
    guard = 256  # elements on each side
    for config in tiles(case, x, g, device):
        needed = FUSED.workspace_bytes(problem, config, device)
        result = torch.full((expected.numel() + 2 * guard,), math.nan, dtype=dtype, device=device)
        scratch = torch.full((-(-needed // 4) + 2 * guard,), math.nan, device=device)
        addresses = (x.data_ptr(), result[guard:].data_ptr(), 0, g.data_ptr(), scratch[guard:].data_ptr())
        FUSED.prepare(problem, config, device)(*addresses, torch.cuda.current_stream(device).cuda_stream)
        torch.cuda.synchronize(device)
        strides = (*problem.w_strides[:2], *problem.w_strides[7 - expected.dim() :])
        assert_exact(result.as_strided(expected.shape, strides, guard), expected, f"config {config}")
        for t, last in ((result, guard + expected.numel()), (scratch, guard + -(-needed // 4))):
            assert t[:guard].isnan().all()
            assert t[last:].isnan().all()


@DTYPES
@pytest.mark.parametrize("name", ["unet-128-64@256", "pose-256-256@32x24", "seed3-wide-kernel", "dpt-256-256@37"])
def test_rounding(name, dtype, device):
    """At most twice the error of operands rounded to what is multiplied, float32 sums and one rounding."""
    case = cases.find(name).scaled(0.5)
    generator = torch.Generator(device).manual_seed(3)
    x, g = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes(case))
    exact, magnitude = want(case, x, g), want(case, x.abs(), g.abs())
    oracle = want(case, compute_type(x), compute_type(g)).float().to(dtype).double()
    allowed = 2 * max(error_figure(oracle - exact, magnitude), torch.finfo(torch.float32).eps)
    x, g = (formatted(t, "channels_last") for t in (x, g))
    for config in tiles(case, x, g, device):
        got = gradient(case, x, g, config).cpu().double()
        assert error_figure(got - exact, magnitude) <= allowed, config


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", ["unet-256-128@128", "seed3-wide-kernel", "pose-256-256@32x24"])
def test_every_tile_repeats_its_bits_while_the_device_is_busy(name, dtype, format, device):
    """What hands stages from warp to warp must not depend on their speed, which other work on the device changes."""
    case = cases.find(name).scaled(2.0)
    generator = torch.Generator(device).manual_seed(4)
    x, g = (formatted(torch.randn(shape, generator=generator, device=device).to(dtype), format) for shape in shapes(case))
    other, stream = torch.randn(2048, 2048, device=device), torch.cuda.Stream(device)
    for config in tiles(case, x, g, device):
        first = gradient(case, x, g, config)
        torch.cuda.synchronize(device)
        for _ in range(8):
            with torch.cuda.stream(stream):
                other = (other @ other).clamp(-1, 1)
            assert torch.equal(gradient(case, x, g, config), first), config
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", ["stride 1", "planes"])
def test_a_small_cap_packs_some_samples_at_a_time(name, dtype, device):
    """Each launch adds to the sums of those before."""
    case = dataclasses.replace(LAYERS[name], batch=1280 // torch.finfo(dtype).bits)
    x, g = exact_operands(case, dtype, device)
    expected, launches = want(case, x, g), set()
    for megabytes in (2, 4, 64):
        with upfold.use(workspace_mb=megabytes):
            problem = describe(case, x, g)
            for config in by_boxes(problem, device):
                assert FUSED.workspace_bytes(problem, config, device) <= megabytes * 2**20
                launches.add(fused_weight_last.call(problem, config, cuda.index(device)).work[2])
                assert_exact(gradient(case, x, g, config), expected, f"config {config}")
    assert cuda.module().code_capability(cuda.index(device)) < 90 or len(launches) > 1


def test_the_layers_take_every_way_to_the_weight(device):
    """Blocks that have all of the reduction store it, or two of a cluster that have half each, or a launch adds parts up."""
    ways = set()
    for case in LAYERS.values():
        x, g = exact_operands(case, torch.bfloat16, device)
        for config in tiles(case, x, g, device):
            work = fused_weight_last.call(describe(case, x, g), config, cuda.index(device)).work
            ways.add(("parts" if work[6] > 0 else "stored", work[8]))
    assert ways == {("parts", 1), ("stored", 1), ("stored", 2)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_squares_are_exact_beside_any_x(dtype, device):
    """By blocks that have all of the reduction, and by two of a cluster; x packed or as it lies."""
    ways = set()
    for name in ("squares", "many squares", "small maps"):
        case = LAYERS[name]
        x, g = exact_operands(case, dtype, device)
        expected = want(case, x, g)
        for own in (x, formatted(x, "channels_last")):
            problem = describe(case, own, g)
            for config in tiles(case, own, g, device):
                work = fused_weight_last.call(problem, config, cuda.index(device)).work
                if not work[9]:
                    continue
                ways.add((work[8], own is x))
                assert_exact(gradient(case, own, g, config), expected, f"config {config}")
    assert ways == {(cluster, packed) for cluster in (1, 2) for packed in (True, False)}


def test_the_layers_read_their_operands_as_they_are_called(device):
    """y in squares, x as planes, in some tile of each layer of that name; of one layer both, and of others neither."""
    ways = {}
    for name, case in LAYERS.items():
        x, g = exact_operands(case, torch.bfloat16, device)
        problem = describe(case, x, g)
        found = tiles(case, x, g, device)
        ways[name] = {fused_weight_last.call(problem, config, cuda.index(device)).work[9:] for config in found}
        assert "squares" not in name or any(squares for squares, _ in ways[name]), name
        assert "planes" not in name or any(planes for _, planes in ways[name]), name
    assert (True, True) in ways["planes and squares"]
    assert ways["stride 1"] == {(False, False)}
