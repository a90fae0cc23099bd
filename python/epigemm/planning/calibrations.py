"""What `epigemm.calibrate` measured of a GPU: on disk, in the user's cache, and the planner's copy of it.

A file belongs to one kind of GPU, one driver and one CUDA of torch's. What is wrong with it is never the caller's
problem: assumed figures decide where no measured ones are to be had.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from epigemm._native import build_info, ops
from epigemm.planning import architectures, measured

FORMAT = 1
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Figures:
    """What is measured of a GPU. ValueError for what no GPU has."""

    memory_bytes_per_us: float  # of a copy, reads and writes counted
    tensor_flops_per_us: float  # by mma.sync in 16 bits with fp32 sums
    cublas_efficiency: float  # of its roofline

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 1e-3 <= value < 1e15 or not math.isfinite(value):
                raise ValueError(f"{name}: got {value!r}; accepted is a positive number")

    @property
    def numbers(self) -> list[int]:
        """As the planner takes them."""
        return [
            round(self.memory_bytes_per_us),
            round(self.tensor_flops_per_us),
            round(1000 * self.cublas_efficiency),
        ]


def driver() -> str:
    """The version of NVIDIA's driver, as the kernel's module tells it."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)*", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "none"
    return found.group() if found else "unknown"


def path_of(gpu: str) -> Path:
    """The file of the user's cache for one kind of GPU under this driver and this CUDA of torch's."""
    about = f"{driver()}-cuda{torch.version.cuda or '-none'}-{FORMAT}"
    return measured.cache_dir() / f"{measured.slug(gpu)}-calibrated-{about}.json"


def _about(gpu: str) -> dict[str, object]:
    """What a file's figures hold for."""
    return {"format": FORMAT, "gpu": gpu, "driver": driver(), "cuda": torch.version.cuda}


def read(path: Path, gpu: str) -> Figures | None:
    """What a file holds for a GPU of this name; None where there is none.

    Raises:
        ValueError: it is damaged, or for something else.
        OSError: it cannot be read.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(table, dict):
        raise ValueError("it must be an object")
    for name, wanted in _about(gpu).items():
        if table.get(name) != wanted:
            raise ValueError(f"it is for {name} {table.get(name)!r}, not for {wanted!r}")
    figures = table.get("figures")
    if not isinstance(figures, dict) or set(figures) != set(Figures.__dataclass_fields__):
        raise ValueError(f"its figures must be {list(Figures.__dataclass_fields__)}")
    return Figures(**figures)


def load(device: int) -> None:
    """Give the planner what was measured of a CUDA device, where its architecture takes that."""
    gpu = torch.cuda.get_device_name(device)
    path = path_of(gpu)
    try:
        figures = read(path, gpu)
        if figures is not None and not architectures.of(device=device)["is_fitted"]:
            install(device, figures)
    except (OSError, ValueError, RuntimeError) as error:
        measured.warn_once(path, f"the calibration in {path} is ignored: {measured.first_line(error)}")


def install(device: int, figures: Figures | None) -> None:
    """Give the planner figures of a CUDA device; None: those that are assumed.

    Raises:
        RuntimeError: the architecture's models are fitted, and take none.
    """
    ops._calibrate(device, [] if figures is None else figures.numbers)


def keep(device: int, figures: Figures) -> Path | None:
    """Give the planner new figures, and write them into the user's cache: the file, or None where it cannot be."""
    install(device, figures)
    gpu = torch.cuda.get_device_name(device)
    path = path_of(gpu)
    text = json.dumps({**_about(gpu), "epigemm": build_info()["version"], "figures": asdict(figures)})
    try:
        measured.write_whole(path, f"{text}\n".encode())
    except OSError as error:
        measured.warn_once(
            path, f"the calibration lasts as long as this process: {path} cannot be written: {error}"
        )
        return None
    return path


def forget(device: int) -> None:
    """Have the planner assume figures again; nothing on disk changes."""
    with suppress(RuntimeError):  # of fitted models there are none
        install(device, None)
