"""Swap the layers of a model for this package's, in place, and back.

Only the class of a layer changes. Parameters, buffers, hooks, mode, device and everything else that torch or the user
keeps in the layer stays where it is, so optimisers, checkpoints and references to the layer go on working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as _with
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from . import dispatch, functional, observe, timing
from .crop import cropped
from .explanation import explain
from .fused_model import uninstall
from .geometry import InvalidArgument
from .nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Fold, Unfold
from .patch import unpatched
from .report import LayerRow, Report


class ReplacedConvTranspose1d(ConvTranspose1d):
    """A ``torch.nn.ConvTranspose1d`` that `replace` made upfold's; `restore` knows it by this class."""


class ReplacedConvTranspose2d(ConvTranspose2d):
    """A ``torch.nn.ConvTranspose2d`` that `replace` made upfold's; `restore` knows it by this class."""


class ReplacedConvTranspose3d(ConvTranspose3d):
    """A ``torch.nn.ConvTranspose3d`` that `replace` made upfold's; `restore` knows it by this class."""


class ReplacedFold(Fold):
    """A ``torch.nn.Fold`` that `replace` made upfold's; `restore` knows it by this class."""


class ReplacedUnfold(Unfold):
    """A ``torch.nn.Unfold`` that `replace` made upfold's; `restore` knows it by this class."""


_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.ConvTranspose1d: ReplacedConvTranspose1d,
    nn.ConvTranspose2d: ReplacedConvTranspose2d,
    nn.ConvTranspose3d: ReplacedConvTranspose3d,
    nn.Fold: ReplacedFold,
    nn.Unfold: ReplacedUnfold,
}
_RESTORED = {ours: theirs for theirs, ours in _REPLACED.items()}
_OURS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Fold, Unfold)
_KINDS = (_ConvTransposeNd, nn.Fold, nn.Unfold)
_NAMES = frozenset(cls.__name__ for cls in _REPLACED)
# What the classes of this package define and torch's do not: an entry of a layer with such a name would change its meaning.
_ADDED = {theirs: frozenset(dir(ours)) - frozenset(dir(theirs)) for theirs, ours in _REPLACED.items()}
# What a replaced layer may hold beside torch's own entries.
_OWN_ENTRIES = ("algorithm", "activation", "crop", "_activation_code", "_activation_slope", "_frozen")
# Time spent on measuring one operator on one shape.
_SECONDS_EACH = 0.15
# Where a parametrized class keeps the one that it took the place of.
_ORIGIN = "_upfold_replaces"


@dataclass(frozen=True)
class Found:
    """A layer of interest: its path, its further paths, and why it cannot be replaced (None where it can)."""

    name: str
    aliases: tuple[str, ...]
    layer: nn.Module
    refusal: str | None

    @property
    def is_ours(self) -> bool:
        """Whether upfold computes it already."""
        return isinstance(self.layer, _OURS)


def replace(model: nn.Module, only_faster: observe.Inputs | None = None, algorithm: str | None = None) -> Report:
    """Make upfold compute the transposed-convolution, fold and unfold layers of a model, in place.

    Args:
        model: any module; it may itself be such a layer. Layers are changed, never exchanged: weights, hooks and
            references stay.
        only_faster: inputs of the model (a tensor, a sequence of positional or a mapping of keyword arguments). The
            model runs once with them, torch's and upfold's operator are timed on what reaches each layer, and layers
            where torch is faster stay.
        algorithm: the algorithm that the transposed convolutions take, or None to let upfold choose.

    Returns:
        A `Report`: which layers were replaced, and which were left alone for what reason.

    Raises:
        InvalidArgument: the algorithm is unknown, or `only_faster` is nothing that a model can be called with.
    """
    if algorithm is not None:
        dispatch.check_name(algorithm)
    found = find(model)
    takeable = [entry for entry in found if entry.refusal is None and not entry.is_ours]
    measured: dict[nn.Module, Contest] = {}
    if only_faster is not None:
        measured = measure(model, observe.as_call(only_faster), [entry.layer for entry in takeable], algorithm)
    rows = {}
    for entry in takeable:
        row, contest = row_of(entry), measured.get(entry.layer)
        reason = None
        if contest is not None:
            theirs, ours = contest.torch_seconds, contest.upfold_seconds
            if contest.refusal is None:
                row = _with(row, algorithm=contest.algorithm, torch_seconds=theirs, upfold_seconds=ours)
            reason = contest.verdict()
        elif only_faster is not None:
            reason = "these inputs do not reach it, so it was not measured"
        if reason is None:
            _swap(entry.layer, _replaced_class(type(entry.layer)))
            if algorithm is not None and isinstance(entry.layer, _ConvTransposeNd):
                entry.layer.algorithm = algorithm  # type: ignore[assignment]
        rows[entry.layer] = _with(row, state="replaced" if reason is None else "left alone", reason=reason)
    return Report("replace", tuple(rows.get(entry.layer) or row_of(entry) for entry in found))


def restore(model: nn.Module) -> Report:
    """Undo `fuse` and `replace`: every layer that they changed is torch's again, with the weights that it has now.

    Layers that were constructed as upfold's stay upfold's.

    Args:
        model: a model, or a part or copy of one, that `replace` or `fuse` changed.

    Returns:
        A `Report` with a row for each layer that was restored.
    """
    rows = []
    if isinstance(model, nn.Module):
        uninstall(model)
    for entry in find(model):
        original = _restored_class(type(entry.layer))
        if original is None:
            continue
        rows.append(_with(row_of(entry), state="restored", reason=None))
        _swap(entry.layer, original)
        for name in _OWN_ENTRIES:
            entry.layer.__dict__.pop(name, None)
    return Report("restore", tuple(rows))


def find(model: nn.Module) -> list[Found]:
    """The layers of interest, in the model's order.

    Raises:
        InvalidArgument: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model = {type(model).__name__}; must be a torch.nn.Module")
    names: dict[nn.Module, list[str]] = {model: [""]}
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                names.setdefault(child, []).append(f"{path}.{name}" if path else name)
    return [
        Found(paths[0], tuple(paths[1:]), layer, refusal(layer))
        for layer, paths in names.items()
        if isinstance(layer, _KINDS) or (isinstance(layer, torch.jit.ScriptModule) and layer.original_name in _NAMES)
    ]


def refusal(layer: nn.Module) -> str | None:
    """Why the class of this layer cannot be changed, or None. Replaced and upfold's own layers count as changeable."""
    if isinstance(layer, torch.jit.ScriptModule):
        return "compiled by torch.jit; replace the layers before scripting or tracing"
    if isinstance(layer, LazyModuleMixin):
        return "a lazy layer whose sizes are not known yet; run the model once, then replace"
    if isinstance(layer, _OURS):
        return None
    patched = [name for name in ("forward", "_output_padding") if name in layer.__dict__]
    if patched:
        return f"the instance has its own {patched[0]}, which a change of class would leave in place"
    cls = _plain_class(layer)
    if cls not in _REPLACED:
        base = next(base.__name__ for base in cls.__mro__ if base in _REPLACED or base in _KINDS)
        return f"{cls.__module__}.{cls.__qualname__} is a subclass of {base}; upfold does not know what it changes"
    entries = {*layer.__dict__, *layer._parameters, *layer._buffers, *layer._modules}
    taken = sorted(_ADDED[cls] & entries)
    if taken:
        return f"the instance has its own {', '.join(taken)}, which upfold's layer would take for its own"
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return f"padding_mode = {layer.padding_mode!r}; only 'zeros' exists for transposed convolutions"
    return None


def _plain_class(layer: nn.Module) -> type[nn.Module]:
    """The class of the layer, seen through the subclass that a parametrization gives it."""
    cls = type(layer)
    return cls.__bases__[0] if is_parametrized(layer) else cls


def row_of(entry: Found) -> LayerRow:
    """What a report says of a layer before anything is done or measured."""
    layer = entry.layer
    if entry.refusal is not None:
        state = "left alone"
    else:
        state = "upfold" if entry.is_ours else "torch"
    try:
        parameters = sum(parameter.numel() for parameter in layer.parameters())
    except ValueError:  # a lazy layer's parameters have no size yet
        parameters = None
    kind = getattr(layer, "original_name", None) or _plain_class(layer).__name__
    settings = "" if isinstance(layer, torch.jit.ScriptModule) else layer.extra_repr()
    return LayerRow(entry.name, entry.aliases, kind.removeprefix("Replaced"), state, entry.refusal, settings, parameters)


def _swap(layer: nn.Module, cls: type[nn.Module]) -> None:
    layer.__class__ = cls


def _replaced_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _REPLACED:
        return _REPLACED[cls]
    return _parametrized(cls, _REPLACED[cls.__bases__[0]], {_ORIGIN: cls})


def _restored_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """What `replace` found where it put `cls`, or None where it did not put it."""
    if cls in _RESTORED:
        return _RESTORED[cls]
    base = cls.__bases__[0]
    if base not in _RESTORED or not cls.__name__.startswith("Parametrized"):
        return None
    origin = cls.__dict__.get(_ORIGIN)
    # Parametrizations may have been added to the layer, or removed from it, since it was replaced.
    if origin is not None and _namespace(origin) == _namespace(cls):
        return origin  # type: ignore[no-any-return]
    return _parametrized(cls, _RESTORED[base], {})


def _namespace(cls: type[nn.Module]) -> dict[str, Any]:
    """What a parametrized class defines itself: its properties and the methods that torch gave it."""
    skipped = ("__dict__", "__weakref__", _ORIGIN)
    return {name: value for name, value in vars(cls).items() if name not in skipped}


def _parametrized(cls: type[nn.Module], base: type[nn.Module], extra: dict[str, Any]) -> type[nn.Module]:
    """The parametrized class `cls` rebuilt on another base, named as torch names such classes."""
    return type(f"Parametrized{base.__name__}", (base,), {**_namespace(cls), **extra})


@dataclass
class Contest:
    """The time that torch and upfold take for the calls that one run of a model makes to a layer."""

    algorithm: str | None = None
    why: str | None = None
    torch_seconds: float = 0.0
    upfold_seconds: float = 0.0
    refusal: str | None = None  # of a shape that reached the layer; the seconds are then those of the others

    def verdict(self) -> str | None:
        """Why the layer should stay torch's, or None."""
        if self.refusal is not None:
            return f"upfold refuses what reaches it: {self.refusal}"
        if self.algorithm == dispatch.FALLBACK:
            return "torch's operator would run all the same: no kernel of upfold covers it here, or tuning found none faster"
        if self.upfold_seconds >= self.torch_seconds:
            ratio = self.upfold_seconds / self.torch_seconds
            return f"torch is faster here: upfold takes {ratio:.2f} times as long"
        return None


def measure(model: nn.Module, call: observe.Call, layers: list[nn.Module], algorithm: str | None) -> dict[nn.Module, Contest]:
    """Time torch's operator and upfold's on what one run of the model gives to each of the layers."""
    contests: dict[nn.Module, Contest] = {}
    known: dict[Any, list[float]] = {}

    def see(layer: nn.Module, its_call: observe.Call) -> None:
        # Measured inside the model's run: on the tensor itself, with its strides, under the autocast that surrounds it.
        x = observe.input_of(its_call)
        contest = contests.setdefault(layer, Contest())
        name = algorithm or getattr(layer, "algorithm", None)
        key = (id(layer), tuple(x.shape), x.stride(), x.dtype, _output_size(its_call))
        if key not in known:
            competitors = _competitors(layer, x, its_call, name)
            try:
                with unpatched():
                    known[key] = timing.medians(competitors, x.device, seconds=_SECONDS_EACH)
            except InvalidArgument as refusal:
                contest.refusal = str(refusal)
                return
        contest.torch_seconds += known[key][0]
        contest.upfold_seconds += known[key][1]
        if contest.algorithm is None and isinstance(layer, _ConvTransposeNd):
            plan = plan_for(layer, x)
            contest.algorithm = name or (None if plan is None else plan.algorithm)
            contest.why = "asked for by name" if name else None if plan is None else plan.reason

    observe.visit(model, call, layers, see)
    return contests


def plan_for(layer: nn.Module, x: Tensor) -> dispatch.Plan | None:
    """What upfold runs for this input, or None where autocast will change the types before the layer runs."""
    try:
        return explain(layer, x).plan
    except InvalidArgument:
        return None


def _output_size(call: observe.Call) -> tuple[int, ...] | None:
    args, kwargs = call
    size = args[1] if len(args) > 1 else kwargs.get("output_size")
    return None if size is None else tuple(size)


def _competitors(layer: Any, x: Tensor, call: observe.Call, algorithm: str | None) -> list[Callable[[], Tensor]]:
    """Torch's operator and upfold's on the same tensors, without what both layers would do around it."""
    if isinstance(layer, nn.Fold):
        fold: Any = (layer.output_size, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return [lambda: F.fold(x, *fold), lambda: functional.fold(x, *fold)]
    if isinstance(layer, nn.Unfold):
        unfold: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return [lambda: F.unfold(x, *unfold), lambda: functional.unfold(x, *unfold)]
    ndim = len(layer.kernel_size)
    size = _output_size(call)
    geometry = (layer.stride, layer.padding, layer.kernel_size, ndim, layer.dilation)
    extra = layer._output_padding(x, None if size is None else list(size), *geometry)
    arguments = (x, layer.weight, layer.bias, layer.stride, layer.padding, extra, layer.groups, layer.dilation)
    theirs, ours = (getattr(module, f"conv_transpose{ndim}d") for module in (F, functional))
    crop = getattr(layer, "crop", None)
    return [lambda: cropped(theirs(*arguments), crop, ndim), lambda: ours(*arguments, algorithm=algorithm, crop=crop)]
