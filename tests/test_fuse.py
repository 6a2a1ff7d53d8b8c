"""Fusing: what is taken into a layer, and that the numbers stay those of the model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import upfold
from fusing import Chain, chain, check, image, taken
from upfold.fused_model import plan_of
from upfold.models.networks import Pix2Pix, dcgan, trained

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
    behind = ("ReLU leave.0", "ReLU inside.model.4", "ReLU inside.model.3.model.4")
    assert [row.fused[-2:] for row in list(report)[:3]] == [("concatenation", relu) for relu in behind]
    assert list(report)[3].fused[-1] == "Tanh leave.2"
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


BEHIND = {
    "module": lambda m, y: m.act(y),
    "in place": lambda m, y: F.relu(y, inplace=True),
    "method": lambda m, y: y.relu(),
}


class Rectified(Joined):
    """What follows the concatenation is a function of it."""

    def __init__(self, behind, act=None, **options):
        super().__init__(**options)
        self.act, self.behind = nn.ReLU() if act is None else act, behind

    def forward(self, x, wide):
        return self.behind(self, super().forward(x, wide))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", BEHIND)
def test_relu_behind_a_concatenation(name, layout, monkeypatch):
    torch.manual_seed(5)
    model = trained(Rectified(BEHIND[name], dim=1)).to(memory_format=layout)
    x, wide = (t.contiguous(memory_format=layout) for t in (image(), image(2, 4, 10, 12)))
    report, fused = check(model, x, wide)
    text = {"module": "ReLU act", "in place": "relu()", "method": "relu()"}[name]
    assert taken(report) == {"a": ["BatchNorm2d norm", "relu()", "concatenation", text], "b": ["concatenation", text]}
    run = plan_of(fused).run
    assert not [node for node in run.graph.nodes if "relu" in f"{node.target} {getattr(node.target, '__name__', '')}"]
    assert not [part for part in run.modules() if isinstance(part, nn.ReLU)]
    monkeypatch.setattr(torch, "relu", lambda *args: pytest.fail("the parts were made first, then joined"))
    with torch.no_grad():
        y = fused(x, wide)
        assert y.is_contiguous(memory_format=layout)
        assert fused(torch.full_like(x, torch.nan), wide).isnan().any()


@pytest.mark.parametrize(
    "behind, act",
    [
        (lambda m, y: F.leaky_relu(y, 0.2), None),
        (lambda m, y: y.relu() + y, None),
        (lambda m, y: torch.maximum(y.relu(), y[:, :1]), None),
        (lambda m, y: m.act(y), nn.Tanh()),
    ],
    ids=["another", "used twice", "read elsewhere", "a module"],
)
def test_no_other_activation_behind_a_concatenation_is_taken(behind, act):
    report, _ = check(trained(Rectified(behind, act, dim=1)), image(), image(2, 4, 10, 12))
    assert taken(report)["b"] == ["concatenation"]


@pytest.mark.parametrize("how", ["hook", "training"])
def test_relu_behind_a_concatenation_that_somebody_watches_stays(how):
    model = trained(Rectified(BEHIND["module"], dim=1))
    seen = []
    if how == "hook":
        model.act.register_forward_hook(lambda *args: seen.append(1))
    else:
        model.act.train()
    fused = copy.deepcopy(model)
    assert taken(upfold.fuse(fused))["b"] == ["concatenation"]
    with torch.no_grad():
        fused(image(), image(2, 4, 10, 12))
    assert bool(seen) == (how == "hook")


def test_relu_behind_another_activation_stays():
    class Bent(Rectified):
        def forward(self, x, wide):
            return self.act(torch.cat([self.skip(wide), self.a(x).tanh(), self.b(x)], 1))

    report, _ = check(trained(Bent(None, dim=1)), image(), image(2, 4, 10, 12))
    assert taken(report) == {"a": ["tanh()", "concatenation"], "b": ["concatenation"]}


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


@torch.no_grad()
def test_folded_weights_are_packed_once_and_anew_when_their_sources_change():
    up = upfold.ConvTranspose2d(8, 8, 4, 2, 1, algorithm="fused")
    model, x = chain(lambda m, y: m.norm(y), up=up, norm=nn.BatchNorm2d(8)), image(2, 8, 5, 6)
    fused = copy.deepcopy(model)
    upfold.fuse(fused)
    copies = []
    for _ in range(2):
        torch.testing.assert_close(fused(x), model(x))
        copies.append(plan_of(fused).layers["up"]._frozen)
    assert copies[0] is copies[1]
    assert sum(kept.copy_bytes for kept in copies[0].kept.values()) > 0
    for other in (model, fused):
        other.up.weight.mul_(3)
        other.norm.running_var.add_(1)
    torch.testing.assert_close(fused(x), model(x))
    assert plan_of(fused).layers["up"]._frozen is not copies[0]
    upfold.unfreeze(fused)
    torch.testing.assert_close(fused(x), model(x))
    assert plan_of(fused).layers["up"]._frozen is None


def test_weights_that_are_the_models_own_are_packed_in_every_call():
    up = upfold.ConvTranspose2d(8, 8, 4, 2, 1)
    _, fused = check(chain(lambda m, y: y.relu(), up=up), image(2, 8, 5, 6))
    assert plan_of(fused).layers["up"]._frozen is None
