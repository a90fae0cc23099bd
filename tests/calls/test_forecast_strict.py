"""strict=True: an error with the reason, before anything is launched, wherever no fused kernel would run."""

from __future__ import annotations

import pytest
import torch

from tests.ops.op import Op
from tests.support.public import PUBLIC_LINEAR

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]
functions = pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)


@functions
def test_fused_calls_pass_on_a_gpu(function: Op, rng: torch.Generator) -> None:
    for dtype, precision in ((torch.bfloat16, None), (torch.float32, "highest"), (torch.float32, "high")):
        if function.name in ("linear", "linear_relu") and dtype is torch.bfloat16:
            continue  # cuBLAS adds a bias itself, and a ReLU behind it
        arguments = function.draw(rng, (4096,), 2048, 2048, dtype=dtype, device="cuda")
        expected = function.call(**arguments, precision=precision)
        assert torch.equal(function.call(**arguments, precision=precision, strict=True), expected)


@functions
@pytest.mark.parametrize(
    ("dtype", "shape", "word"),
    [
        (torch.float64, (256, 256, 256), "float64"),
        (torch.bfloat16, (256, 256, 255), "copies take"),
        (torch.float32, (256, 256, 64), "K = 64"),
    ],
    ids=str,
)
def test_others_are_refused_on_a_gpu(
    function: Op, dtype: torch.dtype, shape: tuple[int, int, int], word: str, rng: torch.Generator
) -> None:
    arguments = function.draw(rng, shape[:1], *shape[1:], dtype=dtype, device="cuda")
    with pytest.raises(RuntimeError, match=f"strict: got True .*{word}"):
        function.call(**arguments, strict=True)
