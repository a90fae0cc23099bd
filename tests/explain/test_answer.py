"""The text of an explanation; and how that of a module is read: as a table, by number and by name."""

from __future__ import annotations

import pytest

from epigemm.explain.answer import GEMM_ELEMENTWISE, Explanation, ModuleExplanation, Product, numbered


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


CALL = Explanation("fc: epigemm::linear", "fused", "a kernel", "bf16", ["the fastest", "more"], us=12.34)
FUSED = Product("fc", "bias_relu", (16, 8, 4), "bfloat16", explanation=CALL, notes=("ends: a view",))
PLAIN = Product("head.out", "matmul", (16, 8, 4), "float32", batch=3, why="it is no layer")
UNKNOWN = Product("attention", "einsum", (), "float32")


def test_one_line_a_product() -> None:
    text = str(ModuleExplanation("Model as it is", [FUSED, PLAIN, UNKNOWN], ["a note"]))
    assert text.splitlines() == [
        "Model as it is:",
        "  0  fc         bias_relu  16 x 8 x 4       bfloat16  fused kernel   12.3 us predicted  the fastest",
        "  1  head.out   matmul     3 of 16 x 8 x 4  float32   PyTorch's own                     it is no layer",
        "  2  attention  einsum     unknown size     float32   PyTorch's own",
        "a note",
    ]
    assert str(ModuleExplanation("Model as it is")) == "Model as it is:\n  no matrix product ran"


def test_any_in_full() -> None:
    found = ModuleExplanation("Model", [FUSED, PLAIN])
    assert found[0] is found["fc"] is FUSED and found[-1] is found["head.out"] is PLAIN
    assert len(found) == 2 and list(found) == [FUSED, PLAIN]
    assert str(FUSED) == f"fc: 16 x 8 x 4, bfloat16\n{CALL}\n  fuse:       ends: a view"
    assert str(PLAIN) == "head.out: 3 of 16 x 8 x 4, float32\n  matmul: PyTorch's own: it is no layer"
    with pytest.raises(KeyError, match=r"'fc9': accepted are fc, head\.out"):
        found["fc9"]
    with pytest.raises(IndexError):
        found[2]


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        ("gemm+elementwise", "fallback"),
        ("elementwise", "elementwise kernel"),
        ("reference", "PyTorch's operators"),
    ],
)
def test_what_runs_in_a_word(path: str, runs: str) -> None:
    call = Explanation("", path, "", "", [])
    assert Product("fc", "", (), "", explanation=call).runs == runs


def test_the_second_product_of_a_layer_has_a_number() -> None:
    assert [each.name for each in numbered([FUSED, PLAIN, FUSED, FUSED])] == [
        "fc",
        "head.out",
        "fc#2",
        "fc#3",
    ]


def test_a_measured_time_is_called_so() -> None:
    call = Explanation("", "fused", "", "", ["why"], us=1.0, is_measured=True)
    assert Product("fc", "", (1, 2, 3), "", explanation=call).columns[5] == "1.0 us measured"
