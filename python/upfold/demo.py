"""The demo: a photograph goes through a constructed decoder, with torch's layers and then with upfold's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import cases, dispatch, native
from .charts import device_text, format_seconds, write_chart
from .compare import Conditions, compare
from .comparison import Comparison
from .decoder import PHOTO_SIZE, Decoder, interpolated, take_apart
from .explanation import explain
from .geometry import cached_geometry
from .modes import FORWARD, Operands, describe
from .replace import replace
from .tables import LEGEND, make_console, new_table, progress_bar, ratio_text, suite_table, summary_table
from .timing import medians

# First row of the square cut out of matplotlib's 600 x 512 sample photograph: head and shoulders.
_PHOTO_TOP = 20
_LAYER_SECONDS = 0.4
_MODEL_SECONDS = 2.0


@dataclass
class Outcome:
    """What the demo found.

    Attributes:
        psnr_torch: decibels of torch's picture against ``F.interpolate`` in float64.
        psnr_upfold: the same of upfold's picture.
        seconds_torch: time of the whole decoder with torch's layers.
        seconds_upfold: the same after ``upfold.replace``.
        layers: the comparison of each layer.
        files: what was written.
    """

    psnr_torch: float
    psnr_upfold: float
    seconds_torch: float
    seconds_upfold: float
    layers: list[Comparison]
    files: list[Path]


def default_device() -> torch.device:
    """The GPU where there is one that upfold has kernels for, else the CPU."""
    if native.load_cuda()[0] is None or not torch.cuda.is_available():
        return torch.device("cpu")
    x, w, bias = cases.find("k4s2p1").tensors()
    found = explain(describe(FORWARD, Operands(x, w, bias), cases.find("k4s2p1").geometry), device="cuda").candidates
    covered = any(one.plan is not None and one.algorithm != dispatch.FALLBACK for one in found)
    return torch.device("cuda" if covered else "cpu")


def photograph(size: int = PHOTO_SIZE) -> Tensor:
    """The sample photograph that matplotlib brings along: (1, 3, size, size), float64 from 0 to 1."""
    from matplotlib import cbook, image

    pixels = torch.from_numpy(image.imread(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)).copy())
    square = pixels[_PHOTO_TOP : _PHOTO_TOP + PHOTO_SIZE, :PHOTO_SIZE]
    photo = square.permute(2, 0, 1)[None].double() / 255
    return torch.nn.functional.avg_pool2d(photo, PHOTO_SIZE // size)


def psnr(picture: Tensor, truth: Tensor) -> float:
    """Peak signal to noise in decibels, for values from 0 to 1."""
    error = (picture.detach().to(truth.device, truth.dtype) - truth).square().mean()
    return float(-10 * torch.log10(error)) if error > 0 else float("inf")


def run(
    folder: str | Path = "demo",
    *,
    device: torch.device | str | None = None,
    size: int = PHOTO_SIZE,
    seconds: float = _LAYER_SECONDS,
    console: Any = None,
) -> Outcome:
    """Run the demo and print what it finds.

    Args:
        folder: where the pictures go.
        device: where to run; None takes a GPU that upfold has kernels for, else the CPU.
        size: pixels on a side of the photograph, 512, 256 or 128.
        seconds: time spent on each method of each layer.
        console: a rich console; None makes one.

    Returns:
        The figures that were printed.
    """
    device = default_device() if device is None else torch.device(device)
    console = make_console() if console is None else console
    with torch.no_grad():
        return _Demo(Path(folder), device, size, seconds, console).run()


class _Demo:
    def __init__(self, folder: Path, device: torch.device, size: int, seconds: float, console: Any) -> None:
        self.folder, self.device, self.seconds, self.console = folder, device, seconds, console
        self.photo = photograph(size)
        self.truth = interpolated(self.photo)
        self.decoder = Decoder().eval().to(device)
        self.features = self.decoder.features([level.float().to(device) for level in take_apart(self.photo)])

    def run(self) -> Outcome:
        say, size = self.console.print, self.photo.shape[-1]
        started = time.perf_counter()
        say(f"[bold]upfold demo[/]: a {size}x{size} photograph through six transposed convolutions, on {self._where()}")
        say(
            "The decoder's weights are constructed: it puts the picture together again from details at five scales and "
            f"enlarges it\nto {2 * size}x{2 * size}. F.interpolate can do the same, so that one wrong tap would be seen.",
            style="dim",
        )
        before, seen = self._with_inputs()
        layers = self._layers(seen)
        say(suite_table("Layer by layer: time of one call, checked first", layers, self.console.width))
        say(summary_table("the decoder", layers, self.console.width))
        say(LEGEND + "\n", style="dim")
        ours = Decoder().eval().to(self.device)
        report = replace(ours)
        say(f"[bold]upfold.replace(model)[/]: {report.summary()}")
        after = ours(*self.features)
        works = [lambda: self.decoder(*self.features), lambda: ours(*self.features)]
        with self.console.status("timing the whole decoder, before and after"):
            times = medians(works, self.device, seconds=_MODEL_SECONDS * min(1.0, self.seconds / _LAYER_SECONDS))
        outcome = Outcome(psnr(before, self.truth), psnr(after, self.truth), times[0], times[1], layers, [])
        say(_model_table(outcome))
        outcome.files = self._write(after, layers)
        say("wrote " + ", ".join(str(path) for path in outcome.files) + f"   ({time.perf_counter() - started:.0f} s in all)")
        return outcome

    def _where(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{torch.get_num_threads()} CPU threads ({native.cpu().instruction_set()})"

    def _with_inputs(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run torch's decoder and keep the input that each layer sees."""
        seen: dict[str, Tensor] = {}

        def keeper(name: str) -> Callable[..., None]:
            def keep(_: Any, inputs: tuple[Tensor, ...]) -> None:
                seen[name] = inputs[0]

            return keep

        hooks = [self.decoder.get_submodule(name).register_forward_pre_hook(keeper(name)) for name in self.decoder.steps]
        picture = self.decoder(*self.features)
        for hook in hooks:
            hook.remove()
        return picture, seen

    def _layers(self, seen: dict[str, Tensor]) -> list[Comparison]:
        results: list[Comparison] = []
        with progress_bar(self.console) as progress:
            task = progress.add_task("", total=len(self.decoder.steps))
            for name, step in self.decoder.steps.items():
                progress.update(task, description=f"checking and timing {step.name}")
                layer: Any = self.decoder.get_submodule(name)
                geometry = cached_geometry(2, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
                operands = Operands(seen[name], layer.weight, layer.bias)
                results.append(compare(operands, geometry, Conditions(seconds=self.seconds), name=step.name))
                progress.advance(task)
        return results

    def _write(self, picture: Tensor, layers: list[Comparison]) -> list[Path]:
        from matplotlib import image

        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / "photograph.png", self.folder / "enlarged.png"]
        for path, values in zip(files, (self.photo, picture)):
            image.imsave(path, values[0].clamp(0, 1).permute(1, 2, 0).cpu().double().numpy())
        title = f"The demo's decoder, layer by layer: {device_text(layers[0])}"
        return [*files, write_chart(layers, self.folder / "methods.png", title)]


def _model_table(outcome: Outcome) -> Any:
    table = new_table("The whole decoder", "layers", "time", "x torch", "PSNR against F.interpolate (float64)")
    for layers, seconds, decibels in (
        ("torch.nn", outcome.seconds_torch, outcome.psnr_torch),
        ("upfold", outcome.seconds_upfold, outcome.psnr_upfold),
    ):
        ratio = "1.00x" if layers == "torch.nn" else ratio_text(outcome.seconds_torch / seconds)
        table.add_row(layers, format_seconds(seconds), ratio, f"{decibels:.1f} dB")
    return table
