"""How an explanation of a module is read: as a table, by number and by name."""

from __future__ import annotations

import pytest

from epigemm.explain.answer import Explanation, ModuleExplanation, Product

CALL = Explanation("fc: epigemm::linear", "fused", "a kernel", "bf16", ["the fastest", "more"], us=12.34)
FUSED = Product("fc", "bias_relu", (16, 8, 4), "bfloat16", explanation=CALL, notes=("ends: a view",))
PLAIN = Product("head.out", "matmul", (16, 8, 4), "float32", batch=3, why="it is no layer")


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
