"""The Python half of the registry against the native one, and its sample inputs."""

from __future__ import annotations

import pytest
import torch

from epigemm.epilogues import registry
from tests.support.cases import REGISTRY
from tools.operands import sample_inputs


def test_both_halves_name_the_same_epilogues_and_operands() -> None:
    python = {
        name: {
            "linear": epilogue.linear,
            "operands": [
                ("accumulator", None),
                *((operand.kind, operand.name) for operand in epilogue.operands),
            ],
        }
        for name, epilogue in registry.EPILOGUES.items()
    }
    native = {
        name: {
            "linear": entry["linear"],
            "operands": [
                (operand["kind"], operand.get("name") if operand["kind"] != "accumulator" else None)
                for operand in entry["operands"]
            ],
        }
        for name, entry in REGISTRY.items()
    }
    assert python == native
    assert len(REGISTRY) >= 6


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reference_rounds_once(name: str, dtype: torch.dtype) -> None:
    epilogue, acc = registry.EPILOGUES[name], torch.randn(50, 64).to(dtype)
    given = epilogue.in_order(*sample_inputs(epilogue, 64, dtype, generator=torch.Generator().manual_seed(5)))
    assert given is not None
    wide = [each.float() if isinstance(each, torch.Tensor) else each for each in given]
    assert torch.equal(epilogue.reference(acc, given), epilogue.reference(acc.float(), wide).to(dtype))
