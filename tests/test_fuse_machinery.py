"""A fused model among torch's machinery and in its owner's hands: it never gives other numbers than the model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import upfold
from fusing import Up, assert_like, block, fused, image, runs_fused
from models import assert_same, snapshot
from upfold import parts
from upfold.fused_model import is_fused, plan_of
from upfold.models.networks import Pix2Pix, dcgan, trained
from upfold.models.rule import error_norm

# --- when the graph stands for the forward ---------------------------------------------------------------------------


def test_restore_gives_back_exactly_what_there_was():
    model = block()
    before = snapshot(model)
    report = upfold.fuse(fused(model))  # twice is once
    assert "1 of 1 layer fused with 2 operations" in str(report)
    assert isinstance(model, Up)
    assert list(model.state_dict()) == list(block().state_dict())
    assert [row.state for row in upfold.restore(model)] == ["restored"]
    assert_same(before, snapshot(model))


def test_gradients_are_the_models():
    model, x = block(), image().requires_grad_()
    want = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    fused(model)
    assert not runs_fused(model, x)
    got = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert model(image()).requires_grad
    with torch.no_grad():
        assert runs_fused(model, x)
    model.requires_grad_(False)
    assert runs_fused(model, image())
    assert not model(image()).requires_grad


def test_inference_mode():
    model = block()
    with torch.inference_mode():
        want = model(image())
        fused(model)
        assert runs_fused(model, image())
        torch.testing.assert_close(model(image()), want, rtol=1e-5, atol=1e-5)


def test_training_goes_on_and_evaluation_sees_it():
    model = fused(block())
    before = model(image()).detach()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(image()).square().mean().backward()
        optimizer.step()
    model.eval()
    other = copy.deepcopy(model)
    upfold.restore(other)
    with torch.no_grad():
        assert runs_fused(model, image())
        assert_like(model(image()), other, image())
        assert error_norm(model(image()), before.double()) > 1e-3


def test_a_norm_set_to_training_by_itself():
    model, other = fused(block()), block()
    for one in (model, other):
        one.norm.train()
    with torch.no_grad():
        torch.testing.assert_close(model(image()), other(image()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.norm.running_mean, other.norm.running_mean)


CHANGES = {
    "weights in place": lambda m: m.layer.weight.mul_(2),
    "statistics in place": lambda m: m.norm.running_mean.add_(1),
    "a new parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.full((6,), 3.0))),
    "another norm": lambda m: setattr(m, "norm", trained(nn.BatchNorm2d(6), seed=5)),
    "a state_dict": lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}),
    "a layer's state_dict": lambda m: m.layer.load_state_dict({k: v * 2 for k, v in m.layer.state_dict().items()}),
    "through data, and eval": lambda m: (m.layer.weight.data.mul_(2), m.eval()),
    "another type and back": lambda m: m.half().float(),
    "a hook": lambda m: m.norm.register_forward_hook(lambda module, args, output: output * 2),
    "a hook before": lambda m: m.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name):
    model, other = fused(block()), block()
    with torch.no_grad():
        before = model(image())
        for one in (model, other):
            CHANGES[name](one)
        assert error_norm(model(image()), before.double()) > 1e-4
        assert runs_fused(model, image()) == (not name.startswith("a hook"))
        assert_like(model(image()), other, image())


def test_hooks_of_the_model_itself_fire_once():
    model, seen = fused(block()), []
    model.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model.register_forward_hook(lambda module, args, output: seen.append("post"))
    with torch.no_grad():
        assert runs_fused(model, image())
    assert seen == ["pre", "post"]


def test_hooks_on_all_modules_are_called():
    model, seen = fused(block()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    with torch.no_grad():
        model(image())
        handle.remove()
        assert "BatchNorm2d" in seen
        assert runs_fused(model, image())


def test_classes_that_cannot_be_extended():
    class Closed(Up):
        def __init_subclass__(cls):
            raise TypeError("closed")

    (row,) = upfold.fuse(block(Closed))
    assert row.state == "replaced"
    assert "its class cannot be changed: closed" in row.reason


def test_arguments_with_defaults_run_the_models_own_forward():
    model, other, x = fused(block()), block(), image()
    with torch.no_grad():
        assert runs_fused(model, x)
        for args, kwargs in (((x, 2.0), {}), ((x,), {"shift": 1.0}), ((), {"x": x, "scale": torch.tensor(3.0)})):
            torch.testing.assert_close(model(*args, **kwargs), other(*args, **kwargs), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(x=x), other(x), rtol=1e-4, atol=1e-5)


def test_inputs_without_a_batch():
    def gives(then, x):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.ConvTranspose2d(4, 6, 4, 2, 1)

            def forward(self, x):
                return then(self.up(x))

        model = Model().eval()
        want = model(x)
        with torch.no_grad():
            torch.testing.assert_close(fused(model)(x), want, rtol=1e-5, atol=1e-5)

    gives(lambda y: y.relu()[..., 1:], image()[0])
    with pytest.raises(upfold.InvalidArgument, match="was fused for inputs with a batch"):
        gives(lambda y: y.relu()[:, :, 1:], image()[0])


# --- copies, files, compilers ----------------------------------------------------------------------------------------


def test_copies_and_files_run_fused_and_restore():
    model = fused(block())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.no_grad():
        want = model(image())
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ):
            assert torch.equal(other(image()), want)
            assert runs_fused(other, image())
            other.layer.weight.mul_(2)
            assert not torch.equal(other(image()), want)
            upfold.restore(other)
            assert type(other) is Up
        assert torch.equal(model(image()), want)


def test_a_shallow_copy_shares_the_weights():
    model = fused(block())
    other = copy.copy(model)
    with torch.no_grad():
        assert torch.equal(other(image()), model(image()))
    upfold.restore(other)
    assert is_fused(model)


@pytest.mark.filterwarnings("ignore")
def test_files_of_torchscript_and_tracing_need_no_fused_class():
    model, x = fused(block()), image()
    sequence = fused(trained(dcgan()))
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), want, rtol=1e-4, atol=1e-5)
        script = torch.jit.script(sequence)
        noise = torch.randn(1, 8, 1, 1)
        torch.testing.assert_close(script(noise), sequence(noise), rtol=1e-4, atol=1e-5)
    assert is_fused(sequence)


def test_functional_call_and_transforms():
    model, other = fused(block()), block()
    state = {name: value * 2 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    x = image()
    with torch.no_grad():
        got = torch.func.functional_call(model, state, (x,))
        torch.testing.assert_close(got, torch.func.functional_call(other, state, (x,)), rtol=1e-4, atol=1e-5)
        assert_like(model(x), other, x)
        many = x.unsqueeze(0).expand(3, *x.shape)
        torch.testing.assert_close(torch.func.vmap(model)(many)[1], other(x), rtol=1e-4, atol=1e-5)
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: other(x).sum())(x), rtol=1e-4, atol=1e-4)


def test_symbolic_tracing_records_the_model():
    model = fused(trained(dcgan()))
    graph, noise = torch.fx.symbolic_trace(model), torch.randn(2, 8, 1, 1)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == [str(i) for i in range(14)]
    with torch.no_grad():
        torch.testing.assert_close(graph(noise), model(noise), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="DataParallel moves the model to the GPU that is there")
def test_data_parallel():
    model, other = fused(block()), block()
    replica = model._replicate_for_data_parallel()
    assert type(replica) is Up
    assert plan_of(replica) is None
    wrapped = nn.DataParallel(block())
    report = upfold.fuse(wrapped)
    assert is_fused(wrapped.module)
    assert report.rows[0].state == "fused"
    with torch.no_grad():
        assert_like(wrapped(image()), other, image())


can_compile = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6),
    reason="torch.compile is tested with PyTorch 2.6 and newer",
)


@can_compile
@pytest.mark.parametrize("make, shape", [(dcgan, (2, 8, 1, 1)), (Pix2Pix, (1, 3, 16, 16))], ids=["dcgan", "pix2pix"])
def test_compiled(make, shape):
    torch.manual_seed(4)
    model = trained(make(levels=3) if make is Pix2Pix else make())
    other, x = copy.deepcopy(model), torch.randn(shape)
    called = []

    def backend(graph, example_inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(fused(model), fullgraph=True, backend=backend)
    with torch.no_grad():
        assert_like(compiled(x), other, x)
    if make is dcgan:
        assert called == ["upfold.conv_transpose"] * 5
    torch.testing.assert_close(compiled(x), other(x), rtol=1e-3, atol=1e-4)
    assert compiled(x).requires_grad  # its own forward, for a backward


@can_compile
@pytest.mark.slow
def test_compiled_by_inductor():
    torch.manual_seed(4)
    model = trained(Pix2Pix(levels=3))
    other, x = copy.deepcopy(model), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert_like(torch.compile(fused(model))(x), other, x)


@pytest.mark.skipif(not hasattr(torch, "export"), reason="torch.export is younger than this PyTorch")
def test_exported():
    model, x = fused(block()), image()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


# --- among the other tools -------------------------------------------------------------------------------------------


def test_tune_measures_what_the_fused_layers_run():
    model = fused(block())
    with torch.no_grad():
        report = upfold.tune(model, image(), seconds=0.2)
    (row,) = report
    assert "relu" in row.problem
    assert row.layers == ("layer",)


def test_scan_of_a_fused_model():
    model = fused(block())
    (row,) = upfold.scan(model, image())
    assert (row.name, row.calls, row.state) == ("layer", 1, "upfold")
    with torch.no_grad():
        assert runs_fused(model, image())


def test_a_report_as_text_and_numbers():
    model = block()
    report = upfold.fuse(model)
    assert "BatchNorm2d norm, relu()" in str(report)
    assert report.to_dict()["rows"][0]["fused"] == ("BatchNorm2d norm", "relu()")
    with torch.no_grad():
        assert F.relu(model(image())).shape == (2, 6, 10, 12)


# --- copies into a concatenation -----------------------------------------------------------------------------------------


def _laid(t, order):
    """The tensor with its axes in memory in that order."""
    return t.permute(order).contiguous().permute([order.index(axis) for axis in range(t.dim())])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 4, 1, 1), (3, 1, 2, 6), (2, 6, 7), (2, 2, 3, 1, 4)], ids=str)
def test_parts_are_rows_where_both_lie_alike(shape, relu):
    torch.manual_seed(2)
    first, last = tuple(range(len(shape))), (0, *range(2, len(shape)), 1)
    swapped = (0, 1, *reversed(range(2, len(shape))))
    source = torch.randn(shape)
    found = {}
    for source_order in (first, last, swapped):
        for buffer_order in (first, last):
            buffer = _laid(torch.zeros(shape[0], 2 * shape[1] + 3, *shape[2:]), buffer_order)
            own, part = _laid(source, source_order), buffer[:, 1 : shape[1] + 1]
            rows = parts.rows_between(own, part)
            if rows is not None:  # as a kernel would copy them
                ours = torch.as_strided(own, rows[:2], (rows[2], 1), own.storage_offset())
                torch.as_strided(buffer, rows[:2], (rows[3], 1), part.storage_offset()).copy_(ours)
                assert torch.equal(part, source)
                assert buffer.count_nonzero() == source.count_nonzero()
            buffer.zero_()
            parts.copy(own, part, rows, relu)
            assert torch.equal(part, source.relu() if relu else source)
            found[source_order, buffer_order] = rows is not None
    assert found[first, first]
    assert found[last, last]


def test_nothing_is_rows_of_an_empty_or_repeated_source():
    assert parts.rows_between(torch.empty(0, 3, 4, 4), torch.empty(0, 3, 4, 4)) is None
    assert parts.rows_between(torch.randn(2, 1, 4, 4).expand(2, 3, 4, 4), torch.empty(2, 5, 4, 4)[:, :3]) is None
