"""Fusing: what is refused, and that the report says why."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import upfold
from fusing import Chain, chain, check, image, reasons, taken
from models import assert_same, snapshot
from upfold.models.networks import dcgan, trained


def shared(m, y):
    return m.up2(m.up2(y[:, :4]))


def parametrized():
    layer = nn.ConvTranspose2d(4, 6, 4, 2, 1)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


def training(module):
    trained(module).train()
    return module


class MyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


class Joining(Chain):
    """Joins what the layer gives with a tensor of the model's own."""

    def __init__(self, dim, shape):
        super().__init__(None)
        self.dim, self.rows = dim, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return torch.cat([self.up(x), self.rows], self.dim)


REFUSED = {
    "used twice": (lambda m, y: F.relu(y) + y, {}, "its result is used in 2 places"),
    "unknown activation": (lambda m, y: F.elu(y), {}, "elu() follows"),
    "instance norm": (lambda m, y: m.norm(y), {"norm": nn.InstanceNorm2d(6)}, "its statistics are those of each input"),
    "norm of each batch": (lambda m, y: m.norm(y), {"norm": nn.BatchNorm2d(6, track_running_stats=False)}, "no running"),
    "norm after activation": (lambda m, y: m.norm(y.relu()), {"norm": nn.BatchNorm2d(6)}, "follows an activation"),
    "unknown norm": (lambda m, y: m.norm(y), {"norm": MyNorm(6)}, "upfold does not know what this class changes"),
    "hooked norm": (lambda m, y: m.norm(y), {"norm": hooked(nn.BatchNorm2d(6))}, "hooks are registered on BatchNorm2d norm"),
    "second activation": (lambda m, y: y.relu().tanh(), {}, "tanh() follows another activation"),
    "slopes by channel": (lambda m, y: m.act(y), {"act": nn.PReLU(6)}, "PReLU act follows"),
    "fixed end": (lambda m, y: y[..., :5], {}, "a slice to a fixed position"),
    "fixed begin": (lambda m, y: y[..., -5:], {}, "begin depends on the size"),
    "steps": (lambda m, y: y[..., ::2], {}, "picks or skips"),
    "channels": (lambda m, y: y[:, 1:], {}, "slice of the channels"),
    "other size": (lambda m, y: y[..., : y.shape[-2] - 2], {}, "computed from something else"),
    "size used elsewhere": (lambda m, y: y[..., : y.shape[-1] - 2] * y.shape[-1], {}, "is used in other places"),
    "padding": (lambda m, y: F.pad(y, (1, 0)), {}, "padding that enlarges"),
    "joined with itself": (lambda m, y: torch.cat([y, y], 1), {}, "takes its result more than once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, modules, text = REFUSED[name]
    model = chain(function, **copy.deepcopy(modules))
    report, _ = check(model, image())
    (row,) = report
    assert text in row.reason, str(report)
    assert text in str(report)


def test_concatenation_along_other_axes_is_refused():
    report, _ = check(Joining(2, (2, 6, 1, 12)).eval(), image())
    assert reasons(report) == {"up": "the concatenation joins axis 2, not the channels"}
    report, _ = check(Joining(1, (2, 1, 10, 12)).eval(), image())
    assert taken(report) == {"up": ["concatenation"]}


@pytest.mark.parametrize(
    "up, text",
    [
        (hooked(nn.ConvTranspose2d(4, 6, 4, 2, 1)), "hooks are registered on the layer"),
        (parametrized(), "a parametrization computes the weights at each call"),
    ],
    ids=["hooks", "parametrization"],
)
def test_refused_for_the_layer(up, text):
    model = chain(lambda m, y: m.norm(y), norm=nn.BatchNorm2d(6))
    model.up = up
    report, _ = check(model, image())
    (row,) = report
    assert (row.state, row.fused) == ("replaced", ())
    assert text in row.reason


def test_parametrized_layers_take_activations_and_crops():
    model = chain(lambda m, y: y.relu()[..., 1:])
    model.up = parametrized()
    report, _ = check(model, image())
    assert taken(report) == {"up": ["relu()", "crop ((0, 0), (1, 0))"]}


def test_a_layer_called_twice_is_refused():
    model = chain(shared, up2=nn.ConvTranspose2d(4, 4, 2, 2))
    report, _ = check(model, image())
    assert reasons(report)["up2"] == "the layer is called 2 times"


def test_a_subclass_is_left_alone():
    class Mine(nn.ConvTranspose2d):
        pass

    report, _ = check(chain(lambda m, y: y.relu(), Mine(4, 6, 4, 2, 1)), image())
    (row,) = report
    assert row.state == "left alone"
    assert "is a subclass of ConvTranspose2d" in row.reason


def test_a_change_in_place_keeps_a_layer_where_it_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act = nn.ConvTranspose2d(4, 4, 1), nn.ReLU(inplace=True)

        def forward(self, x):
            x = x * 1
            y = self.up(x)
            return torch.cat([self.act(x), y], 1)

    torch.manual_seed(6)
    report, _ = check(Model().eval(), image())
    (row,) = report
    assert row.fused == ()
    assert "ReLU act comes between the layer and the concatenation" in row.reason


def test_what_changes_nothing_in_place_may_come_between():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.skip = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            y = self.up(x)
            return torch.cat([F.interpolate(self.skip(x), scale_factor=2.0), y, torch.sigmoid(x.repeat(1, 1, 2, 2)) * 2], 1)

    torch.manual_seed(6)
    report, _ = check(Model().eval(), image())
    assert taken(report) == {"up": ["concatenation"]}


BETWEEN = {
    "method": lambda m, x: x.add_(1),
    "function": lambda m, x: torch.relu_(x),
    "flag": lambda m, x: F.leaky_relu(x, 0.1, True),
    "keyword": lambda m, x: F.elu(x, inplace=True),
    "item": lambda m, x: operator.setitem(x, 0, 1.0),
    "a module of others": lambda m, x: m.other(x),
}


class Adding(nn.Module):
    def forward(self, x):
        return x.add_(1)


@pytest.mark.parametrize("name", BETWEEN)
def test_what_may_change_the_input_in_place(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.other = nn.ConvTranspose2d(4, 4, 1), Adding()

        def forward(self, x):
            x = x * 1
            y = self.up(x)
            BETWEEN[name](self, x)
            return torch.cat([x, y], 1)

    torch.manual_seed(6)
    report, _ = check(Model().eval(), image())
    (row,) = report
    assert row.fused == ()
    assert "comes between the layer and the concatenation" in row.reason or "cannot trace" in row.reason


def test_weights_that_would_leave_the_range_of_their_type():
    """A norm that scales down to where float16 has few digits left, or up beyond its largest number."""
    for variance, dtype, folds in ((1e9, torch.float16, False), (1e9, torch.float32, True), (1.0, torch.float16, True)):
        model = chain(lambda m, y: m.norm(y), norm=nn.BatchNorm2d(6)).to(dtype)
        model.norm.float().running_var.fill_(variance)
        report = upfold.fuse(model)
        assert report.rows[0].state == ("fused" if folds else "replaced"), str(report)
        assert folds or "out of the range of torch.float16" in report.rows[0].reason


def test_training_mode_is_refused():
    model = dcgan().train()
    before = snapshot(model)
    report = upfold.fuse(model)
    assert all(row.state == "replaced" and "it is in training mode; call eval() first" in row.reason for row in report)
    upfold.restore(model)
    assert_same(before, snapshot(model))


def test_one_norm_in_training_mode_is_refused():
    model = trained(dcgan())
    model[1].train()
    report = upfold.fuse(model)
    assert reasons(report)["0"] == "BatchNorm2d 1 is in training mode"
    assert taken(report)["3"] == ["BatchNorm2d 4", "ReLU 5"]


def test_models_without_such_layers():
    assert "no transposed convolution" in str(upfold.fuse(nn.Linear(2, 2)))
    assert len(upfold.fuse(nn.Sequential(nn.Fold((4, 4), 2)))) == 0
    (row,) = upfold.fuse(nn.ConvTranspose2d(2, 2, 2).eval())
    assert (row.name, row.state, row.reason) == ("", "replaced", "it is used by itself")
    with pytest.raises(upfold.InvalidArgument, match="model = str"):
        upfold.fuse("decoder")
