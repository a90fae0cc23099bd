"""Rules for batches of calls, and counts of operations; those of calls: tests/ops/test_flops.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import epigemm
from epigemm._native import ops
from epigemm.operators.vmap import vmap_rule

x, weight, bias = torch.randn(4, 6, 8), torch.randn(4, 5, 8), torch.randn(4, 5)


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return ops.linear("bias_relu", x, weight, bias, [], [], "default")


@pytest.mark.parametrize(
    ("in_dims", "calls"),
    [((0, None, None), 1), ((1, None, None), 1), ((None, 0, None), 4), ((0, None, 0), 4)],
)
def test_a_batch_of_x_alone_is_one_call(in_dims: tuple[int | None, ...], calls: int) -> None:
    seen = []

    def op(*arguments: Any) -> Any:
        seen.append(arguments)
        return ops.linear(*arguments)

    given = [
        each[0] if place is None else each.movedim(0, place)
        for each, place in zip((x, weight, bias), in_dims, strict=True)
    ]
    dims: tuple[Any, ...] = (None, *in_dims, [], [], None)
    rule = vmap_rule(op)
    found, place = rule(SimpleNamespace(batch_size=4), dims, "bias_relu", *given, [], [], "default")
    assert len(seen) == calls and place == 0
    torch.testing.assert_close(found, torch.vmap(linear, in_dims)(*given))


# --- `FlopCounterMode` counts for models what it counts for PyTorch's -------------------------------------------------


LEAD, N, K = (2, 3), 6, 8
PRODUCT = 2 * LEAD[0] * LEAD[1] * N * K
Run = Callable[..., Any]


def counted(run: Callable[[], Any], *, backward: bool) -> tuple[int, int]:
    """Of the forward pass, and of the backward pass of everything that has one."""
    with FlopCounterMode(display=False) as forward:
        found = [each for each in tree_leaves(run()) if each.requires_grad]
    with FlopCounterMode(display=False) as after:
        if backward:
            sum(each.float().square().sum() for each in found).backward()
    return forward.get_total_flops(), after.get_total_flops()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K), nn.ReLU()).eval()


def layers() -> nn.Module:
    return nn.Sequential(epigemm.nn.LinearGELU(K, N), epigemm.nn.LinearReLU(N, K)).eval()


def exported(made: nn.Module) -> nn.Module:
    return torch.export.export(made, (torch.randn(*LEAD, K),)).module()


def by_backend(made: nn.Module) -> Run:
    compiled: Run = torch.compile(made, backend="epigemm", options={"backend": "aot_eager"})
    return compiled


MODELS: dict[str, Callable[[], Run]] = {
    "layers": layers,
    "fused": lambda: epigemm.fuse(model()),
    "exported": lambda: exported(layers()),
    "backend": lambda: by_backend(model()),
    "layers compiled": lambda: torch.compile(layers(), backend="aot_eager"),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, recorded: bool) -> None:
    torch._dynamo.reset()
    made, plain = MODELS[name](), model()
    x = torch.randn(*LEAD, K, requires_grad=recorded)
    with torch.set_grad_enabled(recorded):
        made(x)
        found = counted(lambda: made(x), backward=recorded)
        assert found == counted(lambda: plain(x), backward=recorded)
    assert found[0] == 2 * PRODUCT


WITHOUT_A_PRODUCT = {"_dry_linear", "_cold"}
"""A dry run, and what an operator that is counted calls."""


def test_every_operator_with_a_weight_has_a_formula() -> None:
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("epigemm::")]
    operators = {name.partition("::")[2]: getattr(ops, name.partition("::")[2]) for name in every}
    schemas = {name: operator.default._schema.arguments for name, operator in operators.items()}
    multiply = {name for name, each in schemas.items() if {"x", "weight"} <= {part.name for part in each}}
    assert multiply - WITHOUT_A_PRODUCT == {name for name in operators if operators[name] in flop_registry}
    shapes = {"x": torch.empty(*LEAD, K), "weight": torch.empty(N, K)}
    for name in multiply - WITHOUT_A_PRODUCT:
        formula = flop_registry[operators[name]]
        assert formula(*[shapes.get(part.name) for part in schemas[name]], out_val=None) == PRODUCT


@pytest.mark.parametrize(
    "imports", ["epigemm, torch.utils.flop_counter", "torch.utils.flop_counter, epigemm"]
)
def test_either_order_of_imports(imports: str) -> None:
    code = (
        f"import {imports}, torch\nassert torch.ops.epigemm.linear in torch.utils.flop_counter.flop_registry"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
