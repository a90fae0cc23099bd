"""How an explanation of a module is read: as a table, by number and by name."""

from __future__ import annotations

import pytest

from epigemm.explain.answer import Explanation, ModuleExplanation, Product, numbered

CALL = Explanation("fc: epigemm::linear", "fused", "a kernel", "bf16", ["the fastest", "more"], us=12.34)
FUSED = Product("fc", "bias_relu", (16, 8, 4), "bfloat16", explanation=CALL, notes=("ends: a view",))
SLOW = Explanation("", "gemm+elementwise", "", "", ["why"], us=1.0, is_measured=True)
FALLBACK = Product("fc", "linear", (16, 8, 4), "float32", explanation=SLOW)
PLAIN = Product("head.out", "matmul", (16, 8, 4), "float32", batch=3, why="it is no layer")
UNKNOWN = Product("attention", "einsum", (), "float32")


def test_one_line_a_product() -> None:
    """Each with a name of its own."""
    products = numbered([FUSED, FALLBACK, PLAIN, UNKNOWN])
    text = str(ModuleExplanation("Model as it is", products, ["a note"]))
    assert text.splitlines() == [
        "Model as it is:",
        "  0  fc         bias_relu  16 x 8 x 4       bfloat16  fused kernel   12.3 us predicted  the fastest",
        "  1  fc#2       linear     16 x 8 x 4       float32   fallback       1.0 us measured    why",
        "  2  head.out   matmul     3 of 16 x 8 x 4  float32   PyTorch's own                     it is no layer",
        "  3  attention  einsum     unknown size     float32   PyTorch's own",
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
