"""Measured times: a JSON table in the user's cache, from which the planner gets its copy.

The table has the entries of every build of epigemm (its version and its set of kernels) and kind of GPU. A damaged one
causes no error: without a measurement the cost models decide.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from epigemm._native import build_info, ops

FORMAT = 3
NAME, LOCK = "measured.json", "measured.lock"
ELEMENTS = ("float16", "bfloat16", "float32")
ARITHMETICS = ("ieee", "tf32", "split", "scaled")

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """The best fused plan for one kind of call, and how it compares with the fallback."""

    epilogue: str  # its name, which for an epilogue made at run time has a digest of the functor
    dtype: str  # of x: "float16", "bfloat16" or "float32"
    arithmetic: str  # "ieee" for 16 bits; that, "tf32", "split" or "scaled" for fp32
    packed: bool  # on fp16 slices: whether the weight had a pack
    bias: bool  # whether there was one
    tf32_allowed: bool  # fp32: whether torch's GEMM could use TF32
    m: int  # rows of x: it decides for calls of exactly so many
    n: int  # rows of the weight
    k: int  # columns of x and the weight
    plan: tuple[int, ...]  # family, tile, raster, swizzle, splits
    fused_us: float  # microseconds of a call with this plan
    torch_us: float  # microseconds of the fallback. The faster one runs

    @property
    def key(self) -> Key:
        """The kind of call that it was measured for."""
        return astuple(self)[:9]

    @property
    def row(self) -> list[int]:
        """All but the epilogue, in the form of `_load_measured`; ValueError for unknown names."""
        family, tile, raster, swizzle, splits = self.plan
        names = (ELEMENTS.index(self.dtype), ARITHMETICS.index(self.arithmetic))
        flags = map(int, (self.packed, self.bias, self.tf32_allowed))
        times = (round(1e3 * us) for us in (self.fused_us, self.torch_us))
        return [*names, *flags, self.m, self.n, self.k, family, tile, raster, swizzle, splits, *times]


Entries = dict[Key, Entry]
Table = dict[str, dict[str, list[dict[str, Any]]]]
"""Of the file: entries by build and GPU."""

_NO_DEVICE = -1  # entries for it are checked and not kept


def cache_dir() -> Path:
    """The folder of the user's caches: `EPIGEMM_CACHE_DIR`, else epigemm's in `XDG_CACHE_HOME` or ~/.cache."""
    if chosen := os.environ.get("EPIGEMM_CACHE_DIR"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "epigemm"
    try:
        return Path.home() / ".cache" / "epigemm"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "epigemm"


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone, because linked kernels are kept there, too."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            with suppress(FileExistsError):  # another process has made it
                each.mkdir(mode=0o700)


def build() -> str:
    """What a plan's numbers belong to."""
    info = build_info()
    return f"{info['version']} {info['tiles_fingerprint']} {FORMAT}"


def read() -> Table:
    """The file; ValueError if it is damaged, OSError if it cannot be read."""
    try:
        table = json.loads((cache_dir() / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(table, dict) or not all(isinstance(of_build, dict) for of_build in table.values()):
        raise ValueError("it must be an object of objects")
    return table


def in_table(table: Table, gpu: str) -> Entries:
    """The entries of this build for a GPU of this name; ValueError for damaged ones."""
    try:
        of_gpu = table.get(build(), {}).get(gpu, [])
        entries = [Entry(**{**each, "plan": tuple(each["plan"])}) for each in of_gpu]
        install(_NO_DEVICE, entries)
        return {entry.key: entry for entry in entries}
    except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"an entry is damaged: {first_line(error)}") from error


def merge(gpu: str, entries: Iterable[Entry]) -> None:
    """Add entries to the file, which other processes may do at the same time; a damaged file is replaced."""
    folder = cache_dir()
    make_folder(folder)
    with open(folder / LOCK, "a", opener=_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        table: Table = {}
        known: Entries = {}
        with suppress(ValueError):
            table = read()
            known = in_table(table, gpu)
        known.update((entry.key, entry) for entry in entries)
        table.setdefault(build(), {})[gpu] = [asdict(known[key]) for key in sorted(known)]
        # A reader sees no file, the old one or the new one.
        temporary = folder / f"{NAME}.tmp"
        temporary.unlink(missing_ok=True)  # of a process that was stopped
        with open(temporary, "x", encoding="utf-8", opener=_private) as file:
            json.dump(table, file, indent=1)
        temporary.replace(folder / NAME)


def _private(path: str, flags: int) -> int:
    """Open a file of this user alone; OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def install(device: int, entries: Iterable[Entry]) -> None:
    """Give the planner measured choices for a CUDA device; RuntimeError for plans that this build does not have.

    Without any, all that it has for the device are dropped.
    """
    entries = list(entries)
    names = ",".join(entry.epilogue for entry in entries)
    ops._load_measured(device, names, [number for entry in entries for number in entry.row])


def load(device: int) -> None:
    """Give the planner the user's measurements for a CUDA device."""
    gpu, path = torch.cuda.get_device_name(device), cache_dir() / NAME
    try:
        table = read()
        install(device, in_table(table, gpu).values())
    except (OSError, ValueError, RuntimeError) as error:
        warn_once(path, f"the measured choices in {path} are ignored: {first_line(error)}")
        return
    if build() not in table and any(gpu in of_build for of_build in table.values()):
        warn_once(
            path, f"the measured choices in {path} are ignored: another version or other kernels left them"
        )


def remember(device: int, entries: Iterable[Entry]) -> None:
    """Give the planner new measurements, and write them to the user's cache if that is possible."""
    entries = list(entries)
    if not entries:
        return
    install(device, entries)
    path = cache_dir() / NAME
    try:
        merge(torch.cuda.get_device_name(device), entries)
    except OSError as error:
        warn_once(
            path.parent, f"measured choices last as long as this process: {path} cannot be written: {error}"
        )


def source_text(source: str, plan: Mapping[str, Any]) -> str:
    """The source of a choice in words; the planner calls it "model" or "cache"."""
    if source == "cache":
        return "measured on this GPU (cache)"
    if plan.get("is_speed_assumed"):
        return "cost model, for a device that does not tell its speed: an H100's is assumed"
    return "cost model"


_warned: set[Path] = set()


def warn_once(about: Path, message: str) -> None:
    """Warn of what is wrong with a file, once a process."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(f"epigemm: {message}", RuntimeWarning, stacklevel=2)


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
