"""Torch's machinery round an operator: fakes, opcheck, modes, subclasses, autocast, lazy views, and upfold's own settings."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import upfold
from oracle import GENERAL_ALGORITHMS, dtype_name, geometry_arguments, ours
from small_layer import ARGUMENTS, SMOKE, TORCH, layer, operands, record_runs, torch_layer
from upfold import cases


@SMOKE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=dtype_name)
def test_fakes_have_the_real_shapes_and_strides(case, dtype, device):
    for memory_format in (None, {4: torch.channels_last, 5: torch.channels_last_3d}.get(case.ndim + 2)):
        if TORCH < (2, 1) and memory_format is torch.channels_last_3d:
            continue  # torch 2.0 hides a fake's device from the kernel, and with it which of its 3-D kernels would run
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
    static = tuple(tensor.detach() for tensor in (x, w, b))
    torch.library.opcheck(torch.ops.upfold.conv_transpose_static.default, (*static, "2,2;1,1;1,1;1,1;1;0;0"))


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
    for algorithm in GENERAL_ALGORITHMS:
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


def test_auto_by_name_goes_before_the_block(device, monkeypatch):
    """An explicit 'auto' means the same on every way to the kernels, also where None would follow `use`."""
    ran = record_runs(monkeypatch)
    x, w, b = operands(device)
    first = upfold.explain(upfold.ConvTranspose2d(4, 3, 3, **ARGUMENTS).to(device), x).plan.algorithm
    other = next(name for name in ("gemm", "direct") if name != first)
    with upfold.use(algorithm=other):
        upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm="auto")
        with torch.autograd.forward_ad.dual_level():
            upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm="auto")
            layer(x, w, b)
    assert [run.algorithm for run in ran] == [first, first, other]


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
    with pytest.raises(upfold.InvalidArgument, match=r"input\.shape = \(2,\); the layer takes 4 axes, or 3"):
        upfold.explain(upfold.ConvTranspose2d(4, 3, 3), torch.ones(2))
    for other in (torch.nn.Conv2d(4, 3, 3), upfold.Fold((3, 3), 2), torch.nn.ReLU(), x):
        with pytest.raises(upfold.InvalidArgument, match=r"must be a transposed-convolution layer"):
            upfold.explain(other, x)


def test_auto_takes_torch_never_where_ours_run(device):
    for case in cases.CASES:
        small = case.scaled(0.005)
        x, w, b = small.tensors(device=device)
        model = torch.nn.Module()
        model.weight, model.bias = w, b
        for name, value in geometry_arguments(small.geometry).items():
            setattr(model, name, value)
        assert upfold.explain(model, x).plan.algorithm != "torch", case.name


@pytest.mark.parametrize("algorithm", GENERAL_ALGORITHMS)
@pytest.mark.parametrize("chosen", ["by name", "by the block"])
def test_the_backward_runs_what_the_forward_ran(algorithm, chosen, device, monkeypatch):
    """Also when it runs after the block that chose has ended, as backward passes do."""
    ran = record_runs(monkeypatch)
    x, w, b = operands(device, requires_grad=True)
    if chosen == "by name":
        y = upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=algorithm)
    else:
        with upfold.use(algorithm=algorithm):
            y = layer(x, w, b)
    y.sum().backward()
    assert [run.algorithm for run in ran] == [algorithm] * 3


def test_the_backward_has_the_settings_of_its_forward(device, monkeypatch):
    """In whatever thread it runs: that of a GPU's backward knows nothing of `use`."""
    ran = record_runs(monkeypatch)
    x, w, b = operands(device, requires_grad=True)
    with upfold.use(workspace_mb=3):
        y = layer(x, w, b)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    thread = threading.Thread(target=lambda: first.square().sum().backward())
    thread.start()
    thread.join()
    assert len(ran) > 4
    assert {run.problem.workspace_cap for run in ran} == {3 << 20}
    assert upfold.dispatch.current().workspace_mb is None
    if device.type != "cpu":  # torch runs this backward in a thread of its own, which the block does not reach
        return
    ran.clear()
    y = layer(x, w, b)
    with upfold.use(workspace_mb=5):  # what the forward left open is open to the block round the backward
        y.sum().backward()
    assert [run.problem.workspace_cap for run in ran[1:]] == [5 << 20] * 2
