"""A convolutional variational autoencoder learns handwritten digits, with torch's layers and with upfold's, from the same seeds.

    python examples/train_vae.py                           # about two minutes on one core
    python examples/train_vae.py --device cuda --steps 6000

The digits are scikit-learn's, which come with it (pip install 'upfold[examples]'). For float32 and for bfloat16 autocast, three
seeds train with torch's layers and again with `upfold.replace`. Shown is the mean loss of the last tenth of the steps: for each
seed the two must differ by no more than the three seeds of torch do among themselves, or the exit status is 1. A picture shows
the losses, what both models make of digits that they have not seen, and digits that they make up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import upfold

LAYERS = ("torch", "upfold")
PRECISIONS = ("float32", "bfloat16")
SEEDS = (0, 1, 2)
LATENT, BATCH, HELD_OUT = 16, 32, 200
Tick = Callable[[int, float], None]


class Autoencoder(nn.Module):
    """Images of 8 x 8 to a normal distribution of a few numbers, and back by transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * width, 2 * LATENT),
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 8 * width),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.ConvTranspose2d(2 * width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 3, 1, 1),
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def loss_of(x: Tensor, logits: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """The negative evidence lower bound of an image, in nats and but for a constant: pixels err by 0.15."""
    mean, log_variance = mean.float(), log_variance.float()
    error = 0.5 * ((logits.float().sigmoid() - x) / 0.15).square().sum()
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (error + divergence) / len(x)


def digits(device: torch.device) -> Tensor:
    """The images, (1797, 1, 8, 8), between 0 and 1, in an order of their own."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))].to(device)


@dataclass(frozen=True)
class Run:
    """One training: the loss of each step, and the model after the last."""

    layers: str
    seed: int
    losses: Tensor
    model: Autoencoder

    @property
    def outcome(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return float(self.losses[-max(1, len(self.losses) // 10) :].mean())


def train(layers: str, seed: int, images: Tensor, steps: int, precision: str, tick: Tick | None = None) -> Run:
    """Train a model with torch's layers or upfold's; all else depends on the seed alone."""
    device = images.device
    torch.manual_seed(seed)
    model = Autoencoder().to(device)
    if layers == "upfold":
        upfold.replace(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    generator = torch.Generator(device).manual_seed(seed)
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        x = images[torch.randint(len(images), (BATCH,), generator=generator, device=device)]
        noise = torch.randn(BATCH, LATENT, generator=generator, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            found = model(x, noise)
        loss = loss_of(x, *found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        if tick is not None and (step + 1) % 25 == 0:
            tick(25, float(loss.detach()))
    return Run(layers, seed, losses.cpu(), model)


@dataclass(frozen=True)
class Verdict:
    """What the trainings of one precision say."""

    precision: str
    runs: tuple[Run, ...]

    def outcome(self, layers: str, seed: int) -> float:
        """Of one training."""
        return next(run.outcome for run in self.runs if (run.layers, run.seed) == (layers, seed))

    @property
    def spread(self) -> float:
        """How far the seeds of torch lie apart."""
        found = [run.outcome for run in self.runs if run.layers == "torch"]
        return max(found) - min(found)

    @property
    def differences(self) -> dict[int, float]:
        """How far upfold's outcome is from torch's, seed by seed."""
        seeds = [run.seed for run in self.runs if run.layers == "upfold"]
        return {seed: abs(self.outcome("upfold", seed) - self.outcome("torch", seed)) for seed in seeds}

    @property
    def holds(self) -> bool:
        """Whether no difference is larger than the spread."""
        return all(difference <= self.spread for difference in self.differences.values())


def compare(images: Tensor, steps: int, precision: str, tick: Callable[[str], Tick] | None = None) -> Verdict:
    """Train with each kind of layers from each seed."""
    runs = []
    for seed in SEEDS:
        for layers in LAYERS:
            ticked = None if tick is None else tick(f"{precision}, seed {seed}, {layers}'s layers")
            runs.append(train(layers, seed, images, steps, precision, ticked))
    return Verdict(precision, tuple(runs))


def draw(verdicts: Sequence[Verdict], unseen: Tensor, path: Path) -> None:
    """Losses, digits that the models have not seen beside what they make of them, and digits that they make up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(verdicts), 2, figsize=(13, 4.2 * len(verdicts)), squeeze=False, layout="constrained")
    for (left, right), verdict in zip(axes, verdicts):
        for run in verdict.runs:
            window = max(1, len(run.losses) // 100)
            smooth = F.avg_pool1d(run.losses.reshape(1, 1, -1), window, 1).flatten()
            colour, line = f"C{run.seed}", "-" if run.layers == "torch" else ":"
            left.plot(
                smooth.numpy(),
                line,
                color=colour,
                linewidth=1.2 if line == "-" else 2.4,
                label=f"{run.layers}'s layers, seed {run.seed}",
            )
        left.set(title=f"{verdict.precision}: loss (nats an image, mean of {window} steps)", xlabel="step")
        left.set_yscale("log")
        left.legend(fontsize=8)
        rows = {name: F.pad(row, (1, 1, 1, 1)) for name, row in pictures(verdict, unseen).items()}
        right.imshow(torch.cat([torch.cat(list(row), 1) for row in rows.values()]).numpy(), cmap="gray_r", vmin=0, vmax=1)
        right.set_yticks([10 * place + 4.5 for place in range(len(rows))], list(rows))
        right.set_xticks([])
        right.set_title(f"{verdict.precision}: seed {SEEDS[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@torch.no_grad()
def pictures(verdict: Verdict, unseen: Tensor, count: int = 12) -> dict[str, Tensor]:
    """Rows of images, each (count, 8, 8)."""
    rows = {"digits": unseen[:count, 0].cpu()}
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, LATENT, generator=generator).to(unseen.device)
    for layers in LAYERS:
        model = next(run.model for run in verdict.runs if (run.layers, run.seed) == (layers, SEEDS[0]))
        again = model(unseen[:count], torch.zeros(count, LATENT, device=unseen.device))[0]
        rows[f"{layers}: again"] = again[:, 0].sigmoid().cpu()
        rows[f"{layers}: made up"] = model.decoder(numbers)[:, 0].sigmoid().cpu()
    return rows


def print_verdicts(console: Any, verdicts: Sequence[Verdict]) -> None:
    from rich.table import Table

    table = Table(title="mean loss of the last tenth of the steps", title_justify="left")
    for head in ("precision", "seed", "torch", "upfold", "difference", "spread of torch's seeds"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    for verdict in verdicts:
        for seed, difference in verdict.differences.items():
            outcomes = [f"{verdict.outcome(layers, seed):.4f}" for layers in LAYERS]
            colour = "green" if difference <= verdict.spread else "red"
            cells = f"[{colour}]{difference:.4f}[/]", f"{verdict.spread:.4f}"
            table.add_row(verdict.precision, str(seed), *outcomes, *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="A variational autoencoder of digits, torch's layers against upfold's.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of each training (default: %(default)s)")
    parser.add_argument("--picture", default="vae.png", metavar="FILE", help="where the picture goes (default: %(default)s)")
    options = parser.parse_args()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if options.device == "cpu":
        torch.set_num_threads(1)  # layers of this size are done before a second thread has begun
    images = digits(torch.device(options.device))
    seen, unseen = images[HELD_OUT:], images[:HELD_OUT]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.steps * len(LAYERS) * len(SEEDS) * len(PRECISIONS))

        def tick(label: str) -> Tick:
            return lambda steps, loss: progress.update(task, advance=steps, description=f"{label}: loss {loss:.2f}")

        verdicts = [compare(seen, options.steps, precision, tick) for precision in PRECISIONS]
    print_verdicts(console, verdicts)
    draw(verdicts, unseen, Path(options.picture))
    console.print(f"wrote {options.picture}")
    return int(not all(verdict.holds for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
