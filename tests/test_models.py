"""Models that others wrote: replaced and fused they compute what torch's layers do, in every mode that their users run them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import upfold
from models import assert_within_rule
from upfold.models.foreign import SamDecoder, encodec, monai, monai_dynunet
from upfold.models.networks import Pix2Pix, dcgan, trained
from upfold.models.rule import in_double

THREE_AXES = (1, 1, 16, 16, 16)
SAM = {"hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
ENCODEC = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "codebook_size": 16}


class Main(nn.Module):
    """A model of which the first result counts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        result = self.model(*inputs)
        return result[0] if isinstance(result, (tuple, list)) else result


def monai_unet(dims=2, **options):
    options = {"channels": (4, 8, 16), "strides": (2, 2), **options}
    return monai("UNet", spatial_dims=dims, in_channels=1, out_channels=2, **options)


def monai_unetr(norm="batch"):
    sizes = {"img_size": (16, 16, 16), "feature_size": 4, "hidden_size": 12, "mlp_dim": 24, "num_heads": 2}
    return monai("UNETR", in_channels=1, out_channels=2, norm_name=norm, **sizes)


# How to build it, the shapes of its inputs, and what fuse takes into its layers, in all.
MODELS = {
    "dcgan": (dcgan, [(2, 8, 1, 1)], 9),
    "pix2pix": (Pix2Pix, [(2, 3, 32, 32)], 10),
    "monai-unet": (lambda: monai_unet(norm="batch"), [(1, 1, 16, 16)], 3),
    "monai-unet-residual": (lambda: monai_unet(num_res_units=1), [(1, 1, 16, 16)], 0),
    "monai-unet-3d": (lambda: monai_unet(3, norm="batch", num_res_units=1), [THREE_AXES], 4),
    "monai-unetr": (monai_unetr, [THREE_AXES], 5),
    "monai-dynunet": (lambda: monai_dynunet(2, res_block=True), [(1, 1, 16, 16)], 2),
    "monai-dynunet-3d": (lambda: monai_dynunet(3, norm_name="batch"), [THREE_AXES], 2),
    "sam-mask-decoder": (lambda: SamDecoder(**SAM), [(1, 32, 8, 8), (1, 32, 8, 8), (1, 1, 2, 32), (1, 32, 8, 8)], 1),
    "encodec": (lambda: encodec(**ENCODEC), [(1, 16, 12)], 2),
    "encodec-not-causal": (lambda: encodec(**ENCODEC, use_causal_conv=False), [(1, 16, 12)], 2),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name):
    """The model with random weights, and random inputs; the same in each call."""
    make, shapes, _ = MODELS[name]
    torch.manual_seed(11)
    try:
        model = trained(Main(make()))
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is an extra of the tests (models)")
    return model, [torch.randn(shape) for shape in shapes]


def replaced(model):
    other = copy.deepcopy(model)
    report = upfold.replace(other)
    assert len(report) > 0
    assert {row.state for row in report} == {"replaced"}
    return other


@every_model
def test_evaluation(name):
    model, inputs = build(name)
    other = replaced(model)
    with torch.no_grad():
        want, exact = model(*inputs), in_double(model, *inputs)
        assert_within_rule(other(*inputs), want, exact)
        report = upfold.fuse(other)
        assert sum(len(row.fused) for row in report) == MODELS[name][2], str(report)
        assert_within_rule(other(*inputs), want, exact)
    upfold.restore(other)
    with torch.no_grad():
        assert torch.equal(other(*inputs), want)


@every_model
def test_autocast(name):
    model, inputs = build(name)
    other = replaced(model)
    with torch.no_grad():
        exact = in_double(model, *inputs)
        with torch.autocast("cpu", torch.bfloat16):
            want = model(*inputs)
            assert_within_rule(other(*inputs), want, exact)
            upfold.fuse(other)
            assert_within_rule(other(*inputs), want, exact)


def one_step(model, inputs, autocast=False):
    """The gradients of one step of training, in one vector; the model keeps the weights and statistics that the step leaves."""
    model.train()
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()  # draws other numbers in float64
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*inputs).float().square().mean() if autocast else model(*inputs).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@every_model
def test_training_step(name):
    """One step: every gradient, and the weights and statistics that it leaves, by torch's layers and by upfold's."""
    model, inputs = build(name)
    other, exact = replaced(model), copy.deepcopy(model).double()
    wide = one_step(exact, [value.double() for value in inputs])
    assert_within_rule(one_step(other, inputs), one_step(model, inputs), wide)
    for got, torchs, right in zip(
        other.state_dict().values(), model.state_dict().values(), exact.state_dict().values(), strict=True
    ):
        if got.is_floating_point():
            assert_within_rule(got, torchs, right)
        else:
            assert torch.equal(got, torchs)


@every_model
def test_training_step_under_autocast(name):
    model, inputs = build(name)
    other, exact = replaced(model), copy.deepcopy(model).double()
    wide = one_step(exact, [value.double() for value in inputs])
    # Without oneDNN: with torch 2.13 on a processor with AVX-512 it left parts of a bfloat16 conv3d's weight gradient unwritten,
    # in one run of eight and with torch's own layers alike.
    with torch.backends.mkldnn.flags(enabled=False):
        assert_within_rule(one_step(other, inputs, True), one_step(model, inputs, True), wide)


@every_model
def test_state_dict_goes_both_ways(name):
    model, inputs = build(name)
    other = replaced(model)
    upfold.fuse(other)
    state = {key: value * 1.5 if value.is_floating_point() else value for key, value in model.state_dict().items()}
    assert list(other.state_dict()) == list(state)
    other.load_state_dict(state, strict=True)
    model.load_state_dict(other.state_dict(), strict=True)
    with torch.no_grad():
        assert_within_rule(other(*inputs), model(*inputs), in_double(model, *inputs))


@every_model
def test_hooks_fire_once(name):
    model, inputs = build(name)
    other = replaced(model)
    layers = {path: part for path, part in other.named_modules() if isinstance(part, nn.modules.conv._ConvTransposeNd)}
    called = []
    for path, layer in layers.items():
        layer.register_forward_hook(lambda layer, args, output, path=path: called.append(path))
    with torch.no_grad():
        want = model(*inputs)
        assert_within_rule(other(*inputs), want, in_double(model, *inputs))
        once = list(called)
        upfold.fuse(other)  # takes nothing into layers with hooks
        other(*inputs)
    assert called == once * 2
    assert sorted(once) == sorted(layers)


can_compile = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6),
    reason="torch.compile of these models is tested with PyTorch 2.6 and newer",
)


@can_compile
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pix2pix", "monai-dynunet-3d", "sam-mask-decoder", "encodec"])
def test_compiled(name):
    model, inputs = build(name)
    other = replaced(model)
    torch._dynamo.reset()
    with torch.no_grad():
        want, exact = model(*inputs), in_double(model, *inputs)
        assert_within_rule(torch.compile(other, backend="aot_eager")(*inputs), want, exact)
        upfold.fuse(other)
        torch._dynamo.reset()
        assert_within_rule(torch.compile(other, backend="aot_eager")(*inputs), want, exact)


# --- weight norm -----------------------------------------------------------------------------------------------------


def test_weight_norm_of_encodec_before_and_after_its_removal():
    model, inputs = build("encodec")
    other = replaced(model)
    layers = [[part for part in one.modules() if isinstance(part, nn.ConvTranspose1d)] for one in (model, other)]
    assert all(parametrize.is_parametrized(layer, "weight") or hasattr(layer, "weight_g") for layer in layers[1])
    for one, same in zip(*layers, strict=True):
        for layer in (one, same):
            if parametrize.is_parametrized(layer, "weight"):
                parametrize.remove_parametrizations(layer, "weight")
            else:
                nn.utils.remove_weight_norm(layer)
        assert isinstance(same, upfold.ConvTranspose1d)
        assert list(same.state_dict()) == ["weight", "bias"] or list(same.state_dict()) == ["bias", "weight"]
    with torch.no_grad():
        want, exact = model(*inputs), in_double(model, *inputs)
        assert_within_rule(other(*inputs), want, exact)
        upfold.fuse(other)
        assert_within_rule(other(*inputs), want, exact)


# --- models in wrappers ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="DataParallel moves the model to the GPU that is there")
@pytest.mark.parametrize("wrap_first", [True, False])
def test_data_parallel(wrap_first):
    model, inputs = build("pix2pix")
    other = nn.DataParallel(copy.deepcopy(model)) if wrap_first else replaced(model)
    if wrap_first:
        upfold.replace(other)
    else:
        other = nn.DataParallel(other)
    with torch.no_grad():
        want, exact = model(*inputs), in_double(model, *inputs)
        assert_within_rule(other(*inputs), want, exact)
        assert len(upfold.fuse(other)) == 4
        assert_within_rule(other(*inputs), want, exact)
        assert_within_rule(other.module(*inputs), want, exact)


def _train_distributed(rank, world, folder, wrap_first, results):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        torch.manual_seed(7)
        model = trained(dcgan()).train()
        if wrap_first:
            model = nn.parallel.DistributedDataParallel(model)
            upfold.replace(model)
        else:
            upfold.replace(model)
            model = nn.parallel.DistributedDataParallel(model)
        inner = model.module
        assert all(isinstance(part, upfold.ConvTranspose2d) for part in inner if isinstance(part, nn.ConvTranspose2d))
        noise = torch.randn(4, 8, 1, 1, generator=torch.Generator().manual_seed(8))
        for module in inner:
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # statistics of half a batch would not be those of the whole
        model(noise[rank * (4 // world) : (rank + 1) * (4 // world)]).square().mean().backward()
        if rank == 0:
            torch.save([parameter.grad for parameter in inner.parameters()], results)
        torch.distributed.barrier()  # the store is a file that the first to leave takes away
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("world, wrap_first", [(1, True), (1, False), (2, True)])
def test_distributed_data_parallel(world, wrap_first, tmp_path):
    """Processes with a part of the batch each get the gradients of the whole, whichever came first: replacing or wrapping."""
    results = str(tmp_path / "gradients.pt")
    arguments = (world, str(tmp_path), wrap_first, results)
    if world == 1:
        _train_distributed(0, *arguments)
    else:
        torch.multiprocessing.spawn(_train_distributed, args=arguments, nprocs=world, join=True)
    torch.manual_seed(7)
    model = trained(dcgan())
    noise = torch.randn(4, 8, 1, 1, generator=torch.Generator().manual_seed(8))
    model(noise).square().mean().backward()
    for got, parameter in zip(torch.load(results), model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-6)
