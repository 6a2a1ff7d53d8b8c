"""Replacement: what stays, what is left alone and why, and that restoring gives back exactly what there was."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import upfold
from models import assert_same, decoder, snapshot, states
from upfold import InvalidArgument


def test_swaps_in_place_and_back():
    model, x = decoder()
    want, before, layers = model(x), snapshot(model), [model.up, model.rest[2]]
    parameters = [id(parameter) for parameter in model.parameters()]
    report = upfold.replace(model)
    assert states(report) == {"up": "replaced", "rest.2": "replaced"}
    assert "2 of 2 layers replaced" in str(report)
    for layer in layers:
        assert isinstance(layer, upfold.ConvTranspose2d)
        assert isinstance(layer, nn.ConvTranspose2d)
    assert model.up is layers[0]
    assert [id(parameter) for parameter in model.parameters()] == parameters
    # Nothing but classes changed: no layer gained or lost an entry.
    assert [entries for _, entries in snapshot(model)] == [entries for _, entries in before]
    torch.testing.assert_close(model(x), want)
    assert states(upfold.restore(model)) == {"up": "restored", "rest.2": "restored"}
    assert_same(before, snapshot(model))
    assert torch.equal(model(x), want)
    assert len(upfold.restore(model)) == 0


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.ConvTranspose1d(4, 6, 5, 3, 1, 2), (2, 4, 7)),
        (nn.ConvTranspose2d(4, 6, (2, 3), (3, 1), (0, 2), groups=2, dilation=(1, 2)), (2, 4, 5, 6)),
        (nn.ConvTranspose3d(4, 6, 2, 2, dtype=torch.float64), (4, 3, 2, 3)),
        (nn.Fold((6, 5), 3, padding=1), (2, 18, 30)),
        (nn.Unfold((2, 3), stride=2), (2, 4, 6, 7)),
    ],
    ids=["1d", "2d", "3d unbatched double", "fold", "unfold"],
)
def test_a_layer_by_itself(layer, shape):
    x = torch.randn(shape, dtype=torch.float64 if "3d" in type(layer).__name__ else torch.float32)
    want, kind = layer(x), type(layer)
    (row,) = upfold.replace(layer)
    assert (row.name, row.layer, row.state) == ("", kind.__name__, "replaced")
    assert isinstance(layer, getattr(upfold, kind.__name__))
    torch.testing.assert_close(layer(x), want)
    upfold.restore(layer)
    assert type(layer) is kind


def test_training_goes_on_and_survives_restore():
    model, x = decoder()
    model.train()
    upfold.replace(model)
    assert model.up.training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(x).square().mean().backward()
    optimizer.step()
    trained = copy.deepcopy(model.state_dict())
    assert not torch.equal(trained["up.weight"], before["up.weight"])
    upfold.restore(model)
    assert type(model.up) is nn.ConvTranspose2d
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_algorithm_is_set_and_taken_away():
    model, x = decoder()
    before, want = snapshot(model), model(x)
    upfold.replace(model, algorithm="direct")
    assert model.up.algorithm == "direct"
    assert "algorithm='direct'" in repr(model)
    torch.testing.assert_close(model(x), want)
    upfold.restore(model)
    assert_same(before, snapshot(model))
    with pytest.raises(InvalidArgument, match="algorithm = 'magic'"):
        upfold.replace(model, algorithm="magic")
    assert_same(before, snapshot(model))


def test_all_hooks_stay():
    layer, x = nn.ConvTranspose2d(3, 4, 2, 2), torch.randn(1, 3, 4, 4, requires_grad=True)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    layer.register_forward_hook(lambda module, args, output: seen.append("forward"))
    layer.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    layer._register_state_dict_hook(lambda module, state, prefix, metadata: seen.append("state"))
    layer._register_load_state_dict_pre_hook(lambda *arguments: seen.append("load"))
    upfold.replace(layer)
    layer(x).sum().backward()
    layer.load_state_dict(layer.state_dict())
    assert seen == ["pre", "forward", "backward", "state", "load"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_old_norms_stay(kind):
    torch.manual_seed(0)
    make = lambda: getattr(nn.utils, kind)(nn.ConvTranspose1d(4, 6, 4, 2, 1))  # noqa: E731
    layer, x = make(), torch.randn(2, 4, 9)
    other = make()
    other.load_state_dict(layer.state_dict())
    upfold.replace(layer)
    for _ in range(3):  # spectral_norm's power iteration moves its buffers at each call
        torch.testing.assert_close(layer(x), other(x))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value)
    getattr(nn.utils, f"remove_{kind}")(layer)
    assert isinstance(layer, upfold.ConvTranspose1d)
    upfold.restore(layer)
    assert type(layer) is nn.ConvTranspose1d


class Doubled(nn.Module):
    def forward(self, value):
        return 2 * value

    def right_inverse(self, value):
        return value / 2


def parametrized() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.ConvTranspose2d(3, 4, 3, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def test_parametrized_layer():
    layer, x = parametrized(), torch.randn(1, 3, 4, 5)
    want, cls, before = layer(x), type(layer), snapshot(layer)
    upfold.replace(layer)
    assert isinstance(layer, upfold.ConvTranspose2d)
    assert type(layer).__name__.startswith("Parametrized")
    assert parametrize.is_parametrized(layer, "weight")
    torch.testing.assert_close(layer(x), want)
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None
    layer.zero_grad()
    upfold.restore(layer)
    assert type(layer) is cls
    assert_same(before, snapshot(layer))


def test_remove_parametrizations_lands_on_our_class():
    layer, x = parametrized(), torch.randn(1, 3, 4, 5)
    want = layer(x)
    upfold.replace(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert not parametrize.is_parametrized(layer)
    assert isinstance(layer, upfold.ConvTranspose2d)
    assert layer.__dict__.keys() == nn.ConvTranspose2d(3, 4, 3, 2).__dict__.keys()
    torch.testing.assert_close(layer(x), want)
    upfold.restore(layer)
    assert type(layer) is nn.ConvTranspose2d
    assert torch.equal(layer(x), want)


def test_parametrizations_that_change_between():
    """One is added to the replaced layer and the old one removed; restoring keeps what there is then."""
    layer, x = parametrized(), torch.randn(1, 3, 4, 5)
    want = layer(x)
    upfold.replace(layer)
    parametrize.register_parametrization(layer, "bias", Doubled())
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), want)
    upfold.restore(layer)
    assert not isinstance(layer, upfold.ConvTranspose2d)
    assert parametrize.is_parametrized(layer, "bias")
    assert not parametrize.is_parametrized(layer, "weight")
    torch.testing.assert_close(layer(x), want)
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.ConvTranspose2d


def test_parametrized_deepcopy():
    layer, x = parametrized(), torch.randn(1, 3, 4, 5)
    want = layer(x)
    upfold.replace(layer)
    other = copy.deepcopy(layer)
    torch.testing.assert_close(other(x), want)
    upfold.restore(other)
    assert not isinstance(other, upfold.ConvTranspose2d)
    assert isinstance(layer, upfold.ConvTranspose2d)
    torch.testing.assert_close(other(x), want)


def test_new_norms_after_replacement():
    torch.manual_seed(2)
    layer, x = nn.ConvTranspose2d(3, 4, 3, 2), torch.randn(1, 3, 4, 5)
    want = layer(x)
    upfold.replace(layer)
    norm = getattr(parametrizations, "weight_norm", parametrizations.spectral_norm)
    norm(layer)
    assert isinstance(layer, upfold.ConvTranspose2d)
    layer(x)
    upfold.restore(layer)
    assert parametrize.is_parametrized(layer, "weight")
    assert not isinstance(layer, upfold.ConvTranspose2d)
    if hasattr(parametrizations, "weight_norm"):  # its initial value is the weight itself
        torch.testing.assert_close(layer(x), want)


def test_shared_layer_is_one_row():
    layer = nn.ConvTranspose2d(4, 4, 2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    (row,) = upfold.scan(model, torch.randn(1, 4, 3, 3))
    assert (row.name, row.aliases, row.calls) == ("0", ("2",), 2)
    assert row.input_shapes == ((1, 4, 3, 3), (1, 4, 6, 6))
    assert row.output_shapes == ((1, 4, 6, 6), (1, 4, 12, 12))
    assert states(upfold.replace(model)) == {"0": "replaced"}
    assert model[0] is model[2]
    upfold.restore(model)
    assert type(model[2]) is nn.ConvTranspose2d


class Mine(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


def odd_layers() -> dict[str, tuple[nn.Module, str]]:
    patched = nn.ConvTranspose2d(3, 4, 2)
    patched.forward = types.MethodType(lambda self, x: x, patched)
    activated, named = nn.ConvTranspose2d(3, 4, 2), nn.ConvTranspose2d(3, 4, 2)
    activated.activation, named.algorithm = nn.ReLU(), "mine"
    reflecting = nn.ConvTranspose2d(3, 4, 2)
    reflecting.padding_mode = "reflect"
    return {
        "lazy": (nn.LazyConvTranspose2d(4, 2), "lazy layer"),
        "patched": (patched, "its own forward"),
        "its own activation": (activated, "its own activation"),
        "its own algorithm": (named, "its own algorithm"),
        "scripted": (torch.jit.script(nn.ConvTranspose2d(3, 4, 2)), "torch.jit"),
        "reflecting": (reflecting, "padding_mode = 'reflect'"),
        "subclass": (Mine(3, 4, 2), "test_replace.Mine is a subclass of ConvTranspose2d"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", odd_layers())
def test_left_alone(name):
    odd, text = odd_layers()[name]
    model = nn.ModuleDict({"good": nn.ConvTranspose2d(3, 4, 2), "odd": odd})
    kind = type(odd)
    report = upfold.replace(model)
    assert states(report) == {"good": "replaced", "odd": "left alone"}
    (row,) = report.left_alone
    assert text in row.reason
    assert text in str(report)
    assert type(odd) is kind
    assert text in str(upfold.scan(model))
    assert states(upfold.restore(model)) == {"good": "restored"}
    assert type(odd) is kind


def test_what_users_keep_in_a_layer_stays_theirs():
    """An attribute that upfold's classes happen to define: the layer computes what it did, and keeps it."""
    layer, x = nn.ConvTranspose2d(3, 4, 2), torch.randn(1, 3, 4, 5)
    layer.activation, layer.colour = "relu", "red"
    want = layer(x)
    upfold.replace(layer)
    torch.testing.assert_close(layer(x), want)
    upfold.restore(layer)
    assert (layer.activation, layer.colour) == ("relu", "red")


@pytest.mark.parametrize("original_name", ["Fold", ["a", "list"]])
def test_modules_that_call_themselves_like_a_layer(original_name):
    model, _ = decoder()
    model.original_name = original_name
    assert states(upfold.replace(model)) == {"up": "replaced", "rest.2": "replaced"}


@pytest.mark.filterwarnings("ignore")
def test_lazy_layer_after_its_first_run():
    layer = nn.LazyConvTranspose2d(4, 2)
    layer(torch.randn(1, 3, 4, 4))
    upfold.replace(layer)
    assert isinstance(layer, upfold.ConvTranspose2d)


def test_our_own_layers_stay_ours():
    model = nn.Sequential(upfold.ConvTranspose2d(3, 4, 2, activation="relu"), nn.ConvTranspose2d(4, 3, 2))
    before = snapshot(model)
    assert states(upfold.replace(model)) == {"0": "upfold", "1": "replaced"}
    assert states(upfold.replace(model)) == {"0": "upfold", "1": "upfold"}
    assert states(upfold.restore(model)) == {"1": "restored"}
    assert_same(before, snapshot(model))


def test_copies_and_files_work_and_restore():
    model, x = decoder()
    upfold.replace(model)
    want = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(other(x), want)
    other = pickle.loads(pickle.dumps(model))
    upfold.restore(other)
    assert type(other.up) is nn.ConvTranspose2d
    assert isinstance(model.up, upfold.ConvTranspose2d)


def test_state_dict_loads_both_ways():
    model, x = decoder()
    other, _ = decoder()
    upfold.replace(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    model.load_state_dict(other.state_dict(), strict=True)
    torch.testing.assert_close(model(x), other(x))
    fresh, _ = decoder()
    other.load_state_dict(fresh.state_dict(), strict=True)
    torch.testing.assert_close(other(x), fresh(x))


def test_functional_call():
    model, x = decoder()
    upfold.replace(model)
    state = {name: value * 2 for name, value in model.state_dict().items() if value.is_floating_point()}
    got = torch.func.functional_call(model, state, (x,))
    upfold.restore(model)
    torch.testing.assert_close(got, torch.func.functional_call(model, state, (x,)))


def test_data_parallel_wrapper():
    model, x = decoder()
    wrapped = nn.DataParallel(model)
    assert states(upfold.replace(wrapped)) == {"module.up": "replaced", "module.rest.2": "replaced"}
    replica = model.up._replicate_for_data_parallel()
    assert isinstance(replica, upfold.ConvTranspose2d)
    assert wrapped(x).shape == (2, 4, 20, 24)
