"""Layers under torch's recorders: files need no upfold, graphs keep the layers, and the FLOP counter counts."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import upfold
from models import decoder

ACTIVATIONS = {
    None: lambda t: t,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    ("leaky_relu", 0.25): lambda t: F.leaky_relu(t, 0.25),
}
pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS = {
    "1d": (upfold.ConvTranspose1d, nn.ConvTranspose1d, (2, 4, 7)),
    "2d": (upfold.ConvTranspose2d, nn.ConvTranspose2d, (2, 4, 7, 5)),
    "3d": (upfold.ConvTranspose3d, nn.ConvTranspose3d, (2, 4, 3, 4, 5)),
}


class Folding(nn.Module):
    """A decoder with every kind of layer that `replace` takes."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 3, 2, 1)
        self.unfold = nn.Unfold(2, stride=2)
        self.fold = nn.Fold((10, 8), 2, stride=2)

    def forward(self, x):
        return self.fold(self.unfold(self.up(x, [10, 8])))


def replaced() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A replaced model, its input, and what torch's layers made of it."""
    torch.manual_seed(0)
    model, x = Folding().eval(), torch.randn(2, 3, 5, 4)
    want = model(x)
    upfold.replace(model)
    return model, x, want


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def run_without_upfold(program: str, data: bytes) -> bytes:
    """Run a program that gets `data` on stdin in a Python that cannot import upfold."""
    preamble = "import sys\nsys.modules['upfold'] = None\nimport io, torch\ndata = io.BytesIO(sys.stdin.buffer.read())\n"
    result = subprocess.run([sys.executable, "-c", preamble + program], input=data, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def run_scripted(module: torch.jit.ScriptModule, x: torch.Tensor) -> torch.Tensor:
    """Save a TorchScript module and run it where there is no upfold."""
    file, tensors = io.BytesIO(), io.BytesIO()
    torch.jit.save(module, file)
    torch.save(x, tensors)
    program = (
        f"module = torch.jit.load(io.BytesIO(data.read({len(file.getvalue())})))\n"
        "out = io.BytesIO()\n"
        "with torch.no_grad():\n    torch.save(module(torch.load(io.BytesIO(data.read()))), out)\n"
        "sys.stdout.buffer.write(out.getvalue())\n"
    )
    return torch.load(io.BytesIO(run_without_upfold(program, file.getvalue() + tensors.getvalue())))


def test_traced_file_needs_no_upfold():
    model, x, want = replaced()
    traced = torch.jit.trace(model, x)
    assert "upfold::" not in str(traced.inlined_graph)
    torch.testing.assert_close(run_scripted(traced, x), want)


def test_scripted_file_needs_no_upfold():
    model, x, want = replaced()
    scripted = torch.jit.script(model)
    assert "upfold::" not in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(x), want)
    torch.testing.assert_close(run_scripted(scripted, x), want)
    # Scripting prepares the modules that it finds; the layers of the model must still be ours.
    assert isinstance(model.up, upfold.ConvTranspose2d)
    assert isinstance(model.fold, upfold.Fold)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_is_recorded(activation):
    torch.manual_seed(0)
    layer = upfold.ConvTranspose2d(3, 4, 3, 2, activation=activation)
    x = torch.randn(1, 3, 4, 5)
    want = ACTIVATIONS[activation](F.conv_transpose2d(x, layer.weight, layer.bias, 2))
    for recorded in (layer, torch.jit.trace(layer, x), torch.jit.script(layer)):
        torch.testing.assert_close(recorded(x), want)


def test_scripting_follows_a_changed_activation():
    layer, x = upfold.ConvTranspose2d(3, 4, 3, 2, activation="relu"), torch.randn(1, 3, 4, 5)
    torch.jit.script(layer)
    for activation in (("leaky_relu", 0.5), None):
        layer.activation = activation
        torch.testing.assert_close(torch.jit.script(layer)(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_scripted_output_size(name):
    ours, theirs, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, other, x = ours(4, 3, 3, 2, bias=False), theirs(4, 3, 3, 2, bias=False), torch.randn(shape)
    other.load_state_dict(layer.state_dict())
    scripted = torch.jit.script(layer)
    size = [2 * axis + 2 for axis in shape[2:]]
    torch.testing.assert_close(scripted(x, size), other(x, size))
    torch.testing.assert_close(scripted(x), other(x))


def run_onnx(file: bytes, x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """Names of the operators in an ONNX file, and what onnxruntime makes of x."""
    import onnx
    import onnxruntime

    model = onnx.load_from_string(file)
    domains = {node.domain for node in model.graph.node}
    assert domains <= {"", "ai.onnx", "pkg.onnxscript.torch_lib"}
    assert not any("upfold" in function.name for function in model.functions)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return [node.op_type for node in model.graph.node], torch.from_numpy(got)


@needs("onnx")
@needs("onnxruntime")
@pytest.mark.parametrize("dynamo", [False, True], ids=["by tracing", "by export"])
def test_onnx_file_needs_no_upfold(dynamo):
    if dynamo and not importlib.util.find_spec("onnxscript"):
        pytest.skip("onnxscript is not installed")
    if dynamo and not hasattr(torch.onnx, "ONNXProgram"):
        pytest.skip("this torch has no ONNX exporter built on torch.export")
    model, x = decoder()
    want = model(x)
    upfold.replace(model)
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, **({"dynamo": dynamo} if hasattr(torch.onnx, "ONNXProgram") else {}))
    operators, got = run_onnx(file.getvalue(), x)
    assert operators.count("ConvTranspose") == 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert isinstance(model.up, upfold.ConvTranspose2d)


@pytest.mark.skipif(not hasattr(torch, "export"), reason="this torch has no torch.export")
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_export(strict):
    model, x, want = replaced()
    program = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), want)


@pytest.mark.skipif(sys.version_info >= (3, 11) and torch.__version__.startswith("2.0."), reason="torch 2.0 compiles up to 3.10")
def test_compile():
    model, x, want = replaced()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)
    compiled(x).sum().backward()
    assert model.up.weight.grad is not None


def test_symbolic_trace_keeps_the_layers():
    model, x, want = replaced()
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["up", "unfold", "fold"]
    torch.testing.assert_close(graph(x), want)
    assert isinstance(graph.up, upfold.ConvTranspose2d)
    upfold.restore(graph)
    torch.testing.assert_close(graph(x), want)


def test_replace_in_a_traced_graph():
    torch.manual_seed(0)
    model, x = Folding().eval(), torch.randn(2, 3, 5, 4)
    want = model(x)
    graph = torch.fx.symbolic_trace(model)
    assert len(upfold.replace(graph).changed) == 3
    torch.testing.assert_close(graph(x), want)


def test_symbolic_trace_of_a_layer_itself():
    layer, x = upfold.ConvTranspose2d(3, 4, 3, 2, 1, activation="relu"), torch.randn(1, 3, 4, 5)
    graph = torch.fx.symbolic_trace(layer, concrete_args={"output_size": None})
    torch.testing.assert_close(graph(x), layer(x))
    graph(x).sum().backward()
    assert layer.weight.grad is not None


def count(model: nn.Module, x: torch.Tensor, backward: bool) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        y = model(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.skipif(importlib.util.find_spec("torch.utils.flop_counter") is None, reason="this torch counts no FLOPs")
@pytest.mark.parametrize("backward", [False, True], ids=["without gradients", "with gradients"])
def test_flops_as_torch_counts_them(backward):
    model, x = decoder()
    x.requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        want = count(model, x, backward)
        upfold.replace(model)
        model(x)  # the plans are cached now: the shortest way is open, and the counter must still see the calls
        assert count(model, x, backward) == want
    assert want > 2 * 2 * 10 * 12 * 6 * 4 * 9


def test_import_does_not_fetch_exporters():
    asks = "print('torch.onnx' in sys.modules)"
    ours = f"import sys, upfold, torch\nupfold.ConvTranspose2d(1, 1, 2)(torch.ones(1, 1, 2, 2))\n{asks}"
    bare = f"import sys, torch\n{asks}"
    commands = [[sys.executable, "-c", program] for program in (ours, bare)]
    outputs = [subprocess.run(command, capture_output=True, text=True).stdout for command in commands]
    assert outputs[0] == outputs[1] != ""
