"""Training steps in CUDA graphs: captured whole, or their forward and backward by `make_graphed_callables`."""

from __future__ import annotations

import pytest
import torch

from gpu import missing
from oracle import dtype_name
from stepping import assert_same, batch, decoders, gradients, loss, parameters

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu


def eager_steps(momentum):
    """The weights after two steps, in float64 by torch on the CPU."""
    model = decoders("cpu", torch.float64)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=momentum)
    for index in range(2):
        x, grad = batch(index, "cpu", dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) * grad).flatten(1).sum(1).mean().backward()
        optimizer.step()
    return parameters(model)


def on_side_stream(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("kind", [1, 2], ids=["replaced", "own activation"])
def test_graphed_whole_steps(kind, device):
    """Forward, backward and the optimizer in one graph, replayed on another batch: the weights of two eager steps."""
    model = decoders(device)[kind]
    started = parameters(model)
    x, grad = batch(0, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss(model(x), grad).backward()
        optimizer.step()

    on_side_stream(lambda: [step() for _ in range(3)])
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(model(x), grad).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), started, strict=True):
            parameter.copy_(value)
    for index in range(2):
        fresh = batch(index, device)
        x.copy_(fresh[0])
        grad.copy_(fresh[1])
        graph.replay()
    torch.cuda.synchronize()
    assert_same(parameters(model), eager_steps(0.0))


@pytest.mark.parametrize("kind", [1, 2], ids=["replaced", "own activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_graphed_callables(dtype, kind, device):
    """`make_graphed_callables`, as mixed-precision recipes use it: gradients of the batch that came last."""
    model = decoders(device)[kind]
    reference = decoders(device)[0]
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(model, (batch(2, device)[0].requires_grad_(),))
    for index in (0, 1):
        found = []
        for run, owner in ((graphed, model), (reference, reference)):
            x, grad = batch(index, device)
            owner.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
                y = run(x.requires_grad_())
            loss(y, grad).backward()
            found.append([y, x.grad, *gradients(owner)])
        assert_same(*found)
