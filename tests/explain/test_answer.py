"""The text of an explanation."""

from __future__ import annotations

from epigemm.explain.answer import GEMM_ELEMENTWISE, Explanation


def test_one_line_for_each_fact() -> None:
    found = Explanation(
        "linear_relu: D = relu(acc + bias[n])",
        GEMM_ELEMENTWISE,
        "torch GEMM (mm)",
        "float32",
        ["no GPU", "no driver"],
        backward="not needed",
        kernels=["torch GEMM (mm)", "PyTorch reference"],
    )
    assert str(found).splitlines() == [
        "linear_relu: D = relu(acc + bias[n])",
        "  path:       gemm+elementwise",
        "  kernel:     torch GEMM (mm)",
        "  arithmetic: float32",
        "  because:    no GPU",
        "              no driver",
        "  launches:   1. torch GEMM (mm)",
        "              2. PyTorch reference",
        "  backward:   not needed",
    ]
