"""The demo: the constructed decoder equals interpolation, a wrong tap is seen, and the pictures are written."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F

import upfold
from upfold import decoder


def decode(model, photo):
    with torch.no_grad():
        return model(*model.features([level.float() for level in decoder.take_apart(photo)]))


@pytest.fixture(scope="module")
def photo():
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 4, 6, generator=generator, dtype=torch.float64)
    fine = torch.rand(1, 3, 64, 96, generator=generator, dtype=torch.float64)
    return (3 * F.interpolate(coarse, scale_factor=16, mode="bicubic").clamp(0, 1) + fine) / 4


def decibels(picture, truth):
    return float(-10 * torch.log10((picture.double() - truth).square().mean()))


def test_pyramid_is_lossless(photo):
    small = F.avg_pool2d(decoder.interpolated(photo), 2)
    assert decoder.interpolated(photo).shape == (1, 3, 128, 192)
    # Enlarging by interpolation and shrinking again blurs a little; the means over large squares stay.
    torch.testing.assert_close(F.avg_pool2d(small, 16), F.avg_pool2d(photo, 16), atol=0.1, rtol=0)


@pytest.mark.parametrize("algorithm", ["torch.nn", "auto", "gemm", "direct"])
def test_decoder_equals_interpolation(photo, algorithm):
    model = decoder.Decoder().eval()
    if algorithm == "torch.nn":
        picture = decode(model, photo)
    else:
        upfold.replace(model)
        assert isinstance(model.unet, upfold.ConvTranspose2d)
        with upfold.use(algorithm=algorithm):
            picture = decode(model, photo)
    # float32 carries 24 bits: 20 * log10(2**24) = 144 dB at best; the sums over some hundred channels cost some.
    assert decibels(picture, decoder.interpolated(photo)) > 120


NAMES = ["unet", "pix2pix", "depthwise", "cyclegan", "fcn8", "fcn2"]


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_weight_is_measured(photo, name):
    model = decoder.Decoder().eval()
    weight = model.get_submodule(name).weight
    with torch.no_grad():
        weight.view(-1)[weight.abs().argmax()] = 0.0
    # One of up to 32,768 weights; rounding alone leaves more than 120.
    assert decibels(decode(model, photo), decoder.interpolated(photo)) < 110


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_tap_is_seen(photo, name):
    model = decoder.Decoder().eval()
    weight = model.get_submodule(name).weight
    middle = weight.shape[-1] // 2
    with torch.no_grad():
        weight[:, :, middle, middle] = 0.0
    assert decibels(decode(model, photo), decoder.interpolated(photo)) < 45


def test_layers_are_of_all_the_usual_kinds():
    layers = [decoder.Decoder().get_submodule(name) for name in decoder.steps()]
    kinds = {(m.kernel_size[0], m.stride[0], m.padding[0], m.output_padding[0], m.groups > 1) for m in layers}
    assert kinds == {
        (2, 2, 0, 0, False),
        (4, 2, 1, 0, False),
        (4, 2, 1, 0, True),
        (3, 2, 1, 1, False),
        (16, 8, 4, 0, False),
    }


def test_enlarger_takes_a_picture(photo):
    with torch.no_grad():
        picture = decoder.build()(photo.float())
    assert decibels(picture, decoder.interpolated(photo)) > 110


def test_demo_writes_its_pictures_and_prints_its_figures(tmp_path):
    console_module = pytest.importorskip("rich.console", reason="the demo's tables need rich")
    image = pytest.importorskip("matplotlib.image", reason="the demo's pictures need matplotlib")
    from upfold import demo

    console = console_module.Console(file=io.StringIO(), width=200)
    found = demo.run(tmp_path / "demo", device="cpu", size=128, seconds=0.002, console=console)
    text = console.file.getvalue()
    assert found.psnr_torch > 120
    assert found.psnr_upfold > 120
    assert f"{found.psnr_upfold:.1f} dB" in text
    assert len(found.layers) == 6
    for comparison in found.layers:
        assert comparison.name in text
        assert comparison.row("gemm").seconds > 0
        assert comparison.row("direct").seconds > 0
    assert [path.name for path in found.files] == ["photograph.png", "enlarged.png", "methods.png"]
    photograph, enlarged, chart = (image.imread(path) for path in found.files)
    assert photograph.shape[:2] == (128, 128)
    assert enlarged.shape[:2] == (256, 256)
    assert min(chart.shape[:2]) > 300
    back = F.avg_pool2d(torch.from_numpy(enlarged[..., :3].copy()).permute(2, 0, 1), 2)
    assert decibels(back, torch.from_numpy(photograph[..., :3].copy()).permute(2, 0, 1).double()) > 25
