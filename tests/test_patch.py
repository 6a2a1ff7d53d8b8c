"""The block that runs torch's functions on upfold: what it reaches, that it ends, and that calls do what torch's do."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import upfold
from models import decoder, states, upsampler
from oracle import reference, reference_gradients
from small_layer import ARGUMENTS, Run, layer, operands, record_runs, torch_layer
from upfold import columns
from upfold.geometry import make_geometry

GEOMETRY = make_geometry(2, 2, 1, 1, 1, 1)
CONVOLUTIONS, WINDOWS = 5, ["im2col", "col2im"]


@pytest.fixture
def ran(monkeypatch):
    """What upfold runs: the algorithm of each convolution, and the kernels of unfold and fold."""
    runs, launch = record_runs(monkeypatch), columns._run
    monkeypatch.setattr(columns, "_run", lambda name, *rest: (runs.append(Run(name, None)), launch(name, *rest))[1])
    return runs


def split(ran) -> tuple[int, list[str]]:
    """Number of convolutions by a method of our own, and the kernels of unfold and fold; the list is empty afterwards."""
    names = [run.algorithm for run in ran]
    ran.clear()
    return sum(name not in (*WINDOWS, "torch") for name in names), [name for name in names if name in WINDOWS]


def modes() -> int:
    return torch._C._len_torch_function_stack()


def test_reaches_every_name_and_ends(ran):
    model, x = upsampler()
    functions = [getattr(F, name) for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "fold", "unfold")]
    with torch.no_grad():
        want = model(x)
        assert split(ran) == (0, [])
        with upfold.patch():
            got = model(x)
        assert split(ran) == (CONVOLUTIONS, WINDOWS)
        torch.testing.assert_close(got, want)
        assert torch.equal(model(x), want)
    assert split(ran) == (0, [])
    assert modes() == 0
    for function in functions:
        assert getattr(F, function.__name__) is function


def test_equals_the_direct_call(ran):
    x, w, b = operands("cpu")
    with upfold.patch():
        got = torch_layer(x, w, b)
        keywords = F.conv_transpose2d(input=x, weight=w, bias=b, **ARGUMENTS)
    assert torch.equal(got, layer(x, w, b))
    assert torch.equal(keywords, got)
    torch.testing.assert_close(got.double(), reference((x, w, b), GEOMETRY), rtol=1e-5, atol=1e-5)


def test_replaced_and_own_layers_inside(ran):
    model, x = decoder()
    want = model(x)
    report = upfold.replace(model)
    assert states(report) == {"up": "replaced", "rest.2": "replaced"}
    with upfold.patch():
        torch.testing.assert_close(model(x), want)
        torch.testing.assert_close(upfold.ConvTranspose2d(3, 2, 2)(x).shape, torch.Size((2, 2, 6, 7)))
    assert split(ran) == (3, [])


def test_choice_of_functions(ran):
    model, x = upsampler()
    with torch.no_grad():
        with upfold.patch(fold=False):
            model(x)
        assert split(ran) == (CONVOLUTIONS, [])
        with upfold.patch(conv_transpose=False):
            model(x)
        assert split(ran) == (0, WINDOWS)
        with upfold.patch(conv_transpose=False, fold=False):
            model(x)
        assert split(ran) == (0, [])


def test_tensor_unfold_is_another_function():
    x = torch.arange(12.0).reshape(3, 4)
    want = x.unfold(1, 2, 1)
    with upfold.patch():
        assert torch.equal(x.unfold(1, 2, 1), want)


def test_settings_reach_inside(ran):
    x, w, b = operands("cpu")
    with torch.no_grad(), upfold.patch():
        for name in ("direct", "gemm", "torch"):
            with upfold.use(algorithm=name):
                torch_layer(x, w, b)
    assert [run.algorithm for run in ran] == ["direct", "gemm", "torch"]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_torchs_own_operator_is_not_redirected_again(ran, requires_grad):
    """The algorithm `torch` calls the very function that the block redirects; blocks may lie on each other."""
    x, w, b = operands("cpu", requires_grad=requires_grad)
    with upfold.use(algorithm="torch"), upfold.patch(), upfold.patch():
        y = torch_layer(x, w, b)
        if requires_grad:
            torch.autograd.backward(y.sum())
    assert {run.algorithm for run in ran} == {"torch"}
    assert len(ran) == (3 if requires_grad else 1)
    assert torch.equal(y, torch_layer(x, w, b))


def test_ends_after_an_exception(ran):
    x, w, b = operands("cpu")
    with pytest.raises(KeyError), upfold.patch():
        raise KeyError
    with pytest.raises(RuntimeError), upfold.patch(), upfold.patch(fold=False):
        F.conv_transpose2d(x, w.double())
    assert modes() == 0
    torch_layer(x, w, b)
    assert not ran


def test_nesting_adds(ran):
    model, x = upsampler()
    with torch.no_grad(), upfold.patch(conv_transpose=False):
        with upfold.patch(fold=False):
            model(x)
            assert split(ran) == (CONVOLUTIONS, WINDOWS)
        model(x)
        assert split(ran) == (0, WINDOWS)
    model(x)
    assert split(ran) == (0, [])


def test_decorator(ran):
    x, w, b = operands("cpu")

    @upfold.patch()
    def once(depth=0):
        """Call itself once."""
        return torch_layer(x, w, b) if depth else once(1)

    for _ in range(2):
        assert torch.equal(once(), layer(x, w, b))
    assert once.__doc__ == "Call itself once."
    assert split(ran) == (4, [])
    assert modes() == 0


def test_generators(ran):
    x, w, b = operands("cpu")

    def outputs():
        for _ in range(2):
            yield torch_layer(x, w, b)

    def opening():
        with upfold.patch():
            yield from outputs()

    consumed = outputs()
    with upfold.patch():
        next(consumed)
    assert split(ran) == (1, [])
    next(consumed)
    assert split(ran) == (0, [])
    assert len(list(opening())) == 2
    assert split(ran) == (2, [])
    abandoned = opening()
    next(abandoned)
    abandoned.close()
    assert modes() == 0


def test_threads_are_apart(ran):
    """A thread neither sees the block of another nor ends it."""
    x, w, b = operands("cpu")
    inside, seen = threading.Barrier(2), {}

    def work(name, surroundings):
        with surroundings:
            inside.wait()
            seen[name] = modes()
            for _ in range(5):
                seen[name, "y"] = torch_layer(x, w, b)
            inside.wait()

    blocks = {"patched": upfold.patch(), "plain": contextlib.nullcontext()}
    threads = [threading.Thread(target=work, args=pair) for pair in blocks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen["patched"], seen["plain"], modes()) == (1, 0, 0)
    assert split(ran) == (5, [])
    torch.testing.assert_close(seen["plain", "y"], torch_layer(x, w, b))  # torch may sum in another order in another thread
    with upfold.patch():
        thread = threading.Thread(target=torch_layer, args=(x, w, b))
        thread.start()
        thread.join()
    assert split(ran) == (0, [])


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("by", ["tensor", "module"])
def test_gradients(ran, by, backward_inside):
    x, w, b = operands("cpu", torch.float64, requires_grad=True)
    grad = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    with contextlib.ExitStack() as block:
        block.enter_context(upfold.patch())
        y = torch_layer(x, w, b)
        if not backward_inside:
            block.close()
        y.backward(grad) if by == "tensor" else torch.autograd.backward(y, grad)
    assert len(ran) == 3  # the convolution and its two adjoints
    for got, want in zip((x.grad, w.grad, b.grad), reference_gradients((x, w, b), grad, GEOMETRY), strict=True):
        torch.testing.assert_close(got, want)


def test_derivatives_of_a_whole_model():
    model, x = upsampler(torch.float64, requires_grad=True)
    with upfold.patch():
        assert torch.autograd.gradcheck(model, (x,))
        got = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in got), x)[0]
    want = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], create_graph=True)
    for one, other in zip((*got, second), (*want, torch.autograd.grad(sum(g.square().sum() for g in want), x)[0]), strict=True):
        torch.testing.assert_close(one, other)


def test_transforms():
    x, w, b = operands("cpu", torch.float64)
    loss = lambda x: torch_layer(x, w, b).square().sum()  # noqa: E731
    with upfold.patch():
        got = torch.func.grad(loss)(x), torch.func.vmap(functools.partial(torch_layer, w=w, b=b))(x[None])
    torch.testing.assert_close(got, (torch.func.grad(loss)(x), torch_layer(x, w, b)[None]))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_checkpoints(use_reentrant, backward_inside):
    """Whoever computes a segment again, it gives the same tensors."""
    model, x = upsampler(torch.float64, requires_grad=True)
    want = torch.autograd.grad(model(x).square().sum(), x)[0]
    with contextlib.ExitStack() as block:
        block.enter_context(upfold.patch())
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        if not backward_inside:
            block.close()
        y.square().sum().backward()
    torch.testing.assert_close(x.grad, want)


def test_autocast(ran):
    model, x = upsampler()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.conv_transpose2d(x, model.weight)
        with upfold.patch():
            got = F.conv_transpose2d(x, model.weight)
            assert model(x).dtype == torch.bfloat16
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert split(ran)[0] == 1 + CONVOLUTIONS


def test_without_batch_meta_and_fake(ran):
    x, w, b = operands("cpu")
    with upfold.patch():
        torch.testing.assert_close(torch_layer(x[0], w, b), layer(x[0], w, b))
        assert torch_layer(*operands("meta")).shape == (2, 3, 10, 12)
        with FakeTensorMode():
            assert torch_layer(torch.ones(2, 4, 5, 6), torch.ones(4, 3, 3, 3), None).shape == (2, 3, 10, 12)


def other_operands() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    x, w = torch.arange(32).reshape(1, 2, 4, 4) % 5 - 2, torch.arange(24).reshape(2, 3, 2, 2) % 3
    others = {"integers": (x, w)}
    if torch.backends.mkldnn.is_available():
        others["another layout"] = x.float().to_mkldnn(), w.float()
    return others


@pytest.mark.parametrize("name", other_operands())
def test_what_torch_alone_takes(ran, name):
    x, w = other_operands()[name]
    want = F.conv_transpose2d(x, w)
    with upfold.patch(), pytest.warns(RuntimeWarning, match="upfold refuses.*input"):
        got = F.conv_transpose2d(x, w)
    assert (got.dtype, got.layout) == (want.dtype, want.layout)
    assert torch.equal(got.to_dense(), want.to_dense())
    assert not ran


def test_fallback_that_was_ruled_out():
    x, w = other_operands()["integers"]
    for settings in ({"fallback": False}, {"algorithm": "direct"}):
        with upfold.patch(), upfold.use(**settings), pytest.raises(upfold.InvalidArgument, match=r"input\.dtype"):
            F.conv_transpose2d(x, w)


WRONG = {
    "dtypes": lambda x, w: F.conv_transpose2d(x, w.double()),
    "channels": lambda x, w: F.conv_transpose2d(x[:, :3], w),
    "rank": lambda x, w: F.conv_transpose2d(x[0, 0], w),
    "padding": lambda x, w: F.conv_transpose2d(x, w, padding=-1),
    "stride": lambda x, w: F.conv_transpose2d(x, w, stride=1.5),
    "length": lambda x, w: F.conv_transpose2d(x, w, stride=(1, 1, 1)),
    "keyword": lambda x, w: F.conv_transpose2d(x, w, algorithm="gemm"),
    "no tensor": lambda x, w: F.conv_transpose2d([1.0], w),
    "nothing": lambda x, w: F.conv_transpose2d(),
    "too large a block": lambda x, w: F.unfold(x, 9),
    "wrong blocks": lambda x, w: F.fold(x[:, :, 0], (4, 4), 2),
    "integers": lambda x, w: F.unfold(x.int(), 2),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name):
    x, w, _ = operands("cpu")
    with pytest.raises(Exception) as want:  # noqa: PT011 - whatever torch raises
        WRONG[name](x, w)
    with pytest.raises(want.type) as got, upfold.patch():
        WRONG[name](x, w)
    assert got.type is want.type
    assert str(got.value) == str(want.value)
