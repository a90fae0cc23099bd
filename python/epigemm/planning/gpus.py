"""GPUs in figures, for a planner that has none at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LEAST = (8, 0)
_REACHABLE = 0.89  # of the nominal bandwidth: csrc/device/device.h
_MARK = "GeForce"  # csrc/device/query.cu


@dataclass(frozen=True)
class GPU:
    """A GPU in figures, for `epigemm.precompile(gpu=...)`: one that need not be here.

    Its data sheet, or the white paper of its generation, has them.

    Attributes:
        name: as `torch.cuda.get_device_name` says it. "GeForce" in it means that the tensor cores add fp32 sums at half
            the rate of other cards of the same compute capability.
        capability: the compute capability, as (8, 6).
        multiprocessors: how many.
        clock_mhz: their highest clock, in MHz.
        memory_gb_per_s: the memory's bandwidth, in 10^9 bytes a second.
        l2_mb: of the L2 cache, in 10^6 bytes.

    Raises:
        TypeError: a figure is no number of its kind.
        ValueError: a figure is not of 1 to 10^6 (`multiprocessors`: to 65,536), or `capability` is below 8.0, where no
            kernel of epigemm's runs.

    Example:
        >>> epigemm.GPU("RTX A4000", (8, 6), 48, clock_mhz=1560, memory_gb_per_s=448, l2_mb=4).is_geforce
        False
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_mhz: float
    memory_gb_per_s: float
    l2_mb: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: got {type(self.name).__name__}; accepted is a string")
        of_capability = self.capability
        if (
            not isinstance(of_capability, tuple)
            or len(of_capability) != 2
            or not all(type(each) is int for each in of_capability)
        ):
            raise TypeError(f"capability: got {of_capability!r}; accepted are two integers, as (8, 6)")
        if of_capability < _LEAST or not 0 <= of_capability[1] < 10:  # `numbers` has both in one
            raise ValueError(
                f"capability: got {of_capability}; accepted are (8, 0) and later, the second number at most 9"
            )
        _check("multiprocessors", self.multiprocessors, int, 65536)
        for name in ("clock_mhz", "memory_gb_per_s", "l2_mb"):
            _check(name, getattr(self, name), (int, float), 10**6)

    @property
    def is_geforce(self) -> bool:
        """Whether fp32 sums take its tensor cores twice as long: no attribute of a device tells, so its name does."""
        return _MARK in self.name

    @property
    def numbers(self) -> tuple[int, ...]:
        """As `epigemm.planning.plans.ask` takes them."""
        major, minor = self.capability
        return (
            10 * major + minor,
            self.multiprocessors,
            round(self.clock_mhz),
            round(_REACHABLE * 1000 * self.memory_gb_per_s),
            round(self.l2_mb * 1e6),
            int(self.is_geforce),
        )


def _check(name: str, value: object, kind: type | tuple[type, ...], most: int) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        accepted = "a whole number" if kind is int else "a number"
        raise TypeError(f"{name}: got {value!r}; accepted is {accepted}")
    if not 1 <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value}; accepted is a number from 1 to {most}")


# Capability, multiprocessors, clock, bandwidth, L2: from NVIDIA's data sheets and, for what these leave out, from the
# white papers "A100 Tensor Core GPU Architecture", "Ampere GA102 GPU Architecture", "Ada GPU Architecture", "H100
# Tensor Core GPU Architecture", "RTX Blackwell GPU Architecture" and "RTX PRO Blackwell GPU Architecture". Of H100 and
# H200 the clock is what their driver tells. B200's is what its tensor cores' rate and its multiprocessors come to.
_FIGURES = {
    "A100 40 GB": ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1410, 1555, 40),
    "A100 80 GB": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, 2039, 40),
    "A30": ("NVIDIA A30", (8, 0), 56, 1440, 933, 24),
    "A10": ("NVIDIA A10", (8, 6), 72, 1695, 600, 6),
    "A40": ("NVIDIA A40", (8, 6), 84, 1740, 696, 6),
    "RTX A6000": ("NVIDIA RTX A6000", (8, 6), 84, 1800, 768, 6),
    "RTX 3080": ("NVIDIA GeForce RTX 3080", (8, 6), 68, 1710, 760, 5),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, 936, 6),
    "L4": ("NVIDIA L4", (8, 9), 58, 2040, 300, 48),
    "L40S": ("NVIDIA L40S", (8, 9), 142, 2520, 864, 96),
    "RTX 6000 Ada": ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2505, 960, 96),
    "RTX 4080": ("NVIDIA GeForce RTX 4080", (8, 9), 76, 2505, 717, 64),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, 1008, 72),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980, 3350, 50),
    "H200": ("NVIDIA H200", (9, 0), 132, 1980, 4800, 60),
    "B200": ("NVIDIA B200", (10, 0), 148, 1850, 8000, 126),
    "RTX PRO 6000": ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2617, 1792, 128),
    "RTX 5080": ("NVIDIA GeForce RTX 5080", (12, 0), 84, 2617, 960, 64),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, 1792, 96),
}

KNOWN = {name: GPU(*figures) for name, figures in _FIGURES.items()}
"""GPUs by the names that people use."""

_ALIASES = {"A100": "A100 40 GB"}


def find(gpu: object) -> GPU:
    """A GPU that a caller names or describes.

    Raises:
        TypeError: it is neither a name nor a `GPU`.
        ValueError: no GPU of this name is known.
    """
    if isinstance(gpu, GPU):
        return gpu
    accepted = f"an epigemm.GPU, or one of: {', '.join(KNOWN)}"
    if not isinstance(gpu, str):
        raise TypeError(f"gpu: got {type(gpu).__name__}; accepted is {accepted}")
    wanted = _spelling(gpu)
    for name, known in KNOWN.items():
        if wanted in (_spelling(name), _spelling(known.name)):
            return known
    for alias, name in _ALIASES.items():
        if wanted == _spelling(alias):
            return KNOWN[name]
    raise ValueError(f"gpu: got {gpu!r}; accepted is {accepted}")


def _spelling(name: str) -> str:
    """Without what people leave out: case, spaces, the maker."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
