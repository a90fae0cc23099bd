"""Plain calls that the C++ entry does not take: which they are, and what computes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm.arguments import precision as _precision
from epigemm.calls import entry
from epigemm.packs import weight_packs
from epigemm.packs.weight_packs import FIND
from epigemm.planner.reasons import Reason
from tests.support.untyped import torch as untyped
from tests.support.watching import DONE, WITH_ENTRY, linear_arguments

pytestmark = WITH_ENTRY


class SeesEverything(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def _x() -> Tensor:
    return torch.randn(4, 8)


def _needs_gradient() -> Tensor:
    return _x().requires_grad_()


def _negated() -> Tensor:
    return torch._neg_view(_x())


NOT_PLAIN: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "subclass": (lambda: _x().as_subclass(Subclass), nullcontext),
    "lazily negated": (_negated, nullcontext),
    "zero tensor": (lambda: torch._efficientzerotensor((4, 8)), nullcontext),
    "meta": (lambda: torch.empty(4, 8, device="meta"), nullcontext),
    "sparse": (lambda: _x().to_sparse(), nullcontext),
    "integers": (lambda: torch.ones(4, 8, dtype=torch.int64), nullcontext),
    "no tensor": (lambda: [1.0], nullcontext),
    "dispatch mode": (_x, SeesEverything),
    "function mode": (_x, SeesFunctions),
    "autocast": (_x, lambda: torch.autocast("cpu")),
    "profiler": (_x, torch.autograd.profiler.profile),
    "dual level": (_x, forward_ad.dual_level),
    "another dtype than the weight": (lambda: _x().double(), nullcontext),
    "another depth than the weight": (lambda: torch.randn(4, 9), nullcontext),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_others_answer(name: str, answered: list[Reason | str]) -> None:
    make, mode = NOT_PLAIN[name]
    x, weight = make(), torch.randn(16, 8)
    with mode():
        found = entry.linear(*linear_arguments(x, weight))
    assert found is (Reason.DOES_NOT_FIT if name.startswith("another") else Reason.NOT_PLAIN)
    assert answered == [Reason.DOES_NOT_FIT if name.startswith("another") else Reason.NOT_PLAIN]


def _leaked(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Tensor:
    """A tensor of a transformation that is over."""
    leaked: list[Tensor] = []

    def leak(row: Tensor) -> Tensor:
        leaked.append(row)
        return row.sum()

    transform(leak)(_x())
    return leaked[0]


RECORDED: dict[str, tuple[Callable[[], Any], Reason]] = {
    "plain": (_x, Reason.RECORDED),
    "gradient": (_needs_gradient, Reason.RECORDED),
    "Parameter": (lambda: Parameter(_x()), Reason.RECORDED),
    "subclass": (lambda: _x().as_subclass(Subclass), Reason.NOT_PLAIN),
    "lazily negated": (_negated, Reason.NOT_PLAIN),
    "of torch.func.grad": (lambda: _leaked(torch.func.grad), Reason.NOT_PLAIN),
    "of vmap": (lambda: _leaked(torch.func.vmap), Reason.NOT_PLAIN),
    "functional": (lambda: untyped._to_functional_tensor(_x()), Reason.NOT_PLAIN),
    "functional without elements": (
        lambda: untyped._to_functional_tensor(torch.randn(0, 8)),
        Reason.NOT_PLAIN,
    ),
    "without elements": (lambda: torch.randn(0, 8), Reason.NOT_PLAIN),
    "meta": (lambda: torch.empty(4, 8, device="meta"), Reason.NOT_PLAIN),
    "integers": (lambda: torch.ones(4, 8, dtype=torch.int64), Reason.NOT_PLAIN),
}


@pytest.mark.parametrize("name", RECORDED)
def test_autograd_alone_sees_recorded_calls(name: str, answered: list[Reason | str]) -> None:
    make, reason = RECORDED[name]
    x, weight, bias = make(), torch.randn(16, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    answered.clear()
    who = reason
    assert entry.linear(*linear_arguments(x, weight, strict=True)) is who
    assert entry.elementwise(epigemm.epilogues.library.BIAS_RELU, x, (bias,), None, None) is who
    assert answered == [reason, reason]
    with torch.no_grad():
        assert entry.linear(*linear_arguments(x, weight)) is not entry.RECORDED


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_others_answer_recorded_calls_too(name: str, answered: list[Reason | str]) -> None:
    make, mode = NOT_PLAIN[name]
    x, weight = make(), torch.randn(16, 8, requires_grad=True)
    with mode():
        found = entry.linear(*linear_arguments(x, weight))
    # What does not fit is found out when the call runs.
    recorded = name.startswith("another")
    assert found is (entry.RECORDED if recorded else entry.NOT_PLAIN)
    assert answered == [Reason.RECORDED if recorded else Reason.NOT_PLAIN]


def test_recorded_calls_run_in_their_nodes(answered: list[Reason | str]) -> None:
    """The entry is asked twice: who sees the call, and for its result."""
    x, weight = torch.randn(8192, 8), torch.randn(16, 8, requires_grad=True)
    with mock.patch.object(entry, "sees", side_effect=AssertionError):
        epigemm.linear_relu(x, weight)
        epigemm.sigmoid(_needs_gradient())
    assert answered == [Reason.RECORDED, DONE] * 2


BAD: dict[str, tuple[dict[str, Any], list[Reason]]] = {
    "bias of another length": ({"bias": torch.randn(15)}, [Reason.DOES_NOT_FIT]),
    "bias of another dtype": ({"bias": torch.randn(16).double()}, [Reason.DOES_NOT_FIT]),
    "bias that is no vector": ({"bias": torch.randn(1, 16)}, [Reason.DOES_NOT_FIT]),
    "a scalar that nothing reads": ({"scalar": 1.0}, [Reason.DOES_NOT_FIT]),
    "precision of no kind": ({"precision": "highst"}, []),
    "precision that is no text": ({"precision": 3}, []),
    "strict that is no flag": ({"strict": 1}, [Reason.NOT_PLAIN]),
    "strict without a fused kernel": ({"strict": True}, [Reason.NOT_FUSED]),
    "out of another shape": ({"out": torch.empty(4, 15)}, [Reason.DOES_NOT_FIT]),
    "out of another dtype": ({"out": torch.empty(4, 16).double()}, [Reason.DOES_NOT_FIT]),
    "out by columns": ({"out": torch.empty(16, 4).t()}, [Reason.NOT_STORABLE]),
    "out whose rows overlap": ({"out": torch.empty(64).as_strided((4, 16), (8, 1))}, [Reason.MAY_OVERLAP]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_left_to_those_who_word_it(name: str, answered: list[Reason | str]) -> None:
    changed, reasons = BAD[name]
    found = entry.linear(*linear_arguments(_x(), torch.randn(16, 8), **changed))
    assert found is (reasons[0] if reasons else Reason.NOT_PLAIN)
    assert answered == reasons


def test_what_is_left_to_the_cold_path_though_it_fits(answered: list[Reason | str]) -> None:
    assert entry.linear(*linear_arguments(torch.randn(0, 8), torch.randn(16, 8))) is Reason.IS_EMPTY
    out = torch.empty(2, 16, 2).transpose(1, 2)
    assert (
        entry.linear(*linear_arguments(torch.randn(2, 2, 8), torch.randn(16, 8), out=out))
        is Reason.NOT_STORABLE
    )
    assert answered == [Reason.IS_EMPTY, Reason.NOT_STORABLE]


def test_an_out_that_may_overlap_is_looked_at_closely(answered: list[Reason | str]) -> None:
    memory = torch.randn(8, 8)
    assert (
        entry.linear(*linear_arguments(memory[:4], torch.randn(8, 8), out=memory[2:6])) is Reason.MAY_OVERLAP
    )
    apart = entry.linear(*linear_arguments(memory[:4], torch.randn(8, 8), out=memory[4:]))
    assert isinstance(apart, Tensor)
    assert answered == [Reason.MAY_OVERLAP, DONE]


def test_a_pack_that_a_later_arithmetic_reads_is_not_overlooked() -> None:
    """At "high" under a setting that keeps torch's GEMM in fp32, split comes after scaled and TF32."""
    weight = torch.randn(16, 128)
    (highest, _), (high, in_tf32) = (_precision._BY_PRECISION[name] for name in ("highest", "high"))
    assert entry.slices_at_hand(weight, high, FIND) == (None, 0)
    pack = weight_packs.keep(weight, 2)
    found = entry.slices_at_hand(weight, highest, FIND)
    assert found is not None and found[0] is not None and found[0][0] is pack.read()
    assert entry.slices_at_hand(weight, high, FIND) is None
    assert entry.slices_at_hand(weight, in_tf32, FIND) == (None, 0), "split is not tried there"
