"""What gemm promises on a GPU beyond its numbers, which the shared suite checks: streams, captures, memory, repeatable bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import test_exact
import upfold
from gpu import missing
from oracle import assert_exact, describe, exact_like, geometry_arguments, grid, ours, reference
from upfold import cases, execute
from upfold.algorithms import REGISTRY
from upfold.dispatch import use_config
from upfold.problem import DTYPE_BYTES

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)
if "gemm" not in upfold.algorithms():
    pytest.skip("this build has no gemm", allow_module_level=True)

pytestmark = pytest.mark.gpu
GEMM = REGISTRY["gemm"]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def operands(device: torch.device, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A deep product with a small result, for which cuBLAS splits the sum and needs its workspace."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, 2048, 4, 4, generator=generator).to(device, dtype)
    w = torch.randn(2048, 8, 4, 4, generator=generator).to(device, dtype)
    return x, w


def gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return upfold.conv_transpose2d(x, w, stride=2, padding=1, algorithm="gemm")


def test_two_streams_of_one_thread_do_not_share_scratch(device):
    x, w = operands(device)
    inputs = [x * (i + 1) for i in range(4)]
    with torch.no_grad():
        expected = [gemm(value, w) for value in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results = []
        for number in range(1000):
            with torch.cuda.stream(streams[number % 2]):
                results.append(gemm(inputs[number % 4], w))
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected[number % 4]) for number, result in enumerate(results))


FIRST_CALL_IN_A_CAPTURE = """
import torch, upfold
x = torch.ones(2, 64, 8, 8, device="cuda")
w = torch.ones(64, 32, 4, 4, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    y = upfold.conv_transpose2d(x, w, stride=2, padding=1, algorithm="gemm")
graph.replay()
torch.cuda.synchronize()
inner = y[:, :, 2:-2, 2:-2]
assert (inner == 4 * 64).all(), inner
print("captured")
"""


def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "captured", done.stderr


def test_a_replay_follows_the_operands(device):
    x, w = operands(device)
    with torch.no_grad():
        gemm(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gemm(x, w)
        x.mul_(-2)
        w.add_(1)
        graph.replay()
        assert torch.equal(y, gemm(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extra_memory_stays_under_the_cap(device, dtype):
    x = torch.randn(8, 64, 128, 128, device=device, dtype=dtype)
    w = torch.randn(64, 64, 4, 4, device=device, dtype=dtype)
    with torch.no_grad(), upfold.use(workspace_mb=64):
        whole = gemm(x, w)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = gemm(x, w)
        peak = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    assert torch.equal(y, whole)
    assert peak <= 64 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_same_bits_again(device, dtype):
    x, w = operands(device, dtype)
    with torch.no_grad():
        assert torch.equal(gemm(x, w), gemm(x, w))


# Large enough for every way to lay out operands and columns, which small layers of the shared suite do not take.
LARGE = {
    "weight by depth": ((8, 256, 96, 96), 64, (2, 2), {"stride": 2}),
    "x by depth": ((64, 64, 12, 12), 32, (4, 4), {"stride": 2, "padding": 1}),
    "x side by side": ((64, 40, 12, 14), 32, (4, 4), {"stride": 2, "padding": 1}),
    "odd maps": ((4, 64, 37, 37), 32, (4, 4), {"stride": 4}),
    "one pixel": ((128, 100, 1, 1), 64, (4, 4), {}),
    "one pixel in groups": ((128, 96, 1, 1), 64, (4, 3), {"groups": 4}),
    "one pixel, odd": ((5, 24, 1, 1), 3, (3, 5), {}),
    "depthwise": ((2, 64, 64, 64), 64, (4, 4), {"stride": 2, "padding": 1, "groups": 64}),
    "one tap": ((3, 32, 24, 40), 48, (1, 1), {}),
    "one tap in groups": ((2, 32, 24, 40), 48, (1, 1), {"groups": 4}),
    "stride 1": ((4, 16, 128, 130), 32, (3, 3), {"padding": 1}),
    "long kernels": ((2, 24, 40, 64), 20, (3, 7), {"padding": (1, 3)}),
    "stride 3": ((4, 16, 96, 100), 16, (5, 5), {"stride": 3, "padding": 1}),
    "stride 8": ((4, 16, 40, 37), 16, (16, 16), {"stride": 8, "padding": 4}),
}


@pytest.mark.parametrize("last", [(False, False), (False, True), (True, True)], ids=["planes", "weight last", "channels_last"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_large_layers_are_exact_on_integers(device, name, dtype, has_bias, last):
    x_shape, out_channels, kernel, arguments = LARGE[name]
    groups = arguments.get("groups", 1)
    terms = x_shape[1] // groups * kernel[0] * kernel[1]
    x = exact_like(x_shape, terms, torch.float64, seed=1).to(device)
    w = exact_like((x_shape[1], out_channels // groups, *kernel), terms, torch.float64, seed=2).to(device)
    b = torch.arange(out_channels, dtype=torch.float64, device=device) % 3 - 1 if has_bias else None
    want = torch.nn.functional.conv_transpose2d(x, w, b, **arguments)
    x, w = (t.contiguous(memory_format=torch.channels_last) if is_last else t for t, is_last in zip((x, w), last, strict=True))
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        y = upfold.conv_transpose2d(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype), algorithm="gemm", **arguments)
    assert_exact(y, want.cpu())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["one pixel", "one pixel in groups", "one pixel, odd"])
def test_activations_of_one_pixel(name, dtype, activation, last, device):
    x_shape, out_channels, kernel, arguments = LARGE[name]
    terms = x_shape[1] * kernel[0] * kernel[1]
    x = exact_like(x_shape, terms, dtype, seed=1).to(device)
    w = exact_like((x_shape[1], out_channels // arguments.get("groups", 1), *kernel), terms, dtype, seed=2).to(device)
    b = (torch.arange(out_channels, device=device) % 3 - 1).to(dtype)
    want = torch.nn.functional.conv_transpose2d(x.double(), w.double(), b.double(), **arguments)
    if last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        y = upfold.conv_transpose2d(x, w, b, algorithm="gemm", activation=activation, **arguments)
    torch.testing.assert_close(y, getattr(torch.nn.functional, activation)(want).to(dtype), check_stride=False)


def innermost(t, more=0):
    """The same numbers with channels innermost, among so many other channels."""
    if t.dim() not in CHANNELS_LAST:
        return t
    shape = (len(t), t.shape[1] + more, *t.shape[2:])
    memory = torch.full(shape, float("nan"), dtype=t.dtype, device=t.device).contiguous(memory_format=CHANNELS_LAST[t.dim()])
    return memory[:, : t.shape[1]].copy_(t)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_gradients_of_large_layers_are_exact_on_integers(device, name, dtype, last):
    x_shape, out_channels, kernel, arguments = LARGE[name]
    groups = arguments.get("groups", 1)
    w_shape = (x_shape[1], out_channels // groups, *kernel)
    terms = max(x_shape[1], out_channels) // groups * kernel[0] * kernel[1]
    x = exact_like(x_shape, max(terms, x_shape[0] * x_shape[2] * x_shape[3]), torch.float64, seed=1).to(device).requires_grad_()
    w = exact_like(w_shape, terms, torch.float64, seed=2).to(device).requires_grad_()
    y = torch.nn.functional.conv_transpose2d(x, w, **arguments)
    grad = exact_like(y.shape, max(terms, y.numel() // out_channels), torch.float64, seed=3).to(device)
    leaves = [t.detach().to(dtype) for t in (x, w)]
    leaves = [(innermost(t) if last else t).requires_grad_() for t in leaves]
    given = innermost(grad.to(dtype)) if last else grad.to(dtype)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        got = torch.autograd.grad(upfold.conv_transpose2d(*leaves, algorithm="gemm", **arguments), leaves, given)
    for one, other in zip(got, torch.autograd.grad(y, (x, w), grad), strict=True):
        assert_exact(one, other.cpu())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("case", cases.by_tier("smoke", "edge", "seeds", "decoders", "irregular"), ids=lambda case: case.name)
def test_every_form_of_the_product_is_exact(case, dtype, last, device):
    case = case.scaled(0.02)
    x, w, b = case.tensors(dtype, device, exact=True, bias=case.bias)
    if last and x.dim() in CHANNELS_LAST:
        x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        w = w.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    want = reference((x, w, b), case.geometry)
    for cap in (256, 33, 1):
        with upfold.use(workspace_mb=cap):
            problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
            if GEMM.reject(problem, device) is not None:
                continue
            for config in GEMM.configs(problem, device):
                with use_config(config):
                    assert_exact(ours((x, w, b), case.geometry, "gemm"), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("case", cases.by_tier("smoke", "edge", "seeds", "decoders", "irregular"), ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "some of more channels"])
def test_gradients_of_every_form_are_exact(case, dtype, layout, device):
    """Channels that are innermost are copied as planes first, where the cap allows it."""
    case = case.scaled(0.005)
    operands, grad, want = test_exact._backward_case(case, dtype.is_complex)
    grad, leaves = test_exact._cast(grad, dtype, device), [test_exact._cast(tensor, dtype, device) for tensor in operands]
    if layout != "contiguous":
        grad = innermost(grad, 3 if layout == "some of more channels" else 0)
        leaves = [innermost(t) if t.dim() == grad.dim() else t for t in leaves]
    leaves, arguments = [t.requires_grad_() for t in leaves], tuple(geometry_arguments(case.geometry).values())
    for cap in (256, 33):
        with upfold.use(workspace_mb=cap):
            problem = describe(*leaves, arguments)
            adjoints = (
                execute.describe_conv(grad, leaves[1], case.in_size, arguments)[0],
                execute.describe_conv_transpose_weight(leaves[0], grad, case.kernel_size, arguments)[0],
            )
        if cap < 256 and any(GEMM.reject(p, device) is not None for p in (problem, *adjoints)):
            continue  # the copies of large weights in channels_last alone are beyond it
        for config in GEMM.configs(problem, device):
            with upfold.use(workspace_mb=cap), use_config(config):
                y = ours(tuple(leaves), case.geometry, "gemm")
                got = torch.autograd.grad(y, leaves, grad)
            for one, other in zip(got, want, strict=True):
                assert_exact(one, other)


def test_float32_is_rounded_to_tf32_only_where_torch_allows_it(device):
    x, w = operands(device)
    exact = torch.nn.functional.conv_transpose2d(x.double().cpu(), w.double().cpu(), stride=2, padding=1)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        error = (gemm(x, w).cpu() - exact).abs().max() / exact.abs().max()
    assert error < 2e-6


@grid(
    cases.by_tier("smoke", "edge", "irregular"), (torch.float32, torch.float16, torch.bfloat16, torch.float64), ("gemm_atomic",)
)
def test_the_scatter_add_is_exact_on_integers(algorithm, case, dtype, device):
    test_exact.test_forward(algorithm, case, dtype, device)


def test_the_scatter_add_is_never_chosen(device):
    x, _ = operands(device)
    layer = torch.nn.ConvTranspose2d(2048, 8, 4, 2, 1, device=device)
    assert upfold.explain(layer, x).plan.algorithm in ("gemm", "direct")


def scratch_of_the_gradient(channels, kernel, stride, padding, size, dtype, device):
    """What `gemm` holds for the gradient of an input, channels innermost throughout, and bytes of all its taps' channels."""
    grad_size = (size - 1) * stride - 2 * padding + kernel
    w = innermost(torch.zeros(16, channels, kernel, kernel, dtype=dtype, device=device))
    grad = innermost(torch.zeros(2, channels, grad_size, grad_size, dtype=dtype, device=device))
    arguments = ((stride, stride), (padding, padding), (0, 0), 1, (1, 1))
    problem = execute.describe_conv(grad, w, (size, size), arguments)[0]
    assert problem.x_strides[1] == 1
    return GEMM.workspace_bytes(problem, 0, device), 2 * size * size * channels * kernel * kernel * grad.element_size()


@pytest.mark.parametrize(("channels", "kernel", "stride", "padding"), [(3, 4, 2, 1), (24, 3, 1, 1), (8, 5, 3, 0)])
def test_an_innermost_gradient_holds_rows_of_channels_alone(channels, kernel, stride, padding, device):
    """Neither it nor the weight is turned; of one tap there are no rows either, and what is left is cuBLAS's, always as much."""
    of_cublas, _ = scratch_of_the_gradient(8, 1, 1, 0, 6, torch.complex64, device)
    held, rows = scratch_of_the_gradient(channels, kernel, stride, padding, 6, torch.complex64, device)
    assert held == of_cublas + -(-rows // 256) * 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_hold_what_they_need(dtype, device):
    """Beside rows of channels less than a copy of the gradient would take, not what cuBLAS may take."""
    held, rows = scratch_of_the_gradient(24, 3, 1, 1, 300, dtype, device)
    assert rows < held < rows + 2 * 24 * 300 * 300 * DTYPE_BYTES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("behind", [0, 1, 2, 4])
def test_products_of_any_alignment_are_exact(behind, dtype, device):
    """What cuBLASLt chooses hangs on the addresses of operands."""
    case = cases.find("dcgan-128-64@16").scaled(0.05)
    x, w, _ = case.tensors(dtype, device, exact=True)
    want = reference((x, w, None), case.geometry)
    room = [torch.zeros(t.numel() + behind, dtype=dtype, device=device)[behind:].view(t.shape).copy_(t) for t in (x, w)]
    for operands in ((room[0], w), (x, room[1]), room):
        assert_exact(ours((*operands, None), case.geometry, "gemm"), want)
