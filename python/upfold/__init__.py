"""Transposed convolution for PyTorch: GEMM + col2im, direct and fused methods behind torch's own signatures."""

from . import ops  # noqa: F401 (registers the operators with torch)
from .dispatch import algorithms, use
from .explanation import explain
from .flops import register as _register_flops
from .freeze import freeze, unfreeze
from .functional import conv_transpose1d, conv_transpose2d, conv_transpose3d, fold, unfold
from .fuse import fuse
from .geometry import InvalidArgument
from .nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Fold, Unfold
from .patch import patch
from .replace import replace, restore
from .scan import scan
from .tune import load_plans, save_plans, tune

__version__ = "0.1.0"

_register_flops()

__all__ = [
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Fold",
    "InvalidArgument",
    "Unfold",
    "__version__",
    "algorithms",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "explain",
    "fold",
    "freeze",
    "fuse",
    "load_plans",
    "patch",
    "replace",
    "restore",
    "save_plans",
    "scan",
    "tune",
    "unfold",
    "unfreeze",
    "use",
]
