"""Stale weights on a GPU: captured graphs, streams and the compiler's graphs, by default and frozen; every tile that packs."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import upfold
from freezing import UNCOUNTED, assert_differs, assert_equals_torch, image, make, packing_configs, that_packs
from gpu import missing
from oracle import describe, geometry_arguments, ours
from upfold import cases, frozen
from upfold.algorithms import REGISTRY, Packing
from upfold.dispatch import use_config
from upfold.modes import positional

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
FUSED = REGISTRY["fused"]
CASES = [
    "dcgan-256-128@8",
    "k3s2p1op1-128-64@256",
    "seed0-grouped-dilated",
    "seed3-wide-kernel",
    "sam-64-32@128",
    "k5s3p1-64-64@128",
]


def captured(layer, x):
    """A graph of one call, without a warm-up, and the result that its replays write."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    return graph, y


# --- by default ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["auto", "gemm", "direct", "fused"])
def test_a_captured_graph_sees_writes_in_place(algorithm, device):
    layer, x = make(device, algorithm)
    with torch.no_grad(), that_packs(layer, x):
        before = layer(x)
        graph, y = captured(layer, x)
        for write in UNCOUNTED.values():
            write(layer)
            graph.replay()
            assert_equals_torch(y, layer, x)
        assert_differs(y, before, layer, x)


@pytest.mark.parametrize("algorithm", ["auto", "gemm", "direct", "fused"])
def test_two_streams(algorithm, device):
    """A weight written on one stream and read on another that waits for it, again and again."""
    layer, x = make(device, algorithm)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), that_packs(layer, x):
        for turn in range(8):
            with torch.cuda.stream(writer):
                writer.wait_stream(reader)
                layer.weight.data.mul_(-2 if turn % 2 else -0.5)
            with torch.cuda.stream(reader):
                reader.wait_stream(writer)
                y = layer(x)
            torch.cuda.synchronize()
            assert_equals_torch(y, layer, x)


def test_the_compilers_graphs_see_every_write(device):
    layer, x = make(device)
    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad(), that_packs(layer, x):
        before = compiled(x).clone()
        for write in UNCOUNTED.values():
            for _ in range(3):  # warm-up, recording and replay
                compiled(x)
            write(layer)
            assert_equals_torch(compiled(x), layer, x)
        assert_differs(compiled(x), before, layer, x)


# --- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_tile_gives_the_same_bits(name, dtype, device):
    case = cases.find(name).scaled(0.05)
    x, w, b = case.tensors(dtype, device, bias=True)
    problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
    packed = 0
    for config in FUSED.configs(problem, device):
        with use_config(config):
            want = ours((x, w, b), case.geometry, "fused")
            weight = w.clone()
            copies = frozen.Copies(weight)
            options = positional(case.geometry), "fused", None, copies
            assert torch.equal(frozen.conv_transpose(x, weight, b, *options), want), config
            if isinstance(FUSED.packing(problem, config, device), Packing):
                packed += 1
                weight.fill_(torch.nan)
            assert torch.equal(frozen.conv_transpose(x, weight, b, *options), want), config
    assert packed > 0


def test_inputs_beyond_the_cap_in_parts(device):
    """The parts of a batch share the copy."""
    case = cases.find("k7s2p3op1-32-64@128")
    x, w, b = case.tensors(torch.bfloat16, device, bias=True)
    x = x[:1].repeat(3, 1, 1, 1)
    with upfold.use(workspace_mb=5):
        problem = describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))
        for config in FUSED.configs(problem, device):
            with use_config(config):
                want = ours((x, w, b), case.geometry, "fused")
                options = positional(case.geometry), "fused", None, frozen.Copies(w)
                assert torch.equal(frozen.conv_transpose(x, w, b, *options), want), config


def test_a_graph_captured_after_the_first_call(device):
    """It reads the copy; which lives on for it when the layer is frozen no more, and dies with the weight."""
    layer, x = make(device)
    with torch.no_grad(), that_packs(layer, x):
        want, of_twice = layer(x), layer(2 * x)
        upfold.freeze(layer, x)
        (made,) = layer._frozen._made.values()
        freed = weakref.ref(made.memory)
        del made
        graph, y = captured(layer, x)
        layer.weight.data.zero_()  # which the graph does not read
        upfold.unfreeze(layer)
        gc.collect()
        assert freed() is not None
        taken = [torch.full((1 << 20,), torch.nan, device=device) for _ in range(8)]  # whatever memory is free
        graph.replay()
        assert torch.equal(y, want)
        x.mul_(2)
        graph.replay()
        assert torch.equal(y, of_twice)
        assert len(taken) == 8
        del graph
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        assert freed() is None


def test_no_copy_is_made_in_a_capture(device):
    layer, x = make(device)
    with torch.no_grad(), that_packs(layer, x):
        want = layer(x)
        upfold.freeze(layer)
        graph, y = captured(layer, x)
        assert not layer._frozen._made
        graph.replay()
        assert torch.equal(y, want)
        layer.weight.data.mul_(-2)
        graph.replay()
        assert_equals_torch(y, layer, x)
        assert_equals_torch(layer(x), layer, x)
        assert len(layer._frozen._made) == 1


def test_copies_on_other_streams(device):
    """A copy made on one stream is complete for all; memory that another stream still reads is not given away."""
    layer, x = make(device)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad(), that_packs(layer, x):
        want = layer(x)
        torch.cuda.synchronize()
        for _ in range(20):
            upfold.freeze(layer)
            results = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(layer(x))
            upfold.unfreeze(layer)
            with torch.cuda.stream(streams[0]):
                spoilt = torch.full((1 << 16,), torch.nan, device=device)
            torch.cuda.synchronize()
            assert all(torch.equal(y, want) for y in results)
            assert spoilt.isnan().all()


def test_a_layer_that_moves(device):
    layer, x = make("cpu")
    with torch.no_grad():
        upfold.freeze(layer, x)
        layer.to(device)
        assert layer._frozen is None
        moved = x.to(device)
        with that_packs(layer, moved):
            want = copy.deepcopy(layer)(moved)
            upfold.freeze(layer, moved)
            assert torch.equal(layer(moved), want)
        assert len(packing_configs(layer, moved)) > 1
        assert image(device).is_cuda
