"""`freeze` and `unfreeze`: weights packed once for inference, by request, with a report of what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from . import observe
from .frozen import Copies, Freezable, Kept
from .fused_model import is_fused, named_running, plan_of
from .geometry import InvalidArgument
from .report import aligned
from .twins import Batched


@dataclass(frozen=True)
class FreezeRow:
    """One transposed convolution of a model.

    Attributes:
        name: path of the layer in the model, "" for the model itself.
        layer: name of its class.
        state: "frozen" or "left alone".
        kept: what is kept for each plan that ran: the algorithm, its config, the bytes of the copy, or why there is none.
        reason: why the layer was left alone, or why no plan ran yet; None otherwise.
    """

    name: str
    layer: str
    state: str
    kept: tuple[Kept, ...] = ()
    reason: str | None = None

    @property
    def copy_bytes(self) -> int:
        """Bytes of all its copies."""
        return sum(kept.copy_bytes for kept in self.kept)

    def text(self) -> str:
        """What is kept, or why nothing is."""
        words = [
            f"{kept.algorithm} (config {kept.config}) keeps {_size(kept.copy_bytes)}"
            if kept.reason is None
            else f"{kept.algorithm} (config {kept.config}) keeps nothing: {kept.reason}"
            for kept in self.kept
        ]
        return "; ".join([*words, *([self.reason] if self.reason else [])])


@dataclass(frozen=True)
class FreezeReport:
    """What one `freeze` did, a row for each transposed convolution, in the model's order."""

    rows: tuple[FreezeRow, ...]

    def __iter__(self) -> Iterator[FreezeRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def copy_bytes(self) -> int:
        """Bytes of all copies that were made; layers that share a weight share its copies, and each row counts them."""
        return sum(row.copy_bytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        facts = asdict(self)
        for row, entry in zip(self.rows, facts["rows"]):
            entry["kept"] = [one._asdict() for one in row.kept]
        return facts

    def summary(self) -> str:
        """One sentence on all rows."""
        if not self.rows:
            return "freeze: the model has no transposed convolution layers"
        frozen = sum(row.state == "frozen" for row in self.rows)
        holding = sum(row.copy_bytes > 0 for row in self.rows)
        count = f"{len(self.rows)} layer{'' if len(self.rows) == 1 else 's'}"
        return f"freeze: {frozen} of {count} frozen, {holding} with packed weights of {_size(self.copy_bytes)}"

    def __str__(self) -> str:
        if not self.rows:
            return self.summary()
        lines = [("layer", "class", "state", "kept")]
        lines += [(row.name or "(the model)", row.layer, row.state, row.text()) for row in self.rows]
        return "\n".join((*aligned(*lines), self.summary()))


def freeze(model: nn.Module, inputs: observe.Inputs | None = None) -> FreezeReport:
    """Keep the packed weights of a model's transposed convolutions from call to call, for inference.

    By default a weight that its kernel wants in another order is packed in every call, as part of it, so that it is never stale.
    A frozen layer packs it in the first call of a plan and keeps the copy, in memory of its own: the results are the same bits,
    the plan that `auto` takes is the same. To freeze is to say that the weights do not change. What ends it, layer by layer:
    `unfreeze`, ``train()``, ``load_state_dict()``, ``.to()`` and whatever else moves or converts the layer, another parameter or
    another memory in the weight's place, and a write that torch counts (``_version``). Writes that it does not count, through
    ``.data``, by a fused optimizer or by a replayed graph, are not seen. Where a gradient is asked for, and under autocast,
    ``torch.compile``, ``torch.func`` and whatever else watches the call, a frozen layer runs as if it were not.

    A copy refers to its weight weakly and is freed with it. No copy is made while a CUDA graph is captured: run the model once
    before, or give `inputs`. A captured graph goes on reading the copy that it met, which then lives as long as the weight.
    ``state_dict``, ``copy.deepcopy`` and ``pickle`` see nothing of all this; a copied layer is not frozen. Freezing anew packs
    anew. Of a model that `fuse` changed the layers that run inside it are frozen, until it is fused anew; fuse first.

    Args:
        model: any module, in evaluation mode; its layers of torch's are left alone, `replace` or `fuse` it first.
        inputs: inputs of the model (a tensor, a sequence of positional or a mapping of keyword arguments), or None. With them
            the model runs once, in evaluation mode without gradients, and its copies are made now.

    Returns:
        A `FreezeReport`: which layers keep how many bytes, which need nothing kept, and why.

    Raises:
        InvalidArgument: `model` is no module, or `inputs` is nothing that a model can be called with.
    """
    unfreeze(model)
    call = None if inputs is None else observe.as_call(inputs)
    rows: list[tuple[str, nn.Module, str | None]] = []
    shared: dict[int, Copies] = {}
    for name, layer in _layers(model):
        refusal = _refusal(layer)
        rows.append((name, layer, refusal))
        if refusal is None:
            weight: Any = layer.weight
            layer.__dict__["_frozen"] = shared.setdefault(id(weight), Copies(weight))
    if call is not None:
        with observe.undisturbed(model, call):
            model(*call[0], **call[1])
    return FreezeReport(tuple(_row(*row, ran=call is not None) for row in rows))


def unfreeze(model: nn.Module) -> None:
    """Let go of everything that `freeze` keeps for the layers of a model; from now on they pack in every call.

    Args:
        model: a model, or a part of one, frozen or not.

    Raises:
        InvalidArgument: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model = {type(model).__name__}; must be a torch.nn.Module")
    modules = list(model.modules())
    plans = [plan_of(module) for module in modules if is_fused(module)]
    modules += [part for plan in plans if plan is not None for layer in plan.layers.values() for part in layer.modules()]
    for module in modules:
        if isinstance(module, Freezable):
            module._thaw()


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The transposed convolutions that run in evaluation mode, each once."""
    seen = set()
    for name, module in named_running(model):
        layer: Any = module.twin if isinstance(module, Batched) else module
        if isinstance(layer, _ConvTransposeNd) and layer not in seen:
            seen.add(layer)
            yield name, layer


def _refusal(layer: nn.Module) -> str | None:
    """Why nothing can be kept for this layer, or None."""
    if not isinstance(layer, Freezable):
        return "torch computes it; upfold.replace(model) first"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter of its own but computed anew, by a parametrization or a hook"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}, which has its own way"
    if weight.device.type not in ("cpu", "cuda"):
        return f"upfold has no kernels for {weight.device.type}"
    return None


def _row(name: str, layer: Any, refusal: str | None, ran: bool) -> FreezeRow:
    kind = type(layer).__name__.removeprefix("Replaced")
    if refusal is not None:
        return FreezeRow(name, kind, "left alone", (), refusal)
    kept = tuple(layer._frozen.kept.values()) if layer._frozen is not None else ()
    reason = None
    if not kept:
        reason = "these inputs do not reach it" if ran else "packs in its first call without gradients, outside of a capture"
    return FreezeRow(name, kind, "frozen", kept, reason)


def _size(count: int) -> str:
    """Bytes as text."""
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
