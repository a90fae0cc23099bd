"""Measured times: the user's cache on disk, and the planner's copy.

A file belongs to one kind of GPU and one set of kernels. A damaged file causes no error: without a measurement the cost
models decide.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from epigemm._native import build_info, ops
from epigemm.epilogues import registry

FORMAT = 2
ELEMENTS = ("float16", "bfloat16", "float32")
ARITHMETICS = ("ieee", "tf32", "split", "scaled")

Key = tuple[str, str, str, bool, bool, bool, int, int, int]


@dataclass(frozen=True)
class Entry:
    """The best fused plan for one kind of call, and how it compares with the fallback."""

    epilogue: str  # its name, which for an epilogue made at run time has a digest of the functor
    dtype: str  # of x: "float16", "bfloat16" or "float32"
    arithmetic: str  # "ieee" for 16 bits; "tf32", "split" or "scaled" for fp32
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
        flags = (self.packed, self.bias, self.tf32_allowed)
        return (self.epilogue, self.dtype, self.arithmetic, *flags, self.m, self.n, self.k)

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """An entry of a file, perhaps for an epilogue that has not been made yet; ValueError if it is not valid."""
        if not isinstance(value, dict) or set(value) != {each.name for each in fields(cls)}:
            raise ValueError(f"an entry must be an object with {[each.name for each in fields(cls)]}")
        for names, fits, accepted in _ACCEPTED:
            for name in names:
                if not fits(value[name]):
                    raise ValueError(f"{name} must be {accepted}, got {value[name]!r}")
        entry = cls(**{**value, "plan": tuple(value["plan"])})
        entry.row(_checked_number(entry.epilogue))
        return entry

    def to_json(self) -> dict[str, Any]:
        """In the form that `from_json` reads."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def row(self, epilogue: int) -> list[int]:
        """In the form of `_load_measured`, with the epilogue's number; ValueError for unknown names."""
        indices = [epilogue, ELEMENTS.index(self.dtype), ARITHMETICS.index(self.arithmetic)]
        flags = [int(flag) for flag in (self.packed, self.bias, self.tf32_allowed)]
        times = [round(1e3 * us) for us in (self.fused_us, self.torch_us)]
        return [*indices, *flags, self.m, self.n, self.k, *self.plan, *times]


_MADE = re.compile(r".+\.[0-9a-f]{16}")
"""A pattern of the names of epilogues that are made at run time: see `epigemm.epilogues.traced`."""


def _number(name: str) -> int | None:
    """An epilogue's number in this process; None if it has not been made here."""
    epilogue = registry.named(name)
    return None if epilogue is None else epilogue.number


def _checked_number(name: Any) -> int:
    """A number to check an entry with: that of its epilogue, or any number if the epilogue may still be made."""
    if not isinstance(name, str):
        raise ValueError(f"epilogue must be a name, got {name!r}")
    number = _number(name)
    if number is None and not _MADE.fullmatch(name):
        raise ValueError(f"there is no epilogue {name!r}")
    return number or 0


_NO_DEVICE = -1  # rows for it are checked and not kept
_LEAST_US, _MOST_US = 1e-3, 1e12  # whole nanoseconds that an int64 holds
_ACCEPTED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("plan",), lambda v: isinstance(v, list) and [type(each) for each in v] == [int] * 5, "five integers"),
    (("m", "n", "k"), lambda v: type(v) is int and 0 < v < 2**31, "a positive integer"),
    (("packed", "bias", "tf32_allowed"), lambda v: type(v) is bool, "true or false"),
    (
        ("fused_us", "torch_us"),
        lambda v: type(v) in (int, float) and _LEAST_US <= v < _MOST_US,
        "a time in microseconds",
    ),
)
"""The rules for an entry of a file: names of fields, a test of the value, and a text for accepted values."""

Entries = dict[Key, Entry]


# --- where -----------------------------------------------------------------------------------------------------------


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


def slug(gpu: str) -> str:
    """A GPU's name as part of a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def cache_path(gpu: str) -> Path:
    """The file of the user's cache for one kind of GPU and this build's set of kernels."""
    info = build_info()
    return cache_dir() / f"{slug(gpu)}-{info['version']}-{info['tiles_fingerprint']}-{FORMAT}.json"


def _outdated(path: Path, gpu: str) -> Path | None:
    """If this build has no cache: a file that another version, or a build with other kernels, has left."""
    if path.exists():
        return None
    start = f"{slug(gpu)}-"
    # A version begins with digits and a point: "nvidia-h100-80gb-hbm3-..." is not of an "NVIDIA H100".
    others = (
        each
        for each in path.parent.glob(f"{start}*.json")
        if re.match(r"\d+\.\d", each.name.removeprefix(start))
    )
    return max(others, default=None)


# --- reading and writing ---------------------------------------------------------------------------------------------


def read(path: Path, gpu: str) -> Entries:
    """The entries of a file for a GPU of this name; none if there is no file.

    Raises:
        ValueError: it is damaged, of another format, for another GPU or for other kernels.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        table = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(table, dict) or type(table.get("format")) is not int:
        raise ValueError("it must be an object with the number of its format")
    if table["format"] != FORMAT:
        raise ValueError(f"it is of format {table['format']}, this version reads format {FORMAT}")
    if table.get("gpu") != gpu:
        raise ValueError(f"it was measured on {table.get('gpu')!r}, not on {gpu!r}")
    if table.get("kernels") != build_info()["tiles_fingerprint"]:
        raise ValueError("it was measured with other kernels than those of this build")
    if not isinstance(table.get("entries"), list):
        raise ValueError("it must have a list of entries")
    entries = [Entry.from_json(value) for value in table["entries"]]
    try:
        _pass_on(_NO_DEVICE, [entry.row(_checked_number(entry.epilogue)) for entry in entries])
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return {entry.key: entry for entry in entries}


def write(path: Path, gpu: str, entries: Entries) -> None:
    """Write the entries atomically: a reader sees the old file or the new one."""
    info = build_info()
    about = {"format": FORMAT, "gpu": gpu, "epigemm": info["version"], "kernels": info["tiles_fingerprint"]}
    lines = [json.dumps(entries[key].to_json()) for key in sorted(entries)]
    text = json.dumps({**about, "torch": torch.__version__})[:-1]
    text += ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    write_whole(path, text.encode())


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone, because linked kernels are kept there, too."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            with suppress(FileExistsError):  # another process has made it
                each.mkdir(mode=0o700)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees no file, the old one or the new one."""
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name[:16], suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def merge(path: Path, gpu: str, entries: Iterable[Entry]) -> None:
    """Add entries to a file, which other processes may do at the same time; a damaged file is replaced."""
    make_folder(path.parent)
    lock_file = os.open(
        path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(lock_file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        try:
            known = read(path, gpu)
        except ValueError:
            known = {}
        write(path, gpu, {**known, **{entry.key: entry for entry in entries}})


# --- the planner's copy ----------------------------------------------------------------------------------------------

_lock = threading.RLock()
_known: dict[int, Entries] = {}  # by device, including those of epilogues that have not been made yet


def load(device: int) -> None:
    """Load the user's measurements for a CUDA device into the planner."""
    gpu = torch.cuda.get_device_name(device)
    path = cache_path(gpu)
    try:
        install(device, read(path, gpu).values())
        outdated = _outdated(path, gpu)
    except (OSError, ValueError, RuntimeError) as error:
        warn_once(path, f"the measured choices in {path} are ignored: {first_line(error)}")
        return
    if outdated is not None:
        warn_once(
            path,
            f"the measured choices in {outdated} are ignored: another version or other kernels left them",
        )


def install(device: int, entries: Iterable[Entry]) -> None:
    """Give the planner measured choices for a CUDA device; RuntimeError for plans that this build does not have.

    Those of an epilogue that has not been made yet are kept until it is.
    """
    new = {entry.key: entry for entry in entries}
    with _lock:
        old = _known.get(device, {})
        known = {**{key: old[key] for key in old if key not in new}, **new}  # the newest last
        _pass_on(device, _rows(known.values()))
        if device != _NO_DEVICE:
            _known[device] = known


def _rows(entries: Iterable[Entry]) -> list[list[int]]:
    """The rows of epilogues that have been made."""
    numbered = ((entry, _number(entry.epilogue)) for entry in entries)
    return [entry.row(number) for entry, number in numbered if number is not None]


def _pass_on(device: int, rows: Iterable[list[int]]) -> None:
    ops._load_measured(device, [number for row in rows for number in row])


def _made(name: str) -> None:
    """Load the measurements of an epilogue that has just been made into the planner."""
    with _lock:
        for device, known in _known.items():
            if not any(entry.epilogue == name for entry in known.values()):
                continue
            try:
                _pass_on(device, _rows(known.values()))
            except RuntimeError as error:
                warn_once(Path(name), f"what was measured with {name} is ignored: {first_line(error)}")
                _known[device] = {key: each for key, each in known.items() if each.epilogue != name}


registry.WHEN_MADE.append(_made)


def remember(device: int, entries: Iterable[Entry]) -> None:
    """Give the planner new measurements, and write them to the user's cache if that is possible."""
    entries = list(entries)
    if not entries:
        return
    install(device, entries)
    gpu = torch.cuda.get_device_name(device)
    path = cache_path(gpu)
    try:
        merge(path, gpu, entries)
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
