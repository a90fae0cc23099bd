"""What runs a call, as csrc/call decides it: numbers and words agree, and what each circumstance changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.registry import BIAS, BIAS_RELU, RELU_DIV
from epigemm.planning import decisions, plans
from epigemm.planning.decisions import FALLBACK, NO_COST, PER_CALL, SHIFTS, SHORT, SLICES, STALE, TENSORS

H200 = (-1, 90, 132, 1980, 4285000)
IEEE, HIGHEST, IN_TF32, HIGH, TF32 = (2 * row for row in range(5))
"""Rows of `fp32_roads` in csrc/call/decide.cpp, times two."""
EVERYWHERE = {"split": 1, "scaled": 1}


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(decisions, "_described", lambda x: H200)


def call_of(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> LinearCall:
    """A bare product, of tensors that nobody fills."""
    return LinearCall(BIAS, torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype))


def cost(costs: dict[str, int]) -> int:
    return sum(value << SHIFTS[name] for name, value in costs.items())


def decided(call: LinearCall, code: int, out: Tensor | None = None, **costs: int) -> tuple[int, str]:
    decision = decisions.decide(call._replace(out=out), code, cost(costs))
    way = decisions.way(decision)
    return way, decisions.arithmetic(decision) if way else ""


def is_packed(decision: int) -> bool:
    """On slices: whether the weight's were not charged to the call."""
    return bool(decision >> 6 & 1)


def told(call: LinearCall, code: int, out: Tensor | None = None, **costs: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = decisions.explain(call._replace(out=out), code, cost(costs))["tried"]
    return found


sizes = st.sampled_from([1, 3, 16, 100, 512, 513, 2048])


@given(
    m=sizes, n=sizes, k=sizes, code=st.integers(0, 11), split=st.integers(0, 6), scaled=st.integers(0, 6),
    epilogue=st.sampled_from([BIAS, BIAS_RELU, RELU_DIV]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_numbers_and_words_agree(
    m: int, n: int, k: int, code: int, split: int, scaled: int, epilogue: Any, dtype: torch.dtype
) -> None:
    costs = {"split": split & 4 | min(split & 3, 2), "scaled": scaled & 4 | min(scaled & 3, 2)}
    call = call_of(m, n, k, dtype)._replace(epilogue=epilogue, scalars=(2.0,) if epilogue.scalar else ())
    decision = decisions.decide(call, code, cost(costs))
    answer = decisions.explain(call, code, cost(costs))
    assert answer["gemm"] == decisions.gemm(decision)
    first = next((each for each in answer["tried"] if each["runs"]), None)
    if first is None:
        assert decisions.way(decision) == FALLBACK
        assert all(each["why_not"] or each["plan"]["why_not"] for each in answer["tried"])
        return
    assert decisions.way(decision) == (SLICES if first["arithmetic"] in SHIFTS else TENSORS)
    assert decisions.arithmetic(decision) == first["arithmetic"]
    assert not first["why_not"] and first["plan"]["fused"]
    assert list(decisions.plan(decision)) == first["plan"]["plan"]
    assert is_packed(decision) == first["packed"]
    assert decisions.is_padded(decision) == first["padded"] == (first["arithmetic"] in SHIFTS and n % 4 != 0)


def worth_a_pack_alone() -> LinearCall:
    """A product that is worth reading a pack for, but not making one."""
    for m in range(16, 4096, 16):
        fused = [
            plans.ask("bias", m, 1024, 512, "float32", "split", packed=packed, gpu=H200[1:], has_bias=False)[
                "fused"
            ]
            for packed in (True, False)
        ]
        if fused == [True, False]:
            return call_of(m, 1024, 512)
    raise AssertionError("dispatch knows no such problem")


def test_what_slices_cost() -> None:
    """A stale pack is made for one call where that is worth it, else for many."""
    large, small = call_of(2048, 1024, 512), worth_a_pack_alone()
    for call, ways in ((large, (True, True, True)), (small, (False, True, True))):
        for cost_of, runs in zip((PER_CALL, NO_COST, STALE), ways, strict=True):
            assert (decided(call, HIGHEST, split=cost_of) == (SLICES, "split")) == runs
    for call, packed in ((large, False), (small, True)):
        assert is_packed(decisions.decide(call, HIGHEST, STALE)) == packed
    assert decided(large, HIGHEST, split=NO_COST | SHORT) == (FALLBACK, "")
    words = [each["why_not"] for each in told(large, HIGHEST, split=NO_COST | SHORT)]
    assert "found no memory for fp16 slices" in words[0] and not words[1]


def test_each_arithmetic_has_costs_of_its_own() -> None:
    call = call_of(8192, 8192, 8192)
    assert decided(call, HIGH) == (SLICES, "scaled")
    assert decided(call, HIGH, scaled=SHORT) == (TENSORS, "tf32")
    transposed = call._replace(x=call.x.t())
    assert decided(transposed, HIGH, scaled=SHORT) == (SLICES, "split")
    assert decided(transposed, HIGH, scaled=SHORT, split=SHORT) == (FALLBACK, "")
    reasons = [
        each["why_not"] or each["plan"]["why_not"]
        for each in told(transposed, HIGH, scaled=SHORT, split=SHORT)
    ]
    assert "x is not a row-major matrix" in reasons[1]
    assert "found no memory" in reasons[0] and "found no memory" in reasons[2]


@pytest.mark.parametrize(("code", "arithmetics"), [
    (IEEE, ["ieee"]),
    (HIGHEST, ["split", "ieee"]),
    (IN_TF32, ["scaled", "tf32"]),
    (HIGH, ["scaled", "tf32", "split"]),
    (TF32, ["tf32"]),
])  # fmt: skip
def test_what_is_tried(code: int, arithmetics: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(64, 64, 128)
    assert [each["arithmetic"] for each in told(call, code)] == arithmetics
    assert [each["arithmetic"] for each in told(call_of(64, 64, 128, torch.float16), code)] == ["ieee"]
    monkeypatch.setattr(decisions, "_described", lambda x: None)
    on_cpu = told(call, code)
    assert [each["arithmetic"] for each in on_cpu] == [each for each in arithmetics if each not in SHIFTS]
    assert all("not on a CUDA device" in each["plan"]["why_not"] for each in on_cpu)


@pytest.mark.parametrize(("code", "k", "arithmetics"), [
    (IEEE, 64, ["ieee"]),
    (HIGHEST, 128, ["split"]),
    (HIGHEST, 127, ["split", "ieee"]),
    (IN_TF32, 8192, ["scaled"]),
    (IN_TF32, 8193, ["scaled", "split"]),
    (HIGH, 15, ["scaled", "split", "ieee"]),
    (TF32, 64, ["tf32"]),
])  # fmt: skip
def test_batch_invariant_calls_come_to_the_first_that_is_accurate(
    code: int, k: int, arithmetics: list[str]
) -> None:
    for m in (1, 64, 5000):
        call = call_of(m, 64, k)._replace(invariant=True)
        tried = told(call, code)
        ways = [each["arithmetic"] for each in tried]
        assert ways[: len(arithmetics)] == arithmetics
        assert [each["runs"] for each in tried].index(True) == len(arithmetics) - 1
        assert decided(call, code)[1] == arithmetics[-1]


@pytest.mark.parametrize(("changed", "words"), [
    ({"code": 12}, r"fp32 must be in 0\.\.11, got 12"),
    ({"code": -2}, "fp32 must be in"),
    ({"slices": 3}, "slices: there is no cost 3"),
    ({"slices": 3 << 3}, "slices: there is no cost 3"),
    ({"gpu": (-1, 90)}, "gpu must be empty or"),
    ({"gpu": (64, 90, 132)}, "device must be"),
    ({"weight": torch.empty(4, 7)}, "its last dimension must be weight's in_features, 7"),
    ({"out": torch.empty(3, 5)}, "out has shape"),
    ({"out": torch.empty(3, 4, dtype=torch.float16)}, "same dtype"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    given = {"weight": torch.empty(4, 8), "code": 0, "slices": 0, "gpu": H200, "out": None} | changed
    head = (
        "bias",
        torch.empty(3, 8),
        given["weight"],
        None,
        None,
        None,
        given["code"],
        given["slices"],
        False,
    )
    with pytest.raises(RuntimeError, match=words):
        ops._linear_out(*head, given["gpu"], False, given["out"])
    with pytest.raises(RuntimeError, match=words):
        ops._explain_call(*head, given["gpu"], given["out"])
