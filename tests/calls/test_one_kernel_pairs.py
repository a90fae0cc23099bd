"""Pairs of products as one call: what is done about each reason, and where two calls remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm import glu
from epigemm.arguments.calls import LinearCall
from epigemm.calls import one_kernel
from epigemm.epilogues.library import FUNCTIONS
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers

M, N, K = 4096, 2048, 1024


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)


def call(**changed: Any) -> LinearCall:
    """A pair whose both products have a bias."""
    x, weight, bias = (torch.empty(size, dtype=torch.bfloat16) for size in ((M, K), (N, K), (N,)))
    made = glu.pair_call(FUNCTIONS["gated_silu"], x, weight, bias, torch.empty_like(weight), bias, None)
    return made._replace(**changed)


def test_the_second_product_takes_the_place_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call()
    result = torch.empty(M, N)
    answers = Answers(monkeypatch, "ask", result)
    assert one_kernel.pair(made) is result
    (asked,) = answers.asked
    bias, bias2, gate = asked[3]
    assert bias is made.operands[0] and bias2 is made.operands[1] and gate is None
    assert asked[0] == made.epilogue.number and asked[-4] is made.weight2


def test_a_kernel_is_linked_and_the_call_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.empty(M, N)
    answers = Answers(monkeypatch, "ask", int(Reason.NOT_LINKED), result)
    assert one_kernel.pair(call()) is result
    (linked,) = answers.linked
    assert linked.startswith("epigemm_open_sm90_tma_bfloat16_") and linked.endswith("_pair")


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED, Reason.LACKS_PACK}))
def test_two_calls_for_any_other_reason(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask", int(reason))
    assert one_kernel.pair(call()) is None and len(answers.asked) == 1 and not answers.linked


def test_no_reason_is_met_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask", *[int(Reason.NOT_LINKED)] * 2)
    assert one_kernel.pair(call()) is None and len(answers.asked) == 2


def test_autocast_with_nothing_to_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.empty(M, N)
    answers = Answers(monkeypatch, "ask", int(Reason.NOT_LINKED), result)
    with torch.autocast("cpu", torch.bfloat16):
        assert one_kernel.pair(call()) is result
    (known,) = {each[-6] for each in answers.asked}
    assert known == dry_runs.ROUTED | dry_runs.OUT_APART


def test_two_calls_where_autocast_would_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask")
    with torch.autocast("cpu", torch.float16):
        assert one_kernel.pair(call()) is None and not answers.asked


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "plain"])
def test_two_calls_where_autograd_records(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask")
    made = call()
    with torch.autocast("cpu", torch.bfloat16, enabled):
        assert made.weight2 is not None
        made.weight2.requires_grad_()
        assert one_kernel.pair(made) is None and not answers.asked


def test_two_calls_under_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, made = Answers(monkeypatch, "ask"), call()
    many = torch.empty(2, M, K, dtype=torch.bfloat16)
    found = torch.vmap(lambda x: x if one_kernel.pair(made._replace(x=x)) is None else 2 * x)(many)
    assert found.shape == many.shape and not answers.asked


def test_a_profiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.empty(M, N)
    Answers(monkeypatch, "ask", result)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert one_kernel.pair(call()) is result
    assert "epigemm::gated_silu_bias2.000" in {event.key for event in profile.key_averages()}


def test_a_kernel_that_cannot_be_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, "ask", int(Reason.NOT_LINKED))
    monkeypatch.setattr(loader, "link", lambda *about: "no NVRTC")
    assert one_kernel.pair(call()) is None


@pytest.mark.parametrize(
    ("bias", "bias2", "name"),
    [
        (True, True, "gated_gelu_bias2.000"),
        (True, False, "gated_gelu.00"),
        (False, True, "gated_gelu_bias2.000"),
        (False, False, "gated_gelu.00"),
    ],
)
def test_the_epilogue_has_the_biases_that_there_are(bias: bool, bias2: bool, name: str) -> None:
    x = torch.empty(8, 16, dtype=torch.float16)
    vector = torch.empty(8, dtype=torch.float16)
    made = glu.pair_call(
        FUNCTIONS["gated_gelu"], x, x, vector if bias else None, x, vector if bias2 else None, None
    )
    given = (vector if bias else None, *([vector] if bias2 else []), None)
    assert made.epilogue.name == name and len(made.operands) == len(given)
    assert all(each is other for each, other in zip(made.operands, given, strict=True))


def test_on_a_cpu_there_are_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call()
    assert one_kernel.pair(made) is None
