"""Fusing: what is taken into a layer, what is refused and why, and that the numbers stay those of the model."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import upfold
from generators import Pix2Pix, dcgan, trained
from models import assert_same, assert_within_rule, in_double, snapshot
from upfold.fused_model import plan_of


def check(model, *inputs, autocast=None):
    """Fuse a copy and compare it with the model itself; returns the report and the fused copy."""
    fused = copy.deepcopy(model)
    report = upfold.fuse(fused)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        want, got = model(*inputs), fused(*inputs)
    if want.is_contiguous() or want.is_contiguous(memory_format=torch.channels_last):  # no view, as a slice is
        assert got.stride() == want.stride()
    if want.dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    else:
        assert_within_rule(got, want, in_double(model, *inputs))
    return report, fused


def taken(report):
    return {row.name: list(row.fused) for row in report}


def reasons(report):
    return {row.name: row.reason for row in report}


class Chain(nn.Module):
    """A transposed convolution and what the test puts behind it."""

    def __init__(self, then, up=None, **modules):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 4, 2, 1) if up is None else up
        self.then = then
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.then(self, self.up(x))


def chain(then, up=None, **modules):
    torch.manual_seed(2)
    return trained(Chain(then, up, **modules))


def image(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (2, 4, 5, 6)), generator=torch.Generator().manual_seed(4), dtype=torch.float32).to(dtype)


# --- whole generators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dcgan(dtype, layout):
    torch.manual_seed(0)
    model = trained(dcgan()).to(dtype).to(memory_format=layout)
    report, _ = check(model, image(3, 8, 1, 1, dtype=dtype))
    assert taken(report) == {
        "0": ["BatchNorm2d 1", "ReLU 2"],
        "3": ["BatchNorm2d 4", "ReLU 5"],
        "6": ["BatchNorm2d 7", "ReLU 8"],
        "9": ["BatchNorm2d 10", "ReLU 11"],
        "12": ["Tanh 13"],
    }
    assert "5 of 5 layers fused with 9 operations" in str(report)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_pix2pix(autocast, layout):
    torch.manual_seed(1)
    model = trained(Pix2Pix()).to(memory_format=layout)
    report, _ = check(model, image(2, 3, 32, 32).contiguous(memory_format=layout), autocast=autocast)
    assert [row.state for row in report] == ["fused"] * 4
    assert [row.fused[-1] for row in report] == ["concatenation"] * 3 + ["Tanh leave.2"]
    assert [any("BatchNorm2d" in what for what in row.fused) for row in report] == [True] * 3 + [False]


# --- what is taken in ------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "relu module": lambda m, y: m.act(y),
    "F.relu": lambda m, y: F.relu(y),
    "F.relu in place": lambda m, y: F.relu(y, inplace=True),
    "torch.relu": lambda m, y: torch.relu(y),
    "method": lambda m, y: y.relu(),
    "method in place": lambda m, y: y.tanh_(),
    "sigmoid": lambda m, y: torch.sigmoid(y),
    "F.leaky_relu": lambda m, y: F.leaky_relu(y, 0.2),
    "F.leaky_relu by name": lambda m, y: F.leaky_relu(y, negative_slope=0.3),
    "F.leaky_relu by default": lambda m, y: F.leaky_relu(y),
    "F.silu": lambda m, y: F.silu(y),
    "F.gelu": lambda m, y: F.gelu(y),
    "F.gelu tanh": lambda m, y: F.gelu(y, approximate="tanh"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_functions(name):
    report, _ = check(chain(FUNCTIONS[name], act=nn.ReLU(inplace=True)), image())
    assert len(taken(report)["up"]) == 1, str(report)


@pytest.mark.parametrize(
    "module",
    [nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU(0.3), nn.PReLU(init=0.1)],
    ids=str,
)
def test_activation_modules(module):
    report, _ = check(chain(lambda m, y: m.act(y), act=module), image())
    assert taken(report) == {"up": [f"{type(module).__name__} act"]}


NORMS = {
    "1d": (nn.ConvTranspose1d(4, 6, 5, 3, 1), nn.BatchNorm1d(6), (2, 4, 7)),
    "2d without bias": (nn.ConvTranspose2d(4, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6), (2, 4, 5, 6)),
    "2d without weights": (nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6, affine=False), (2, 4, 5, 6)),
    "2d grouped": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), nn.BatchNorm2d(6, eps=0.1), (2, 4, 5, 6)),
    "2d depthwise": (nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=4), nn.BatchNorm2d(4), (1, 4, 5, 6)),
    "2d empty phases": (nn.ConvTranspose2d(4, 6, 1, 3, output_padding=1), nn.BatchNorm2d(6), (1, 4, 5, 6)),
    "2d synchronised": (nn.ConvTranspose2d(4, 6, 2, 2), nn.SyncBatchNorm(6), (1, 4, 5, 6)),
    "3d": (nn.ConvTranspose3d(4, 6, 2, 2), nn.BatchNorm3d(6), (1, 4, 2, 3, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm(name):
    up, norm, shape = NORMS[name]
    model = chain(lambda m, y: F.dropout(m.norm(y), 0.5, m.training).relu(), up, norm=norm)
    report, _ = check(model, image(*shape))
    assert taken(report) == {"up": [f"{type(norm).__name__} norm", "relu()"]}


def test_two_norms_and_dropout_modules():
    model = chain(lambda m, y: m.b(m.drop(m.a(y))), a=nn.BatchNorm2d(6), b=nn.BatchNorm2d(6), drop=nn.Dropout2d(0.3))
    report, _ = check(model, image())
    assert taken(report) == {"up": ["BatchNorm2d a", "BatchNorm2d b"]}


CROPS = {
    "ends": (lambda m, y: y[:, :, 1:-2, 2:-1], ((1, 2), (2, 1))),
    "ellipsis": (lambda m, y: y[..., :-1], ((0, 0), (0, 1))),
    "rows": (lambda m, y: y[:, :, 2:], ((2, 0), (0, 0))),
    "own shape": (lambda m, y: y[..., 1 : y.shape[-1] - 3], ((0, 0), (1, 3))),
    "own size": (lambda m, y: y[:, :, : y.size(2) - 1, : y.size(-1) - 2], ((0, 1), (0, 2))),
    "whole shape": (lambda m, y: y[:, :, :, 1 : y.shape[3]], ((0, 0), (1, 0))),
    "pad": (lambda m, y: F.pad(y, (-1, -2, 0, -1)), ((0, 1), (1, 2))),
    "pad one axis": (lambda m, y: F.pad(y, (-1, 0)), ((0, 0), (1, 0))),
    "pad module": (lambda m, y: m.pad(y), ((1, 1), (1, 1))),
}


@pytest.mark.parametrize("name", CROPS)
def test_crop(name):
    function, pairs = CROPS[name]
    model = chain(lambda m, y: m.norm(function(m, y)).relu(), norm=nn.BatchNorm2d(6), pad=nn.ZeroPad2d(-1))
    report, fused = check(model, image())
    assert taken(report) == {"up": [f"crop {pairs}", "BatchNorm2d norm", "relu()"]}
    layer = next(part for part in plan_of(fused).run.modules() if isinstance(part, upfold.ConvTranspose2d))
    assert layer.crop == pairs


def test_crops_add_up_to_the_layers_own():
    up = upfold.ConvTranspose1d(3, 4, 8, 4, crop=(1, 2), activation="relu")
    report, _ = check(chain(lambda m, y: F.pad(y[..., 2:-1], (0, -1)), up), image(2, 3, 5))
    assert taken(report) == {"up": ["crop ((2, 1),)", "crop ((0, 1),)"]}


def test_output_size_is_that_before_the_crop():
    class Model(Chain):
        def forward(self, x):
            return self.up(x, output_size=[2 * x.shape[2] + 1, 2 * x.shape[3]])[..., 1:-1]

    torch.manual_seed(3)
    report, _ = check(Model(None, nn.ConvTranspose2d(4, 6, 4, 2, 1)).eval(), image())
    assert taken(report) == {"up": ["crop ((0, 0), (1, 1))"]}


class Joined(nn.Module):
    """Two layers and a tensor that meet in one concatenation."""

    def __init__(self, cat=torch.cat, **options):
        super().__init__()
        self.a, self.b = nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.ConvTranspose2d(4, 2, 2, 2)
        self.norm = nn.BatchNorm2d(6)
        self.skip = nn.Conv2d(4, 3, 1)
        self.cat, self.options = cat, options

    def forward(self, x, wide):
        return self.cat([self.skip(wide), self.norm(self.a(x)).relu(), self.b(x)], **self.options)


@pytest.mark.parametrize("options", [{"dim": 1}, {"dim": -3}], ids=str)
def test_concatenation(options, monkeypatch):
    torch.manual_seed(5)
    model = trained(Joined(**options))
    x, wide = image(), image(2, 4, 10, 12)
    report, fused = check(model, x, wide)
    assert taken(report) == {"a": ["BatchNorm2d norm", "relu()", "concatenation"], "b": ["concatenation"]}
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: pytest.fail("the parts were made first, then copied"))
    with torch.no_grad():
        fused(x, wide)


def test_concatenation_of_what_does_not_fit_is_torchs_error():
    _, fused = check(trained(Joined(dim=1)), image(), image(2, 4, 10, 12))
    with torch.no_grad(), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        fused(image(), image(2, 4, 10, 13))


def test_concatenation_in_mixed_types_is_torchs():
    model = trained(Joined(dim=1))
    model.skip.double()
    fused = copy.deepcopy(model)
    upfold.fuse(fused)
    with torch.no_grad():
        got, want = fused(image(), image(2, 4, 10, 12).double()), model(image(), image(2, 4, 10, 12).double())
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# --- what is refused, and why ----------------------------------------------------------------------------------------


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
