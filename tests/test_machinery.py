"""Torch's machinery round an operator: compile, export, fakes, opcheck, vmap, func, autocast, subclasses, fork, threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import ALGORITHMS, dtype_name, geometry_arguments, ours, torchs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import upfold
from upfold import cases, native
from upfold.execute import describe
from upfold.problem import make_geometry

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
SMOKE = pytest.mark.parametrize("case", cases.by_tier("smoke"), ids=lambda case: case.name)
ARGUMENTS = {"stride": 2, "padding": 1, "output_padding": 1}


def needs_torch(major, minor, what):
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__} has no {what}")


def operands(device, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 6), (4, 3, 3, 3), (3,)
    made = (torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes)
    return tuple(tensor.requires_grad_(options.get("requires_grad", False)) for tensor in made)


def layer(x, w, b):
    return upfold.conv_transpose2d(x, w, b, **ARGUMENTS)


def torch_layer(x, w, b):
    return F.conv_transpose2d(x, w, b, **ARGUMENTS)


# --- fakes -----------------------------------------------------------------------------------------------------------


@SMOKE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=dtype_name)
def test_fakes_have_the_real_shapes_and_strides(case, dtype, device):
    for memory_format in (None, {4: torch.channels_last, 5: torch.channels_last_3d}.get(case.ndim + 2)):
        x, w, b = case.tensors(dtype, device, memory_format=memory_format)
        leaves = (x.requires_grad_(), w.requires_grad_(), b)
        real = ours(leaves, case.geometry)
        real_gradients = torch.autograd.grad(real, leaves[:2], torch.ones_like(real))
        with FakeTensorMode() as mode:
            fakes = tuple(None if tensor is None else mode.from_tensor(tensor) for tensor in (x, w, b))
            fake = ours(fakes, case.geometry)
            fake_gradients = torch.autograd.grad(fake, fakes[:2], torch.ones_like(fake))
        for one, other in zip((real, *real_gradients), (fake, *fake_gradients), strict=True):
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert (one.dtype, one.device) == (other.dtype, other.device)


def test_fakes_of_fold_and_unfold(device):
    image = torch.randn(2, 3, 8, 9, device=device).contiguous(memory_format=torch.channels_last)
    columns = upfold.unfold(image, 3, 1, 1, 2)
    folded = upfold.fold(columns, (8, 9), 3, 1, 1, 2)
    with FakeTensorMode() as mode:
        fake_columns = upfold.unfold(mode.from_tensor(image), 3, 1, 1, 2)
        fake = upfold.fold(mode.from_tensor(columns), (8, 9), 3, 1, 1, 2)
    for one, other in ((columns, fake_columns), (folded, fake)):
        assert (one.shape, one.stride()) == (other.shape, other.stride())


def test_meta_tensors():
    x, w, b = (tensor.to("meta") for tensor in operands("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back: the fakes answer
        y = layer(x, w, b)
    assert y.device.type == "meta"
    assert y.shape == torch_layer(x, w, b).shape
    assert upfold.unfold(x, 3).shape == F.unfold(torch.empty(2, 4, 5, 6), 3).shape


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {torch.__version__} has no torch.library.opcheck")
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "gradients"])
def test_opcheck(requires_grad, device):
    x, w, b = operands(device, requires_grad=requires_grad)
    geometry = [2, 2], [1, 1], [1, 1], [1, 1], 1
    g = torch.randn(2, 3, 10, 12, device=device, requires_grad=requires_grad)
    calls = {
        "conv_transpose": (x, w, b, *geometry, 0, 0),
        "conv": (g, w, [5, 6], *geometry, 0),
        "conv_transpose_weight": (x, g, [3, 3], *geometry, 0),
        "unfold": (x, [3, 3], [1, 1], [1, 1], [2, 2]),
        "fold": (torch.randn(2, 36, 9, device=device, requires_grad=requires_grad), [5, 6], [3, 3], [1, 1], [1, 1], [2, 2]),
    }
    for name, arguments in calls.items():
        # What autograd would see of the raw operators is the public ones' business.
        torch.library.opcheck(getattr(torch.ops.upfold, name).default, arguments)
        plain = tuple(argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments)
        torch.library.opcheck(getattr(torch.ops.upfold, f"{name}_raw").default, plain)


def test_modes_see_the_operators(device):
    """Nothing bypasses the dispatcher while a mode watches, with gradients or without."""

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w, b = operands(device)
    with Names() as seen:
        layer(x, w, b)
    assert any("upfold.conv_transpose" in name for name in seen.names), seen.names
    with Names() as seen:
        y = layer(x.requires_grad_(), w.requires_grad_(), b)
        torch.autograd.grad(y.sum(), (x, w))
    assert any("upfold.conv_raw" in name for name in seen.names), seen.names
    assert any("upfold.conv_transpose_weight_raw" in name for name in seen.names), seen.names


def test_function_modes_and_subclasses_see_the_call(device):
    from torch.overrides import TorchFunctionMode

    calls = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    class Labelled(torch.Tensor):
        pass

    x, w, b = operands(device)
    want = layer(x, w, b)
    with Watch():
        got = layer(x, w, b)
    assert calls
    assert torch.equal(got, want)
    labelled = x.as_subclass(Labelled)
    assert isinstance(layer(labelled, w, b), Labelled)
    assert torch.equal(layer(labelled, w, b).as_subclass(torch.Tensor), want)


# --- functional transforms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
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


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
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
    for mine, theirs in zip(torch.func.jvp(run, (x, w, b), tangents), torch.func.jvp(torch_layer, (x, w, b), tangents), strict=True):
        torch.testing.assert_close(mine, theirs)
    _, pullback = torch.func.vjp(run, x, w, b)
    _, torch_pullback = torch.func.vjp(torch_layer, x, w, b)
    g = torch.randn_like(torch_layer(x, w, b))
    for mine, theirs in zip(pullback(g), torch_pullback(g), strict=True):
        torch.testing.assert_close(mine, theirs)
    small = x[:1, :, :2, :2]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            transform(run, argnums=1)(small, w, b), torch.func.jacrev(torch_layer, argnums=1)(small, w, b)
        )
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


def test_functional_call(device):
    model = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device)
    x, w, b = operands(device)
    torch.testing.assert_close(torch.func.functional_call(model, {"weight": w, "bias": b}, x), torch_layer(x, w, b))


def test_forward_mode(device):
    x, w, b = operands(device, torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y, tangent = torch.autograd.forward_ad.unpack_dual(layer(dual, w, b))
    torch.testing.assert_close(y, torch_layer(x, w, b))
    torch.testing.assert_close(tangent, torch_layer(torch.ones_like(x), w, None))


# --- compile and export ----------------------------------------------------------------------------------------------


def compiled(function, **options):
    torch._dynamo.reset()
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
            for one, other in zip(torch.autograd.grad(got.square().sum(), (w, b)), torch.autograd.grad(want.square().sum(), (w, b)), strict=True):
                torch.testing.assert_close(one, other)


def test_compile_dynamic_does_not_recompile(device):
    if TORCH < (2, 2):
        pytest.skip(f"torch {torch.__version__} counts recompilations otherwise")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
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
    x, w, b = operands(device)
    run = compiled(layer, backend="aot_eager")
    want = run(x, w, b)
    for algorithm in ALGORITHMS:
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


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "gradients"])
def test_autocast_as_torchs_layer(dtype, requires_grad, device):
    x, w, b = operands(device, requires_grad=requires_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with torch.autocast(device.type, dtype=dtype):
                want = torch_layer(x, w, b)
        except (RuntimeError, UserWarning) as error:
            pytest.skip(f"this torch has no such autocast: {error}")
    with torch.autocast(device.type, dtype=dtype):
        got = layer(x, w, b)
        module = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device)
        assert module(x).dtype == want.dtype
        with torch.autocast(device.type, enabled=False):
            assert layer(x, w, b).dtype == torch.float32
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    if requires_grad:
        gradients = torch.autograd.grad(got.float().sum(), (x, w, b))
        for one, other in zip(gradients, torch.autograd.grad(want.float().sum(), (x, w, b)), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=3e-2, atol=5e-2)


def test_autocast_casts_what_differs(device):
    """Under autocast float32 weights meet 16-bit inputs, as torch's layer allows; float64 stays."""
    x, w, b = operands(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(x.bfloat16(), w, b).dtype == torch.bfloat16
        assert layer(x.double(), w.double(), b.double()).dtype == torch_layer(x.double(), w.double(), b.double()).dtype
        assert upfold.fold(upfold.unfold(x, 3), (5, 6), 3).dtype == F.fold(F.unfold(x, 3), (5, 6), 3).dtype


# --- views, modes of torch, contexts ---------------------------------------------------------------------------------


def test_lazy_conjugates_and_negations(device):
    x, w, b = operands(device, torch.complex128)
    want = torch_layer(x.conj().resolve_conj(), w, b)
    assert x.conj().is_conj()
    torch.testing.assert_close(layer(x.conj(), w, b), want)
    torch.testing.assert_close(layer(x, w.conj(), b.conj()), torch_layer(x, w.conj().resolve_conj(), b.conj().resolve_conj()))
    part = x.conj().imag
    assert part.is_neg()
    real_w, real_b = w.real.contiguous(), b.real.contiguous()
    torch.testing.assert_close(layer(part, real_w, real_b), torch_layer(part.resolve_neg(), real_w, real_b))
    for algorithm in ALGORITHMS:
        got = upfold.conv_transpose2d(x.conj(), w, b, **ARGUMENTS, algorithm=algorithm)
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(upfold.unfold(x.conj(), 3), upfold.unfold(x.conj().resolve_conj(), 3))


def test_inference_mode(device):
    x, w, b = operands(device, requires_grad=True)
    with torch.inference_mode():
        y = layer(x, w, b)
        assert y.is_inference()
    torch.testing.assert_close(y, torch_layer(x, w, b).detach())
    with torch.inference_mode():
        inner = torch.randn(2, 4, 5, 6, device=device)
    assert layer(inner, w.detach(), b.detach()).shape == y.shape


def test_settings_belong_to_the_thread(device):
    """`use` nests, ends with its block, and does not reach another thread."""
    model = upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device)
    x = operands(device)[0]
    first = upfold.explain(model, x).plan.algorithm
    seen = []
    with upfold.use(algorithm="direct"):
        assert upfold.explain(model, x).plan.algorithm == "direct"
        with upfold.use(algorithm="gemm", workspace_mb=8):
            assert upfold.explain(model, x).plan.algorithm == "gemm"
        with upfold.use(workspace_mb=3):
            assert upfold.explain(model, x).plan.algorithm == "direct"
        with upfold.use(algorithm="auto"):
            assert upfold.explain(model, x).plan.algorithm == first
        thread = threading.Thread(target=lambda: seen.append(upfold.explain(model, x).plan.algorithm))
        thread.start()
        thread.join()
        with contextlib.suppress(ZeroDivisionError), upfold.use(algorithm="gemm"):
            raise ZeroDivisionError
        assert upfold.explain(model, x).plan.algorithm == "direct"
    assert seen == [first]
    assert upfold.explain(model, x).plan.algorithm == first


def test_use_decorates(device):
    @upfold.use(algorithm="direct")
    def run():
        return upfold.explain(upfold.ConvTranspose2d(4, 3, 3).to(device), operands(device)[0]).plan.algorithm

    assert run() == run() == "direct"


def test_explanation_reads_well(device):
    x = operands(device)[0]
    for kind in (upfold.ConvTranspose2d, torch.nn.ConvTranspose2d):
        explanation = upfold.explain(kind(4, 3, 3, 2, 1).to(device), x)
        text = str(explanation)
        assert "4 -> 3 channels" in text
        assert explanation.plan.algorithm in text
        assert [candidate.algorithm for candidate in explanation.candidates] == list(upfold.algorithms())
        assert all((candidate.plan is None) != (candidate.refusal is None) for candidate in explanation.candidates)
    named = upfold.explain(upfold.ConvTranspose2d(4, 3, 3, algorithm="gemm").to(device), x)
    assert named.plan.algorithm == "gemm"
    with pytest.raises(upfold.InvalidArgument, match="input = None"):
        upfold.explain(upfold.ConvTranspose2d(4, 3, 3))


def test_auto_takes_torch_never_where_ours_run(device):
    for case in cases.CASES:
        small = case.scaled(0.005)
        x, w, b = small.tensors(device=device)
        model = torch.nn.Module()
        model.weight, model.bias = w, b
        for name, value in geometry_arguments(small.geometry).items():
            setattr(model, name, value)
        assert upfold.explain(model, x).plan.algorithm != "torch", case.name


# --- threads and processes -------------------------------------------------------------------------------------------


class Decode(torch.utils.data.Dataset):
    """A data set whose items are made by the operators, in the worker."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, w, b = operands("cpu")
        columns = upfold.unfold(x, 3, 1, 1, 2)
        return index, layer(x + index, w, b), upfold.fold(columns, (5, 6), 3, 1, 1, 2)


def items(threads, **options):
    torch.set_num_threads(threads)
    return list(torch.utils.data.DataLoader(Decode(), batch_size=2, **options))


def test_forked_workers():
    """Child processes run the operators after the parent has used its thread pool."""
    want = items(2)
    got = items(2, num_workers=2, multiprocessing_context="fork", timeout=60)
    for one, other in zip(got, want, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


FORKED = """
import os, sys, torch, upfold
torch.set_num_threads(2)
x, w = torch.randn(4, 8, 32, 32), torch.randn(8, 8, 4, 4)
want = upfold.conv_transpose2d(x, w, stride=2, algorithm="direct")
columns = upfold.unfold(x, 3)
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    y, again = upfold.conv_transpose2d(x, w, stride=2, algorithm="direct"), upfold.unfold(x, 3)
    torch.set_num_threads(1)  # for torch.equal, whose own thread pool does not outlive a fork
    os._exit(0 if torch.equal(y, want) and torch.equal(again, columns) else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 99)
"""


def test_bare_fork_with_threads():
    """A forked child that keeps two threads: an OpenMP pool would hang there."""
    import os
    import subprocess

    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    done = subprocess.run([sys.executable, "-c", FORKED], timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_threads_at_once(device):
    """Eight Python threads share plans and kernels; each gets its own numbers."""
    sample = [cases.find(name) for name in ("k2s2", "k3s2p1op1", "depthwise-k4s2p1", "3d-mixed", "1d-k16s8p4")]
    prepared = [(case, case.tensors(torch.float64, device, exact=True)) for case in sample]
    want = [torchs(tensors, case.geometry) for case, tensors in prepared]
    failures = []

    def work(offset):
        for turn in range(30):
            index = (turn + offset) % len(prepared)
            case, tensors = prepared[index]
            for algorithm in ALGORITHMS:
                if not torch.equal(ours(tensors, case.geometry, algorithm), want[index]):
                    failures.append((case.name, algorithm))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def released(call):
    """Whether another Python thread gets to run while `call` does. The interpreter hands over of its own accord only after ten
    seconds here, so a call that keeps it to its end is followed, not interrupted, by the other thread.
    """
    gate, done, seen = threading.Lock(), [], []
    gate.acquire()

    def other():
        with gate:
            seen.append(not done)

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        gate.release()
        call()
        done.append(True)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    return seen == [True]


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_release_the_interpreter(threads):
    x, w, y = torch.randn(4, 64, 64, 64), torch.randn(64, 64, 4, 4), torch.empty(4, 64, 130, 130)
    torch.set_num_threads(threads)
    problem = describe(x, w, None, (2, 0, 0, 1, 1))
    module = native.cpu()
    workspace = torch.empty(max(1, module.direct_workspace_bytes(problem.cpu, threads)), dtype=torch.uint8)
    pointers = x.data_ptr(), w.data_ptr(), 0, y.data_ptr(), workspace.data_ptr()
    native_problem = problem.cpu
    assert not released(lambda: sum(range(10**6)))
    assert released(lambda: module.direct(native_problem, *pointers, threads))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_call_leaves_the_thread_count_alone(name):
    x, w, b = operands("cpu")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=name)
        assert torch.get_num_threads() == threads


def test_random_state_is_left_alone(device):
    before = torch.get_rng_state()
    layer(*operands(device))
    assert torch.equal(before, torch.get_rng_state())


def test_geometry_is_cached_and_checked_once():
    assert make_geometry(2, 2, 1, 1, 1, 1) == make_geometry(2, (2, 2), (1,), [1, 1], 1, (1, 1))
