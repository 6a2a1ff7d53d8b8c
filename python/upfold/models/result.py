"""What was measured of a whole model, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..timing import geometric_mean

TORCH, REPLACED, FUSED = LAYERS = ("torch", "replaced", "fused")
EAGER, COMPILED = WAYS = ("eager", "compiled")


@dataclass
class Variant:
    """One way of running the model.

    Attributes:
        layers: whose transposed convolutions: "torch", "replaced" (upfold's) or "fused" (with what follows them).
        way: "eager" or "compiled", by ``torch.compile``.
        error: `rule.error_norm` of its result; None where it did not run.
        seconds: median time of a call as its caller waits for it; None where it did not run or is wrong.
        spread: distance of the quartiles of those times divided by the median.
        device_seconds: median device time of a call; None on a CPU.
        how: the way in which that was measured (`timing.Timing.how`).
        peak_bytes: the most memory that a call held at a time beside the weights, its result included; None on a CPU.
        held_bytes: what this way holds between calls beside the model's weights, as folded weights; None on a CPU.
        first_seconds: what the checked call took, which comes first: compiling included.
        note: what was fused, or why there is no time.
        failed: whether it is upfold's and broke or is wrong, where torch in the same way is neither.
    """

    layers: str
    way: str
    error: float | None = None
    seconds: float | None = None
    spread: float | None = None
    device_seconds: float | None = None
    how: str | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    first_seconds: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def name(self) -> str:
        """As ``fused compiled``; eager is not said."""
        return self.layers if self.way == EAGER else f"{self.layers} {self.way}"


@dataclass(frozen=True)
class LayerTime:
    """One transposed convolution of the model: its path, what upfold takes for it, and what its calls in one run take."""

    name: str
    algorithm: str | None
    torch_seconds: float
    upfold_seconds: float


@dataclass
class ModelResult:
    """One model in all ways.

    Attributes:
        name: of the model.
        source: where it is defined.
        size: shape of its first input.
        dtype, precision, layout: as in the bench's results.
        repro: a command that repeats this.
        reason: why it was not measured, or None.
        parameters: their number.
        bound: the largest error that counts as correct.
        share: the part, 0 to 1, of the eager model's time with torch's layers that these layers take; None where unknown.
        layers: the transposed convolutions one by one.
        variants: the ways.
    """

    name: str
    source: str
    size: str
    dtype: str
    precision: str | None
    layout: str
    repro: str
    reason: str | None = None
    parameters: int | None = None
    bound: float | None = None
    share: float | None = None
    layers: list[LayerTime] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """A line for each way of upfold's that broke or is wrong."""
        return [f"{self.name}: {one.name}: {one.note}; repro: {self.repro}" for one in self.variants if one.failed]

    def find(self, layers: str, way: str = EAGER) -> Variant | None:
        """The variant of that description, if it is among them."""
        return next((one for one in self.variants if (one.layers, one.way) == (layers, way)), None)

    def figures(self, one: Variant) -> dict[str, float | None]:
        """How many times faster, and smaller, a variant is than torch in the same way, and than torch eager."""
        same, eager = self.find(TORCH, one.way), self.find(TORCH)
        return {
            "x_torch": _ratio(same, one, "seconds"),
            "x_torch_eager": _ratio(eager, one, "seconds"),
            "x_torch_device": _ratio(same, one, "device_seconds"),
            "x_torch_eager_device": _ratio(eager, one, "device_seconds"),
            "memory_x_torch": _ratio(one, same, "peak_bytes"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        variants = [{"variant": one.name, **asdict(one), **self.figures(one)} for one in self.variants]
        return {**asdict(self), "variants": variants}


def _ratio(top: Variant | None, bottom: Variant | None, name: str) -> float | None:
    above, below = (None if one is None else getattr(one, name) for one in (top, bottom))
    return above / below if above and below else None


def summarize(results: Sequence[ModelResult]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each variant of upfold's, over the models: mean, worst case and losses against torch in the same way and eager."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        for one in result.variants:
            for figure, ratio in result.figures(one).items():
                if one.layers != TORCH and figure.startswith("x_") and ratio is not None:
                    found.setdefault(one.name, {}).setdefault(figure, {"ratios": []})["ratios"].append(ratio)
    for figures in found.values():
        for entry in figures.values():
            ratios = entry.pop("ratios")
            entry.update(geometric_mean=geometric_mean(ratios), models=len(ratios))
            entry.update(worst=min(ratios), slower=sum(ratio < 1 for ratio in ratios))
    return found
