"""GPUs in figures, for a planner that has none at hand."""

from __future__ import annotations

from typing import NamedTuple

_REACHABLE = 0.89  # of the nominal bandwidth: csrc/device/device.h
_MARK = "GeForce"  # csrc/device/query.cu


class GPU(NamedTuple):
    """A GPU in figures: its data sheet, or the white paper of its generation, has them."""

    name: str  # as `torch.cuda.get_device_name` says it
    capability: tuple[int, int]
    multiprocessors: int
    clock_mhz: float  # the highest
    memory_gb_per_s: float
    l2_mb: float  # 10^6 bytes

    @property
    def is_geforce(self) -> bool:
        """Whether fp32 sums take its tensor cores twice as long: no attribute of a device tells, so its name does."""
        return _MARK in self.name

    @property
    def numbers(self) -> tuple[int, ...]:
        """As C++ takes them: see csrc/torch/plans.cpp."""
        major, minor = self.capability
        return (
            10 * major + minor,
            self.multiprocessors,
            round(self.clock_mhz),
            round(_REACHABLE * 1000 * self.memory_gb_per_s),
            round(self.l2_mb * 1e6),
            int(self.is_geforce),
        )


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
