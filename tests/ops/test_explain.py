"""`epigemm.explain` and `strict=True` of every row: what would run, and why no fused kernel does; nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigemm
from tests.ops.op import COUNT, VARIANCE, Op, map_tensors, tensors_of
from tests.ops.table import rows


@rows("explain", lambda op: op.layer is None and op.name != "nn.Sigmoid")
def test_explain(op: Op, rng: torch.Generator) -> None:
    """By the function's name; the launches; the reason. Arguments by name, with and without gradients."""
    arguments = op.draw(rng)
    function: Any = op.function
    given = dict(arguments)
    if op.name == "linear_glu-two_weights":
        function = epigemm.linear_glu
    name = op.name.split("-")[0].removeprefix("@").removesuffix(".elementwise")
    for recorded in (False, True):
        kept = map_tensors(given, torch.clone)
        first, named = op.in_order(given)
        found = epigemm.explain(function, *first, **named)
        for place, value in tensors_of(kept).items():
            assert torch.equal(given[place], value)
        text = str(found)
        assert found.op.startswith(name) and name in text
        assert found.kernels
        if op.is_linear:
            assert any("not on a CUDA device" in reason for reason in found.reasons)
        assert ("not needed" in found.backward) is not recorded, found.backward
        for leaf in op.leaves(given):
            given[leaf] = given[leaf].clone().requires_grad_()


@rows("explain layers", lambda op: op.layer is not None and not op.of_kind(COUNT))
def test_explain_layers(op: Op, rng: torch.Generator) -> None:
    """A module is called, and its products are told."""
    layer, inputs = op.module(op.draw(rng))
    found = epigemm.explain(layer.eval(), *inputs)
    assert len(found.products) >= 1
    assert str(found)


@rows("explain what is wrong", lambda op: op.layer is None and op.name != "nn.Sigmoid")
def test_explain_refuses_what_the_call_refuses(op: Op, rng: torch.Generator) -> None:
    """With the same words."""
    arguments = op.draw(rng)
    function: Any = epigemm.linear_glu if op.name == "linear_glu-two_weights" else op.function
    given = {**arguments, op.input: arguments[op.input].int()}
    with pytest.raises(RuntimeError) as caught:
        op.call(**given)
    first, named = op.in_order(given)
    with pytest.raises(RuntimeError) as told:
        epigemm.explain(function, *first, **named)
    assert str(told.value) == str(caught.value)


@rows("strict", lambda op: op.takes_precision)
def test_strict(op: Op, rng: torch.Generator) -> None:
    """On a CPU no fused kernel runs: an error that says so, before `out` is written; not so where `strict` is False."""
    arguments = op.draw(rng)
    words = "strict: got True for a call that no fused kernel would run"
    with pytest.raises(RuntimeError, match=words):
        op.call(**arguments, strict=True)
    if op.takes_out:
        out = torch.full((9, 16), float("nan"))
        with pytest.raises(RuntimeError, match=words):
            op.call(**arguments, strict=True, out=out)
        assert bool(out.isnan().all())
    arguments[op.input].requires_grad_()
    with pytest.raises(RuntimeError, match=words):
        op.call(**arguments, strict=True)
    op.call(**arguments, strict=False)


@rows("explain writes nothing", lambda op: op.layer is None and op.takes_out)
def test_explain_writes_nothing(op: Op, rng: torch.Generator) -> None:
    """Not to `out` either, also where BatchNorm is not folded."""
    first, named = op.in_order(op.draw(rng))
    is_norm = bool(op.of_kind(VARIANCE))
    for options in ({}, {"eps": 1e-60}) if is_norm else ({},):
        out = torch.full((9, 16), 7.0)
        function: Any = epigemm.linear_glu if op.name == "linear_glu-two_weights" else op.function
        epigemm.explain(function, *first, **named, **options, out=out)
        assert bool((out == 7.0).all())
