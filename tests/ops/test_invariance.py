"""`epigemm.batch_invariant()`: a row of the results has the same bits among any other rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import epigemm
from tests.ops.op import Arguments, Op, results_of, wide
from tests.ops.table import rows
from tests.support.invariance import bits, selections


def of_rows(op: Op, arguments: Arguments, chosen: Tensor) -> Arguments:
    """The same call of some of its rows."""
    return arguments | {name: arguments[name][chosen] for name in op.inputs()}


@rows("invariance", lambda op: op.is_row_by_row)
def test_rows_keep_their_bits(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """In every batch, with and without gradients. A recorded call may have other bits than a plain one."""
    if device.type == "cpu" and op.name.startswith("@") and not op.is_linear and len(op.results) == 1:
        return  # a limit that the page names: PyTorch's operators run, on all elements at once
    m, n, k = (50, 43, 60) if device.type == "cpu" else (300, 264, 200)
    for dtype, recorded in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        arguments = op.draw(rng, (m,), n, k, dtype=dtype, device=device)

        def call(given: Arguments, *, recorded: bool = recorded) -> list[Tensor]:
            if recorded:
                given = {**given, op.input: given[op.input].detach().requires_grad_()}
            return [each.detach() for each in results_of(op.call(**given))]

        with epigemm.batch_invariant():
            together = call(arguments)
            for chosen in (each.to(device) for each in selections(m, rng)):
                for one, whole in zip(call(of_rows(op, arguments, chosen)), together, strict=True):
                    told = f"{dtype}, recorded={recorded}: rows {chosen.tolist()[:9]} ..."
                    assert torch.equal(bits(one), bits(whole)[chosen]), told
        # A bias is added behind the product's rounding there.
        for one, want in zip(together, results_of(op.reference(**wide(arguments))), strict=True):
            error = torch.linalg.vector_norm(one.double() - want)
            assert float(error) <= 4 * torch.finfo(dtype).eps * float(torch.linalg.vector_norm(want))


@rows("invariance of layouts", lambda op: op.is_linear and op.takes_out)
def test_layouts_and_out(op: Op, rng: torch.Generator) -> None:
    """Leading axes, strides, a transposed or odd x, and `out` in any layout: the same bits."""
    arguments = op.draw(rng, (24,), 20, 36)
    x = arguments["x"]
    wide = torch.zeros(24, 39)
    wide[:, 1:37] = x
    with epigemm.batch_invariant():
        expected = bits(op.call(**arguments))
        for lying in (x.t().contiguous().t(), wide[:, 1:37]):
            assert torch.equal(bits(op.call(**arguments | {"x": lying})), expected)
        batches = {name: arguments[name].unflatten(0, (2, 12)) for name in op.inputs()}
        assert torch.equal(bits(op.call(**arguments | batches)).view(24, 20), expected)
        for out in (torch.empty(24, 20), torch.empty(20, 24).t(), torch.empty(24, 23)[:, 1:21]):
            assert op.call(**arguments, out=out) is out
            assert torch.equal(bits(out), expected)
        transposed = torch.empty(12, 2, 20).transpose(0, 1)
        op.call(**arguments | batches, out=transposed)
        assert torch.equal(bits(transposed).view(24, 20), expected)


@rows("invariance refused", lambda op: not op.is_row_by_row and op.name.startswith("@"))
def test_sums_over_rows_are_refused(op: Op, rng: torch.Generator) -> None:
    """They are no row's own."""
    arguments, function = op.draw(rng), op.function
    assert function is not None
    with epigemm.batch_invariant():
        for call in (lambda: op.call(**arguments), lambda: epigemm.explain(function, *arguments.values())):
            with pytest.raises(
                RuntimeError, match=r"batch_invariant: got a call of .* reductions of each row"
            ):
                call()
