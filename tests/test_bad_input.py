"""Each wrong argument gets one sentence (argument = value; rule; hint) before any work, from functions, layers and fakes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch

import upfold
from oracle import ALGORITHMS, GENERAL_ALGORITHMS, ours
from upfold import InvalidArgument, overlap
from upfold.geometry import make_geometry

X, W, B = torch.ones(2, 4, 5, 6), torch.ones(4, 3, 3, 3), torch.ones(3)


def deconv(x=X, w=W, b=B, **keywords):
    return upfold.conv_transpose2d(x, w, b, **keywords)


# What is called, and what the text must name.
BAD = {
    "rank of input": (lambda: deconv(torch.ones(4, 5)), r"input\.shape = \(4, 5\).*4 axes"),
    "rank of input, too many": (lambda: deconv(torch.ones(1, 1, 4, 5, 6)), r"input\.shape = \(1, 1, 4, 5, 6\)"),
    "rank of weight": (lambda: deconv(w=torch.ones(4, 3, 3)), r"weight\.shape = \(4, 3, 3\).*4 axes"),
    "rank of weight in 1-D": (lambda: upfold.conv_transpose1d(torch.ones(1, 4, 5), W), r"weight\.shape.*3 axes"),
    "rank of bias": (lambda: deconv(b=torch.ones(3, 1)), r"bias\.shape = \(3, 1\); must be \(3,\)"),
    "channels": (
        lambda: deconv(w=torch.ones(5, 3, 3, 3)),
        r"weight\.shape\[0\] = 5 but input has 4 channels; in_channels must match",
    ),
    "length of bias": (lambda: deconv(b=torch.ones(4)), r"bias\.shape = \(4,\); must be \(3,\)"),
    "groups that do not divide": (lambda: deconv(groups=3), r"groups = 3; must divide in_channels = 4"),
    "no groups": (lambda: deconv(groups=0), r"groups = 0; must be at least 1"),
    "negative groups": (lambda: deconv(groups=-2), r"groups = -2; must be at least 1"),
    "zero stride": (lambda: deconv(stride=0), r"stride = \(0, 0\); must be at least 1"),
    "negative stride on one axis": (lambda: deconv(stride=(1, -1)), r"stride = \(1, -1\); must be at least 1"),
    "zero dilation": (lambda: deconv(dilation=(0, 1)), r"dilation = \(0, 1\); must be at least 1"),
    "zero kernel": (lambda: deconv(w=torch.ones(4, 3, 0, 3)), r"weight\.shape = \(4, 3, 0, 3\).*at least 1"),
    "no output channels": (lambda: deconv(w=torch.ones(4, 0, 3, 3), b=None), r"weight\.shape = \(4, 0, 3, 3\).*at least 1"),
    "empty image": (lambda: deconv(torch.ones(2, 4, 0, 6)), r"input\.shape = \(2, 4, 0, 6\).*at least 1"),
    "no channels": (lambda: deconv(torch.ones(2, 0, 5, 6), torch.ones(0, 3, 3, 3)), r"at least 1"),
    "negative padding": (lambda: deconv(padding=-1), r"padding = \(-1, -1\); must be at least 0"),
    "negative output padding": (lambda: deconv(output_padding=-1), r"output_padding = \(-1, -1\); must be at least 0"),
    "output padding": (
        lambda: deconv(stride=2, output_padding=2),
        r"output_padding = \(2, 2\); must be smaller than stride \(2, 2\) or dilation",
    ),
    "output padding on one axis": (
        lambda: deconv(stride=(2, 1), output_padding=(1, 1)),
        r"output_padding = \(1, 1\); must be smaller",
    ),
    "no output": (lambda: deconv(padding=4), r"padding = \(4, 4\) gives output size \(-1, 0\).*at least 1"),
    "length of stride": (lambda: deconv(stride=(1, 2, 3)), r"stride = \(1, 2, 3\); must be an integer or 2 integers; got 3"),
    "length of padding": (
        lambda: upfold.conv_transpose1d(torch.ones(1, 4, 5), torch.ones(4, 1, 3), padding=(1, 1)),
        r"padding = \(1, 1\)",
    ),
    "dtypes differ": (lambda: deconv(w=W.double()), r"weight\.dtype = torch\.float64.*torch\.float32"),
    "dtype of bias": (lambda: deconv(b=B.half()), r"bias\.dtype = torch\.float16.*torch\.float32"),
    "integers": (lambda: deconv(X.long(), W.long(), B.long()), r"dtype = torch\.int64"),
    "devices differ": (lambda: deconv(w=W.to("meta")), r"weight\.device = meta but input is on cpu; they must match"),
    "device of bias": (lambda: deconv(b=B.to("meta")), r"bias\.device = meta but input is on cpu"),
    "unknown algorithm": (
        lambda: deconv(algorithm="winograd"),
        r"algorithm = 'winograd'; must be one of 'auto', 'gemm', 'gemm_atomic', 'direct'",
    ),
    "unknown algorithm in a block": (lambda: upfold.use(algorithm="winograd").__enter__(), r"algorithm = 'winograd'"),
    "negative cap": (lambda: upfold.use(workspace_mb=-1).__enter__(), r"workspace_mb = -1; must be positive"),
    "no cap": (lambda: upfold.use(workspace_mb=float("inf")).__enter__(), r"workspace_mb = inf; must be positive and finite"),
    "unknown activation": (lambda: deconv(activation="softmax"), r"activation = 'softmax'; must be None or one of 'relu'"),
    "activation with a slope": (lambda: deconv(activation=("relu", 0.1)), r"only 'leaky_relu' takes a slope"),
    "slope that is no number": (
        lambda: deconv(activation=("leaky_relu", "steep")),
        r"activation = \('leaky_relu', 'steep'\); the slope must be a number",
    ),
    "activation of complex": (lambda: deconv(X + 0j, W + 0j, B + 0j, activation="relu"), r"activation = 'relu'.*complex"),
    "shape of out": (lambda: deconv(out=torch.empty(2, 3, 7, 9)), r"out\.shape = \(2, 3, 7, 9\); must be \(2, 3, 7, 8\)"),
    "dtype of out": (lambda: deconv(out=torch.empty(2, 3, 7, 8).double()), r"out\.dtype = torch\.float64"),
    "device of out": (lambda: deconv(out=torch.empty(2, 3, 7, 8, device="meta")), r"out\.device = meta but input is on cpu"),
    "out with gradients": (lambda: deconv(w=W.clone().requires_grad_(), out=torch.empty(2, 3, 7, 8)), r"out.*gradient"),
    "out that needs a gradient": (lambda: deconv(out=torch.empty(2, 3, 7, 8, requires_grad=True)), r"out.*gradient"),
    "out that overlaps itself": (
        lambda: deconv(out=torch.empty(2, 3, 7, 1).expand(2, 3, 7, 8)),
        r"out has strides .*must not share memory",
    ),
    "64-bit overflow": (lambda: deconv(stride=2**61), r"64-bit"),
    "stride beyond 64 bits on an axis of 1": (lambda: deconv(X[:, :, :1, :1], stride=2**64), r"stride = .*64-bit"),
    "dilation beyond 64 bits of a kernel of 1": (lambda: deconv(w=W[:, :, :1, :1], dilation=2**64), r"dilation = .*64-bit"),
    "padding beyond 64 bits": (lambda: deconv(padding=2**63), r"padding = .*64-bit"),
    "stride of fold beyond 64 bits": (lambda: upfold.unfold(X, 3, stride=2**64), r"stride = .*64-bit"),
    "64-bit overflow of one axis": (lambda: deconv(dilation=2**62), r"64-bit"),
    "layer's input": (
        lambda: upfold.ConvTranspose2d(4, 3, 3)(torch.ones(2, 5, 4, 4)),
        r"weight\.shape\[0\] = 4 but input has 5 channels",
    ),
}


@pytest.mark.parametrize("call, pattern", BAD.values(), ids=list(BAD))
def test_text(call, pattern):
    with pytest.raises(InvalidArgument, match=pattern) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


WITH_GRADIENTS = {name: row for name, row in BAD.items() if not row[1].startswith("out") or "output_" in row[1]}


@pytest.mark.parametrize("call, pattern", WITH_GRADIENTS.values(), ids=list(WITH_GRADIENTS))
def test_text_with_gradients(call, pattern, monkeypatch):
    """The same through autograd: the dispatcher must not wrap or lose the error."""
    operands = [tensor.clone().requires_grad_() for tensor in (X, W, B)]
    monkeypatch.setitem(globals(), "W", operands[1])
    monkeypatch.setattr(deconv, "__defaults__", tuple(operands))
    with pytest.raises(InvalidArgument, match=pattern):
        call()


NO_TENSORS = {
    "list": (lambda: deconv([1.0]), "input = list; must be a torch.Tensor"),
    "array": (lambda: deconv(X.numpy()), "input = ndarray; must be a torch.Tensor"),
    "nothing": (lambda: deconv(None), "input = NoneType"),
    "no weight": (lambda: deconv(w=None), "weight = NoneType"),
    "bias": (lambda: deconv(b=[1.0]), "bias = list"),
    "out": (lambda: deconv(out=[1.0]), "out = list"),
    "image": (lambda: upfold.unfold([1.0], 3), "input = list"),
    "columns": (lambda: upfold.fold(None, (3, 3), 3), "input = NoneType"),
}


@pytest.mark.parametrize("call, text", NO_TENSORS.values(), ids=list(NO_TENSORS))
def test_what_is_no_tensor(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_layouts_without_strides():
    for call in (lambda: deconv(X.to_sparse()), lambda: deconv(w=W.to_sparse()), lambda: upfold.unfold(X.to_sparse(), 3)):
        with pytest.raises(InvalidArgument, match=r"layout = torch\.sparse_coo; must be torch\.strided"):
            call()


def test_wrong_types_are_type_errors():
    for keywords in ({"stride": 1.5}, {"padding": "same"}, {"dilation": None}, {"output_padding": (1, None)}, {"groups": 1.5}):
        with pytest.raises(TypeError, match="integer"):
            deconv(**keywords)


@pytest.mark.parametrize("algorithm", GENERAL_ALGORITHMS)
def test_nothing_is_written_when_refused(algorithm):
    out = torch.full((2, 3, 7, 8), 7.0)
    for keywords in ({"padding": 4}, {"groups": 3}, {"stride": 0}, {"b": torch.ones(4)}, {"w": torch.ones(5, 3, 3, 3)}):
        with pytest.raises(InvalidArgument):
            deconv(**keywords, algorithm=algorithm, out=out)
    assert (out == 7).all()


OVERLAPS = {
    "the input itself": lambda x, w, b: (x, w, b, x),
    "a view of the input": lambda x, w, b: (x[:, :, 1:], w, b, x[:, :, :-1]),
    "the weight": lambda x, w, b: (x, w, b, w),
    "the bias": lambda x, w, b: (x, w, (out := torch.ones_like(x)).view(-1)[7:11], out),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_out_must_not_overlap_an_operand(name):
    """A stride-1 kernel-1 layer maps shapes to themselves, so only the overlap can be wrong."""
    x, w, b = torch.ones(2, 4, 6, 5), torch.ones(4, 4, 1, 1), torch.ones(4)
    if name == "the weight":
        x = torch.ones(4, 4, 1, 1)
    x, w, b, out = OVERLAPS[name](x, w, b)
    with pytest.raises(InvalidArgument, match=r"out.*overlap"):
        upfold.conv_transpose2d(x, w, b, out=out)
    assert (x == 1).all()
    assert (w == 1).all()


def test_out_beside_the_input_in_one_storage_is_taken():
    """Disjoint parts of one buffer do not overlap."""
    buffer = torch.ones(2, 2, 4, 6, 5)
    x, out = buffer[0], buffer[1]
    assert upfold.conv_transpose2d(x, torch.ones(4, 4, 1, 1), out=out) is out
    assert (out == 4).all()
    channels = torch.ones(2, 8, 6, 5)
    upfold.conv_transpose2d(channels[:, :4], torch.ones(4, 4, 1, 1), out=channels[:, 4:])
    assert (channels[:, 4:] == 4).all()
    assert (channels[:, :4] == 1).all()


@pytest.mark.parametrize("buffer", [torch.arange(15).view(3, 5), torch.arange(15).view(5, 3).t()], ids=["rows", "columns"])
def test_overlap_is_decided_exactly(buffer):
    """Every pair of slices of a small buffer, against the sets of their elements."""
    ranges = [[slice(*ends) for ends in itertools.combinations(range(size + 1), 2)] for size in buffer.shape]
    slices = [buffer[index] for index in itertools.product(*ranges)] + [buffer[::2], buffer[:, 1::2]]
    elements = [set(part.flatten().tolist()) for part in slices]
    for (one, of_one), (other, of_other) in itertools.product(zip(slices, elements, strict=True), repeat=2):
        assert overlap._share_an_element(one, other) == bool(of_one & of_other), (one, other)


def test_overlap_of_channels_costs_no_memory():
    """Channels of a buffer too large to exist: nothing may be marked."""
    image = 2**20 * 2**20
    strides = (96 * image, image, 2**20, 1)
    halves = (8, 48, 2**20, 2**20)
    assert not overlap._views_meet(halves, strides, halves, strides, 48 * image)
    assert not overlap._views_meet(halves, strides, halves, strides, -48 * image)
    assert not overlap._views_meet(halves, strides, (8, 32, 2**20, 2**20), strides, 64 * image)


def test_gemm_by_name_needs_its_workspace():
    """A cap in which not even one piece fits is refused by name, and `auto` goes another way."""
    x, w = torch.ones(1, 2, 4, 60000), torch.ones(2, 3, 4, 4)
    with upfold.use(workspace_mb=0.0001):
        with pytest.raises(InvalidArgument, match=r"algorithm = 'gemm'.*workspace") as caught:
            upfold.conv_transpose2d(x, w, stride=2, algorithm="gemm")
        assert "direct" in str(caught.value)
        y = upfold.conv_transpose2d(x, w, stride=2)
    assert torch.equal(y, upfold.conv_transpose2d(x, w, stride=2, algorithm="gemm"))


def test_bad_environment(monkeypatch):
    for height, text in enumerate(("many", "0", "-3", "inf"), 101):
        monkeypatch.setenv("UPFOLD_WORKSPACE_MB", text)
        # A plan is made once for a shape: each turn takes another.
        with pytest.raises(InvalidArgument, match=f"UPFOLD_WORKSPACE_MB = '{text}'; must be a positive, finite number"):
            deconv(torch.ones(1, 4, height, 3))


def test_every_refusal_is_listed():
    """On a device without kernels and with the fallback forbidden, the sentence names each algorithm and its reason."""
    problem = upfold.explain(upfold.ConvTranspose2d(4, 3, 3), X).problem
    with upfold.use(fallback=False), pytest.raises(InvalidArgument) as caught:
        upfold.dispatch.plan(problem, torch.device("mps"))
    for name in ALGORITHMS:
        assert name in str(caught.value)
    for name in ALGORITHMS:
        with pytest.raises(InvalidArgument, match=f"algorithm = '{name}'; it refuses"):
            upfold.dispatch.plan(problem, torch.device("mps"), name)


@pytest.fixture
def uncovered(monkeypatch):
    """As on a device that upfold has no kernels for, which this machine lacks: the CPU plays it."""
    monkeypatch.setattr(upfold.functional, "_OUR_DEVICES", frozenset())
    monkeypatch.setattr(upfold.functional, "_kernels_may_run", lambda t: False)
    reason = "upfold has no kernels for this"
    monkeypatch.setattr(upfold.columns, "_missing", lambda tensor: reason)


def test_an_uncovered_device_runs_torchs_operator(uncovered):
    for x in (X, X[0]):
        x, w = x.clone().requires_grad_(), W.clone().requires_grad_()
        with pytest.warns(RuntimeWarning, match="torch's own operator runs"):
            y = deconv(x, w, stride=2, output_padding=1, activation="tanh")
        want = torch.tanh(torch.nn.functional.conv_transpose2d(x, w, B, 2, 0, 1))
        assert torch.equal(y, want)
        for one, other in zip(torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w)), strict=True):
            assert torch.equal(one, other)
    with pytest.warns(RuntimeWarning, match="fold and unfold"):
        columns = upfold.unfold(X, 3)
    assert torch.equal(columns, torch.nn.functional.unfold(X, 3))
    with pytest.warns(RuntimeWarning, match="fold and unfold"):
        assert torch.equal(upfold.fold(columns, (5, 6), 3), torch.nn.functional.fold(columns, (5, 6), 3))
    with pytest.raises(InvalidArgument, match="two axes only"):
        upfold.unfold(torch.ones(1, 1, 5), (3,))


def test_an_uncovered_device_refuses_what_it_must(uncovered):
    with pytest.raises(InvalidArgument, match=r"algorithm = 'gemm'; it refuses this problem: upfold has no kernels for cpu"):
        deconv(algorithm="gemm")
    with pytest.raises(InvalidArgument, match=r"algorithm = 'winograd'; must be one of"):
        deconv(algorithm="winograd")
    with pytest.raises(InvalidArgument, match=r"groups = 3; must divide"):
        deconv(groups=3)
    with upfold.use(fallback=False):
        with pytest.raises(InvalidArgument, match="falling back to torch is off"):
            deconv()
        with pytest.raises(InvalidArgument, match="no kernel runs on this device"):
            upfold.unfold(X, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(deconv(algorithm="torch"), torch.nn.functional.conv_transpose2d(X, W, B))


def test_fallback_warns_and_says_why():
    upfold.dispatch._automatic.cache_clear()
    problem = upfold.explain(upfold.ConvTranspose2d(4, 3, 3), X).problem
    with upfold.use(fallback=True), pytest.warns(RuntimeWarning, match="torch's own operator"):
        plan = upfold.dispatch.plan(problem, torch.device("mps"))
    assert plan.algorithm == "torch"
    assert "mps" in plan.reason


def test_fakes_raise_the_same():
    """The fake kernel checks what the real one checks, with the same words."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    wrong = (
        ((2, 5, 5, 6), (4, 3, 3, 3), (3,), {}),
        ((2, 4, 5, 6), (4, 3, 3, 3), (4,), {}),
        ((2, 4, 5, 6), (4, 3, 3, 3), (3,), {"padding": 9}),
        ((2, 4, 5, 6), (4, 3, 3, 3), (3,), {"groups": 3}),
        ((2, 4, 5, 6), (4, 3, 3, 3), (3,), {"stride": 2, "output_padding": 2}),
        ((2, 4, 5, 6), (4, 3, 3, 3), (3,), {"algorithm": "winograd"}),
        ((2, 4, 5), (4, 3, 3), (3,), {}),
    )
    for x_shape, w_shape, b_shape, keywords in wrong:
        with pytest.raises(InvalidArgument) as real:
            upfold.conv_transpose2d(torch.ones(x_shape), torch.ones(w_shape), torch.ones(b_shape), **keywords)
        with FakeTensorMode(), pytest.raises(InvalidArgument) as fake:
            upfold.conv_transpose2d(torch.ones(x_shape), torch.ones(w_shape), torch.ones(b_shape), **keywords)
        assert str(real.value) == str(fake.value)


def test_writing_out_is_noticed_by_autograd():
    """A tensor that a graph has saved and `out=` overwrites makes the backward fail, as after any operation in place."""
    parameter = torch.ones(2, 3, 7, 8, requires_grad=True)
    saved = torch.ones(2, 3, 7, 8)
    product = parameter * saved
    deconv(out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_nothing_leaks():
    """Refused calls keep no tensor alive."""
    import gc
    import weakref

    x = torch.ones(2, 4, 5, 6)
    alive = weakref.ref(x)
    geometry = make_geometry(2, 1, 9, 0, 1, 1)
    with pytest.raises(InvalidArgument):
        ours((x, W, B), geometry)
    del x
    gc.collect()
    assert alive() is None


def test_errors_of_the_compiled_module_are_translated():
    """What C++ refuses arrives as the same class, with the values in its text."""
    from upfold import native

    problem = upfold.explain(upfold.ConvTranspose2d(4, 3, 3), X).problem
    fields = problem.native_fields()
    with pytest.raises(InvalidArgument, match="Problem: groups is missing"):
        native.cpu().Problem(**{name: value for name, value in fields.items() if name != "groups"})
    with pytest.raises(InvalidArgument, match=r"groups = 3; must divide in_channels = 4"):
        native.cpu().direct_workspace_bytes(native.cpu().Problem(**(fields | {"groups": 3})), 1)


UNKNOWN_INSTRUCTIONS = """
import torch, upfold
try:
    upfold.unfold(torch.ones(1, 1, 3, 3), 2)
except upfold.InvalidArgument as error:
    print(error)
"""


def test_unknown_instruction_set():
    environment = {**os.environ, "UPFOLD_CPU_ISA": "sse9"}
    command = [sys.executable, "-c", UNKNOWN_INSTRUCTIONS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "UPFOLD_CPU_ISA = sse9; must be portable, avx2 or avx512\n", done.stderr
