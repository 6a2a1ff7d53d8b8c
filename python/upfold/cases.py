"""Named transposed-convolution layers: those of published decoders, irregular ones, and the edges of the arithmetic.

Tests, demo and bench share this one list, so that a figure and the proof of its correctness speak of the same layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .geometry import Geometry, cached_geometry, output_size
from .problem import Operator, Problem, pad_axes

TIERS = ("smoke", "edge", "seeds", "decoders", "irregular")
_NO_STRIDES = (0, 0, 0, 0, 0)
# Mean number of non-zero products in an output of exact operands: sums stay far below the 256 that bfloat16 counts to.
_MEAN_PRODUCTS = 24.0


@dataclass(frozen=True)
class Case:
    """One layer with its input size; `bias` is the flag of the published model, `source` says which model that is."""

    name: str
    tier: str
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    source: str = ""
    cut_from: str = ""  # batch and input size of the case that this one was scaled down from

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.in_size)

    @property
    def geometry(self) -> Geometry:
        """The checked arguments, as the operators take them."""
        return cached_geometry(self.ndim, self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    @property
    def out_size(self) -> tuple[int, ...]:
        """Spatial size of the output."""
        arguments = self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding
        return tuple(output_size(*axis) for axis in zip(self.in_size, *arguments, strict=True))

    @property
    def gflop(self) -> float:
        """Billions of floating-point operations in the tap products that land inside the output, for real numbers."""
        return self._problem(torch.float32).flops / 1e9

    @property
    def size_text(self) -> str:
        """Batch and input size, as ``n4 64x64``; a scaled case also names the size it was cut from."""
        text = _size_text(self.batch, self.in_size)
        return f"{text} (cut from {self.cut_from})" if self.cut_from else text

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of x, w, bias and y, each counted once, in `dtype`."""
        return self._problem(dtype).bytes

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``conv_transpose1d/2d/3d``, torch's or ours."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "dilation": self.dilation,
        }

    def scaled(self, max_gflop: float) -> Case:
        """Cut the batch, then halve the longest spatial axes, until at most `max_gflop` remain, and nothing else."""
        case = self
        if case.gflop > max_gflop:
            case = replace(case, batch=max(1, int(case.batch * max_gflop / case.gflop)))
        while case.gflop > max_gflop:
            smaller = case._halve_longest_axis()
            if smaller is None:
                break
            case = smaller
        return case if case is self else replace(case, cut_from=self.cut_from or _size_text(self.batch, self.in_size))

    def tensors(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        memory_format: torch.memory_format | None = None,
        exact: bool = False,
        bias: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Make operands for this case.

        Args:
            dtype: of all three; values are drawn on the CPU, so every device sees the same.
            device: where they go.
            seed: of the random numbers.
            memory_format: of x, for example ``torch.channels_last``; None leaves it contiguous.
            exact: integers so few and so small that every partial sum is exact in every dtype.
            bias: whether to make one; None takes the published flag.

        Returns:
            x (batch, in_channels, spatial...), w (in_channels, out_channels / groups, kernel...), and the bias
            (out_channels,) or None.
        """
        generator = torch.Generator().manual_seed(seed)
        x_shape = (self.batch, self.in_channels, *self.in_size)
        w_shape = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        # The products in one output: a tap is skipped unless its division by the stride is exact.
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        taps = math.prod(math.ceil(kernel * math.gcd(stride, dilation) / stride) for kernel, stride, dilation in axes)
        products = self.in_channels // self.groups * taps
        if exact:
            density = min(2 / 3, math.sqrt(_MEAN_PRODUCTS / products))
            x = sparse_integers(x_shape, density, generator, complex_values=dtype.is_complex)
            w = sparse_integers(w_shape, density, generator, complex_values=dtype.is_complex)
            b = torch.randint(-3, 4, (self.out_channels,), generator=generator, dtype=torch.float32)
        else:
            drawn = torch.complex64 if dtype.is_complex else torch.float64 if dtype == torch.float64 else torch.float32
            x = torch.randn(x_shape, generator=generator, dtype=drawn)
            w = torch.randn(w_shape, generator=generator, dtype=drawn) / math.sqrt(products)
            b = torch.randn((self.out_channels,), generator=generator, dtype=drawn)
        x, w, b = (tensor.to(device=device, dtype=dtype) for tensor in (x, w, b))
        if memory_format is not None:
            x = x.contiguous(memory_format=memory_format)
        return x, w, b if (self.bias if bias is None else bias) else None

    def _problem(self, dtype: torch.dtype) -> Problem:
        """The Problem of this case, whose counts of bytes and operations do not depend on the strides left out here."""
        return Problem(
            operator=Operator.CONV_TRANSPOSE,
            dtype=dtype,
            batch=self.batch,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            groups=self.groups,
            in_size=pad_axes(self.in_size, 1),
            out_size=pad_axes(self.out_size, 1),
            kernel_size=pad_axes(self.kernel_size, 1),
            stride=pad_axes(self.stride, 1),
            padding=pad_axes(self.padding, 0),
            dilation=pad_axes(self.dilation, 1),
            x_strides=_NO_STRIDES,
            w_strides=_NO_STRIDES,
            y_strides=_NO_STRIDES,
            spatial_ndim=self.ndim,
            has_bias=self.bias,
        )

    def _halve_longest_axis(self) -> Case | None:
        """The same layer on half of the longest axis that may still shrink, or None when none may."""
        for axis in sorted(range(self.ndim), key=lambda axis: -self.in_size[axis]):
            if self.in_size[axis] > 1:
                half = tuple(-(-size // 2) if index == axis else size for index, size in enumerate(self.in_size))
                smaller = replace(self, in_size=half)
                if smaller.out_size[axis] >= 1:
                    return smaller
        return None


def sparse_integers(
    shape: tuple[int, ...], density: float, generator: torch.Generator, complex_values: bool = False
) -> torch.Tensor:
    """Draw -1, 0 and 1 (times 1 or the imaginary unit), non-zero with probability `density`.

    Returns:
        A contiguous tensor of int8, or of complex64 where `complex_values`, on the generator's device.
    """
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1
    values = signs * (torch.rand(shape, generator=generator) < density)
    if not complex_values:
        return values
    turned = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
    return torch.complex((values * (1 - turned)).float(), (values * turned).float())


def _size_text(batch: int, in_size: tuple[int, ...]) -> str:
    return f"n{batch} " + "x".join(str(size) for size in in_size)


def _case(tier: str, name: str, channels: str, size: str, kernel: str, source: str = "", **options: Any) -> Case:
    """Read a table row: "in>out", "n x size", and a kernel such as "3x5 s2 p1x2": one number, or one for each axis."""
    batch, *in_size = (int(entry) for entry in size.split("x"))
    in_channels, out_channels = (int(entry) for entry in channels.split(">"))
    kernel_size, *letters = kernel.split()
    values = {"s": "1", "p": "0", "o": "0", "d": "1", "g": "1"}
    values.update({letter[0]: letter[1:] for letter in letters})
    axes = {key: tuple(int(entry) for entry in value.split("x")) for key, value in values.items()}
    ndim = len(in_size)
    stride, padding, output_padding, dilation = (axes[key] * (ndim // len(axes[key])) for key in "spod")
    kernels = tuple(int(entry) for entry in kernel_size.split("x"))
    return Case(
        name=name,
        tier=tier,
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        in_size=tuple(in_size),
        kernel_size=kernels * (ndim // len(kernels)),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=axes["g"][0],
        bias=options.pop("bias", False),
        source=source,
    )


# A row is: name, "in>out" channels, "batch x size", "kernel s(tride) p(adding) o(utput padding) d(ilation) g(roups)".
_SMOKE = (
    _case("smoke", "k2s2", "6>5", "2x5x6", "2 s2", bias=True),
    _case("smoke", "k4s2p1", "8>6", "2x5x7", "4 s2 p1"),
    _case("smoke", "k3s1p1", "5>7", "2x6x9", "3 p1", bias=True),
    _case("smoke", "k3s2p1op1", "6>4", "2x5x6", "3 s2 p1 o1", bias=True),
    _case("smoke", "asymmetric-all", "8>12", "2x5x8", "3x5 s2x3 p1x2 o1x0 d2x1 g4", bias=True),
    _case("smoke", "depthwise-k4s2p1", "10>10", "2x6x7", "4 s2 p1 g10"),
    _case("smoke", "depthwise-two-each", "6>12", "2x5x9", "3 s2 p1 o1 g6", bias=True),
    _case("smoke", "grouped-k2s2", "12>8", "2x5x6", "2 s2 g2", bias=True),
    _case("smoke", "one-output-channel", "16>1", "1x7x9", "4 s2 p1", bias=True),
    _case("smoke", "empty-phases", "6>5", "2x4x5", "3 s4 d3", bias=True),
    _case("smoke", "small-map", "96>64", "1x2x2", "4 s2 p1"),
    _case("smoke", "1d-k16s8p4", "12>6", "2x19", "16 s8 p4", bias=True),
    _case("smoke", "3d-k2s2", "6>4", "2x3x4x5", "2 s2", bias=True),
    _case("smoke", "3d-mixed", "4>6", "1x3x4x5", "3x1x2 s2x1x3 p1x0x0 o1x0x2 d1x2x1 g2", bias=True),
)

_EDGE = (
    _case("edge", "2x2-to-4x4", "3>2", "1x2x2", "3 s2 p1 o1", bias=True),
    _case("edge", "bias-alone-k2s2op1", "4>3", "2x3x5", "2 s2 o1", bias=True),
    _case("edge", "negative-halo", "5>4", "2x7x8", "3 p3", bias=True),
    _case("edge", "negative-halo-dilated", "4>4", "1x12x13", "2x3 p4x5 d2", bias=True),
    _case("edge", "op-over-stride", "4>3", "2x4x5", "2 s2 o3 d4", bias=True),
    _case("edge", "op-over-stride-one", "4>3", "2x4x5", "3 p1 o2x1 d3x2", bias=True),
    _case("edge", "stride-over-kernel", "5>4", "2x4x3", "2x1 s5x4 p1x0", bias=True),
    _case("edge", "kernel-1", "7>5", "2x4x6", "1", bias=True),
    _case("edge", "kernel-1-stride-3", "7>5", "2x4x6", "1 s3 o2", bias=True),
    _case("edge", "kernel-1-padding", "7>5", "2x4x6", "1 p1x2", bias=True),
    _case("edge", "pixel-1x1", "9>8", "3x1x1", "4 s1", bias=True),
    _case("edge", "width-1", "20>3", "2x7x1", "4 s2 p1", bias=True),
    _case("edge", "width-7", "20>21", "2x7x7", "4 s2 p1", bias=True),
    _case("edge", "width-37", "3>20", "2x37x37", "2 s2", bias=True),
    _case("edge", "width-37-k3", "3>21", "1x5x37", "3 p1", bias=True),
    _case("edge", "channels-1", "1>1", "2x6x7", "4 s2 p1", bias=True),
    _case("edge", "channels-1-to-20", "1>20", "2x6x7", "3 s2 p1 o1", bias=True),
    _case("edge", "channels-21-to-1", "21>1", "2x6x7", "3", bias=True),
    _case("edge", "groups-of-3-and-7", "9>21", "2x5x6", "3 s2 g3", bias=True),
    _case("edge", "coprime-stride-dilation", "4>4", "2x5x6", "4x3 s3x2 p1 d2x3", bias=True),
    _case("edge", "common-factor", "4>4", "2x5x6", "3 s4x6 p2 d6x4 o5x1", bias=True),
    _case("edge", "long-stride", "2>3", "1x3x2", "3x2 s17x31 p1", bias=True),
    _case("edge", "crop-to-one", "4>3", "2x2x3", "3 s1 p1x2", bias=True),
    _case("edge", "no-tap-reaches", "4>3", "2x4", "1 s2 p3", bias=True),
    _case("edge", "no-tap-reaches-64", "64>64", "2x4x4", "1 s2 p3", bias=True),
    _case("edge", "phase-without-inputs", "2>4", "1x2x3", "1x3 s1x3 p0x7 o0x2 d2x4", bias=True),
    _case("edge", "batch-70000", "2>3", "70000x1x2", "2 s2", bias=True),
    _case("edge", "planes-over-65535", "258>258", "256x1x1", "2 s1 g258", bias=True),
    _case("edge", "depthwise-rows", "3>6", "2x5x70", "4 s2 p1 g3", bias=True),
    _case("edge", "depthwise-rows-unequal-taps", "3>3", "2x4x45", "3 s2 p1 o1 g3", bias=True),
    _case("edge", "depthwise-rows-stride-1", "4>4", "1x6x90", "3 p2 d1x2 g4"),
    _case("edge", "depthwise-rows-stride-4", "3>3", "1x4x40", "8 s4 p2 g3", bias=True),
    _case("edge", "depthwise-rows-stride-8", "2>6", "1x3x40", "16 s8 p4x8 g2"),
    _case("edge", "depthwise-empty-phases", "3>3", "1x3x40", "3x4 s5x2 p1x0 g3", bias=True),
    _case("edge", "depthwise-1d-blocks", "2>2", "1x4200", "4 s2 p1 g2", bias=True),
    _case("edge", "depthwise-3d", "3>3", "1x3x4x40", "3x4x4 s2 p1 d1 g3", bias=True),
    _case("edge", "depthwise-37", "37>37", "2x5x6", "4x3 s2 p1 g37", bias=True),
    _case("edge", "depthwise-3d-20", "20>20", "1x3x4x5", "3x3x4 s2x2x3 p1x1x0 d2x1x1 g20", bias=True),
    _case("edge", "groups-of-20-and-30", "40>60", "2x6x7", "3x4 s2x3 p1 d2x1 g2", bias=True),
    _case("edge", "channels-300-to-90", "300>90", "2x5x6", "3 s2 p1 o1", bias=True),
    _case("edge", "channels-70-to-100-3d", "70>100", "1x3x4x5", "2x3x3 s1x2x1 p1", bias=True),
    _case("edge", "1d-length-1", "5>4", "2x1", "7 s3 p2", bias=True),
    _case("edge", "3d-depth-1", "4>3", "2x1x4x5", "1x3x3 s1x2x2 p0x1x1 o0x1x1", bias=True),
    _case("edge", "3d-all-different", "4>6", "2x3x2x4", "2x3x4 s3x2x1 p1x0x2 o2x1x0 d1x2x1 g2", bias=True),
    # 2 x 32800 x 32800 outputs: more elements than a signed 32-bit integer counts. A CPU test sees it scaled.
    _case("edge", "output-over-2^31", "2>2", "1x16400x16400", "2 s2", bias=True),
)

_SEED = "one of the five tasks that upfold was written for"

_SEEDS = (
    _case("seeds", "seed0-grouped-dilated", "32>64", "16x128x256", "3x5 s2x3 p1x2 d2x1 g4", _SEED),
    _case("seeds", "seed1-asymmetric", "32>64", "16x16x32", "3x5", _SEED),
    _case("seeds", "seed2-square", "32>32", "8x512x1024", "3", _SEED),
    _case("seeds", "seed3-wide-kernel", "64>64", "8x512x512", "3x7", _SEED),
    _case("seeds", "seed4-wide-image", "64>128", "64x128x256", "3x5", _SEED),
)

_GAN = "DCGAN: pytorch/examples dcgan/main.py, ngf 64, batch 128"
_PIX2PIX = "pix2pix: UnetGenerator of pytorch-CycleGAN-and-pix2pix, batch norm; 256x256, 512x512 for the one at 64x64"
_CYCLEGAN = "CycleGAN: ResnetGenerator of pytorch-CycleGAN-and-pix2pix, instance norm, 256x256"
_UNET = "U-Net: milesial/Pytorch-UNet, bilinear=False, 512x512"
_NNUNET = "nnU-Net v2: dynamic-network-architectures UNetDecoder, conv_bias=True"
_SAM = "Segment Anything: MaskDecoder.output_upscaling"
_MASK_RCNN = "Mask R-CNN: torchvision MaskRCNNPredictor"
_VITDET = "ViTDet: detectron2 SimpleFeaturePyramid, ViT-B"
_YOLO = "YOLO segmentation: Ultralytics Proto"
_DPT = "DPT: Depth Anything ViT-L resize_layers[0]"
_POSE = "SimpleBaseline: pose_resnet.py, 256x192, DECONV_WITH_BIAS False"
_DLA = "CenterNet DLA-34: IDAUp, groups=channels"
_FCN = "FCN: wkentaro/pytorch-fcn, 21 classes"
_PILLARS = "PointPillars on KITTI: OpenPCDet BaseBEVBackbone deblocks, 496x432 grid"
_HIFIGAN = "HiFi-GAN V1: jik876/hifi-gan Generator.ups"
_ENCODEC = "EnCodec 24 kHz: SEANetDecoder, one second of 75 frames"

_DECODERS = (
    _case("decoders", "dcgan-100-512@1", "100>512", "128x1x1", "4 s1", _GAN),
    _case("decoders", "dcgan-512-256@4", "512>256", "128x4x4", "4 s2 p1", _GAN),
    _case("decoders", "dcgan-256-128@8", "256>128", "128x8x8", "4 s2 p1", _GAN),
    _case("decoders", "dcgan-128-64@16", "128>64", "128x16x16", "4 s2 p1", _GAN),
    _case("decoders", "dcgan-64-3@32", "64>3", "128x32x32", "4 s2 p1", _GAN),
    _case("decoders", "pix2pix-512-512@1", "512>512", "1x1x1", "4 s2 p1", _PIX2PIX),
    _case("decoders", "pix2pix-1024-512@4", "1024>512", "1x4x4", "4 s2 p1", _PIX2PIX),
    _case("decoders", "pix2pix-512-128@64", "512>128", "1x64x64", "4 s2 p1", _PIX2PIX),
    _case("decoders", "pix2pix-128-3@128", "128>3", "1x128x128", "4 s2 p1", _PIX2PIX, bias=True),
    _case("decoders", "cyclegan-256-128@64", "256>128", "1x64x64", "3 s2 p1 o1", _CYCLEGAN, bias=True),
    _case("decoders", "cyclegan-128-64@128", "128>64", "1x128x128", "3 s2 p1 o1", _CYCLEGAN, bias=True),
    _case("decoders", "unet-1024-512@32", "1024>512", "4x32x32", "2 s2", _UNET, bias=True),
    _case("decoders", "unet-256-128@128", "256>128", "4x128x128", "2 s2", _UNET, bias=True),
    _case("decoders", "unet-128-64@256", "128>64", "4x256x256", "2 s2", _UNET, bias=True),
    _case("decoders", "nnunet2d-512-512@8", "512>512", "12x8x8", "2 s2", _NNUNET, bias=True),
    _case("decoders", "nnunet2d-64-32@256", "64>32", "12x256x256", "2 s2", _NNUNET, bias=True),
    _case("decoders", "nnunet3d-320-320@4", "320>320", "2x4x4x4", "2 s2", _NNUNET, bias=True),
    _case("decoders", "nnunet3d-64-32@64", "64>32", "2x64x64x64", "2 s2", _NNUNET, bias=True),
    _case("decoders", "nnunet3d-anisotropic", "320>256", "2x5x16x16", "1x2x2 s1x2x2", _NNUNET, bias=True),
    _case("decoders", "sam-256-64@64", "256>64", "16x64x64", "2 s2", _SAM, bias=True),
    _case("decoders", "sam-64-32@128", "64>32", "16x128x128", "2 s2", _SAM, bias=True),
    _case("decoders", "maskrcnn-256-256@14", "256>256", "256x14x14", "2 s2", _MASK_RCNN, bias=True),
    _case("decoders", "vitdet-768-384@64", "768>384", "2x64x64", "2 s2", _VITDET, bias=True),
    _case("decoders", "yolo-proto-256-256@80", "256>256", "8x80x80", "2 s2", _YOLO, bias=True),
    _case("decoders", "dpt-256-256@37", "256>256", "4x37x37", "4 s4", _DPT, bias=True),
    _case("decoders", "pointpillars-64-128-k1", "64>128", "1x248x216", "1", _PILLARS),
    _case("decoders", "pointpillars-128-128-k2", "128>128", "1x124x108", "2 s2", _PILLARS),
    _case("decoders", "pointpillars-256-128-k4", "256>128", "1x62x54", "4 s4", _PILLARS),
    _case("decoders", "pose-2048-256@8x6", "2048>256", "64x8x6", "4 s2 p1", _POSE),
    _case("decoders", "pose-256-256@32x24", "256>256", "64x32x24", "4 s2 p1", _POSE),
    _case("decoders", "dla-depthwise-256@64", "256>256", "8x64x64", "4 s2 p1 g256", _DLA),
    _case("decoders", "dla-depthwise-64@32-k16", "64>64", "8x32x32", "16 s8 p4 g64", _DLA),
    _case("decoders", "fcn8s-21-21-k4@16", "21>21", "1x16x16", "4 s2", _FCN),
    _case("decoders", "fcn8s-21-21-k16@70", "21>21", "1x70x70", "16 s8", _FCN),
    _case("decoders", "fcn32s-21-21-k64@16", "21>21", "1x16x16", "64 s32", _FCN),
    _case("decoders", "hifigan-512-256@64", "512>256", "16x64", "16 s8 p4", _HIFIGAN, bias=True),
    _case("decoders", "hifigan-128-64@4096", "128>64", "16x4096", "4 s2 p1", _HIFIGAN, bias=True),
    _case("decoders", "encodec-512-256@75", "512>256", "8x75", "16 s8", _ENCODEC, bias=True),
    _case("decoders", "encodec-256-128@600", "256>128", "8x600", "10 s5", _ENCODEC, bias=True),
    _case("decoders", "encodec-64-32@12000", "64>32", "8x12000", "4 s2", _ENCODEC, bias=True),
)

_IRREGULAR = (
    _case("irregular", "k3s2p1op1-128-64@256", "128>64", "16x256x256", "3 s2 p1 o1"),
    _case("irregular", "k5s3p1-64-64@128", "64>64", "16x128x128", "5 s3 p1"),
    _case("irregular", "k3s4d3-64-64@64", "64>64", "16x64x64", "3 s4 d3"),
    _case("irregular", "k7s2p3op1-32-64@128", "32>64", "16x128x128", "7 s2 p3 o1"),
    _case("irregular", "1d-k3d3-32-64@131072", "32>64", "16x131072", "3 d3"),
)

CASES: tuple[Case, ...] = _SMOKE + _EDGE + _SEEDS + _DECODERS + _IRREGULAR


def by_tier(*tiers: str) -> tuple[Case, ...]:
    """The cases of the named tiers, in the order of the list.

    Raises:
        ValueError: a tier that does not exist.
    """
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown:
        raise ValueError(f"tier = {unknown[0]!r}; must be one of {', '.join(TIERS)}")
    return tuple(case for case in CASES if case.tier in tiers)


def find(name: str) -> Case:
    """The case of that name.

    Raises:
        ValueError: no case has it.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"case = {name!r}; no such case; known: {', '.join(case.name for case in CASES)}")
