"""What `explain` gives of a call: an `Explanation`, its text, and the names of the paths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epigemm.explain.words import candidate_text, listed

FUSED = "fused"
GEMM_ELEMENTWISE = "gemm+elementwise"
ELEMENTWISE = "elementwise"
REFERENCE = "reference"


@dataclass(frozen=True)
class Explanation:
    """What one call would do.

    Attributes:
        op: the public function and the epilogue behind it.
        path: "fused" (one GEMM kernel with the epilogue in it; fp32 on fp16 slices needs helpers before and after
            it, see `kernels`), "gemm+elementwise" (a GEMM, torch's or, if gradients are recorded, epigemm's, then one
            elementwise kernel where the GEMM does not do everything), "elementwise" (one kernel), or "reference"
            (plain PyTorch operations, where epigemm has no kernels).
        kernel: the kernel that does most of the work.
        arithmetic: what the numbers are multiplied and accumulated in.
        reasons: why this path; for a path that is not fused, what ruled the fused kernel out.
        candidates: the fused kernels that were compared, best first, with their predicted microseconds
            (`predicted_us`) and, where that is known, what was measured (`measured_us`).
        backward: what the first derivative will run.
        kernels: every launch, in order.
        us: the time of the chosen kernel, or of the fallback, by which the planner decided; None if nothing was
            compared.
        is_measured: whether `us` was measured (by `epigemm.tune`), not predicted.
        results: for a function with several results, what each of them is; `kernels` refers to them by name.
    """

    op: str
    path: str
    kernel: str
    arithmetic: str
    reasons: list[str]
    candidates: list[dict[str, Any]] = field(default_factory=list)
    backward: str = ""
    kernels: list[str] = field(default_factory=list)
    us: float | None = None
    is_measured: bool = False
    results: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The explanation as text, one line for each fact."""
        lines = [f"{self.op}", f"  path:       {self.path}", f"  kernel:     {self.kernel}"]
        lines += [f"  arithmetic: {self.arithmetic}"]
        lines += listed("results", self.results)
        lines += listed("because", self.reasons)
        lines += listed("launches", [f"{i}. {kernel}" for i, kernel in enumerate(self.kernels, 1)])
        lines += listed("compared", [candidate_text(candidate) for candidate in self.candidates])
        lines += [f"  backward:   {self.backward}"]
        return "\n".join(lines)
