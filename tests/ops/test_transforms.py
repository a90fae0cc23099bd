"""`torch.vmap` and `torch.func`: what PyTorch's program gives under them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from tests.ops.op import COUNT, Op, results_of, tensors_of
from tests.ops.table import rows
from tests.support.thorough import is_thorough
from tests.support.untyped import torch as untyped

forward_ad: Any = torch.autograd.forward_ad


def matrices(op: Op, found: Any) -> list[Tensor]:
    """The results but for those in fp32, which have errors of their own."""
    return [each for each, result in zip(results_of(found), op.results, strict=True) if not result.is_fp32]


@rows("vmap", lambda op: op.is_vmappable)
def test_vmap_over_each_operand(op: Op, rng: torch.Generator) -> None:
    """And over all of them, along their first or their last axis, x alone along its last one; one in another."""
    arguments = op.draw(rng, (3,), 4, 5, dtype=torch.float64, tensor_numbers=True)
    op.call(**arguments)  # what a row makes, it makes outside of transforms
    tensors = {name: value for name, value in tensors_of(arguments).items() if value.is_floating_point()}
    stacked = {name: torch.stack([value, value + 1, value * 2]) for name, value in tensors.items()}
    alone = [((name,), -1 if name == op.input else 0) for name in tensors]
    for names, axis in (*alone, (tuple(tensors), 0), (tuple(tensors), -1)):
        given = [stacked[name].movedim(0, axis) for name in names]

        def call(*values: Tensor, names: tuple[str, ...] = names, of: Any = op.call) -> Any:
            return of(**{**arguments, **dict(zip(names, values, strict=True))})

        found = torch.vmap(call, in_dims=axis)(*given)
        wanted = [call(*(stacked[name][place] for name in names), of=op.reference) for place in range(3)]
        for one, *each in zip(matrices(op, found), *(matrices(op, one) for one in wanted), strict=True):
            torch.testing.assert_close(one, torch.stack(each))
    nested = torch.vmap(torch.vmap(lambda x: op.call(**{**arguments, op.input: x})))(
        torch.stack([stacked[op.input]] * 2)
    )
    for one, other in zip(results_of(nested), results_of(op.call(**arguments)), strict=True):
        torch.testing.assert_close(one[1, 0], other)


@rows("gradients of vmap", lambda op: op.is_vmappable)
def test_results_of_vmap_require_what_pytorchs_do(op: Op, rng: torch.Generator) -> None:
    """A batched tensor does not tell of its own gradient; what `detach` ends has none.

    Any tensors are batched, as in ensembles, and any have a gradient, in a batch or beside it.
    """
    for number in range(32 if is_thorough() else 8):
        arguments = op.draw(rng, (3,), 4, 5, dtype=torch.float64)
        op.call(**arguments)
        batched, learned = (
            {name for name in names if torch.rand((), generator=rng) < 0.5} or {op.input}
            for names in (tensors_of(arguments), op.leaves(arguments))
        )
        given = {
            name: (torch.stack([value] * 2) if name in batched else value).requires_grad_(name in learned)
            for name, value in tensors_of(arguments).items()
        }
        flags = []
        for of in (op.call, op.reference):

            def call(values: dict[str, Tensor], of: Any = of, arguments: Any = arguments) -> Any:
                return of(**{**arguments, **values})

            dims = {name: 0 if name in batched else None for name in given}
            is_off = (
                number % 4 == 0
            )  # a program that returns its argument may return one with a gradient there
            with torch.no_grad() if is_off else nullcontext():
                results = results_of(torch.vmap(call, (dims,))(given))
            flags.append([each.requires_grad and not (is_off and of is op.reference) for each in results])
        assert flags[0] == flags[1], (batched, learned)


@rows("empty vmap", lambda op: op.is_vmappable)
def test_vmap_over_nothing(op: Op, rng: torch.Generator) -> None:
    """A batch of no elements, of each argument, of everything that has a row for each of x, and of all."""
    arguments = op.draw(rng, (3,), 4, 5)
    op.call(**arguments)
    every = tensors_of(arguments)
    for names in (*((name,) for name in every), tuple(op.inputs()), tuple(every)):
        shapes = []
        for of in (op.call, op.reference):
            found = torch.vmap(
                lambda *values, names=names, of=of: of(
                    **{**arguments, **dict(zip(names, values, strict=True))}
                )
            )(*(every[name].new_empty(0, *every[name].shape) for name in names))
            shapes.append([each.shape for each in results_of(found)])
        assert shapes[0] == shapes[1]


@rows("torch.func", lambda op: not op.of_kind(COUNT))
def test_functional_derivatives(op: Op, rng: torch.Generator) -> None:
    """`grad`, `jvp`, `jacrev` and `hessian` of x, of the first result."""
    arguments = op.draw(rng, (2,), 3, 4, dtype=torch.float64)
    op.call(**arguments)
    x = arguments.pop(op.input)
    tangent = torch.randn(x.shape, generator=rng, dtype=torch.float64)
    found: list[list[Any]] = []
    for call in (op.call, op.reference):

        def of_x(x: Tensor, call: Callable[..., Any] = call) -> Tensor:
            return results_of(call(**{**arguments, op.input: x}))[0]

        def loss(x: Tensor, of_x: Callable[..., Tensor] = of_x) -> Tensor:
            return of_x(x).square().sum()

        found.append(
            [
                *untyped.func.jvp(of_x, (x,), (tangent,)),
                torch.func.grad(loss)(x),
                torch.func.jacrev(of_x)(x),
                torch.func.hessian(loss)(x),
                torch.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x])),
            ]
        )
    torch.testing.assert_close(*found)


@rows("forward mode", lambda op: not op.of_kind(COUNT) and op.input in (op.differentiable or (op.input,)))
def test_forward_mode_is_refused_and_not_dropped(op: Op, rng: torch.Generator) -> None:
    """Where PyTorch's own operators do not run in the call's place."""
    arguments = op.draw(rng, (3,), 4, 5, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments[op.input], torch.ones_like(arguments[op.input]))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            op.call(**{**arguments, op.input: dual})


@rows("ensembles", lambda op: op.layer is not None and op.is_vmappable)
def test_ensembles_of_layers(op: Op, rng: torch.Generator) -> None:
    """`functional_call` over stacked parameters: values, gradients of each sample, none that nobody asked for."""
    arguments = op.draw(rng, (3,), 4, 5, dtype=torch.float64)
    layer, inputs = op.module(arguments)
    layer.eval()
    state = {name: torch.stack([value.detach()] * 2) for name, value in layer.state_dict().items()}

    def call(state: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(layer, state, tuple(inputs))
        return result

    found = torch.vmap(call)(state)
    want = layer(*inputs)
    torch.testing.assert_close(found, torch.stack([want, want]))
    assert not found.requires_grad

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        rest = [each[:1] for each in inputs[1:]]
        result: Tensor = functional_call(layer, parameters, (row.unsqueeze(0), *rest))
        return result.square().sum()

    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    of_rows = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs[0])
    for place, row in enumerate(inputs[0]):
        total = layer(row.unsqueeze(0), *(each[:1] for each in inputs[1:])).square().sum()
        wanted = torch.autograd.grad(total, list(layer.parameters()))
        for (name, _), one in zip(layer.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(of_rows[name][place], one)
