"""Calls that torch's one kernel answers: what is remembered of them, and that nothing else goes that way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import epigemm
from epigemm import packs, plans, shortcut
from epigemm.epilogues import BIAS, BIAS_RELU, RELU_DIV
from epigemm.precision import DEFAULT
from tests.support.cases import fused_unavailable

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


def draw(device: str, dtype: torch.dtype, m: int = 8, n: int = 16, k: int = 32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*size, device=device).to(dtype) for size in ((m, k), (n, k), (n,)))


def test_nothing_on_a_cpu_has_a_key() -> None:
    x, weight, bias = draw("cpu", torch.float32)
    assert shortcut.key_of(BIAS_RELU, x, weight, bias, DEFAULT, packs.FIND) is None
    assert not shortcut.answers(None)
    shortcut.remember(None, BIAS_RELU, x, weight, bias, DEFAULT, x)
    assert not shortcut._verdicts


def test_forgetting_and_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "_is_torchs", lambda *_: True)
    monkeypatch.setattr(shortcut, "_REMEMBERED", 3)
    x, weight, bias = draw("cpu", torch.float32)
    for number in range(5):
        shortcut.remember((number,), BIAS, x, weight, bias, DEFAULT, x)
        assert shortcut.answers((number,)) and len(shortcut._verdicts) <= 3
    plans.forget()
    assert not shortcut.answers((4,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["linear", "linear_relu"])
def test_a_remembered_call_gives_the_same_result(function: str, dtype: torch.dtype) -> None:
    run: Any = getattr(epigemm, function)
    x, weight, bias = draw("cuda", dtype, 256, 1024, 1024)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = expected.relu() if function == "linear_relu" else expected
    shortcut._verdicts.clear()
    first = run(x, weight, bias)
    assert len(shortcut._verdicts) == 1
    for key in shortcut._verdicts:
        shortcut._verdicts[key] = True
    second = run(x, weight, bias)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-9}[dtype]
    for result in (first, second):
        assert result.dtype == dtype and result.is_contiguous()
        assert bool(((result.double() - expected).abs() <= bound * (expected.abs() + 32)).all())


@pytest.mark.gpu
def test_what_is_never_torchs() -> None:
    x, weight, bias = draw("cuda", torch.bfloat16)
    assert shortcut.key_of(RELU_DIV, x, weight, bias, DEFAULT, packs.FIND) is None
    assert shortcut.key_of(BIAS, x, weight, None, DEFAULT, packs.FIND) is None
    assert shortcut.key_of(BIAS, x[None], weight, bias, DEFAULT, packs.FIND) is None
    assert not shortcut._is_torchs(BIAS_RELU, x, weight[:1], bias[:1], DEFAULT, x[:, :1].contiguous())
    if not fused_unavailable():
        x, weight, bias = draw("cuda", torch.bfloat16, 16384, 4096, 4096)
        assert not shortcut._is_torchs(BIAS_RELU, x, weight, bias, DEFAULT, x @ weight.t()), (
            "the fused kernel is faster there"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_input_is_refused_on_the_shortcut_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortcut, "answers", lambda key: key is not None)
    x, weight, bias = draw("cuda", dtype)
    for arguments, message in (
        ((x[:, :31], weight, bias), "x: got shape"),
        ((x, weight.double(), bias), "weight: got dtype"),
        ((x, weight, bias.cpu()), "bias: got device"),
    ):
        with pytest.raises(RuntimeError, match=message):
            epigemm.linear_relu(*arguments)
