"""Gradients: PyTorch's, of every operand, of first and second order; none is missing, and none is recorded in vain."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.op import (
    COUNT,
    MATRIX,
    TWO_WEIGHTS,
    WEIGHT,
    Arguments,
    Op,
    map_tensors,
    results_of,
    tensors_of,
)
from tests.ops.table import few, rows
from tests.ops.test_values import ieee
from tests.support.threads import at_once
from tests.support.untyped import backends, backward

Call = Callable[..., Any]


def with_leaves(op: Op, arguments: Arguments, wanted: Sequence[str] | None = None) -> Arguments:
    """Fresh copies; those that are wanted, or all that may, require a gradient."""
    fresh = map_tensors(arguments, lambda t: t.detach().clone())
    for name in op.leaves(fresh) if wanted is None else wanted:
        fresh[name].requires_grad_()
    return fresh


def upstream_of(results: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """A gradient of each result."""
    return [torch.randn(each.shape, generator=rng, dtype=torch.float64).to(each) for each in results]


def gradients(
    op: Op, call: Call, given: Arguments, upstream: Sequence[Tensor], **options: Any
) -> list[Tensor]:
    """Of all leaves."""
    pairs = [
        (each, one)
        for each, one in zip(results_of(call(**given)), upstream, strict=True)
        if each.is_floating_point() and each.requires_grad
    ]
    leaves = [value for value in tensors_of(given).values() if value.requires_grad]
    return list(
        torch.autograd.grad(
            [each for each, _ in pairs], leaves, [one.to(each) for each, one in pairs], **options
        )
    )


@rows("gradients")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Of all operands at once, against those of the PyTorch program in fp64.

    In fp64 element by element. Else by their norms: a result near a kink may be rounded across it. A gradient is a sum
    of products of numbers, each rounded a few times: to 16 bits, or to fp32.
    """
    for options in op.variants() if dtype is torch.float64 else [{"tensor_numbers": True}]:
        lead = (3, 7) if "shares_rows" in options else (19,)
        arguments = op.draw(rng, lead, dtype=dtype, device=device, **options)
        given, exact = with_leaves(op, arguments), with_leaves(op, map_tensors(arguments, in_fp64))
        results = results_of(op.reference(**exact))
        upstream = upstream_of([each.to(dtype) for each in results], rng)
        assert [each.requires_grad for each in results_of(op.call(**given))] == [
            each.requires_grad for each in results
        ]
        wanted = gradients(op, op.reference, exact, [each.double() for each in upstream])
        found = gradients(op, op.call, {**given, **ieee(op)}, upstream)
        names = op.leaves(arguments)
        for name, one, other in zip(names, found, wanted, strict=True):
            assert one.shape == arguments[name].shape
            assert one.dtype is dtype or not arguments[name].dim()
            if dtype is torch.float64:
                fp32: dict[str, Any] = (
                    {"rtol": 1e-5, "atol": 1e-5} if any(each.is_fp32 for each in op.results) else {}
                )
                torch.testing.assert_close(one, other, **fp32)
                continue
            error = torch.linalg.vector_norm(one.double() - other)
            size = torch.linalg.vector_norm(other) + 1e-3
            if op.of_kind(COUNT):  # the bias in front of a mean that is subtracted: a sum that is zero
                size = size + torch.linalg.vector_norm(upstream[0].double())
            most = 60 * torch.finfo(dtype).eps * float(size)
            assert float(error) <= most, f"{name}: {float(error) / most} times"


def in_fp64(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


@rows("precision of gradients", lambda op: op.takes_precision and few(op))
def test_a_precision_holds_in_the_backward_pass(op: Op, rng: torch.Generator) -> None:
    """Whatever torch's setting is by then, which stays as it is."""
    arguments = op.draw(rng, (64,), 40, 96, tensor_numbers=True)
    exact = with_leaves(op, map_tensors(arguments, torch.Tensor.double))
    upstream = upstream_of(results_of(op.reference(**exact)), rng)
    wanted = gradients(op, op.reference, exact, upstream)
    backends.mkldnn.matmul.fp32_precision = "bf16"
    for precision in ("highest", "ieee"):
        given = with_leaves(op, arguments)
        found = gradients(op, op.call, {**given, "precision": precision}, upstream)
        for one, other in zip(found, wanted, strict=True):
            error = torch.linalg.vector_norm(one.double() - other)
            assert float(error) <= 2.0**-16 * float(torch.linalg.vector_norm(other))
        assert backends.mkldnn.matmul.fp32_precision == "bf16"


@rows("layouts of upstream gradients", lambda op: len(op.results) == 1)
def test_layouts_of_upstream_gradients(op: Op, rng: torch.Generator) -> None:
    """Transposed, expanded, with gaps."""
    arguments = op.draw(rng, dtype=torch.float64, tensor_numbers=True)
    (like,) = upstream_of(results_of(op.reference(**arguments)), rng)
    lies = [like[:1].expand_as(like), torch.stack((like, like), -1)[..., 0]]
    for upstream in (*lies, like.mT.contiguous().mT) if like.dim() == 2 else lies:
        found = gradients(op, op.call, with_leaves(op, arguments), [upstream])
        wanted = gradients(op, op.reference, with_leaves(op, arguments), [upstream])
        torch.testing.assert_close(found, wanted)


@rows("one tensor twice", lambda op: op.is_linear and not op.of_kind(TWO_WEIGHTS, COUNT))
def test_one_tensor_as_two_arguments(op: Op, rng: torch.Generator) -> None:
    """x is the weight, too, and a matrix: their gradients add up."""
    arguments = op.draw(rng, (5,), 5, 5, dtype=torch.float64)
    found = []
    for call in (op.call, op.reference):
        both = arguments["x"].clone().requires_grad_()
        given = arguments | dict.fromkeys(("x", *op.of_kind(WEIGHT, MATRIX)), both)
        results = [
            each
            for each, result in zip(results_of(call(**given)), op.results, strict=True)
            if each.requires_grad and not result.is_fp32
        ]
        total: Any = sum(each.square().sum() for each in results)
        found.append(torch.autograd.grad(total, both)[0] if results else None)
    torch.testing.assert_close(*found)


@rows(
    "inference tensors", lambda op: op.function is not None and len(op.leaves(op.draw(torch.Generator()))) > 1
)
def test_inference_tensors(op: Op, rng: torch.Generator) -> None:
    """As PyTorch: one that a derivative needs may not be saved, and the error says so; else there are gradients."""
    with torch.inference_mode():
        frozen = op.draw(rng, (19,))
    given = with_leaves(op, frozen)
    given[op.input] = frozen[op.input]
    if op.leaves(frozen) == [op.input]:
        return
    raised = []
    for call in (op.call, op.reference):
        try:
            call(**given)
        except RuntimeError as error:
            raised.append(str(error))
    assert all("nference tensors cannot be saved for backward" in each for each in raised)


@rows("threads of gradients", few)
def test_threads_run_backward_through_one_graph(op: Op, rng: torch.Generator) -> None:
    """At once, again and again: each gets the same gradients."""
    given = with_leaves(op, op.draw(rng, (19,), dtype=torch.float64, tensor_numbers=True))
    results: Any = [each for each in results_of(op.call(**given)) if each.requires_grad]
    total, leaves = sum(each.sum() for each in results), [given[name] for name in op.leaves(given)]
    expected = torch.autograd.grad(total, leaves, retain_graph=True)

    def work(_: int) -> None:
        for _ in range(50):
            found = torch.autograd.grad(total, leaves, retain_graph=True)
            assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))

    at_once(4, work)


@rows("each operand alone")
def test_each_operand_alone(op: Op, rng: torch.Generator) -> None:
    """Only what requires a gradient gets one, the same as when all do; a frozen weight changes no other."""
    arguments = op.draw(rng, (19,), dtype=torch.float64, tensor_numbers=True)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    names = op.leaves(arguments)
    together = dict(zip(names, gradients(op, op.call, with_leaves(op, arguments), upstream), strict=True))
    pairs = itertools.pairwise(names) if len(names) > 2 else ()
    for wanted in (*((name,) for name in names), *pairs):
        given = with_leaves(op, arguments, wanted)
        flags = [[each.requires_grad for each in results_of(of(**given))] for of in (op.call, op.reference)]
        assert flags[0] == flags[1] and any(flags[0])
        for name, one in zip(wanted, gradients(op, op.call, given, upstream), strict=True):
            torch.testing.assert_close(one, together[name], rtol=1e-11, atol=1e-11)


@rows("nothing recorded")
def test_nothing_is_recorded_where_none_is_wanted(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Under `no_grad`, in inference mode and without leaves: the same numbers, no graph."""
    given = with_leaves(op, op.draw(rng, (19,), device=device))
    expected = [each.detach() for each in results_of(op.call(**given))]
    for *outer, inner in (
        (torch.no_grad,),
        (torch.inference_mode,),
        (torch.inference_mode, torch.enable_grad),  # which records nothing there
    ):
        with outer[0]() if outer else nullcontext(), inner():
            got = results_of(op.call(**given))
        assert not any(each.requires_grad for each in got)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got = results_of(op.call(**map_tensors(given, torch.Tensor.detach)))
    assert not any(each.requires_grad or each.grad_fn is not None for each in got)


@rows("retained graphs")
def test_a_retained_graph(op: Op, rng: torch.Generator) -> None:
    """Twice backward gives twice the gradients; a graph that is not retained is gone."""
    given = with_leaves(op, op.draw(rng, (19,)))
    results = [each for each in results_of(op.call(**given)) if each.requires_grad]
    total: Any = sum(each.sum() for each in results)
    backward(total, retain_graph=True)
    first = {name: value.grad.clone() for name, value in tensors_of(given).items() if value.grad is not None}
    assert list(first) == op.leaves(given)
    backward(total)
    for name, one in first.items():
        torch.testing.assert_close(given[name].grad, 2 * one)


@rows("views", lambda op: op.takes_any_lead)
def test_an_input_that_is_a_view(op: Op, rng: torch.Generator) -> None:
    """Of a larger tensor, with leading axes: the gradient lies where the view does."""
    arguments = op.draw(rng, (3, 4), dtype=torch.float64)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    found: list[Any] = []
    for call in (op.call, op.reference):
        base = torch.stack((arguments[op.input], arguments[op.input]), 1).mT.contiguous().requires_grad_()
        given = {**map_tensors(arguments, torch.Tensor.detach), op.input: base[:, 0].mT}
        pairs = [(a, b) for a, b in zip(results_of(call(**given)), upstream, strict=True) if a.requires_grad]
        if not pairs:
            continue
        found += torch.autograd.grad(
            [a for a, _ in pairs], base, [b.to(a) for a, b in pairs], allow_unused=True
        )
    if found and found[0] is not None:
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def positional(op: Op, arguments: Arguments) -> tuple[Call, list[Tensor]]:
    """The call as a function of its leaves; of results those with a gradient that is one of fp64."""
    names = op.leaves(arguments)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        results = results_of(op.call(**{**arguments, **dict(zip(names, values, strict=True))}))
        return tuple(
            each
            for each, result in zip(results, op.results, strict=True)
            if each.requires_grad and not result.is_fp32
        )

    return call, [arguments[name].detach().clone().requires_grad_() for name in names]


@rows("double backward")
def test_double_backward(op: Op, rng: torch.Generator) -> None:
    """First and second derivatives are those of differences."""
    arguments = op.draw(rng, (4,), 3, 5, dtype=torch.float64, tensor_numbers=True)
    call, values = positional(op, arguments)
    if call(*values):
        assert torch.autograd.gradcheck(call, values, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, values, fast_mode=True)


@rows("batched upstream", lambda op: op.is_vmappable and len(op.results) == 1)
def test_batches_of_upstream_gradients(op: Op, rng: torch.Generator) -> None:
    """`is_grads_batched`, and `vmap` over what is passed upstream; of all leaves and of one."""
    arguments = op.draw(rng, dtype=torch.float64, tensor_numbers=True)
    for names in (op.leaves(arguments), op.leaves(arguments)[:1]):
        given = with_leaves(op, arguments, names)
        result = op.call(**given)
        result = result if isinstance(result, Tensor) else result[0]
        assert_batches(result, [given[name] for name in names])


def assert_batches(result: Tensor, leaves: list[Tensor]) -> None:
    """Batches of gradients give what one by one gives."""
    upstream = torch.randn(3, *result.shape, dtype=torch.float64)
    one_by_one = [torch.autograd.grad(result, leaves, row, retain_graph=True) for row in upstream]
    expected = [torch.stack(column) for column in zip(*one_by_one, strict=True)]
    for create_graph in (False, True):
        found = torch.autograd.grad(
            result, leaves, upstream, retain_graph=True, create_graph=create_graph, is_grads_batched=True
        )
        torch.testing.assert_close(list(found), expected, rtol=1e-10, atol=1e-10)

    def of_one(row: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, leaves, row, retain_graph=True)

    torch.testing.assert_close(list(torch.vmap(of_one)(upstream)), expected, rtol=1e-10, atol=1e-10)


@rows("layers in training", lambda op: op.layer is not None)
def test_a_layer_is_trained_as_pytorchs_program(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """The layer itself, with parameters and buffers of its own: gradients by `backward`, and a step of an optimiser."""
    arguments = op.draw(rng, (19,), dtype=torch.float64, device=device)
    layer, inputs = op.module(arguments)
    twin = copy.deepcopy(layer)
    results = layer(*inputs)
    wanted = results_of(op.reference(**arguments))
    torch.testing.assert_close(results, wanted[0])
    backward(results.square().sum())
    given = with_leaves(op, arguments)
    backward(results_of(op.reference(**given))[0].square().sum())
    names = {inner: outer for outer, inner in op.names}
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, given[names.get(name, name)].grad)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert any(not torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters(), strict=True))
    for name, buffer in layer.named_buffers():
        if op.of_kind(COUNT) and name != "scale":
            torch.testing.assert_close(
                buffer, wanted[1 + ("running_mean", "running_var", "count").index(names[name])]
            )
