"""Training steps on several processes, in `DistributedDataParallel` and FSDP2's `fully_shard`, with either's layers.

    torchrun --nproc-per-node 2 examples/train_distributed.py                  # gloo on a CPU, NCCL where each process has a GPU
    torchrun --nproc-per-node 2 examples/train_distributed.py --json steps.json

First a small decoder of whole numbers takes two steps, which are exact: the weights after them must be, bit for bit, those of
one process that saw the whole batch in float64. Then a larger decoder's step is timed, with torch's layers and with upfold's. The
exit status is 1 where weights differ. The number of processes must be a power of two, or their mean is not exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import upfold
from upfold import info

SMALL, SMALL_SIZE, SMALL_BATCH = (6, 4, 4, 3), (3, 4), 4
LARGE = {"cpu": ((64, 32, 16, 3), (8, 8), 4), "cuda": ((512, 256, 128, 64, 3), (8, 8), 64)}
LAYERS = ("torch", "upfold")
ROUNDS = 5


def decoder(channels: Sequence[int]) -> nn.Sequential:
    """Each layer doubles the height and the width."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def whole_numbers(shape: Sequence[int], seed: int) -> Tensor:
    """Sparse -1, 0, 1."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, tuple(shape), generator=generator) * 2.0 - 1
    return sign * (torch.rand(tuple(shape), generator=generator) < 0.25)


def small_decoder() -> nn.Sequential:
    model = decoder(SMALL)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = whole_numbers(parameter.shape, seed)
    return model


def small_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """An input and the gradient of its result, different on each process and in each step."""
    grown = 2 ** (len(SMALL) - 1)
    result = SMALL_BATCH, SMALL[-1], *(grown * size for size in SMALL_SIZE)
    seed = 1000 + 100 * step + 2 * rank
    return whole_numbers((SMALL_BATCH, SMALL[0], *SMALL_SIZE), seed), whole_numbers(result, seed + 1)


def loss_of(y: Tensor, grad: Tensor) -> Tensor:
    """The mean over samples of a product: linear, so that whole numbers stay exact."""
    return (y * grad).flatten(1).sum(1).mean()


def two_steps(model: nn.Module, batches: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(2):
        x, grad = batches(step)
        optimizer.zero_grad()
        loss_of(model(x), grad).backward()
        optimizer.step()


def expected(world: int) -> list[Tensor]:
    """The weights after two steps of one process on all the processes' batches, in float64."""
    model = small_decoder().double()

    def whole(step: int) -> tuple[Tensor, Tensor]:
        x, grad = zip(*(small_batch(rank, step) for rank in range(world)))
        return torch.cat(x).double(), torch.cat(grad).double()

    two_steps(model, whole)
    return [parameter.detach() for parameter in model.parameters()]


def in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model.to(device))


def in_fsdp2(model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = model.to(device)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole_weights(model: nn.Module) -> list[Tensor]:
    """The parameters on the CPU, gathered where they are sharded."""
    found = []
    for parameter in model.parameters():
        data = parameter.detach()
        found.append((data.full_tensor() if hasattr(data, "full_tensor") else data).cpu())
    return found


def differing(found: Sequence[Tensor], want: Sequence[Tensor]) -> int:
    """How many weights are not the expected ones, bit for bit."""
    return sum(int((one.double() != other).sum()) for one, other in zip(found, want, strict=True))


def check(wrap: Callable[..., nn.Module], layers: str, device: torch.device) -> int:
    """Two exact steps; return how many weights differ on this process."""
    model = small_decoder()
    if layers == "upfold":
        upfold.replace(model)
    model = wrap(model, device)
    rank = dist.get_rank()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # which would round the second step
        two_steps(model, lambda step: tuple(t.to(device) for t in small_batch(rank, step)))
    return differing(whole_weights(model), expected(dist.get_world_size()))


def timed(wrap: Callable[..., nn.Module], device: torch.device, steps: int) -> dict[str, float]:
    """Seconds of a step of the larger decoder, in rounds that take turns: the median."""
    channels, size, batch = LARGE[device.type]
    runs = {}
    for layers in LAYERS:
        torch.manual_seed(0)
        model = decoder(channels)
        if layers == "upfold":
            upfold.replace(model)
        model = wrap(model, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(batch, channels[0], *size, device=device)

        def run(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        runs[layers] = run
    seconds: dict[str, list[float]] = {layers: [] for layers in LAYERS}
    for number in range(ROUNDS + 1):
        for layers, run in runs.items():
            settle(device)
            start = time.perf_counter()
            for _ in range(steps):
                run()
            settle(device)
            if number:  # the first round warms up
                seconds[layers].append((time.perf_counter() - start) / steps)
    return {layers: statistics.median(times) for layers, times in seconds.items()}


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def missing_fsdp2() -> str | None:
    """Why there is no FSDP2 here, or None."""
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard"
    return None


def checked(wrap: Callable[..., nn.Module], device: torch.device) -> dict[str, int]:
    """How many weights differ after two exact steps, over all processes."""
    wrong = {layers: check(wrap, layers, device) for layers in LAYERS}
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, wrong)
    return {layers: sum(count[layers] for count in counts) for layers in LAYERS}


def run(device: torch.device, steps: int) -> dict[str, Any]:
    """What every way of wrapping gives, for the file."""
    found: dict[str, Any] = {"ddp": {"differing_weights": checked(in_ddp, device), "step_seconds": timed(in_ddp, device, steps)}}
    reason = missing_fsdp2()
    if reason is None:
        try:
            found["fsdp2"] = {"differing_weights": checked(in_fsdp2, device), "step_seconds": timed(in_fsdp2, device, steps)}
        except RuntimeError as error:  # an older gloo lacks what it needs, and says so
            reason = str(error).splitlines()[0]
            if dist.get_backend() != "gloo" or "not support" not in reason:
                raise
    return found if reason is None else {**found, "fsdp2": {"skipped": reason}}


def main() -> int:
    parser = argparse.ArgumentParser(description="Training steps on several processes, torch's layers against upfold's.")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where each process has a GPU of its own")
    parser.add_argument("--steps", type=int, default=20, help="of each of the timed rounds (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    backend = options.backend or ("nccl" if 0 < world <= torch.cuda.device_count() else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        facts = {"machine": info.gather(), "backend": backend, "processes": world, **run(device, options.steps)}
        if dist.get_rank() == 0:
            report(facts, options.json)
    finally:
        dist.destroy_process_group()
    return int(any(facts[name].get("differing_weights", {}).get("upfold", 0) for name in ("ddp", "fsdp2")))


def report(facts: dict[str, Any], path: str | None) -> None:
    for name in ("ddp", "fsdp2"):
        found = facts[name]
        if "skipped" in found:
            print(f"{name}: skipped: {found['skipped']}")
            continue
        wrong, seconds = found["differing_weights"], found["step_seconds"]
        verdict = "equal bit for bit" if not any(wrong.values()) else f"DIFFERENT: {wrong}"
        ratio = seconds["torch"] / seconds["upfold"]
        print(f"{name}, {facts['processes']} processes over {facts['backend']}: weights after two exact steps {verdict}")
        print(f"  a step: torch {1e3 * seconds['torch']:.2f} ms, upfold {1e3 * seconds['upfold']:.2f} ms ({ratio:.2f}x torch)")
    if path is not None:
        Path(path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
