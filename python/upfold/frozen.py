"""Packed copies of a layer's weight, kept by request from call to call, and what ends them.

By default a kernel reads torch's layout of a weight or packs it in every call, so that nothing can be stale. `freeze` gives a
layer `Copies` instead: an attribute of that layer, found by no one else, that refers to the weight weakly. The layer's events
(`Freezable`) end it, and so does a weight that is seen to be another, to lie elsewhere or to have been written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .algorithms import Packing
from .execute import Arguments, Launch, launch_of
from .fused_model import version_of
from .problem import ActivationLike
from .watch import needs_gradient, nobody_intercepts

# Of one weight: plans that want it otherwise, for further input sizes, pack in every call.
_MOST_COPIES = 4
_MOST_LAUNCHES = 256
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class _Copy:
    """One packed copy: its memory, the streams that have read it, and whether a captured graph reads it."""

    __slots__ = ("captured", "memory", "streams")

    def __init__(self, memory: Tensor, stream: int) -> None:
        self.memory, self.streams, self.captured = memory, {stream}, False


class _Use(NamedTuple):
    """How a launch runs with a copy: all that does not change from call to call."""

    copy: _Copy
    enqueue: Any
    address: int
    scratch: tuple[int, ...] | None  # in elements of the operands' type, as `Launch.elements`


class Kept(NamedTuple):
    """What `Copies` holds for one plan: the algorithm and config, and the bytes of the copy or why there is none."""

    algorithm: str
    config: int
    copy_bytes: int
    reason: str | None


class Copies:
    """The packed copies of one weight, by algorithm, config and layout, each made when a plan first asks for it.

    They are freed when the weight is, and when this is dropped; what a CUDA graph captured lives as long as the weight. A copy
    or a file of a layer that holds this gets None in its place.

    Args:
        weight: a parameter, on a CPU or a CUDA device.
    """

    def __init__(self, weight: Tensor) -> None:
        made: dict[Any, _Copy] = {}
        known: dict[Launch, _Use | None] = {}

        def drop(_: Any) -> None:  # holds the dictionaries alone, so that nothing here is part of a cycle
            made.clear()
            known.clear()

        self._weight: Any = weakref.ref(weight, drop)
        self._storage = StorageWeakRef(weight.untyped_storage())
        self._address, self._version = weight.data_ptr(), version_of(weight)
        self._made, self._known = made, known
        self.kept: dict[Any, Kept] = {}

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def fit(self, weight: Tensor) -> bool:
        """Whether the tensor is the weight, where it was, and not written to in any way that torch counts."""
        return (
            self._weight() is weight
            and weight.data_ptr() == self._address
            and version_of(weight) == self._version
            and weight.untyped_storage()._cdata == self._storage.cdata  # memory freed and taken again has the same address
        )

    def end(self) -> None:
        """Let go of the copies, for every layer that shares them."""
        self._weight = lambda: None
        self._made.clear()
        self._known.clear()
        self.kept.clear()

    def run(self, launch: Launch, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> bool:
        """Run a launch that is not empty on readable operands with a packed copy; return whether there is one."""
        try:
            use = self._known[launch]
        except KeyError:
            use = self._find(launch, weight)
        if use is None:
            return False
        stream = launch.stream
        if weight.is_cuda:
            self._note_use(use.copy, weight, stream)
        scratch = None if use.scratch is None else x.new_empty_strided(use.scratch, (1,))
        use.enqueue(
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
            stream,
            use.address,
        )
        return True

    def _find(self, launch: Launch, weight: Tensor) -> _Use | None:
        """How to run a launch not met before; a copy is made where none serves it, but not in a capture or beyond the limit."""
        name, config = launch.algorithm.name, launch.config
        if launch.packing is None:
            launch.packing = launch.algorithm.packing(launch.problem, config, weight.device)
        packing = launch.packing
        if len(self._known) >= _MOST_LAUNCHES:
            self._known.clear()
        if isinstance(packing, str):
            self.kept[name, config, None] = Kept(name, config, 0, packing)
            self._known[launch] = None
            return None
        key = name, config, packing.layout
        copy = self._made.get(key)
        if copy is None:
            if weight.is_cuda and _is_capturing():
                return None
            if len(self._made) >= _MOST_COPIES:
                self.kept[name, config, None] = Kept(name, config, 0, f"there are {_MOST_COPIES} copies for other plans already")
                self._known[launch] = None
                return None
            copy = self._made[key] = _packed(packing, weight, launch.stream)
            self.kept[key] = Kept(name, config, packing.copy_bytes, None)
        elements = -(-packing.workspace_bytes // weight.element_size())
        use = _Use(copy, packing.enqueue, copy.memory.data_ptr(), (elements,) if elements else None)
        self._known[launch] = use
        return use

    @staticmethod
    def _note_use(copy: _Copy, weight: Tensor, stream: int) -> None:
        """Keep the memory from others for as long as this call, or the graph that captures it, reads it."""
        if stream not in copy.streams:
            copy.streams.add(stream)
            copy.memory.record_stream(torch.cuda.current_stream(weight.device))
        if not copy.captured and _is_capturing():
            copy.captured = True
            weakref.finalize(weight, _let_go, copy.memory).atexit = False


def _let_go(memory: Tensor) -> None:
    """Nothing more: what a finalizer is given lives until it runs."""


def _packed(packing: Packing, weight: Tensor, stream: int) -> _Copy:
    """A copy that is complete when this returns, so that any stream and any graph may read it."""
    memory = weight.new_empty(packing.copy_bytes, dtype=torch.uint8)
    packing.pack(weight.data_ptr(), memory.data_ptr(), stream)
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()
    return _Copy(memory, stream)


def conv_transpose(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    arguments: Arguments,
    algorithm: str | None,
    activation: ActivationLike,
    copies: Copies,
    out: Tensor | None = None,
) -> Tensor:
    """As `execute.conv_transpose`, with copies that fit w, and `out` in memory that only the caller knows."""
    launch = launch_of(x, w, bias, arguments, algorithm, activation, out)
    y = x.new_empty_strided(launch.shape, launch.strides) if out is None else out
    if launch.empty:
        return y
    if launch.copies:
        x, bias = launch.readable(x, bias)
    if not copies.run(launch, x, w, bias, y):
        launch.run(x, w, bias, y)
    return y


def run(layer: Any, x: Any, output_size: Sequence[int] | None) -> Tensor | None:
    """The result of a frozen layer with its copies, or None where the ordinary way has to run: in training, and when watched."""
    w, bias, copies = layer.weight, layer.bias, layer._frozen
    if x is None or not nobody_intercepts(x, w, bias) or needs_gradient(x, w, bias):
        return None
    if not copies.fit(w):
        layer.__dict__.pop("_frozen", None)
        return None
    if x.dim() == w.dim() - 1:
        y = run(layer, x.unsqueeze(0), output_size)
        return None if y is None else y.squeeze(0)
    if x.dim() != w.dim() or not (x.is_cuda or x.is_cpu):
        return None
    activation = tuple(layer.activation) if isinstance(layer.activation, list) else layer.activation
    return conv_transpose(x, w, bias, layer._arguments(x, output_size), layer.algorithm, activation, copies)


class Freezable(nn.Module):
    """A layer whose packed copies end with `train()`, `load_state_dict()` and whatever moves or converts it."""

    _frozen = None  # type: Copies | None

    def _thaw(self) -> None:
        """End the copies of this layer's weight."""
        copies = self.__dict__.pop("_frozen", None)
        if copies is not None:
            copies.end()

    def train(self, mode: bool = True) -> Any:
        """Set the mode; the training mode ends what `freeze` keeps."""
        if mode:
            self._thaw()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._thaw()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._thaw()
        super()._load_from_state_dict(*args, **kwargs)
