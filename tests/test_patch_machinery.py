"""The block of `patch` among torch's other machinery: subclasses, modes, measuring, recorders and the compiler."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import upfold
from models import decoder, upsampler
from small_layer import TORCH, layer, operands, record_runs, torch_layer
from test_export import needs, run_scripted
from upfold import compare, timing
from upfold.geometry import make_geometry
from upfold.modes import Operands
from upfold.patch import unpatched


def modes() -> int:
    return torch._C._len_torch_function_stack()


class Labelled(torch.Tensor):
    """Knows torch's functions by name, as many subclasses do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is upfold.conv_transpose2d:
            return NotImplemented
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.filterwarnings("error")
def test_subclass_gets_torchs_function(monkeypatch):
    ran, (x, w, b) = record_runs(monkeypatch), operands("cpu")
    with upfold.patch():
        y = torch_layer(x.as_subclass(Labelled), w, b)
    assert isinstance(y, Labelled)
    assert torch.equal(y.as_subclass(torch.Tensor), torch_layer(x, w, b))
    assert not ran


@pytest.mark.skipif(TORCH < (2, 4), reason="the wrapper comes with newer versions")
def test_wrapper_gets_torchs_operator(monkeypatch):
    from torch.testing._internal.two_tensor import TwoTensor

    ran, (x, w, b) = record_runs(monkeypatch), operands("cpu")
    with upfold.patch():
        y = torch_layer(TwoTensor(x, 2 * x), w, b)
    assert torch.equal(y.b, torch_layer(2 * x, w, b))
    assert not ran


class Watch(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("outermost", [False, True])
def test_beside_other_modes(outermost):
    x, w, b = operands("cpu")
    watch = Watch()
    blocks = [watch, upfold.patch()]
    with contextlib.ExitStack() as stack:
        for block in blocks if outermost else reversed(blocks):
            stack.enter_context(block)
        got = torch_layer(x, w, b)
        assert modes() == 2
    assert torch.equal(got, layer(x, w, b))
    assert (upfold.conv_transpose2d if outermost else F.conv_transpose2d) in watch.calls
    assert modes() == 0


def test_set_aside(monkeypatch):
    ran, (x, w, b) = record_runs(monkeypatch), operands("cpu")
    outer, inner = Watch(), Watch()
    with outer, upfold.patch(), inner, upfold.patch():
        with unpatched():
            assert modes() == 2
            torch_layer(x, w, b)
        assert modes() == 4
        assert not ran
        torch_layer(x, w, b)
        assert len(ran) == 1
        with contextlib.suppress(KeyError), unpatched():
            raise KeyError
        assert modes() == 4
    assert F.conv_transpose2d in inner.calls
    assert inner.calls[: len(outer.calls)] == outer.calls
    assert modes() == 0


def test_replacing_inside_measures_torch(monkeypatch):
    """The competitors call torch's functions; redirected, upfold would be compared with itself."""
    ran, (model, x) = record_runs(monkeypatch), decoder()
    seen = []

    def medians(functions, *_, **__):
        for function in functions:
            before = len(ran)
            function()
            seen.append(len(ran) - before)
        return [2.0, 1.0]

    monkeypatch.setattr(timing, "medians", medians)
    with upfold.patch():
        upfold.replace(model, only_faster=x)
        assert modes() == 1
    assert seen == [0, 1, 0, 1]  # torch's operator and ours, for each of two layers


def test_comparing_inside_runs_torch(monkeypatch):
    seen, peers = [], compare.peers
    monkeypatch.setattr(compare, "peers", lambda *arguments: (seen.append(modes()), peers(*arguments))[1])
    with upfold.patch():
        result = compare.compare(Operands(*operands("cpu")), make_geometry(2, 2, 1, 1, 1, 1), compare.Conditions(seconds=0.0))
    assert seen == [0]
    assert not result.failures


@pytest.mark.filterwarnings("ignore")
def test_recorders_keep_torchs_operators():
    model, x = decoder()
    want = model(x)
    with upfold.patch():
        traced, scripted = torch.jit.trace(model, x), torch.jit.script(model)
        graph = torch.fx.symbolic_trace(lambda x: F.unfold(F.conv_transpose2d(x, x), 2))
        torch.testing.assert_close(scripted(x), want)
    for recorded in (traced, scripted):
        assert "upfold::" not in str(recorded.inlined_graph)
    torch.testing.assert_close(run_scripted(traced, x), want)
    assert {F.conv_transpose2d, F.unfold} <= {node.target for node in graph.graph.nodes}


@needs("onnx")
@pytest.mark.filterwarnings("ignore")
def test_onnx_file_needs_no_upfold():
    import onnx

    model, x = decoder()
    file = io.BytesIO()
    with upfold.patch():
        torch.onnx.export(model, (x,), file, **({"dynamo": False} if TORCH >= (2, 5) else {}))
    domains = {node.domain for node in onnx.load_model_from_string(file.getvalue()).graph.node}
    assert domains == {""}


@needs("onnxscript")
@pytest.mark.skipif(TORCH < (2, 6), reason="the exporter of programs is newer")
@pytest.mark.filterwarnings("ignore")
def test_onnx_program_needs_no_upfold():
    model, x = decoder()
    with upfold.patch():
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert "ConvTranspose" in str(program.model)
    assert "upfold" not in str(program.model)


def nodes(graphs) -> list[str]:
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.skipif(TORCH < (2, 6), reason="torch.compile does not look at modes")
@pytest.mark.parametrize("opened", ["around", "within"])
def test_compiled_for_inside_and_for_outside(opened):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model, x = upsampler()
    want = model(x)
    compiled = torch.compile(upfold.patch()(model) if opened == "within" else model, backend=backend, fullgraph=True)
    for _ in range(2):
        with upfold.patch() if opened == "around" else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x), want)
    assert len(graphs) == 1
    assert sum(name.startswith("upfold.") for name in nodes(graphs)) == 7
    if opened == "around":
        assert torch.equal(compiled(x), want)
        assert not any(name.startswith("upfold.") for name in nodes(graphs[1:]))
    torch._dynamo.reset()


@pytest.mark.skipif(TORCH < (2, 6), reason="torch.compile does not look at modes")
def test_compiled_training_step():
    torch._dynamo.reset()
    model, x = upsampler()
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with upfold.patch():
        loss = torch.compile(model, backend="aot_eager", dynamic=True)(x).square().sum()
        got = torch.autograd.grad(loss, list(model.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
