"""Named transposed-convolution layers: those of published decoders, irregular ones, and the edges of the arithmetic.

Tests, demo and bench share this one list, so that a figure and the proof of its correctness speak of the same layer.
"""

from __future__ import annotations

from .case import Case, sparse_integers
from .case import read_case as _case

TIERS = ("smoke", "edge", "seeds", "decoders", "irregular", "survey")

__all__ = ["CASES", "TIERS", "Case", "by_tier", "find", "sparse_integers"]

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
    _case("edge", "stride-40", "4>3", "2x3x9", "3x50 s2x40 p1x7 o1x5", bias=True),
    _case("edge", "1d-stride-33", "6>4", "2x40", "100 s33 p11", bias=True),
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

_FSRCNN = "FSRCNN (Dong et al. 2016)"
_LAPSRN = "LapSRN (Lai et al. 2017)"
_DEMUCS = "Hybrid Transformer Demucs (Rouard et al. 2023)"
_3D_GAN = "3D-GAN (Wu et al. 2016)"
_VQ_VAE = "VQ-VAE (van den Oord et al. 2017)"
_STYLEGAN2 = "StyleGAN2 (Karras et al. 2020), samples as groups"
_STYLE = "fast style transfer (Johnson et al. 2016)"
_ERFNET = "ERFNet (Romera et al. 2018)"
_CENTERNET = "CenterNet (Zhou et al. 2019)"
_PIX2PIX_HD = "pix2pixHD (Wang et al. 2018)"
_BIGVGAN = "BigVGAN (Lee et al. 2023)"
_DAC = "Descript Audio Codec (Kumar et al. 2023)"
_MIMI = "Mimi (Défossez et al. 2024)"
_DIGITS = "an autoencoder of handwritten digits"
_DREAMER = "Dreamer (Hafner et al. 2020)"
# Of further published models, to see how what was fitted to the layers above fares on others.
_SURVEY = (
    _case("survey", "fsrcnn-56-1-x2", "56>1", "1x256x256", "9 s2 p4 o1", _FSRCNN, bias=True),
    _case("survey", "fsrcnn-56-1-x3", "56>1", "16x64x64", "9 s3 p4 o2", _FSRCNN, bias=True),
    _case("survey", "lapsrn-64-64", "64>64", "16x64x64", "4 s2 p1", _LAPSRN, bias=True),
    _case("survey", "lapsrn-1-1", "1>1", "16x128x128", "4 s2 p1", _LAPSRN),
    _case("survey", "diffwave-1-1", "1>1", "16x80x64", "3x32 s1x16 p1x8", "DiffWave (Kong et al. 2021)", bias=True),
    _case("survey", "waveglow-80-80", "80>80", "4x64", "1024 s256", "WaveGlow (Prenger et al. 2019)", bias=True),
    _case("survey", "htdemucs-48-8", "48>8", "4x85995", "8 s4", _DEMUCS, bias=True),
    _case("survey", "htdemucs-384-192", "384>192", "4x8x336", "8x1 s4x1", _DEMUCS, bias=True),
    _case("survey", "demucs-384-192", "384>192", "4x1344", "8 s4", _DEMUCS, bias=True),
    _case("survey", "3dgan-512-256@4", "512>256", "32x4x4x4", "4 s2 p1", _3D_GAN),
    _case("survey", "3dgan-256-128@8", "256>128", "32x8x8x8", "4 s2 p1", _3D_GAN),
    _case("survey", "3dgan-64-1@32", "64>1", "32x32x32x32", "4 s2 p1", _3D_GAN),
    _case("survey", "vnet-256-128@16", "256>128", "2x16x16x16", "2 s2", "V-Net (Milletari et al. 2016)", bias=True),
    _case("survey", "vqvae-128-64@32", "128>64", "64x32x32", "4 s2 p1", _VQ_VAE, bias=True),
    _case("survey", "vqvae-64-3@64", "64>3", "64x64x64", "4 s2 p1", _VQ_VAE, bias=True),
    _case("survey", "stylegan2-8x512@32", "4096>4096", "1x32x32", "3 s2 g8", _STYLEGAN2),
    _case("survey", "style-128-64@64", "128>64", "4x64x64", "3 s2 p1 o1", _STYLE, bias=True),
    _case("survey", "style-64-32@128", "64>32", "4x128x128", "3 s2 p1 o1", _STYLE, bias=True),
    _case("survey", "enet-16-19", "16>19", "1x256x512", "3 s2 p1 o1", "ENet (Paszke et al. 2016)"),
    _case("survey", "erfnet-128-64", "128>64", "1x64x128", "3 s2 p1 o1", _ERFNET, bias=True),
    _case("survey", "erfnet-16-20", "16>20", "1x256x512", "2 s2", _ERFNET, bias=True),
    _case("survey", "linknet-128-128", "128>128", "4x32x32", "3 s2 p1 o1", "LinkNet (Chaurasia and Culurciello 2017)", bias=True),
    _case("survey", "centernet-512-256@16", "512>256", "32x16x16", "4 s2 p1", _CENTERNET),
    _case("survey", "centernet-256-256@64", "256>256", "16x64x64", "4 s2 p1", _CENTERNET),
    _case("survey", "simvp-64-64@32", "64>64", "160x32x32", "3 s2 p1 o1", "SimVP (Gao et al. 2022)", bias=True),
    _case("survey", "pix2pixhd-1024-512", "1024>512", "1x32x64", "3 s2 p1 o1", _PIX2PIX_HD, bias=True),
    _case("survey", "pix2pixhd-128-64", "128>64", "1x256x512", "3 s2 p1 o1", _PIX2PIX_HD, bias=True),
    _case("survey", "hifigan-256-128@512", "256>128", "16x512", "16 s8 p4", _HIFIGAN, bias=True),
    _case("survey", "hifigan-64-32@8192", "64>32", "16x8192", "4 s2 p1", _HIFIGAN, bias=True),
    _case("survey", "bigvgan-1536-768@32", "1536>768", "8x32", "8 s4 p2", _BIGVGAN, bias=True),
    _case("survey", "bigvgan-768-384@128", "768>384", "8x128", "8 s4 p2", _BIGVGAN, bias=True),
    _case("survey", "bigvgan-filter-96@8202", "96>96", "8x8202", "12 s2 g96", _BIGVGAN),
    _case("survey", "dac-1536-768@87", "1536>768", "8x87", "16 s8 p4", _DAC, bias=True),
    _case("survey", "dac-768-384@696", "768>384", "8x696", "16 s8 p4", _DAC, bias=True),
    _case("survey", "dac-192-96@22272", "192>96", "8x22272", "4 s2 p1", _DAC, bias=True),
    _case("survey", "mimi-512-256@200", "512>256", "8x200", "12 s6", _MIMI, bias=True),
    _case("survey", "mimi-256-128@1200", "256>128", "8x1200", "10 s5", _MIMI, bias=True),
    _case("survey", "upernet-768-768@32", "768>768", "2x32x32", "2 s2", "UPerNet on a ViT-B (Bao et al. 2022)", bias=True),
    _case("survey", "vitpose-1280-256@16x12", "1280>256", "64x16x12", "4 s2 p1", "ViTPose-H (Xu et al. 2022)"),
    _case("survey", "maskrcnn-256-256@100", "256>256", "100x14x14", "2 s2", _MASK_RCNN, bias=True),
    _case("survey", "fcn-150-150-k4@32", "150>150", "2x32x32", "4 s2 p1", _FCN),
    _case("survey", "fcn16s-21-21-k32@32", "21>21", "2x32x32", "32 s16 p8", _FCN),
    _case("survey", "depthanything-512-512@37", "512>512", "4x37x37", "2 s2", "Depth Anything (Yang et al. 2024)", bias=True),
    _case("survey", "digits-64-32@7", "64>32", "256x7x7", "3 s2 p1 o1", _DIGITS, bias=True),
    _case("survey", "digits-32-1@14", "32>1", "256x14x14", "3 s2 p1 o1", _DIGITS, bias=True),
    _case("survey", "dreamer-1024-128@1", "1024>128", "2500x1x1", "5 s2", _DREAMER, bias=True),
    _case("survey", "dreamer-128-64@5", "128>64", "2500x5x5", "5 s2", _DREAMER, bias=True),
    _case("survey", "dreamer-64-32@13", "64>32", "2500x13x13", "6 s2", _DREAMER, bias=True),
    _case("survey", "dreamer-32-3@30", "32>3", "2500x30x30", "6 s2", _DREAMER, bias=True),
    _case("survey", "wavelet-64@128", "64>64", "8x128x128", "8 s2 p3 g64", "wavelet synthesis, Daubechies 4"),
    _case("survey", "fir-512@64", "512>512", "8x64x64", "4 s2 p1 g512", "up-sampling by a filter (Karras et al. 2020)"),
    _case("survey", "fastdepth-256@56", "256>256", "8x56x56", "5 s2 p2 o1 g256", "FastDepth (Wofk et al. 2019)"),
    _case("survey", "convtasnet-512-1", "512>1", "4x8000", "16 s8", "Conv-TasNet (Luo and Mesgarani 2019)"),
    _case("survey", "sepformer-256-1", "256>1", "4x8000", "16 s8", "SepFormer (Subakan et al. 2021)"),
    _case("survey", "istft-1026-1", "1026>1", "8x400", "1024 s256", "an inverse short-time Fourier transform"),
    _case("survey", "pqmf-4-4", "4>4", "16x16384", "4 s4", "pseudo-quadrature filters (Yang et al. 2021)"),
)

CASES: tuple[Case, ...] = _SMOKE + _EDGE + _SEEDS + _DECODERS + _IRREGULAR + _SURVEY


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
