"""The tuned plans: what they are kept by, the file in the user's cache folder, and those in force in this process.

The file holds, for each device and each class of problems, the best config that was measured of each algorithm, fastest first.
Whether and which of them runs is for `dispatch.py` to say.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import native
from .problem import Problem

_FORMAT, _SCHEMA = "upfold plans", 1
# The schema is in the name, so that two versions of upfold do not set each other's files aside.
_FILE = f"plans-{_SCHEMA}.json"
_LOCK_SECONDS = 10.0
# What keeps a file from being written or locked: the system, a missing filelock, a file system without locks.
_FAILURES = (OSError, ImportError, NotImplementedError)


class Machine(NamedTuple):
    """What measured times belong to: the device's name, its driver (a CPU's instruction set), and upfold's version."""

    device: str
    driver: str
    upfold: str


class Measured(NamedTuple):
    """The time of one way of running a problem, in seconds."""

    algorithm: str
    config: int
    seconds: float


@dataclass(frozen=True)
class Ranking:
    """What was measured for a class of problems.

    Attributes:
        measured: the best config of each algorithm, fastest first.
        complete: whether every algorithm and config that accepted the problem was timed.
        torch: the version of torch that ran meanwhile.
    """

    measured: tuple[Measured, ...]
    complete: bool = True
    torch: str = torch.__version__


# By machine, by `problem_key`.
Plans = dict[Machine, dict[str, Ranking]]


class DamagedFile(ValueError):
    """A file that holds no plans of this schema."""


# --- keys ------------------------------------------------------------------------------------------------------------


def bucket(size: int) -> int:
    """The largest of the sizes that share a plan with this one: quarters of an octave, each size by itself up to 8."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def problem_key(problem: Problem, device: torch.device) -> str:
    """What a plan is kept by: everything that a plan depends on, with the batch and the spatial sizes in buckets.

    Strides follow the sizes, so the order of the axes in memory and the gaps between them stand for them.
    """
    p = problem
    covered = [(i - 1) * s - 2 * pad + d * (k - 1) + 1 for i, s, pad, d, k in _axes(p)]
    words = [
        p.operator.name.lower(),
        str(p.dtype).rpartition(".")[2] + (" tf32" if p.allow_tf32 else ""),
        f"batch {bucket(p.batch)} channels {p.in_channels} {p.out_channels} groups {p.groups}",
        f"{p.spatial_ndim}d size " + _sizes(map(bucket, p.in_size)),
        f"kernel {_sizes(p.kernel_size)} stride {_sizes(p.stride)} padding {_sizes(p.padding)} dilation {_sizes(p.dilation)}",
        "output_padding " + _sizes(out - least for out, least in zip(p.out_size, covered)),
        "x " + _layout((p.batch, p.in_channels, *p.in_size), p.x_strides),
        "w " + _layout((p.in_channels, p.out_channels_per_group, *p.kernel_size), p.w_strides),
        "y " + _layout((p.batch, p.out_channels, *p.out_size), p.y_strides),
        f"bias {int(p.has_bias)} activation {p.activation.name} {p.activation.slope:g}",
        f"workspace {p.workspace_cap}",
        # Plans on a CPU are kept from call to call without a look at addresses, those on a GPU without a count of threads.
        f"threads {p.threads}" if device.type == "cpu" else f"alignment {p.alignment}",
    ]
    return ", ".join(words)


def _axes(p: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    return zip(p.in_size, p.stride, p.padding, p.dilation, p.kernel_size)


def _sizes(axes: Any) -> str:
    return "x".join(map(str, axes))


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """The axes that are stepped, outermost first; a + stands behind an axis whose steps leave a gap or overlap."""
    order = sorted((axis for axis in range(5) if shape[axis] > 1), key=lambda axis: (-strides[axis], axis))
    text, packed = "", 1
    for axis in reversed(order):
        text = "ncdhw"[axis] + ("" if strides[axis] == packed else "+") + text
        packed = strides[axis] * shape[axis]
    return text


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """What times measured on this device now belong to."""
    from . import __version__, info

    if device.type == "cuda" and torch.cuda.is_available():
        module, _ = native.load_cuda()
        driver = "unknown" if module is None else str(module.info()["driver_version"])
        return Machine(torch.cuda.get_device_name(device), driver, __version__)
    name = info.processor() if device.type == "cpu" else device.type
    return Machine(name, native.cpu().instruction_set() if device.type == "cpu" else "unknown", __version__)


def here() -> set[Machine]:
    """The devices of this machine."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {machine_of(torch.device("cpu")), *(machine_of(torch.device("cuda", index)) for index in gpus)}


# --- in force --------------------------------------------------------------------------------------------------------

_in_force: Plans | None = None
_changing = threading.Lock()


def lookup(problem: Problem, device: torch.device) -> Ranking | None:
    """What was measured for the problem's class on this device, or None."""
    found = in_force()
    by_problem = found.get(machine_of(device)) if found else None
    return None if by_problem is None else by_problem.get(problem_key(problem, device))


def in_force() -> Plans:
    """All plans of this process: those of the file, read once, and those that were added since."""
    global _in_force
    if _in_force is None:
        found, complaint = _read_cache()
        _in_force = found
        if complaint is not None:
            warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return _in_force


def forget() -> None:
    """Read the file again when the next problem is planned."""
    global _in_force
    _in_force = None


def add(plans: Plans) -> None:
    """Put plans in force in this process; they take the place of older ones."""
    global _in_force
    known = in_force()
    with _changing:
        _in_force = merged(known if _in_force is None else _in_force, plans)


def merged(older: Plans, newer: Plans) -> Plans:
    """Both together; where both have a plan, the newer."""
    return {machine: {**older.get(machine, {}), **newer.get(machine, {})} for machine in {**older, **newer}}


def count(plans: Plans, machines: set[Machine] | None = None) -> int:
    """Number of plans, or of those for some machines."""
    return sum(len(entries) for machine, entries in plans.items() if machines is None or machine in machines)


# --- the file --------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where plans are kept: in UPFOLD_CACHE_DIR, else in the user's cache folder.

    Without platformdirs that is XDG_CACHE_HOME or ~/.cache, the folder that platformdirs names on Linux.
    """
    folder = os.environ.get("UPFOLD_CACHE_DIR")
    if folder:
        return Path(folder) / _FILE
    try:
        import platformdirs
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base) / "upfold" / _FILE
    return Path(platformdirs.user_cache_dir("upfold", appauthor=False)) / _FILE


def read(path: Path) -> Plans:
    """Read a file of plans; single entries that make no sense are left out.

    Raises:
        OSError: it cannot be read.
        DamagedFile: it holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"it is damaged ({error})") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT or not isinstance(document.get("devices"), list):
        raise DamagedFile("it holds no plans of upfold")
    if document.get("schema") != _SCHEMA:
        raise DamagedFile(f"its schema is {document.get('schema')!r}; this upfold reads {_SCHEMA}")
    plans: Plans = {}
    for entry in document["devices"]:
        names = [entry.get(field) for field in Machine._fields] if isinstance(entry, dict) else [None]
        if all(isinstance(name, str) for name in names) and isinstance(entry.get("plans"), dict):
            rankings = {key: ranking for key, text in entry["plans"].items() if (ranking := _ranking(text)) is not None}
            plans = merged(plans, {Machine(*names): rankings})
    return plans


def _ranking(entry: Any) -> Ranking | None:
    try:
        measured = [Measured(one["algorithm"], one["config"], one["seconds"]) for one in entry["ranking"]]
        if not measured or not all(map(_makes_sense, measured)):
            return None
        return Ranking(tuple(sorted(measured, key=lambda one: one.seconds)), entry["complete"] is True, str(entry["torch"]))
    except (KeyError, TypeError):
        return None


def _makes_sense(one: Measured) -> bool:
    config, seconds = one.config, one.seconds
    if type(config) is not int or type(seconds) not in (int, float):
        return False
    return isinstance(one.algorithm, str) and config >= 0 and 0 < seconds < math.inf


def write(path: Path, plans: Plans) -> None:
    """Write a file of plans: a reader finds the old one or the new one, never a part of it."""
    devices = []
    for machine, rankings in sorted(plans.items()):
        entries = {key: _entry(ranking) for key, ranking in sorted(rankings.items())}
        devices.append({**machine._asdict(), "plans": entries})
    document = {"format": _FORMAT, "schema": _SCHEMA, "devices": devices}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _entry(ranking: Ranking) -> Mapping[str, Any]:
    return {
        "ranking": [{**one._asdict(), "seconds": float(f"{one.seconds:.4g}")} for one in ranking.measured],
        "complete": ranking.complete,
        "torch": ranking.torch,
    }


def remember(plans: Plans) -> bool:
    """Add plans to those in force and to the file, with what other processes have written there meanwhile.

    Returns:
        Whether the file holds them. Where it cannot be written, one warning says why, and they stay in this process.
    """
    add(plans)
    path, complaint = cache_file(), None
    try:
        with _locked(path):
            older, complaint = _read_locked(path)
            write(path, merged(older, plans))
    except _FAILURES as error:
        text = f"upfold's plans stay in this process: {path} cannot be written: {_reason(error)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    if complaint is not None:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock", timeout=_LOCK_SECONDS):
        yield


def _reason(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; pip install 'upfold[cli]' brings it"
    return f"{type(error).__name__}: {error}"


def _read_cache() -> tuple[Plans, str | None]:
    """The file's plans, and what is wrong with it; a damaged file is set aside."""
    path = cache_file()
    try:
        return read(path), None
    except (FileNotFoundError, NotADirectoryError):
        return {}, None
    except OSError as error:
        return {}, f"upfold's tuned plans are not used: {path} cannot be read: {_reason(error)}"
    except DamagedFile as damage:
        try:
            with _locked(path):  # another process may have put a good one there
                return _read_locked(path)
        except _FAILURES:
            return {}, f"upfold's tuned plans are not used: {path}: {damage}"


def _read_locked(path: Path) -> tuple[Plans, str | None]:
    try:
        return read(path), None
    except FileNotFoundError:
        return {}, None
    except DamagedFile as damage:
        number = 1
        while (aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, aside)
        return {}, f"{path} was set aside as {aside.name}: {damage}; upfold.tune makes new plans"
