"""Training as models are trained: mixed precision, checkpoints, accumulation, and a decoder that learns digits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle import dtype_name
from programs import load
from small_layer import record_runs
from stepping import assert_same, autocast, batch, decoders, gradients, loss, parameters

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)


def in_double(index, device, size=4):
    """What a step on that batch gives in float64, by torch on the CPU."""
    model = decoders("cpu", torch.float64)[0]
    x, grad = batch(index, "cpu", size, torch.float64)
    y = model(x)
    (y * grad).flatten(1).sum(1).mean().backward()
    return y, gradients(model)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_equal_torchs(momentum, device):
    """Two steps of SGD whose rate is a power of two: every model has the same weights after them, bit for bit."""
    after = []
    for model in (decoders("cpu", torch.float64)[0], *decoders(device)):
        where, dtype = model.first.weight.device, model.first.weight.dtype
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=momentum)
        for index in range(2):
            x, grad = batch(index, where, dtype=dtype)
            optimizer.zero_grad()
            (model(x) * grad).flatten(1).sum(1).mean().backward()
            optimizer.step()
        after.append(parameters(model))
    for found in after[1:]:
        assert_same(found, after[0])


@LOW
def test_autocast_equals_torchs(dtype, device):
    """The sums of this decoder are exact in 16 bits: its gradients are those of float64."""
    y64, want = in_double(0, device)
    for model in decoders(device):
        x, grad = batch(0, device)
        with autocast(device, dtype):
            y = model(x)
        assert y.dtype == dtype
        assert_same([y], [y64])
        loss(y, grad).backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        assert_same(gradients(model), want)


def scaler_on(device, **options):
    if not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"):
        if device.type != "cuda":
            pytest.skip(f"torch {torch.__version__} has no GradScaler for a CPU")
        return torch.cuda.amp.GradScaler(**options)
    return torch.amp.GradScaler(device.type, **options)


@LOW
def test_grad_scaler(dtype, device):
    """A step, one that overflows and is left out, and another: the same weights and the same scale as with torch's layers."""
    after = []
    for model in decoders(device):
        scaler = scaler_on(device, init_scale=8.0, growth_interval=100)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        for index in (0, 1):
            x, grad = batch(index, device)
            if index == 1:
                x[0, 0, 0, 0] = torch.inf
            optimizer.zero_grad()
            with autocast(device, dtype):
                y = model(x)
            scaler.scale(loss(y, grad)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((parameters(model), scaler.get_scale()))
        assert_same(seen[1][0], seen[0][0])  # the second step was left out
        assert [scale for _, scale in seen] == [8.0, 4.0]
        after.append(seen[0][0])
    started = parameters(decoders("cpu")[0])
    want = [weight - gradient for weight, gradient in zip(started, in_double(0, device)[1], strict=True)]
    for found in after:
        assert_same(found, want)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_checkpoints(reentrant, dtype, device, monkeypatch):
    """The forward runs twice, the gradients are those of a plain step."""
    _, want = in_double(0, device)
    for model in decoders(device)[1:]:
        x, grad = batch(0, device)
        ran = record_runs(monkeypatch)
        with autocast(device, dtype):
            y = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        loss(y, grad).backward()
        assert_same(gradients(model), want)
        assert len(ran) == 2 * 3 + 2 * 3
        assert x.grad is not None


def test_accumulation(device):
    """The gradients of four parts of a batch add up to those of the whole, bit for bit, into the same tensors."""
    _, want = in_double(0, device, size=8)
    for model in decoders(device)[1:]:
        x, grad = batch(0, device, size=8)
        addresses = set()
        for part in range(4):
            rows = slice(2 * part, 2 * part + 2)
            (loss(model(x[rows]), grad[rows]) / 4).backward()
            addresses.add(model.first.weight.grad.data_ptr())
        assert len(addresses) == 1
        assert_same(gradients(model), want)


def test_a_frozen_decoder_passes_gradients_on(device, monkeypatch):
    """As a generator behind a frozen critic: the gradient of the input alone is computed."""
    want = None
    for model in decoders(device):
        model.requires_grad_(False)
        x, grad = batch(0, device)
        ran = record_runs(monkeypatch)
        loss(model(x.requires_grad_()), grad).backward()
        if want is None:
            want = x.grad
            continue
        assert torch.equal(x.grad, want)
        assert [run.problem.operator.name for run in ran] == ["CONV_TRANSPOSE"] * 3 + ["CONV"] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_a_step_of_random_numbers_is_as_close_as_torchs(dtype, device):
    """Error of each gradient against float64, in norm over eight draws: at most twice that of torch's, and a unit of the type.

    In one draw chance decides: rounding flips an activation near its kink, and the errors of a bias cancel or do not.
    """
    squares = [[], [], []]
    for seed in range(8):
        torch.manual_seed(seed)
        models = decoders(device)
        for parameter in models[0].parameters():
            nn.init.normal_(parameter, std=0.3)
        exact = decoders("cpu", torch.float64)[0]
        for model in (*models[1:], exact):
            model.load_state_dict(models[0].state_dict())
        x, grad = torch.randn(8, 6, 9, 10), torch.randn(8, 4, 72, 80)
        (exact(x.double()) * grad.double()).flatten(1).sum(1).mean().backward()
        for model, found in zip(models, squares, strict=True):
            with autocast(device, dtype):
                y = model(x.to(device))
            loss(y, grad.to(device)).backward()
            pairs = zip(gradients(model), gradients(exact), strict=True)
            found.append([float((got.cpu().double() - want).square().sum() / want.square().sum()) for got, want in pairs])
    theirs, *ours = [torch.tensor(found).mean(0).sqrt() for found in squares]
    for one in ours:
        assert bool((one <= 2 * theirs + torch.finfo(dtype).eps).all()), (theirs, one)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_decoder_learns_digits_as_with_torchs_layers(precision, device, tmp_path, monkeypatch):
    """A short version of `examples/train_vae.py`: the same losses, within what three seeds of torch differ by."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    image = pytest.importorskip("matplotlib.image", reason="the picture needs matplotlib")
    torch.set_num_threads(1)
    example = load("train_vae")
    images = example.digits(device)
    assert images.shape == (1797, 1, 8, 8)
    ran = record_runs(monkeypatch)
    verdict = example.compare(images[example.HELD_OUT :], 40, precision)
    steps = 3 * 40
    assert len(ran) == steps * 3 * 3
    assert {run.problem.dtype for run in ran} == {getattr(torch, precision)}
    assert verdict.holds, (verdict.differences, verdict.spread)
    for run in verdict.runs:
        assert float(run.losses[-5:].mean()) < 0.95 * float(run.losses[:5].mean())  # it learns
    example.draw([verdict], images[: example.HELD_OUT], tmp_path / "vae.png")
    height, width = image.imread(tmp_path / "vae.png").shape[:2]
    assert min(height, width) > 300


def test_a_difference_beyond_the_seeds_is_told():
    """Outcomes apart by more than the seeds of torch are."""
    example = load("train_vae")
    runs = [example.Run("torch", seed, torch.full((20,), 30.0 + seed), None) for seed in (0, 1, 2)]
    near = [example.Run("upfold", seed, run.losses + 1.5, None) for seed, run in enumerate(runs)]
    assert example.Verdict("float32", (*runs, *near)).holds
    near[1] = example.Run("upfold", 1, runs[1].losses - 2.5, None)
    assert not example.Verdict("float32", (*runs, *near)).holds
