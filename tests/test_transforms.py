"""Transforms of a call: vmap, torch.func, forward mode, compile, export."""

from __future__ import annotations

import importlib

import pytest
import torch

import upfold
from oracle import GENERAL_ALGORITHMS
from small_layer import ARGUMENTS, TORCH, layer, operands, torch_layer


@pytest.mark.parametrize("algorithm", [None, *GENERAL_ALGORITHMS])
def test_vmap(algorithm, device):
    x, w, b = operands(device, torch.float64)
    xs, ws, bs = (torch.stack([tensor, tensor * 2, tensor - 1]) for tensor in (x, w, b))
    run = lambda x, w, b: upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=algorithm)  # noqa: E731
    for in_dims in ((0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, 0, 0)):
        stacks = tuple(many if axis == 0 else one for axis, many, one in zip(in_dims, (xs, ws, bs), (x, w, b), strict=True))
        got = torch.func.vmap(run, in_dims=in_dims)(*stacks)
        want = torch.stack(
            [torch_layer(*(many[i] if axis == 0 else many for axis, many in zip(in_dims, stacks, strict=True))) for i in range(3)]
        )
        torch.testing.assert_close(got, want)
    moved = torch.func.vmap(run, in_dims=(2, None, None), out_dims=1)(xs.movedim(0, 2), w, b)
    torch.testing.assert_close(moved, torch.stack([torch_layer(one, w, b) for one in xs], 1))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_empty_batches(in_dims, device):
    x, w, b = operands(device, torch.float64)
    stacks = tuple(torch.stack([t, t, t]) if axis == 0 else t for axis, t in zip(in_dims, (x[:0], w), strict=True))
    for run in (lambda x, w: layer(x, w, b), lambda x, w: torch.func.grad(lambda w: layer(x, w, b).sum())(w)):
        got = torch.func.vmap(run, in_dims=in_dims)(*stacks)
        one = run(x[:0], w)
        assert got.shape == (3, *one.shape)
        assert not got.any()


def test_vmap_of_nothing(device):
    x, w, b = operands(device, torch.float64)
    assert torch.func.vmap(lambda x: layer(x, w, b))(x[None][:0]).shape[2:] == layer(x, w, b).shape[1:]
    assert torch.func.vmap(lambda x: upfold.unfold(x, 3))(x[None][:0]).shape[2:] == upfold.unfold(x, 3).shape[1:]


@pytest.mark.parametrize("algorithm", [None, *GENERAL_ALGORITHMS])
def test_func_transforms(algorithm, device):
    x, w, b = operands(device, torch.float64)
    run = lambda x, w, b: upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=algorithm)  # noqa: E731
    loss, torch_loss = (lambda x, w, b, f=f: f(x, w, b).pow(3).sum() for f in (run, torch_layer))
    every = (0, 1, 2)
    for mine, theirs in zip(
        torch.func.grad(loss, argnums=every)(x, w, b), torch.func.grad(torch_loss, argnums=every)(x, w, b), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    tangents = tuple(torch.randn_like(tensor) for tensor in (x, w, b))
    for mine, theirs in zip(
        torch.func.jvp(run, (x, w, b), tangents), torch.func.jvp(torch_layer, (x, w, b), tangents), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    _, pullback = torch.func.vjp(run, x, w, b)
    _, torch_pullback = torch.func.vjp(torch_layer, x, w, b)
    g = torch.randn_like(torch_layer(x, w, b))
    for mine, theirs in zip(pullback(g), torch_pullback(g), strict=True):
        torch.testing.assert_close(mine, theirs)
    small = x[:1, :, :2, :2]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(run, argnums=1)(small, w, b), torch.func.jacrev(torch_layer, argnums=1)(small, w, b))
    hessian = torch.func.jacfwd(torch.func.jacrev(loss, argnums=2), argnums=2)(small, w, b)
    torch.testing.assert_close(hessian, torch.func.hessian(torch_loss, argnums=2)(small, w, b))


def test_per_sample_gradients(device):
    """vmap over grad: the usual way to per-sample gradients."""
    x, w, b = operands(device, torch.float64)
    loss = lambda w, one: layer(one[None], w, b).square().sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    for one, sample in zip(got, x, strict=True):
        leaf = w.clone().requires_grad_()
        (want,) = torch.autograd.grad(torch_layer(sample[None], leaf, b).square().sum(), leaf)
        torch.testing.assert_close(one, want)


@pytest.mark.parametrize("algorithm", [None, *GENERAL_ALGORITHMS])
def test_ensembles(algorithm, device):
    """vmap over models, each with its own weights and data, and over their gradients."""
    x, w, b = operands(device, torch.float64)
    xs, ws, bs = (torch.stack([tensor, tensor * 2, tensor - 1]) for tensor in (x, w, b))
    mine = lambda x, w, b: upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=algorithm).pow(3).sum()  # noqa: E731
    theirs = lambda x, w, b: torch_layer(x, w, b).pow(3).sum()  # noqa: E731
    every = (0, 1, 2)
    for in_dims in ((0, 0, 0), (None, 0, None), (0, None, None)):
        stacks = tuple(many if axis == 0 else one for axis, many, one in zip(in_dims, (xs, ws, bs), (x, w, b), strict=True))
        got = torch.func.vmap(torch.func.grad(mine, argnums=every), in_dims=in_dims)(*stacks)
        for index in range(3):
            one = tuple(many[index] if axis == 0 else many for axis, many in zip(in_dims, stacks, strict=True))
            for stacked, want in zip(got, torch.func.grad(theirs, argnums=every)(*one), strict=True):
                torch.testing.assert_close(stacked[index], want)


def test_functional_call(device):
    model = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device)
    x, w, b = operands(device)
    torch.testing.assert_close(torch.func.functional_call(model, {"weight": w, "bias": b}, x), torch_layer(x, w, b))


@pytest.mark.parametrize("which", range(3), ids=["x", "w", "bias"])
def test_forward_mode_of_each_operand(which, device):
    given = operands(device, torch.float64)
    tangent = torch.randn_like(given[which])
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(t, tangent) if i == which else t for i, t in enumerate(given)]
        _, mine = torch.autograd.forward_ad.unpack_dual(layer(*duals))
        _, theirs = torch.autograd.forward_ad.unpack_dual(torch_layer(*duals))
    torch.testing.assert_close(mine, theirs)


def test_forward_mode(device):
    x, w, b = operands(device, torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y, tangent = torch.autograd.forward_ad.unpack_dual(layer(dual, w, b))
    torch.testing.assert_close(y, torch_layer(x, w, b))
    torch.testing.assert_close(tangent, torch_layer(torch.ones_like(x), w, None))


def compiled(function, **options):
    importlib.import_module("torch._dynamo").reset()  # torch 2.0 does not import it by itself
    try:
        return torch.compile(function, fullgraph=True, **options)
    except RuntimeError as error:
        pytest.skip(f"this torch cannot compile here: {error}")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "gradients"])
def test_compile_whole_graph(dynamic, requires_grad, device):
    if dynamic and TORCH < (2, 1):
        pytest.skip(f"torch {torch.__version__} has no dynamic shapes for custom operators")
    run = compiled(layer, backend="aot_eager", dynamic=dynamic)
    for batch, height in ((2, 5), (3, 7), (5, 9)):
        x = torch.randn(batch, 4, height, 6, device=device, dtype=torch.float64)
        _, w, b = operands(device, torch.float64, requires_grad=requires_grad)
        got, want = run(x, w, b), torch_layer(x, w, b)
        torch.testing.assert_close(got, want)
        if requires_grad:
            for one, other in zip(
                torch.autograd.grad(got.square().sum(), (w, b)), torch.autograd.grad(want.square().sum(), (w, b)), strict=True
            ):
                torch.testing.assert_close(one, other)


def test_compile_dynamic_does_not_recompile(device):
    if TORCH < (2, 2):
        pytest.skip(f"torch {torch.__version__} counts recompilations otherwise")
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(layer, backend=counter, dynamic=True)
    _, w, b = operands(device)
    for batch, height, width in ((2, 5, 6), (3, 7, 4), (5, 9, 11)):
        run(torch.randn(batch, 4, height, width, device=device), w, b)
    assert counter.frame_count == 1


def test_compile_modules_and_options(device):
    model = torch.nn.Sequential(
        upfold.ConvTranspose2d(4, 6, 4, 2, 1, activation="relu"), upfold.ConvTranspose2d(6, 3, 2, 2, algorithm="gemm")
    ).to(device)
    x = operands(device)[0]
    run = compiled(model, backend="aot_eager")
    torch.testing.assert_close(run(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    fold = compiled(lambda t: upfold.fold(upfold.unfold(t, 3, 1, 1, 2), (5, 6), 3, 1, 1, 2), backend="aot_eager")
    torch.testing.assert_close(fold(x), upfold.fold(upfold.unfold(x, 3, 1, 1, 2), (5, 6), 3, 1, 1, 2))


def test_compiled_code_follows_use(device):
    """The block that surrounds a call decides, compiled or not."""
    # float64: in float32 the algorithms differ by TF32, which only the matrix product uses.
    x, w, b = (tensor.detach().double() for tensor in operands(device))
    run = compiled(layer, backend="aot_eager")
    want = run(x, w, b)
    for algorithm in GENERAL_ALGORITHMS:
        with upfold.use(algorithm=algorithm):
            torch.testing.assert_close(run(x, w, b), want)
    if device.type == "cpu":
        with upfold.use(algorithm="direct"):
            assert torch.equal(run(x, w, b), upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm="direct"))


def test_inductor(device, tmp_path, monkeypatch):
    import shutil

    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler for inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = compiled(lambda x, w, b: layer(x, w, b).relu() * 2)
    x, w, b = operands(device)
    try:
        got = run(x, w, b)
    except Exception as error:
        if TORCH < (2, 1):
            pytest.skip(f"inductor of torch {torch.__version__} cannot build here: {error}")
        raise
    torch.testing.assert_close(got, torch_layer(x, w, b).relu() * 2)


@pytest.mark.skipif(not hasattr(torch, "export"), reason=f"torch {torch.__version__} has no torch.export")
def test_export(device):
    model = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device).eval()
    x = operands(device)[0]
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    for size in (2, 5):
        x = torch.randn(size, 4, 5, 6, device=device)
        torch.testing.assert_close(program.module()(x), model(x))
