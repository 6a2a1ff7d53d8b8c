"""Frozen layers: the same bits, what ends the freezing, calls that run the ordinary way, copies, files and reports."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import upfold
from freezing import (
    COUNTED,
    UNCOUNTED,
    allowed,
    assert_differs,
    assert_equals_torch,
    image,
    make,
    packing_configs,
    reallocate,
    that_packs,
)
from small_layer import TORCH
from upfold import cases
from upfold.compare import Conditions, compare_case
from upfold.dispatch import use_config
from upfold.frozen import Copies
from upfold.models.networks import Pix2Pix, trained


def copies_of(layer):
    """The memory of a layer's packed copies."""
    return [copy.memory for copy in layer._frozen._made.values()]


def frozen(device, **options):
    """A layer that keeps a packed copy, its input, and what it gave before."""
    layer, x = make(device, **options)
    with torch.no_grad():
        before = layer(x)
        upfold.freeze(layer, x)
    assert len(copies_of(layer)) == 1
    return layer, x, before


# --- frozen: the same bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"activation": ["leaky_relu", 0.1]}, {"crop": ((0, 1), (1, 0))}, {"output_padding": 1}, {"groups": 2}],
    ids=str,
)
def test_the_same_bits(options, dtype, device):
    layer, x = make(device, dtype=dtype, **options)
    configs = packing_configs(layer, x, output_padding=(1, 0))
    assert configs
    for config in configs:
        with torch.no_grad(), use_config(config):
            calls = (lambda: layer(x), lambda: layer(x[0]), lambda: layer(x, output_size=(17, 16)))  # noqa: B023
            want = [call() for call in calls]
            upfold.freeze(layer, x)
            assert len(copies_of(layer)) == 1
            for poison in (1, torch.nan):  # the second time nobody reads the weight any more
                layer.weight.data.mul_(poison)
                assert all(torch.equal(call(), result) for call, result in zip(calls, want, strict=True))
        layer = make(device, dtype=dtype, **options)[0]


@pytest.mark.parametrize("ndim", [1, 3])
def test_other_numbers_of_axes(ndim, device):
    torch.manual_seed(0)
    cls = {1: upfold.ConvTranspose1d, 3: upfold.ConvTranspose3d}[ndim]
    layer = cls(16, 16, 4, 2, 1, algorithm="fused").to(device).eval()
    x = image(device, shape=(2, 16, *[6] * ndim))
    with torch.no_grad(), that_packs(layer, x):
        want = layer(x)
        upfold.freeze(layer, x)
        layer.weight.data.fill_(torch.nan)
        assert torch.equal(layer(x), want)


def test_channels_last_and_strided_inputs(device, packing):
    layer, x, _ = frozen(device)
    with torch.no_grad():
        for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
            plain = copy.deepcopy(layer)
            want, got = plain(other), layer(other)
            assert got.stride() == want.stride()
            assert torch.equal(got, want)


def test_one_copy_for_many_sizes(device, packing):
    layer, x, _ = frozen(device)
    with torch.no_grad():
        for batch in (1, 3, 4):
            other = x[:1].repeat(batch, 1, 1, 1)
            assert torch.equal(layer(other), copy.deepcopy(layer)(other))
    assert len(copies_of(layer)) == 1


def test_an_empty_batch(device, packing):
    layer, x, _ = frozen(device)
    with torch.no_grad():
        assert layer(x[:0]).shape == (0, 16, 16, 16)


def test_bad_weights(device, packing):
    """On a CPU they take a slow path, with the weight beside the copy."""
    layer, x = make(device)
    with torch.no_grad():
        layer.weight[3, 2, 1, 1] = torch.inf
        want = layer(x)
        upfold.freeze(layer, x)
        assert torch.equal(layer(x).nan_to_num(1e4), want.nan_to_num(1e4))


# --- what ends it ----------------------------------------------------------------------------------------------------


def test_the_promise_is_the_owners(device, packing):
    """A write that torch does not count is not seen; that shows that the copy is what runs."""
    for write in UNCOUNTED.values():
        layer, x, before = frozen(device)
        with torch.no_grad():
            write(layer)
            assert torch.equal(layer(x), before)
            upfold.unfreeze(layer)
            assert_equals_torch(layer(x), layer, x)


@pytest.mark.parametrize("name", COUNTED)
def test_other_weights_end_it(name, device, packing):
    layer, x, before = frozen(device)
    with torch.no_grad():
        COUNTED[name](layer)
        y = layer(x)
        assert_equals_torch(y, layer, x)
        assert_differs(y, before, layer, x)
    assert layer._frozen is None


ENDS = {
    "unfreeze": upfold.unfreeze,
    "train": lambda model: model.train(),
    "state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "another type and back": lambda model: model.double().float(),
    "to": lambda model: model.to("cpu"),
}


@pytest.mark.parametrize("name", ENDS)
def test_events_of_the_model_end_it(name, device):
    layer, x = make(device)
    model = nn.Sequential(nn.Identity(), layer, nn.ReLU())
    with torch.no_grad(), that_packs(layer, x):
        upfold.freeze(model, x)
        (memory,) = copies_of(layer)
        freed = weakref.ref(memory)
        del memory
        ENDS[name](model)
        assert layer._frozen is None
        assert freed() is None
        layer.weight.data.mul_(-2)
        y = layer.to(device)(x)
        assert_equals_torch(y, layer, x)


def test_restore_leaves_nothing(device):
    model = nn.Sequential(nn.ConvTranspose2d(16, 16, 4, 2, 1)).to(device).eval()
    upfold.replace(model, algorithm="fused")
    x, before = image(device), dict(vars(nn.ConvTranspose2d(16, 16, 4, 2, 1)))
    with torch.no_grad(), that_packs(model[0], x):
        upfold.freeze(model, x)
    assert len(copies_of(model[0])) == 1
    upfold.restore(model)
    assert vars(model[0]).keys() == before.keys()


def test_evaluation_mode_does_not(device, packing):
    layer, _, _ = frozen(device)
    layer.eval()
    layer.requires_grad_(False)
    assert len(copies_of(layer)) == 1


def test_a_copy_is_freed_with_its_weight(device, packing):
    for end in (reallocate, lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros_like(layer.weight)))):
        layer, _, _ = frozen(device)
        freed = weakref.ref(copies_of(layer)[0])
        end(layer)
        assert freed() is None


def test_a_copy_is_freed_with_its_layer(device, packing):
    layer, _, _ = frozen(device)
    freed = weakref.ref(copies_of(layer)[0])
    weight = layer.weight
    del layer
    assert freed() is None
    assert weight.shape == (16, 16, 4, 4)


def test_layers_that_share_a_weight(device, packing):
    """One copy; what ends it for one layer ends it for the other."""
    (one, x), other = make(device), make(device)[0]
    other.weight = one.weight
    model = nn.ModuleList([one, other])
    with torch.no_grad():
        upfold.freeze(model)
        one(x), other(x)
        assert one._frozen is other._frozen
        assert len(copies_of(one)) == 1
        one.load_state_dict({name: -2 * value for name, value in one.state_dict().items()})
        assert_equals_torch(other(x), other, x)
        assert other._frozen is None


# --- watched calls run the ordinary way --------------------------------------------------------------------------------


def count_uses(monkeypatch):
    """A list that grows with every run of a packed copy from now on."""
    used, run = [], Copies.run
    monkeypatch.setattr(Copies, "run", lambda self, *rest: used.append(self) or run(self, *rest))
    return used


def test_gradients_are_the_layers(device, packing, monkeypatch):
    layer, x, _ = frozen(device)
    uses = count_uses(monkeypatch)
    layer.algorithm = None  # the block's tile is none of a gradient's
    plain = copy.deepcopy(layer)
    got, want = (torch.autograd.grad(one(x).square().sum(), list(one.parameters())) for one in (layer, plain))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not uses
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    assert len(uses) == 1


def test_autocast(device, packing, monkeypatch):
    layer, x, _ = frozen(device)
    uses = count_uses(monkeypatch)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert not uses


def test_transforms(device, packing, monkeypatch):
    layer, x, before = frozen(device)
    uses = count_uses(monkeypatch)
    with torch.no_grad():
        each = torch.func.vmap(layer)(x.unsqueeze(1))
        torch.testing.assert_close(each.squeeze(1), before, rtol=0, atol=allowed(layer, x).max().item())
        assert not uses
        assert torch.equal(layer(x), before)
    assert len(uses) == 1


@pytest.mark.skipif(TORCH < (2, 1), reason="torch.compile of 2.0")
def test_compilers(device, packing, monkeypatch):
    layer, x, before = frozen(device)
    uses = count_uses(monkeypatch)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), before)
        assert not uses
        assert torch.equal(layer(x), before)
    assert len(uses) == 1


def test_other_weights_for_one_call(device, packing):
    layer, x, _ = frozen(device)
    with torch.no_grad():
        other = copy.deepcopy(layer)
        other.weight.mul_(-2)
        assert torch.equal(torch.func.functional_call(layer, {"weight": -2 * layer.weight}, (x,)), other(x))
        assert_equals_torch(layer(x), layer, x)


def test_tracing_and_scripting(device, packing):
    layer, x, before = frozen(device)
    with torch.no_grad():
        for program in (torch.jit.trace(layer, x), torch.jit.script(layer)):
            torch.testing.assert_close(program(x), before, rtol=0, atol=allowed(layer, x).max().item())


# --- copies, files and reports -----------------------------------------------------------------------------------------


def test_copies_and_files_are_those_of_the_layer(device, packing):
    layer, x, before = frozen(device)
    plain = make(device)[0]
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert repr(layer) == repr(plain)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    others.append(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    with torch.no_grad():
        for other in others:
            assert other._frozen is None
            other.weight.data.mul_(-2)
            assert_equals_torch(other(x), other, x)
        assert torch.equal(layer(x), before)
    assert len(pickle.dumps(layer)) < len(pickle.dumps(plain)) + 100


def test_the_report(device):
    torch.manual_seed(0)
    ours = upfold.ConvTranspose2d(16, 16, 4, 2, 1, algorithm="fused")
    model = nn.Sequential(
        ours,
        upfold.ConvTranspose2d(16, 16, 3, 1, 1, algorithm="torch"),
        nn.ConvTranspose2d(16, 8, 2, 2),
        nn.Identity(),
        parametrize.register_parametrization(upfold.ConvTranspose2d(16, 8, 1), "weight", nn.Identity()),
    )
    model = model.to(device).eval()
    model[3].spare = upfold.ConvTranspose2d(4, 4, 3).to(device)
    first = model[:4]
    x = image(device)
    with that_packs(ours, x):
        report = upfold.freeze(model)
        assert [row.state for row in report] == ["frozen", "frozen", "left alone", "frozen", "left alone"]
        assert report.copy_bytes == 0
        assert "packs in its first call" in report.rows[0].text()
        report = upfold.freeze(first, x)
    rows = {row.name: row for row in report}
    (kept,) = rows["0"].kept
    assert (kept.algorithm, kept.reason) == ("fused", None)
    assert rows["0"].copy_bytes == kept.copy_bytes >= ours.weight.numel() * 4
    assert "keeps nothing: torch's own operator" in rows["1"].text()
    assert "upfold.replace(model) first" in rows["2"].text()
    assert rows["3.spare"].text() == "these inputs do not reach it"
    assert report.summary() == f"freeze: 3 of 4 layers frozen, 1 with packed weights of {kept.copy_bytes / 1024:.3g} KiB"
    assert str(report).endswith(report.summary())
    assert report.to_dict()["rows"][0]["kept"][0]["copy_bytes"] == report.copy_bytes
    assert "by a parametrization" in upfold.freeze(model).rows[4].reason
    assert str(upfold.freeze(nn.Identity())) == "freeze: the model has no transposed convolution layers"
    for function in (upfold.freeze, upfold.unfreeze):
        with pytest.raises(upfold.InvalidArgument, match=r"model = str; must be a torch\.nn\.Module"):
            function("model")


def test_freezing_anew_packs_anew(device, packing):
    layer, x, before = frozen(device)
    with torch.no_grad():
        layer.weight.data.mul_(-2)
        upfold.freeze(layer, x)
        assert_equals_torch(layer(x), layer, x)
        assert_differs(layer(x), before, layer, x)


def test_plans_beyond_the_limit_pack_in_every_call(device):
    layer, x = make(device)
    upfold.freeze(layer)
    for stride, padding, dilation in ((1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 0, 1), (4, 1, 5), (5, 1, 3)):
        layer.stride, layer.padding, layer.dilation = (stride,) * 2, (padding,) * 2, (dilation,) * 2
        for config in packing_configs(layer, x):
            with torch.no_grad(), use_config(config):
                assert torch.equal(layer(x), copy.deepcopy(layer)(x))
    assert len(copies_of(layer)) == 4
    assert any(kept.reason is not None and "4 copies" in kept.reason for kept in layer._frozen.kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_model(dtype, device):
    """What runs inside a fused model is frozen, layers that write into a concatenation too."""
    torch.manual_seed(1)
    model = trained(Pix2Pix(16, levels=5)).to(device, dtype)
    x = torch.randn(2, 3, 64, 64).to(device, dtype)
    with torch.no_grad():
        upfold.fuse(model)
        want = model(x)
        report = upfold.freeze(model, x)
        assert {row.state for row in report} == {"frozen"}
        assert all(row.kept for row in report)
        assert torch.equal(model(x), want)
        kept = report.copy_bytes
        upfold.unfreeze(model)
        assert torch.equal(model(x), want)
    assert kept > 0 or device.type == "cuda"  # whose choice may read every weight as it lies


def test_the_bench_times_both_ways():
    comparison = compare_case(cases.find("k4s2p1"), Conditions(seconds=0.001, frozen=True))
    row = comparison.row("fused frozen")
    assert row.correct
    assert row.seconds > 0
    assert row.note.startswith("keeps ")
    assert comparison.row("gemm frozen") is None
    assert compare_case(cases.find("k4s2p1"), Conditions(seconds=0.001)).row("fused frozen") is None
