"""What must hold of every geometry, layout and algorithm: drawn at random, the same every time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import upfold
from oracle import (
    ALGORITHMS,
    FORWARD_ALGORITHMS,
    assert_exact,
    dtype_name,
    exact_like,
    grid,
    loop_conv,
    loop_conv_transpose,
    loop_conv_transpose_weight,
    ours,
    reference,
    refusal,
    skip_if_refused,
)
from strategies import STORAGES, layers
from upfold import cases, execute
from upfold.algorithms import REGISTRY
from upfold.algorithms.base import enqueue_tensors
from upfold.problem import Operator

SIX = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
EACH = pytest.mark.parametrize("algorithm", FORWARD_ALGORITHMS)


def integers(shape, dtype, seed, device):
    return exact_like(shape, 24 * 2.25, dtype, seed).to(device)


@EACH
@given(layer=layers(), dtype=st.sampled_from(SIX), bias=st.booleans(), seed=st.integers(0, 99))
def test_forward_and_gradients_are_exact(algorithm, layer, dtype, bias, seed, device):
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, dtype, seed, device), integers(w_shape, dtype, seed + 1, device)
    b = integers((w_shape[1] * geometry.groups,), dtype, seed + 2, device) if bias else None
    if refusal(algorithm, x, w, b, geometry) is not None:
        return
    x.requires_grad_()
    w.requires_grad_()
    y = ours((x, w, b), geometry, algorithm)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x64, w64, b64 = (None if tensor is None else tensor.detach().cpu().to(wide) for tensor in (x, w, b))
    assert_exact(y.detach(), loop_conv_transpose((x64, w64, b64), geometry))
    grad = integers(y.shape, dtype, seed + 3, device)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
    g64 = grad.cpu().to(wide)
    # Few enough terms for exact sums in the 16-bit types: at most 25 taps of 5 channels, at most a few hundred pixels.
    want_x = loop_conv(g64, w64.conj(), x_shape[2:], geometry)
    want_w = loop_conv_transpose_weight(x64.conj(), g64, w_shape[2:], geometry)
    if dtype == torch.bfloat16 and max(want_x.abs().amax() if want_x.numel() else 0, want_w.abs().max()) > 256:
        return
    assert_exact(grad_x, want_x, "x.grad")
    assert_exact(grad_w, want_w, "w.grad")


@EACH
@given(layer=layers(), kibibytes=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_workspace_cap(algorithm, layer, kibibytes, seed, device):
    """Cut into pieces of samples, channels and rows, down to single ones, forward and backward."""
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, torch.float32, seed, device), integers(w_shape, torch.float32, seed + 1, device)
    with upfold.use(workspace_mb=kibibytes / 1024):
        if refusal(algorithm, x, w, None, geometry) is not None:
            return
        y = ours((x.requires_grad_(), w.requires_grad_(), None), geometry, algorithm)
        x64, w64 = x.detach().cpu().double(), w.detach().cpu().double()
        assert_exact(y.detach(), loop_conv_transpose((x64, w64, None), geometry))
        g = integers(y.shape, torch.float32, seed + 2, device)
        try:
            grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
        except upfold.InvalidArgument as error:  # each operator has its own smallest piece
            if "workspace" not in str(error):
                raise
            return
    assert_exact(grad_x, loop_conv(g.cpu().double(), w64, x_shape[2:], geometry), "x.grad")
    assert_exact(grad_w, loop_conv_transpose_weight(x64, g.cpu().double(), w_shape[2:], geometry), "w.grad")


@EACH
@given(layer=layers(), seed=st.integers(0, 99))
def test_the_operators_are_adjoint(algorithm, layer, seed, device):
    """<conv_transpose(x, w), g> = <x, conv(g, w)> = <w, conv_transpose_weight(x, g)>, with no reference at all."""
    geometry, x_shape, w_shape = layer
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(x_shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    w = torch.randn(w_shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    y = ours((x, w, None), geometry, algorithm)
    g = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(device)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    products = [(y * g).sum(), (x * grad_x).sum(), (w * grad_w).sum()]
    scale = (y.abs() * g.abs()).sum().item() + (x.abs() * grad_x.abs()).sum().item() + 1
    for one, other in itertools.pairwise(products):
        assert abs((one - other).item()) <= 1e-13 * scale


@EACH
@given(
    layer=layers(),
    stored=st.tuples(*[st.sampled_from(sorted(STORAGES))] * 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 99),
)
def test_storage_does_not_matter(algorithm, layer, stored, dtype, seed, device):
    """The same numbers in other strides, between NaN, misaligned or expanded give the same integers."""
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, dtype, seed, device), integers(w_shape, dtype, seed + 1, device)
    b = integers((w_shape[1] * geometry.groups,), dtype, seed + 2, device)
    x, w = STORAGES[stored[0]](x), STORAGES[stored[1]](w)
    b = STORAGES[stored[2]](b) if stored[2] in ("misaligned", "every second element") else b
    if refusal(algorithm, x, w, b, geometry) is not None:
        return
    assert_exact(ours((x, w, b), geometry, algorithm), reference((x, w, b), geometry))


@EACH
@given(layer=layers(), storage=st.sampled_from(sorted(set(STORAGES) - {"expanded batch"})), seed=st.integers(0, 99))
def test_gradient_storage_does_not_matter(algorithm, layer, storage, seed, device):
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, torch.float32, seed, device), integers(w_shape, torch.float32, seed + 1, device)
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    x.requires_grad_()
    w.requires_grad_()
    y = ours((x, w, None), geometry, algorithm)
    g = integers(y.shape, torch.float32, seed + 2, device)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), STORAGES[storage](g))
    x64, w64, g64 = (tensor.detach().cpu().double() for tensor in (x, w, g))
    assert_exact(grad_x, loop_conv(g64, w64, x_shape[2:], geometry), "x.grad")
    assert_exact(grad_w, loop_conv_transpose_weight(x64, g64, w_shape[2:], geometry), "w.grad")


@EACH
@given(layer=layers(), dtype=st.sampled_from((torch.float32, torch.float16, torch.complex64)), seed=st.integers(0, 99))
def test_repeats_bit_for_bit(algorithm, layer, dtype, seed, device):
    geometry, x_shape, w_shape = layer
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    x, w = (torch.randn(shape, generator=generator, dtype=drawn).to(dtype).to(device) for shape in (x_shape, w_shape))
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    x.requires_grad_()
    w.requires_grad_()
    first = ours((x, w, None), geometry, algorithm)
    g = torch.ones_like(first)
    gradients = torch.autograd.grad(first, (x, w), g)
    for _ in range(2):
        again = ours((x, w, None), geometry, algorithm)
        assert torch.equal(first, again)
        assert all(map(torch.equal, gradients, torch.autograd.grad(again, (x, w), g)))


REPEATED = (
    "asymmetric-all",
    "depthwise-k4s2p1",
    "depthwise-rows-unequal-taps",
    "depthwise-1d-blocks",
    "cyclegan-128-64@128",
    "seed0-grouped-dilated",
    "nnunet3d-64-32@64",
    "encodec-64-32@12000",
    "pix2pix-512-512@1",
)


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_threads_do_not_change_a_bit(name, dtype):
    """`direct` sums in an order that does not depend on how many threads share the work."""
    case = cases.find(name).scaled(0.02)
    x, w, b = case.tensors(dtype, bias=True)
    skip_if_refused("direct", (x, w, b), case.geometry)
    x.requires_grad_()
    w.requires_grad_()
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        y = ours((x, w, b), case.geometry, "direct")
        results.append((y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@EACH
@given(
    layer=layers(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    poison=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    seed=st.integers(0, 999),
)
def test_bad_pixels_stay_where_taps_carry_them(algorithm, layer, dtype, poison, seed, device):
    geometry, x_shape, w_shape = layer
    if x_shape[0] == 0:
        return
    x, w = integers(x_shape, dtype, seed, device), integers(w_shape, dtype, seed + 1, device)
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    clean = ours((x, w, None), geometry, algorithm)
    index = tuple(seed * 7919 % size for size in x_shape)
    mark = torch.zeros(x_shape, dtype=torch.float64)
    mark[index] = 1
    reached = loop_conv_transpose((mark, torch.ones(w_shape, dtype=torch.float64), None), geometry) > 0
    x[index] = poison
    dirty = ours((x, w, None), geometry, algorithm)
    assert torch.equal(dirty.cpu()[~reached], clean.cpu()[~reached])
    touched = loop_conv_transpose((mark, (w.cpu() != 0).double(), None), geometry) > 0
    assert not dirty.cpu()[touched].isfinite().any()


@EACH
@given(layer=layers(), seed=st.integers(0, 99))
def test_bad_gradients_stay_where_taps_carry_them(algorithm, layer, seed, device):
    geometry, x_shape, w_shape = layer
    if x_shape[0] == 0:
        return
    x = integers(x_shape, torch.float32, seed, device).requires_grad_()
    w = integers(w_shape, torch.float32, seed + 1, device)
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    y = ours((x, w, None), geometry, algorithm)
    g = integers(y.shape, torch.float32, seed + 2, device)
    (clean,) = torch.autograd.grad(y, x, g, retain_graph=True)
    index = tuple(seed * 7919 % size for size in y.shape)
    mark = torch.zeros(y.shape, dtype=torch.float64)
    mark[index] = 1
    reached = loop_conv(mark, torch.ones(w_shape, dtype=torch.float64), x_shape[2:], geometry) > 0
    g[index] = torch.nan
    (dirty,) = torch.autograd.grad(y, x, g)
    assert torch.equal(dirty.cpu()[~reached], clean.cpu()[~reached])


@EACH
@given(
    layer=layers(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.complex64)),
    poison=st.sampled_from([torch.nan, torch.inf]),
    seed=st.integers(0, 999),
)
def test_bad_weights_reach_what_their_taps_reach(algorithm, layer, dtype, poison, seed):
    """On a CPU: the outputs by every method, the gradients by all but `gemm`, which multiplies the padding's zeros too."""
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, dtype, seed, "cpu"), integers(w_shape, dtype, seed + 1, "cpu")
    if x_shape[0] == 0 or refusal(algorithm, x, w, None, geometry) is not None:
        return
    bad, index = w.clone(), tuple(seed * 7919 % size for size in w_shape)
    bad[index] = poison
    mark = torch.zeros(w_shape, dtype=torch.float64)
    mark[index] = 1
    clean, dirty = (ours((x, weight, None), geometry, algorithm) for weight in (w, bad))
    reached = loop_conv_transpose((torch.ones(x_shape, dtype=torch.float64), mark, None), geometry) > 0
    assert torch.equal(dirty[~reached], clean[~reached])
    touched = loop_conv_transpose(((x != 0).double(), mark, None), geometry) > 0
    assert not dirty[touched].isfinite().any()
    if algorithm in ("direct", "fused"):
        g = integers(clean.shape, dtype, seed + 2, "cpu")
        leaf = x.requires_grad_()
        kept, spoiled = (torch.autograd.grad(ours((leaf, weight, None), geometry, algorithm), leaf, g)[0] for weight in (w, bad))
        reached = loop_conv(torch.ones(g.shape, dtype=torch.float64), mark, x_shape[2:], geometry) > 0
        assert torch.equal(spoiled[~reached], kept[~reached])


@given(layer=layers(), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.complex64)), seed=st.integers(0, 999))
def test_bad_pixels_reach_the_weights_that_meet_them(layer, dtype, seed):
    """The direct gradient of the weight on a CPU: a tap that carries the pixel into the padding alone does not see it."""
    geometry, x_shape, w_shape = layer
    if x_shape[0] == 0:
        return
    x, w = integers(x_shape, dtype, seed, "cpu"), integers(w_shape, dtype, seed + 1, "cpu").requires_grad_()
    bad, index = x.clone(), tuple(seed * 7919 % size for size in x_shape)
    bad[index] = torch.nan
    mark = torch.zeros(x_shape, dtype=torch.float64)
    mark[index] = 1
    results = [ours((pixels, w, None), geometry, "direct") for pixels in (x, bad)]
    g = integers(results[0].shape, dtype, seed + 2, "cpu")
    kept, spoiled = (torch.autograd.grad(y, w, g)[0] for y in results)
    met = loop_conv_transpose_weight(mark, torch.ones(g.shape, dtype=torch.float64), w_shape[2:], geometry) > 0
    assert torch.equal(spoiled[~met], kept[~met])


@EACH
@given(
    layer=layers(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.complex64)),
    seed=st.integers(0, 99),
    storage=st.sampled_from(["flat", "slice"]),
)
def test_nothing_is_written_beside_the_output(algorithm, layer, dtype, seed, storage, device):
    """`out` lies in a buffer of NaN; every element of it is overwritten and nothing round it."""
    geometry, x_shape, w_shape = layer
    x, w = integers(x_shape, dtype, seed, device), integers(w_shape, dtype, seed + 1, device)
    if refusal(algorithm, x, w, None, geometry) is not None:
        return
    want = reference((x, w, None), geometry)
    if storage == "flat":
        buffer = torch.full((want.numel() + 67,), torch.nan, dtype=dtype, device=device)
        out = buffer[33:-34].view(want.shape)
    else:
        buffer = torch.full([size + 2 for size in want.shape], torch.nan, dtype=dtype, device=device)
        out = buffer[tuple(slice(1, -1) for _ in want.shape)]
    result = ours((x, w, None), geometry, algorithm, out=out)
    assert result is out
    assert_exact(out, want)
    assert int(buffer.isnan().sum()) == buffer.numel() - want.numel()


@grid(cases.by_tier("smoke", "edge"), (torch.float32, torch.bfloat16, torch.complex64))
def test_workspace_and_results_may_hold_anything(algorithm, case, dtype, device, monkeypatch):
    """Scratch and fresh results come full of NaN, forward and backward: nothing is read unwritten, or written outside."""
    case = case.scaled(0.001)
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    method = REGISTRY[algorithm]
    prepare, run, ran = method.prepare, method.run, []

    def surrounded(problem, tensors, config, workspace, stream):
        call = prepare(problem, config, tensors.x.device)
        written = {Operator.CONV_TRANSPOSE: tensors.y, Operator.CONV: tensors.x, Operator.CONV_TRANSPOSE_WEIGHT: tensors.w}
        written[problem.operator].fill_(torch.nan)
        size = 0 if workspace is None else workspace.numel()
        alignment = 64 if device.type == "cpu" else 256  # what torch's allocators give at the least, and the kernels are promised
        buffer = torch.full((size + 3 * alignment,), 0xFF, dtype=torch.uint8, device=device)
        first = alignment + -buffer.data_ptr() % alignment
        workspace = buffer[first : first + size] if size else None
        if call is None:
            run(problem, tensors, config, workspace, stream)
        else:
            enqueue_tensors(call, tensors, workspace, stream)
        assert (buffer[:first] == 0xFF).all()
        assert (buffer[first + size :] == 0xFF).all()
        ran.append(problem.operator)

    monkeypatch.setattr(execute, "_launches", {})
    monkeypatch.setattr(method, "prepare", lambda *rest: None)
    monkeypatch.setattr(method, "run", surrounded)
    leaves = x.requires_grad_(), w.requires_grad_(), b
    y = ours(leaves, case.geometry, algorithm)
    assert_exact(y.detach(), reference(leaves, case.geometry))
    grad = exact_like(y.shape, max(y.shape[0] * y[0, 0].numel(), 54), dtype).to(device)
    for tensor in torch.autograd.grad(y, leaves[:2], grad):
        assert not tensor.isnan().any()
    # fused leaves the gradients that it refuses to others.
    assert ran[0] is Operator.CONV_TRANSPOSE if algorithm == "fused" else sorted(ran) == list(Operator)


@EACH
def test_misaligned_operands(algorithm, device):
    """x, w, bias and out each at an address that only its own element size divides."""
    case = cases.find("width-37-k3")
    for dtype, which in itertools.product((torch.float32, torch.bfloat16, torch.float64), range(4)):
        operands = list(case.tensors(dtype, device, exact=True))
        if refusal(algorithm, *operands, case.geometry) is not None:
            continue
        want = reference(tuple(operands), case.geometry)
        if which < 3:
            operands[which] = STORAGES["misaligned"](operands[which])
        out = torch.empty(want.numel() + 2, dtype=dtype, device=device)
        out = out[1:-1].view(want.shape) if which == 3 else out[:-2].view(want.shape)
        assert_exact(ours(tuple(operands), case.geometry, algorithm, out=out), want)


@grid(cases.by_tier("smoke"), (torch.float32,))
def test_channel_slice_is_read_where_it_lies(algorithm, case, dtype, device):
    """A slice of a wider tensor (a skip connection) is taken by its strides: it costs no more copies than a tensor of its own."""
    if case.ndim == 1:
        case = cases.find("encodec-64-32@12000").scaled(0.005)
    x, w, b = case.tensors(dtype, device, exact=True)
    wider = torch.full((case.batch, case.in_channels + 5, *case.in_size), torch.nan, dtype=dtype, device=device)
    view = wider[:, 2:-3].copy_(x)
    skip_if_refused(algorithm, (view, w, b), case.geometry)

    def copies(operand):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            y = ours((operand, w, b), case.geometry, algorithm)
        assert_exact(y, reference((x, w, b), case.geometry))
        return [event.input_shapes for event in profile.function_events if event.name == "aten::copy_"]

    assert copies(view) == copies(x)
    if algorithm == "direct":
        assert not copies(view)


@grid(tuple(cases.find(name) for name in ("batch-70000", "planes-over-65535")), (torch.float32, torch.bfloat16))
def test_large_counts(algorithm, case, dtype, device):
    """Batches and planes beyond 65,535, channels_last too."""
    x, w, b = case.tensors(dtype, device, exact=True, memory_format=torch.channels_last)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    assert_exact(ours((x, w, b), case.geometry, algorithm), reference((x, w, b), case.geometry))


def test_the_peer_is_not_among_them():
    assert "torch" in upfold.algorithms()
    assert set(ALGORITHMS) >= {"gemm", "direct"}
