"""The fused gradient of the input on a GPU: every tile of its own and of the forward turned round, against torch in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import upfold
from gpu import missing
from oracle import assert_exact, describe, exact_like, geometry_arguments, loop_conv
from upfold import cases, execute, modes
from upfold.algorithms import REGISTRY, cuda, fused_input, fused_last
from upfold.cases import Case
from upfold.dispatch import use_config
from upfold.problem import Operator

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
HOPPER = torch.cuda.get_device_capability()[0] == 9
LIMIT = 0.02  # GFLOP: the reference takes no time
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def _layer(name: str, channels: tuple[int, int], size: tuple[int, ...], batch: int = 3, **changes: object) -> Case:
    """A case of that kernel with other channels and sizes."""
    axes = {"in_channels": channels[0], "out_channels": channels[1], "in_size": size, "batch": batch}
    return dataclasses.replace(cases.find(name), **axes, **changes)  # type: ignore[arg-type]


# What the named layers miss: odd maps and channels, tiles beyond a map, split reductions, groups, paddings of every remainder.
ODD = {
    "k2s2-odd": _layer("k2s2", (20, 21), (7, 5)),
    "k2s2-deep": _layer("k2s2", (300, 600), (6, 6), 1),
    "k2s2-padded": _layer("k2s2", (33, 19), (6, 10), padding=(2, 2)),
    "k4s2p1-odd": _layer("k4s2p1", (40, 24), (9, 11), 2),
    "k4s2p1-deep": _layer("k4s2p1", (270, 300), (4, 4), 2),
    "k4s2p1-width-1": _layer("k4s2p1", (32, 16), (9, 1), 4),
    "k4s2p1-pixel": _layer("k4s2p1", (512, 64), (1, 1), 5),
    "k4s2p0": _layer("k4s2p1", (32, 20), (10, 12), padding=(0, 0)),
    "k4s2p3": _layer("k4s2p1", (32, 20), (10, 12), padding=(3, 3)),
    "k4s2p1-groups": _layer("k4s2p1", (64, 96), (10, 12), groups=2),
    "k3s2p1op1-odd": _layer("k3s2p1op1", (40, 21), (7, 10)),
    "k3s1p1": _layer("k3s1p1", (32, 48), (20, 24), 2),
    "3d-k2s2": _layer("3d-k2s2", (40, 24), (5, 6, 10), 2),
    "3d-k2s2-groups": _layer("3d-k2s2", (48, 36), (3, 4, 6), groups=3),
    # Rows of pixels numbered over samples, which a tile cuts where it ends.
    "rows": _layer("k2s2", (32, 48), (14, 14), 7),
    "rows-one-sample": _layer("k2s2", (40, 32), (16, 24), 1),
    "rows-of-many-maps": _layer("k2s2", (24, 64), (2, 4), 61),
    "rows-groups": _layer("k2s2", (64, 96), (8, 8), 5, groups=2),
    "rows-deep": _layer("k2s2", (300, 608), (6, 8), 3),
    "rows-output-padding": _layer("k2s2", (32, 32), (8, 8), 5, output_padding=(1, 0)),
    "rows-k4s4": _layer("k2s2", (33, 20), (5, 7), 5, kernel_size=(4, 4), stride=(4, 4)),
    "rows-k4s4-deep": _layer("k2s2", (64, 256), (9, 37), 2, kernel_size=(4, 4), stride=(4, 4)),
    "rows-k1x4": _layer("k2s2", (32, 48), (10, 6), 3, kernel_size=(1, 4), stride=(1, 4)),
    "rows-3d": _layer("3d-k2s2", (32, 32), (3, 4, 8), 4),
    "rows-3d-groups": _layer("3d-k2s2", (64, 64), (4, 6, 4), 3, groups=2),
    # Weights that are not packed: taps of a step in one channel or several, in one row or several, padded, few, in every type.
    "words-k4s4-padded": _layer("k2s2", (33, 24), (6, 10), kernel_size=(4, 4), stride=(4, 4), padding=(2, 2)),
    "words-k2x4": _layer("k2s2", (40, 28), (6, 9), kernel_size=(2, 4), stride=(2, 4)),
    "words-k8x2": _layer("k2s2", (24, 12), (5, 7), kernel_size=(8, 2), stride=(4, 2), padding=(3, 0)),
    "words-k4x8": _layer("k2s2", (24, 12), (5, 6), kernel_size=(4, 8), stride=(2, 4), padding=(1, 0)),
    "words-k1x16": _layer("k2s2", (24, 10), (5, 9), kernel_size=(1, 16), stride=(1, 8), padding=(0, 4)),
    "words-k2-dilated": _layer("k2s2", (36, 20), (9, 8), dilation=(3, 2), padding=(1, 2)),
    "words-k1": _layer("k2s2", (30, 44), (11, 12), kernel_size=(1, 1), stride=(1, 1)),
    "words-k1s2": _layer("k2s2", (30, 48), (11, 12), kernel_size=(1, 1)),
    "words-1d-k2": _layer("1d-k16s8p4", (48, 40), (37,), kernel_size=(2,), stride=(2,), padding=(0,)),
    "words-3d-k4x2x2": _layer("3d-k2s2", (40, 20), (3, 5, 6), 2, kernel_size=(4, 2, 2), stride=(4, 2, 2)),
    "words-groups-deep": _layer("k2s2", (600, 160), (8, 8), 2, groups=2),
    "three-result-channels": _layer("k4s2p1", (17, 3), (16, 16), 1),
}
ALL = {case.name: case.scaled(LIMIT) for case in cases.by_tier("seeds", "decoders", "irregular")} | ODD


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _operands(case, dtype, device, exact=True):
    """The weight, a gradient of the result, and what a call takes beside them."""
    x, w, _ = case.tensors(dtype, device, exact=exact, bias=False)
    shape = (case.batch, case.out_channels, *case.out_size)
    if exact:
        g = exact_like(shape, case.out_channels // case.groups * w[0, 0].numel(), dtype).to(device)
    else:
        g = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    return w, g, tuple(x.shape[2:]), modes.positional(case.geometry)


def _configs(g, w, size, arguments, device):
    problem = execute.describe_conv(g, w, size, arguments)[0]
    refusal = FUSED.reject(problem, device)
    if refusal is not None:
        pytest.skip(refusal)
    return FUSED.configs(problem, device)


@TYPES
@pytest.mark.parametrize("name", ALL)
def test_every_tile_is_exact(name, dtype, device):
    case = ALL[name]
    w, g, size, arguments = _operands(case, dtype, device)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    for config in _configs(g, w, size, arguments, device):
        with use_config(config):
            assert_exact(execute.conv(g, w, size, arguments, "fused"), want, f"config {config}")


@TYPES
@pytest.mark.parametrize("name", ["k2s2-odd", "k4s2p1-odd", "k4s2p1-deep", "k3s2p1op1-odd", "k3s1p1", "3d-k2s2"])
def test_it_accepts_what_it_is_for(name, dtype, device):
    """Or every test here would skip."""
    if not HOPPER and name != "k3s1p1":
        pytest.skip("its own tiles are for compute capability 9.0")
    w, g, size, arguments = _operands(ODD[name], dtype, device)
    problem = execute.describe_conv(g, w, size, arguments)[0]
    assert FUSED.reject(problem, device) is None
    mirrored = [c for c in FUSED.configs(problem, device) if fused_input.MIRRORED <= c < fused_last.FIRST]
    assert bool(mirrored) == (name == "k3s1p1")


@TYPES
@pytest.mark.parametrize(
    "name", ["k2s2-padded", "k4s2p1-odd", "k3s2p1op1-odd", "k3s1p1", "k2s2-deep", "rows", "rows-k4s4", "rows-3d"]
)
def test_errors_are_those_of_the_type(name, dtype, device):
    """At most twice what rounding the operands to the compute type, and the sum once, costs."""
    case = ODD[name]
    w, g, size, arguments = _operands(case, dtype, device, exact=False)
    wide = g.cpu().double(), w.cpu().double()
    exact, scale = (loop_conv(*pair, size, case.geometry) for pair in (wide, (wide[0].abs(), wide[1].abs())))
    # Half a unit in the last place of each operand (TF32), or of the result (16 bits), and float32's sums.
    bound = {torch.float32: 2 * 2.0**-11, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype] + 1e-6
    for config in _configs(g, w, size, arguments, device):
        with use_config(config):
            got = execute.conv(g, w, size, arguments, "fused").cpu().double()
            assert ((got - exact).abs() / scale.clamp_min(1e-30)).max() <= bound, config


@TYPES
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_operands_at_any_address(shift, dtype, device):
    """Gradients, weights and results that begin `shift` elements behind an aligned address, between values that must stay."""
    case = ODD["k4s2p1-odd"]
    w, g, size, arguments = _operands(case, dtype, device)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    moved = []
    for t in (w, g, torch.empty(case.batch, case.in_channels, *size, dtype=dtype, device=device)):
        buffer = torch.full((t.numel() + 64,), torch.nan, dtype=dtype, device=device)
        moved.append(buffer[shift : shift + t.numel()].view(t.shape))
        moved[-1].copy_(t)
    w, g, x = moved
    problem = execute.describe_conv(g, w, size, arguments)[0]
    if FUSED.reject(problem, device) is not None:
        pytest.skip(FUSED.reject(problem, device))
    for config in FUSED.configs(problem, device):
        workspace = torch.full((FUSED.workspace_bytes(problem, config, device) + 256,), 0xFF, dtype=torch.uint8, device=device)
        x.fill_(torch.nan)
        call, stream = FUSED.prepare(problem, config, device), torch.cuda.current_stream(device).cuda_stream
        call(x.data_ptr(), w.data_ptr(), 0, g.data_ptr(), workspace.data_ptr(), stream)
        assert torch.equal(x.cpu().double(), want), config
        whole = x.as_strided((x.numel() + 64,), (1,), 0)
        assert torch.cat([whole[:shift], whole[shift + x.numel() :]]).isnan().all(), config
        assert (workspace[-256:] == 0xFF).all(), config


# Of so many tiles that results are stored while the next tile is multiplied: by whole vectors, by pairs of pixels and one by one,
# of tiles that end beyond the last row and channel, in groups, and with the last tiles' reduction in parts.
LATER = {
    "vectors": _layer("k2s2", (256, 16), (64, 64), 9),
    "pairs": _layer("k2s2", (256, 20), (14, 14), 190),
    "pairs, parts": _layer("k2s2", (250, 128), (14, 14), 175),
    "one by one": _layer("k2s2", (200, 16), (37, 37), 28),
    "quads": _layer("k2s2", (256, 16), (37, 37), 28, kernel_size=(4, 4), stride=(4, 4)),
    "groups": _layer("k2s2", (384, 32), (40, 64), 9, groups=2),
    "3d": _layer("3d-k2s2", (130, 16), (16, 24, 24), 5),
}


# Of half as many tiles as there are multiprocessors, so that two blocks add what each has of a reduction.
CLUSTERED = {
    "runs": _layer("k2s2", (256, 128), (16, 16), 24),
    "odd": _layer("k2s2", (130, 136), (15, 17), 24),
    "patches": _layer("k4s2p1", (72, 32), (16, 16), 24),
    "patches, odd": _layer("k3s2p1op1", (40, 60), (13, 15), 30),
    "groups": _layer("k2s2", (144, 256), (16, 16), 12, groups=2),
    "3d": _layer("3d-k2s2", (70, 64), (4, 16, 16), 6),
}

# Weights that are not packed: for float32 and 16 bits, parts of a reduction, and whether as many blocks of a cluster add them.
TOGETHER = {
    "four": (_layer("k2s2", (256, 512), (8, 8), 24), (4, True), (4, True)),
    "four, odd": (_layer("k2s2", (100, 136), (7, 9), 56, kernel_size=(4, 4), stride=(4, 4)), (4, True), (4, True)),
    "three": (_layer("k2s2", (100, 136), (7, 9), 72, kernel_size=(4, 4), stride=(4, 4)), (3, True), (3, True)),
    "eight": (_layer("k2s2", (256, 256), (8, 8), 12), (8, True), (4, False)),
    "eight of 16 bits": (_layer("k2s2", (256, 512), (8, 8), 12), (11, False), (8, True)),
}


def _works_of_exact_tiles(case, dtype, shift, device):
    """The work of its own tiles, of results that begin `shift` elements behind an aligned address, between values that stay."""
    if not HOPPER:
        pytest.skip("its own tiles are for compute capability 9.0")
    w, g, size, arguments = _operands(case, dtype, device)
    want = loop_conv(g.cpu().double(), w.cpu().double(), size, case.geometry)
    memory = torch.full((want.numel() + 64,), torch.nan, dtype=dtype, device=device)
    x = memory[shift : shift + want.numel()].view(want.shape)
    problem, works = execute.describe_conv(g, w, size, arguments)[0], []
    for config, _ in enumerate(cuda.module().fused_input_tiles()):
        if not cuda.module().fused_input_fits(cuda.index(device), problem.cuda, config, problem.alignment):
            continue
        works.append(cuda.module().FusedInputCall(cuda.index(device), problem.cuda, config, problem.alignment).work)
        workspace = torch.empty(FUSED.workspace_bytes(problem, config, device), dtype=torch.uint8, device=device)
        call, stream = FUSED.prepare(problem, config, device), torch.cuda.current_stream(device).cuda_stream
        for _ in range(4):
            x.fill_(torch.nan)
            call(x.data_ptr(), w.data_ptr(), 0, g.data_ptr(), workspace.data_ptr(), stream)
            assert torch.equal(x.cpu().double(), want), config
            assert torch.cat([memory[:shift], memory[shift + want.numel() :]]).isnan().all(), config
    return works


@TYPES
@pytest.mark.parametrize("name", TOGETHER)
def test_sums_that_clusters_of_more_blocks_add_are_exact(name, dtype, device):
    case, of_float, of_half = TOGETHER[name]
    parts = [(work[2], work[8]) for work in _works_of_exact_tiles(case, dtype, 0, device)]
    assert (of_float if dtype == torch.float32 else of_half) in parts, parts


@pytest.mark.parametrize("shift", [0, 2, 1])
@pytest.mark.parametrize("name", LATER)
def test_results_that_are_stored_later_are_exact(name, shift, device):
    assert any(work[7] for work in _works_of_exact_tiles(LATER[name], torch.float32, shift, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", CLUSTERED)
def test_parts_that_two_blocks_add_are_exact(name, shift, dtype, device):
    assert any(work[8] for work in _works_of_exact_tiles(CLUSTERED[name], dtype, shift, device))


@pytest.mark.parametrize("name", ["k2s2-odd", "k4s2p1-odd", "k3s2p1op1-odd", "k4s2p1-groups"])
def test_a_bad_gradient_stays_where_taps_carry_it(name, device):
    case = ODD[name]
    w, g, size, arguments = _operands(case, torch.float32, device)
    mark = torch.zeros(g.shape, dtype=torch.float64)
    mark[1, 3, 2, 4] = 1
    reached = loop_conv(mark, torch.ones(w.shape, dtype=torch.float64), size, case.geometry) > 0
    bad = g.clone()
    bad[1, 3, 2, 4] = torch.nan
    for config in _configs(g, w, size, arguments, device):
        with use_config(config):
            clean, dirty = (execute.conv(t, w, size, arguments, "fused").cpu() for t in (g, bad))
            assert torch.equal(dirty[~reached], clean[~reached]), config
            assert dirty[reached].isnan().all(), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", ["pose-256-256@32x24", "yolo-proto-256-256@80", "unet-128-64@256", "seed3-wide-kernel"])
def test_every_tile_repeats_its_bits_while_the_device_is_busy(name, dtype, device):
    """What hands buffers from warp to warp must not depend on their speed, which other work on the device changes."""
    w, g, size, arguments = _operands(cases.find(name).scaled(8.0), dtype, device, exact=False)
    other, stream = torch.randn(2048, 2048, device=device), torch.cuda.Stream(device)
    for config in _configs(g, w, size, arguments, device):
        with use_config(config):
            want = execute.conv(g, w, size, arguments, "fused")
            torch.cuda.synchronize(device)
            for _ in range(8):
                with torch.cuda.stream(stream):
                    other = (other @ other).clamp(-1, 1)
                assert torch.equal(execute.conv(g, w, size, arguments, "fused"), want), config
            torch.cuda.synchronize(device)


def test_a_backward_runs_it(device):
    """A layer that asks for fused gets its gradient of the input from it, in any number of dimensions."""
    if not HOPPER:
        pytest.skip("its own tiles are for compute capability 9.0")
    case = ODD["k4s2p1-odd"]
    x, w, _ = case.tensors(torch.bfloat16, device, exact=True, bias=False)
    x.requires_grad_()
    with upfold.use(algorithm="fused"):
        y = upfold.conv_transpose2d(x, w, **case.arguments())
        problem = dataclasses.replace(
            describe(x, w, None, tuple(geometry_arguments(case.geometry).values())), operator=Operator.CONV
        )
        assert FUSED.reject(problem, device) is None
        g = exact_like(y.shape, 1000, torch.bfloat16).to(device)
        (got,) = torch.autograd.grad(y, x, g)
    want = loop_conv(g.cpu().double(), w.cpu().double(), case.in_size, case.geometry)
    assert torch.equal(got.cpu().double(), want)
