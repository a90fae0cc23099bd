"""What PyTorch's own checker and compiler say about the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests.support.cases import signed
from tests.support.public import PUBLIC, Public

ops: Any = torch.ops.epigemm
functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op: Any, arguments: tuple[Any, ...]) -> None:
    results = torch.library.opcheck(op, arguments, test_utils=OPCHECKS)
    assert set(results) == set(OPCHECKS)
    assert all(result == "SUCCESS" for result in results.values()), results


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_opcheck_fold_batch_norm(requires_grad: bool, device: torch.device, rng: torch.Generator) -> None:
    vectors = [(signed((8,), rng).abs() + 0.5).float().to(device) for _ in range(6)]
    for vector in vectors:
        vector.requires_grad_(requires_grad)
    like = torch.empty(0, device=device)
    opcheck(ops.fold_batch_norm, (like, *vectors, 1e-5))
    opcheck(ops.fold_batch_norm, (like, None, *vectors[1:4], None, None, 1e-5))


@functions
def test_compiled_graphs_call_the_fused_operator(function: Public, rng: torch.Generator) -> None:
    """One node of ours in the graph: the call is not taken apart into torch's operators."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(function.call, fullgraph=True, backend=keep)(**function.draw(rng))
    targets = [
        str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert [target.startswith("epigemm.") for target in targets].count(True) == 1, targets
    others = [target for target in targets if not target.startswith("epigemm.")]
    assert all(target.startswith("<built-in method empty_like") for target in others), targets
