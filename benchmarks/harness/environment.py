"""Where a run took place: machine, versions, and the trees of the source that it belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import epigemm
from epigemm._native import cuda_status

_TREES = ("csrc", "python")
_PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "numpy")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_trees(text: str) -> dict[str, str]:
    """``"csrc=HASH,python=HASH"`` -> {"csrc": HASH, "python": HASH}.

    Raises:
        ValueError: not both names, each with 40 hexadecimal digits.
    """
    pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if sorted(pairs) != sorted(_TREES) or not all(re.fullmatch("[0-9a-f]{40}", v) for v in pairs.values()):
        raise ValueError(f"--trees: expected csrc=<40 hex>,python=<40 hex>, got {text!r}")
    return pairs


def source_trees() -> dict[str, Any]:
    """Git's tree hashes of csrc and python when the working directory is a checkout; empty otherwise.

    ``modified`` tells whether files differ from those trees.
    """
    top = _output("git", "rev-parse", "--show-toplevel")
    if not top or not all((Path(top) / name).is_dir() for name in _TREES):
        return {}
    trees: dict[str, Any] = {name: _output("git", "-C", top, "rev-parse", f"HEAD:{name}") for name in _TREES}
    if not all(re.fullmatch("[0-9a-f]{40}", str(tree)) for tree in trees.values()):
        return {}
    trees["modified"] = bool(_output("git", "-C", top, "status", "--porcelain", "--", *_TREES))
    return trees


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver[0] if driver else "",
        "cuda": torch.version.cuda,
        "kernels": cuda_status(index) or "usable",
    }


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _short(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith("/") else word


def describe(device: torch.device, trees: str | None) -> dict[str, Any]:
    """The environment part of a record."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {
        "device": device.type,
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "cpu": {"name": _cpu_name(), "logical": os.cpu_count(), "threads": torch.get_num_threads()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: found[name] for name in _PACKAGES if name in found},
        "epigemm": epigemm.build_info(),
        "trees": parse_trees(trees) if trees else source_trees(),
        # Records are published, and do not tell on which paths they were written: of an absolute path only the last
        # part is kept.
        "command": ["python", "-m", "benchmarks", *(_short(word) for word in sys.argv[1:])],
    }


def gpu_folder(about: Mapping[str, Any]) -> str:
    """The device as the folders of records name it: ``nvidia-h200``, ``cpu``."""
    return re.sub("[^a-z0-9]+", "-", (about["gpu"] or {"name": "cpu"})["name"].lower()).strip("-")


def identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary says of the source, the device and the command that it was made with."""
    gpu, trees = about["gpu"] or {}, about["trees"]
    return {
        "csrc": trees.get("csrc", ""),
        "python": trees.get("python", ""),
        "modified": trees.get("modified"),
        "gpu": gpu.get("name", ""),
        "driver": gpu.get("driver", ""),
        "cuda": gpu.get("cuda", ""),
        "torch": about["torch"],
        "epigemm": about["epigemm"],
        "command": " ".join(about["command"]),
    }


def headline(environment: Mapping[str, Any]) -> str:
    """One line for people: device, torch, CUDA."""
    gpu = environment["gpu"]
    cpu = environment["cpu"]
    where = (
        f"{gpu['name']} (sm_{gpu['capability'].replace('.', '')}, driver {gpu['driver'] or 'unknown'})"
        if gpu
        else f"{cpu['name']}, {cpu['threads']} threads"
    )
    cuda = f", CUDA {gpu['cuda']}" if gpu else ""
    return f"{where}; torch {environment['torch']}{cuda}; epigemm {environment['epigemm']['version']}"
