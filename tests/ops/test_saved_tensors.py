"""What autograd saves of a call: no more than PyTorch needs, through hooks, and what changes in place is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.op import COUNT, Arguments, Op, results_of, tensors_of
from tests.ops.table import rows
from tests.ops.test_autograd import Call, gradients, upstream_of, with_leaves
from tests.support.untyped import backward


@rows("in place", lambda op: not op.of_kind(COUNT))
def test_a_saved_input_changed_in_place_is_noticed(op: Op, rng: torch.Generator) -> None:
    """By autograd's counter of versions, wherever PyTorch's program notices it, or the gradient does not need it.

    Whatever learns: all, or one alone, as in `x += block(x)` beside a frozen weight.
    """
    arguments = op.draw(rng, dtype=torch.float64)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    names = op.leaves(arguments)
    for learning in (names, *([name] for name in names)):
        expected = gradients(op, op.call, with_leaves(op, arguments, learning), upstream)
        for name in names:
            given = with_leaves(op, arguments, learning)
            results = results_of(op.call(**given))
            with torch.no_grad():
                given[name].add_(1)
            pairs = [(a, b) for a, b in zip(results, upstream, strict=True) if a.requires_grad]
            try:
                found = torch.autograd.grad(
                    [a for a, _ in pairs], [given[each] for each in learning], [b.to(a) for a, b in pairs]
                )
            except RuntimeError as error:
                if "modified" not in str(error) or "inplace" not in str(error):
                    raise
                if op.is_linear and not op.name.startswith("@") and "running_mean" not in op.operands:
                    # Others compute again from what they read, as a scale's gradient from its fold.
                    assert notices(op, arguments, learning, name) or learning == [name] == ["scale"]
            else:
                torch.testing.assert_close(list(found), expected)


def notices(op: Op, arguments: Arguments, learning: Sequence[str], name: str) -> bool:
    """Whether PyTorch's program notices a change of this argument."""
    given = with_leaves(op, arguments, learning)
    results: Any = [each for each in results_of(op.reference(**given)) if each.requires_grad]
    with torch.no_grad():
        given[name].add_(1)
    try:
        backward(sum(each.sum() for each in results))
    except RuntimeError:
        return True
    return False


@rows("results in place", lambda op: not op.of_kind(COUNT))
def test_a_result_changed_in_place_is_noticed(op: Op, rng: torch.Generator) -> None:
    """Where a derivative reads it, as that of a ReLU does; else nothing changes."""
    arguments = op.draw(rng, dtype=torch.float64)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    expected = gradients(op, op.call, with_leaves(op, arguments), upstream)

    def written(**given: Any) -> list[Tensor]:
        results = results_of(op.call(**given))
        with torch.no_grad():
            for each in results:
                each.mul_(2)
        return results

    try:
        found = gradients(op, written, with_leaves(op, arguments), upstream)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@rows("bias through data", lambda op: op.is_linear and "bias" in op.operands and not op.of_kind(COUNT))
def test_a_bias_written_through_data(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Which no counter shows. PyTorch's operators do not look at it again, whatever learns.

    Of several results in 16 bits the derivative reads it: product and bias are rounded once.
    """
    if len(op.results) > 1 and dtype is torch.bfloat16:
        return
    arguments = op.draw(rng, dtype=dtype)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    names = op.leaves(arguments)

    def written(**given: Any) -> Any:
        results = op.call(**given)
        given["bias"].data.mul_(-3)
        return results

    for learning in (names, *([name] for name in names)):
        found, expected = (
            gradients(op, call, with_leaves(op, arguments, learning), upstream) for call in (written, op.call)
        )
        assert all(map(torch.equal, found, expected)), learning


def saved_bytes(call: Call, given: Arguments) -> int:
    """What autograd saves beside the arguments, each storage once."""
    own = {value.untyped_storage().data_ptr() for value in tensors_of(given).values()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = call(**given)
    del results
    return sum(each.untyped_storage().nbytes() for place, each in seen.items() if place not in own)


@rows("saved memory", lambda op: not op.of_kind(COUNT))
def test_no_more_is_saved_than_by_pytorchs_program(op: Op, rng: torch.Generator) -> None:
    """But for some vectors. Whatever learns: all, one of the tensors alone, or all but one."""
    arguments = op.draw(rng, (64,), tensor_numbers=True)
    names = [name for name in op.leaves(arguments) if "running" not in name]
    for learning in (
        names,
        *([name] for name in names),
        *([n for n in names if n != name] for name in names),
    ):
        if learning == ["bn_bias"]:
            continue  # what a fold gives both learn by then, and the multiplier's gradient reads the product
        given = with_leaves(op, arguments, learning)
        found, allowed = (saved_bytes(call, given) for call in (op.call, op.reference))
        assert found <= allowed + 4 * 4 * 16, (learning, found, allowed)


@rows("saved tensors")
def test_hooks_of_saved_tensors(op: Op, rng: torch.Generator) -> None:
    """Everything that is saved goes through them: what they change, changes the gradients."""
    arguments = op.draw(rng, (19,), dtype=torch.float64)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    wanted = gradients(op, op.call, with_leaves(op, arguments), upstream)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]):
        found = gradients(op, op.call, with_leaves(op, arguments), upstream)
    torch.testing.assert_close(found, wanted)


@rows("checkpoints", lambda op: not op.of_kind(COUNT))
def test_checkpoints(op: Op, rng: torch.Generator) -> None:
    """The call is made again in the backward pass."""
    arguments = op.draw(rng, dtype=torch.float64)
    upstream = upstream_of(results_of(op.reference(**arguments)), rng)
    wanted = gradients(op, op.call, with_leaves(op, arguments), upstream)
    given = with_leaves(op, arguments)

    def again(*values: Any) -> Any:
        return op.call(**dict(zip(given, values, strict=True)))

    def call(**given: Any) -> Any:
        return checkpoint(again, *given.values(), use_reentrant=False)

    torch.testing.assert_close(gradients(op, call, given, upstream), wanted)
