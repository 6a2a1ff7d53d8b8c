"""Every tile choice of the direct kernels on a GPU, for all three operators, against torch in float64."""

from __future__ import annotations

import pytest
import torch

import upfold
from gpu import missing
from oracle import exact_like
from upfold import native
from upfold.algorithms import Tensors
from upfold.geometry import cached_geometry
from upfold.problem import Operator, make_problem

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)
cuda = native.load_cuda()[0]
if not hasattr(cuda, "direct") or not upfold.algorithms():
    pytest.skip("this build has no direct kernel for CUDA", allow_module_level=True)

pytestmark = pytest.mark.gpu
# x, out_channels / groups, kernel, (stride, padding, output_padding, groups, dilation)
LAYERS = {
    "k4s2p1": ((2, 24, 9, 21), 40, (4, 4), (2, 1, 0, 1, 1)),
    "k3x7": ((1, 16, 12, 40), 16, (3, 7), (1, 0, 0, 1, 1)),
    "grouped": ((3, 12, 5, 6), 3, (3, 2), ((2, 3), 1, (1, 0), 4, (1, 2))),
    "depthwise": ((2, 9, 8, 8), 1, (4, 4), (2, 1, 0, 9, 1)),
    "three axes": ((2, 4, 3, 4, 5), 6, (2, 3, 2), ((2, 1, 3), 0, 0, 2, (1, 2, 1))),
    "many taps": ((1, 2, 4, 5), 3, (17, 17), (1, 3, 0, 1, 1)),
    "wide stride": ((2, 3, 2, 3), 2, (2, 2), (40, 0, 0, 1, 1)),
    "small map": ((40, 24, 1, 2), 20, (4, 4), (1, 0, 0, 1, 1)),
    # Enough outputs for the variants that give a thread several rows.
    "many depthwise k4s2p1": ((4, 140, 30, 31), 1, (4, 4), (2, 1, 0, 140, 1)),
    "many depthwise k16s8p4": ((2, 70, 15, 16), 1, (16, 16), (8, 4, 0, 70, 1)),
    "many depthwise k3": ((4, 140, 31, 33), 1, (3, 3), (1, 1, 0, 140, 1)),
    "many of three k3s2p1op1": ((4, 280, 30, 31), 3, (3, 3), (2, 1, 1, 140, 1)),
    "many of three s3": ((2, 140, 30, 31), 3, (3, 5), ((2, 3), (1, 2), 0, 70, (2, 1))),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("operator", list(Operator), ids=lambda operator: operator.name.lower())
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", LAYERS)
def test_every_tile_is_exact(device, name, dtype, operator):
    x_shape, per_group, kernel, arguments = LAYERS[name]
    ndim = len(kernel)
    geometry = cached_geometry(ndim, *arguments)
    w_shape = (x_shape[1], per_group, *kernel)
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    function = getattr(torch.nn.functional, f"conv_transpose{ndim}d")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    terms = x_shape[0] * torch.Size(x_shape[2:]).numel() * torch.Size(kernel).numel()
    x, w = exact_like(x_shape, terms, wide, 1).requires_grad_(), exact_like(w_shape, terms, wide, 2).requires_grad_()
    full = function(x, w, **dict(zip(names, arguments)))
    y = exact_like(full.shape, terms, wide, 3)
    expected = full.detach()
    if operator is not Operator.CONV_TRANSPOSE:
        # The adjoints here are bilinear, autograd's are conjugated.
        leaf = x if operator is Operator.CONV else w
        expected = torch.autograd.grad(full, leaf, y.conj())[0].conj()
    operands = [t.detach().to(device, dtype).resolve_conj() for t in (x, w, y)]
    written = {Operator.CONV_TRANSPOSE: 2, Operator.CONV: 0, Operator.CONV_TRANSPOSE_WEIGHT: 1}[operator]
    problem = make_problem(operator, *operands, geometry)
    ran = 0
    for config in range(len(cuda.direct_tiles()) + 1):  # the adjoint in w has a choice more
        if not cuda.direct_fits(problem.cuda, config):
            continue
        operands[written].fill_(float("nan"))
        workspace = torch.empty(cuda.direct_workspace_bytes(problem.cuda, config), dtype=torch.uint8, device=device)
        tensors = Tensors(operands[0], operands[1], None, operands[2])
        pointers = tensors.x.data_ptr(), tensors.w.data_ptr(), 0, tensors.y.data_ptr(), workspace.data_ptr()
        stream = torch.cuda.current_stream(device).cuda_stream
        cuda.DirectCall(problem.cuda, config, device.index).enqueue(*pointers, stream)
        assert torch.equal(operands[written].cpu(), expected.to(dtype)), f"config {config}"
        ran += 1
    assert ran
