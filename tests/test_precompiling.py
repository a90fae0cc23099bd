"""`precompile`: its arguments, and its answer on a machine without a GPU. See test_user_epilogue_gpu.py, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar, precompiling, progress
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.traced import LinkedEpilogue
from epigemm.linking import loading
from epigemm.precompiling import _call


@epigemm.epilogue
def mixed(acc: Tensor, bias: PerColumn, gain: PerRow, other: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) * gain + other


PRECOMPILE: dict[str, tuple[type[Exception], str, Any, dict[str, Any]]] = {
    "no triples": (TypeError, "shapes: got 1; accepted are triples", (1, 2, 3), {}),
    "no sizes": (TypeError, "shapes: got 8; accepted are triples", 8, {}),
    "empty": (TypeError, r"shapes: got \(0, 8, 8\); accepted are triples", [(0, 8, 8)], {}),
    "dtype": (TypeError, "dtype: got torch.int8; accepted are", [(1, 8, 8)], {"dtype": torch.int8}),
    "operands": (
        TypeError,
        "operand_dtype: got torch.float16",
        [(1, 8, 8)],
        {"operand_dtype": torch.float16},
    ),
    "training": (TypeError, "training: got int", [(1, 8, 8)], {"training": 1}),
    "no GPU": (
        RuntimeError,
        "device: got cpu, where no kernel of epigemm's runs",
        [(1, 8, 8)],
        {"device": "cpu"},
    ),
    "architecture": (ValueError, "arch: got 'sm_75'; accepted are sm_80 and later", (), {"arch": "sm_75"}),
    "no architecture": (ValueError, "arch: got 80; accepted are sm_80 and later", (), {"arch": 80}),
    "beside shapes": (ValueError, "arch: got 'sm_80' beside shapes", [(1, 8, 8)], {"arch": "sm_80"}),
    "beside a device": (
        ValueError,
        "arch: got 'sm_80' beside device",
        (),
        {"arch": "sm_80", "device": "cuda"},
    ),
}


@pytest.mark.parametrize("name", PRECOMPILE)
def test_precompile_says_what_is_wrong(name: str) -> None:
    error, words, shapes, named = PRECOMPILE[name]
    with pytest.raises(error, match=words):
        epigemm.precompile(mixed, shapes, **named)


def test_precompile_needs_a_gpu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"device: got cuda, .* .torch finds no GPU"):
        epigemm.precompile(mixed, [(1, 8, 8)])


class Linker:
    """Stands for `loading.link_for`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], tuple[int, int]]] = []
        self.reason = ""

    def __call__(
        self, epilogue: LinkedEpilogue, symbols: list[str], capability: tuple[int, int]
    ) -> tuple[list[str], str]:
        self.asked.append((epilogue.name, symbols, capability))
        return symbols[:1], self.reason


def test_precompile_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    linker = Linker()
    monkeypatch.setattr(loading, "link_for", linker)
    assert epigemm.precompile(mixed, arch="sm_120") == ["epigemm_open_elementwise_bfloat16"]
    ((name, symbols, capability),) = linker.asked
    tiles = [f"epigemm_open_sm80_mma_bfloat16_{tile}" for tile in range(10)]
    assert name == mixed.linked([False, False, False, True]).name and capability == (12, 0)
    assert symbols == ["epigemm_open_elementwise_bfloat16", *tiles]
    epigemm.precompile(mixed, dtype=torch.float32, training=True, arch="sm_86")
    assert linker.asked[-1][1:] == (
        ["epigemm_open_elementwise_float32", "epigemm_open_derivative_float32"],
        (8, 6),
    )
    linker.reason = "no libraries"
    with pytest.raises(RuntimeError, match="mixed: no libraries"):
        epigemm.precompile(mixed, arch="sm_80")


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, other: Matrix | None = None) -> tuple[Tensor, Tensor, Tensor]:
    z = acc + bias if other is None else (acc + bias) * other
    return F.gelu(z), z, (z * z).sum(0)


def test_of_several_results_each_matrix_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the product for all kernels, others alone; what is reduced and not stored in fp32 beside 16 bits."""
    linker = Linker()
    monkeypatch.setattr(loading, "link_for", linker)
    epigemm.precompile(several, arch="sm_80", training=True)
    alone = ["epigemm_open_elementwise_bfloat16", "epigemm_open_derivative_bfloat16"]
    wide = [name.replace("bfloat16", "float32") for name in alone]
    asked = [(name.partition(".")[0], symbols) for name, symbols, _ in linker.asked]
    assert [name for name, _ in asked] == ["several_shared", "several_result0", "several_result2"] * 2
    for (_, product), *others in (asked[:3], asked[3:]):
        assert product[:2] == alone and len(product) > 2
        assert [symbols for _, symbols in others] == [alone, wide]
    linker.asked.clear()
    epigemm.precompile(several, arch="sm_80", dtype=torch.float32)
    assert [symbols for _, symbols, _ in linker.asked] == [["epigemm_open_elementwise_float32"]] * 6


def test_what_is_no_epilogue() -> None:
    with pytest.raises(TypeError, match="function: got function"):
        epigemm.precompile(F.relu, [(1, 8, 8)])  # type: ignore[arg-type]


@pytest.mark.parametrize("of_operands", [torch.bfloat16, torch.float32], ids=str)
def test_the_call_that_is_decided_on(of_operands: torch.dtype) -> None:
    """It has the sizes and types that were given, and an epilogue for them."""
    call = _call(mixed, (5, 16, 24), (torch.bfloat16, of_operands), "ieee", torch.device("cpu"))
    assert (call.x.shape, call.weight.shape) == ((5, 24), (16, 24))
    assert call.out is not None and (call.out.shape, call.out.dtype) == ((5, 16), torch.bfloat16)
    assert [(each.shape, each.dtype) for each in call.operands] == [
        ((16,), of_operands),
        ((5, 1), of_operands),
        ((5, 16), of_operands),
    ]
    folded = [operand.folded for operand in call.epilogue.operands[1:] if operand.kind != SCALAR]
    assert folded == [of_operands == torch.float32] * 3 and call.precision == "ieee"


def test_it_says_that_it_takes_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "NOTED", 0.0)
    monkeypatch.setattr(precompiling, "_gpu", torch.device)
    monkeypatch.setattr(precompiling, "_missing", lambda *_: iter(["a,b", ""]))
    monkeypatch.setattr(loading, "link", lambda *_: "")
    caplog.set_level("DEBUG", "epigemm")
    assert epigemm.precompile(mixed, [(1, 8, 8), (2, 8, 8)], device="cpu") == ["a", "b", "a", "b"]
    assert [text.rpartition(": ")[0] for text in caplog.messages] == ["precompiling mixed for 2 calls"]
