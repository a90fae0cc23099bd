"""What `explain` gives: an `Explanation` of a call; a `ModuleExplanation` of a module's call, of which each is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from epigemm.planner import plans

FUSED = "fused"
GEMM_ELEMENTWISE = "gemm+elementwise"
ELEMENTWISE = "elementwise"
REFERENCE = "reference"

BY_TORCH = "PyTorch's own"
_RUNS = {
    FUSED: "fused kernel",
    GEMM_ELEMENTWISE: "fallback",
    ELEMENTWISE: "elementwise kernel",
    REFERENCE: "PyTorch's operators",
}


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
        lines += _listed("results", self.results)
        lines += _listed("because", self.reasons)
        lines += _listed("launches", [f"{i}. {kernel}" for i, kernel in enumerate(self.kernels, 1)])
        compared = list[str]()
        for each in self.candidates:
            how = "measured" if "measured_us" in each else "predicted"
            compared.append(f"{plans.fused_us(each):9.1f} us {how:<9}  {plans.tile_text(each)}")
        lines += _listed("compared", compared)
        lines += [f"  backward:   {self.backward}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Product:
    """One matrix product of a module's call, or one of epigemm's elementwise calls.

    Attributes:
        name: its layer's name, as in `named_modules`; the second product of a layer `fc` is `fc#2`.
        function: what computes it.
        size: (M, N, K); (M, N) of an elementwise call; empty where it is not known.
        batch: the number of products, for a batched product.
        dtype: of x, as "bfloat16".
        why: why epigemm does not compute it; empty if there is an explanation.
        explanation: the full explanation of the call; None if it is not a call of epigemm.
        notes: notes of `fuse` about it.
    """

    name: str
    function: str = ""
    size: tuple[int, ...] = ()
    dtype: str = ""
    batch: int = 1
    why: str = ""
    explanation: Explanation | None = None
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> str:
        """What runs: "fused kernel", "fallback", "elementwise kernel", "PyTorch's operators", "PyTorch's own"."""
        return BY_TORCH if self.explanation is None else _RUNS[self.explanation.path]

    @property
    def columns(self) -> tuple[str, ...]:
        """One line, in columns."""
        size = " x ".join(map(str, self.size)) or "unknown size"
        size = f"{self.batch} of {size}" if self.batch != 1 else size
        why, us = self.why, ""
        if (found := self.explanation) is not None:
            why = found.reasons[0] if found.reasons else ""
            if found.us is not None:
                us = f"{found.us:.1f} us {'measured' if found.is_measured else 'predicted'}"
        return (self.name, self.function, size, self.dtype, self.runs, us, why)

    def __str__(self) -> str:
        """In full."""
        name, _, size, dtype, *_ = self.columns
        head = f"{name}: {size}, {dtype}"
        if self.explanation is None:
            body = [f"  {self.function}: {self.runs}{f': {self.why}' if self.why else ''}"]
        else:
            body = str(self.explanation).splitlines()
        return "\n".join([head, *body, *(f"  fuse:       {note}" for note in self.notes)])


@dataclass(frozen=True)
class ModuleExplanation:
    """What one call of a module would do; print it to read it, or one product of it: `explanation["layers.3"]`.

    Attributes:
        about: the module, and whether the products are those of the module as it is, or after `fuse`.
        products: in the order in which they run.
        notes: notes about all products.
    """

    about: str
    products: list[Product] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, which: int | str) -> Product:
        """A product by its number or its layer's name.

        Raises:
            IndexError: there is no such number.
            KeyError: there is no such name; the message lists the names.
        """
        if isinstance(which, int):
            return self.products[which]
        for product in self.products:
            if product.name == which:
                return product
        raise KeyError(f"{which!r}: accepted are {', '.join(each.name for each in self.products) or 'none'}")

    def __len__(self) -> int:
        return len(self.products)

    def __iter__(self) -> Iterator[Product]:
        return iter(self.products)

    def __str__(self) -> str:
        """One line a product."""
        rows = [(str(number), *each.columns) for number, each in enumerate(self.products)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = [
            "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        lines = lines or ["no matrix product is listed (rows in groups are, if no gradient is recorded)"]
        return "\n".join([f"{self.about}:", *(f"  {line}".rstrip() for line in lines), *self.notes])


def _listed(title: str, items: Sequence[str]) -> list[str]:
    """Lines under one title."""
    heads = [f"{title}:"] + [""] * len(items)
    return [f"  {head:<11} {item}" for head, item in zip(heads, items, strict=False)]
