"""Products of 8-bit numbers in a graph: PyTorch's, and epigemm's own, with what follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import FusionReport, profit
from epigemm.fusion.profit import Way
from tests.fusion.eager import fuse_eagerly
from tests.fusion.test_profit import chain_of
from tests.ops.eight_bits import check_quantised, close
from tests.support.thorough import in_turn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
M, N, K = 6, 32, 48
_torch: Any = torch


def product(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """`torch._scaled_mm` in float64."""
    found = (x.double() @ weight.double()) * scale_a.double() * scale_b.double()
    return found if bias is None else found + bias.double()


def listed(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Any = None) -> Tensor:
    """`torch.nn.functional.scaled_mm`, whose product is bf16."""
    kinds: Any = F.ScalingType
    kind = kinds.TensorWise if x_scale.numel() == 1 else kinds.RowWise
    return F.scaled_mm(x, weight, x_scale, kind, weight_scale, kind, bias=bias)


def own(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Any = None) -> Tensor:
    """epigemm's."""
    return epigemm.linear(x, weight.t(), bias, x_scale=x_scale, weight_scale=weight_scale)


FUNCTIONS = {
    "mm": _torch._scaled_mm,
    "aten": torch.ops.aten._scaled_mm,
    "overload": torch.ops.aten._scaled_mm.default,
    "own": own,
    **({"listed": listed} if hasattr(F, "scaled_mm") else {}),
}


class Layer(nn.Module):
    """An expression of x and the weight, their scales, for the tensor or rows, and operands; `exact`: in float64."""

    def __init__(self, text: str) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng)

        self.text = text
        self.given: dict[str, Any] = {
            "x": draw(M, K).to(E4M3), "w": draw(N, K).to(E4M3), "x5": draw(M, K).to(E5M2),
            "wide": draw(N, K + 16).to(E4M3)[:, :K], "kn": draw(K, N).to(E4M3),
            "s": torch.tensor(0.2), "t": torch.tensor([[0.4]]), "q": torch.tensor(0.03),
            "rs": torch.rand(M, 1, generator=rng) / 4 + 0.1, "cs": torch.rand(1, N, generator=rng) / 4 + 0.1,
            "b": draw(N).bfloat16(), "bw": draw(N), "r": draw(M, N).bfloat16(), "rw": draw(M, N),
            "row": draw(M, 1), "one": torch.tensor(1.5),
        }  # fmt: skip
        self.learned = nn.Parameter(draw(N).bfloat16())
        names = ", ".join([*self.given, *FUNCTIONS, "learned"])
        scope = {"torch": torch, "F": F, "BF16": BF16, "HALF": HALF, "FP32": FP32, "E4M3": E4M3}
        self.function = eval(f"lambda {names}: {text}", scope)

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given, *FUNCTIONS.values(), self.learned)

    def exact(self) -> Tensor:
        values = [each.double() if each.dtype in (BF16, FP32) else each for each in self.given.values()]
        found: Tensor = self.function(*values, *[product] * len(FUNCTIONS), self.learned.double())
        return found

    def fused(self, *, backend: str = "eager", **settings: Any) -> tuple[Any, FusionReport]:
        """The result of the fused call, and the report."""
        options: Any = {"backend": backend}
        made: Any = epigemm.fuse(self, strict=True, options=options, **settings)
        return made(*self.given.values()), made.fusion_report


# What is taken, with the formula of the fused call.
TAKEN = {
    "F.gelu(mm(x, w.t(), s, t, out_dtype=BF16))": "gelu(acc)",
    "F.gelu(mm(x, w.t(), rs, cs, out_dtype=BF16))": "gelu(acc)",
    "torch.relu(mm(x, w.t(), rs, cs, bias=b, out_dtype=BF16))": "relu(acc + c1)",
    "torch.relu(mm(x, w.t(), rs, cs, bias=bw, out_dtype=BF16))": "relu(acc + c1)",
    "torch.relu(mm(x, w.t(), scale_a=s, scale_b=t, out_dtype=BF16, use_fast_accum=True) + b) * r":
        "relu(acc + c1) * m1",
    "torch.tanh(mm(x, w.t(), rs, cs, out_dtype=FP32) * row) + rw": "tanh(acc * r1) + m1",
    "torch.tanh(mm(x, w.t(), rs, cs, out_dtype=FP32) + bw) * one": "tanh(acc + c1) * s1",
    "(mm(x, w.t(), one, one, out_dtype=FP32) * row * t + bw).to(BF16)": "copy(((acc * r1) * s1) + c1)",
    "torch.relu(mm(x, w.t(), rs, cs, out_dtype=FP32) + rw).half()": "copy(relu(acc + m1))",
    "torch.relu(mm(x, w.t(), rs, cs, out_dtype=HALF) - 0.5)": "relu(acc - 0.5)",
    "torch.relu(mm(x5, w.t(), s, s, out_dtype=BF16)) * 2": "relu(acc) * 2",
    "torch.relu(aten(x, w.t(), rs, cs, b, None, BF16))": "relu(acc + c1)",
    "torch.relu(overload(x, w.t(), rs, cs, b, None, BF16, True))": "relu(acc + c1)",
    "mm(x, w.t(), rs, cs, out_dtype=BF16).view(2, 3, -1).relu() + r.view(2, 3, -1)": "relu(acc) + m1",
    "torch.relu(own(x, w.t(), rs, cs, b)) + r": "relu(acc + c1) + m1",
    "torch.relu(own(x.view(2, 3, -1), w.t(), rs.view(2, 3, 1), cs, b)) + r.view(2, 3, -1)": "relu(acc + c1) + m1",
    "mm(x, w.t(), rs, cs, bias=b, out_dtype=BF16)": "acc + c1",
    "torch.where(mm(x, w.t(), rs, cs, out_dtype=BF16) > learned, 1.0, -1.0).bfloat16()": "",
    **({"torch.relu(listed(x, w.t(), s, t, b))": "relu(acc + c1)",
        "torch.relu(listed(x, w.t(), rs, cs))": "relu(acc)"} if "listed" in FUNCTIONS else {}),
}  # fmt: skip
# What is left, with the reason. Nothing behind these is taken.
LEFT = {
    "torch.relu(mm(x, w.t(), s, s, out_dtype=E4M3).float())": "its result is in float8_e4m3fn",
    "torch.relu(mm(x, w.t(), s, s).float())": "its result is in float8_e4m3fn",
    "torch.relu(mm(x, kn, s, s, out_dtype=BF16))": "its weight is no [N, K] without gaps",
    "torch.relu(mm(x, wide.t(), s, s, out_dtype=BF16))": "its weight is no [N, K] without gaps",
    "torch.relu(mm(x[:, :24], w[:, :24].contiguous().t(), s, s, out_dtype=BF16))": "not of whole 16",
    "torch.relu(mm(x, w.t(), s, s, out_dtype=FP32, bias=b))": "its summand l_args_10_, bfloat16 [32], is no operand",
    "torch.relu(mm(x, w.t(), s, s, out_dtype=BF16, bias=learned))": "requires a gradient",
}


@pytest.mark.parametrize(("text", "backend"), in_turn([*TAKEN], ["eager", "aot_eager"]), ids=str)
@torch.no_grad()
def test_chains(text: str, backend: str) -> None:
    """The product and the operators behind it are rounded once."""
    layer = Layer(text)
    found, report = layer.fused(backend=backend)
    expected = layer(*layer.given.values())
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    close(found, layer.exact())
    (site,) = report.sites
    assert not report.skipped and (site.formula == TAKEN[text] or not TAKEN[text]), report
    assert report.chains == ((0, 0) if site.formula == "acc + c1" else (1, 1))


@pytest.mark.parametrize("text", LEFT)
def test_what_stays_pytorchs(text: str) -> None:
    layer = Layer(text)
    found, report = layer.fused()
    assert torch.equal(found, layer(*layer.given.values()))
    (skipped,) = report.skipped
    assert not report.sites and LEFT[text] in skipped.reason, report


def test_other_sizes() -> None:
    """Where the number of rows is a symbol."""
    layer = Layer("F.gelu(mm(x, w.t(), rs, cs, bias=b, out_dtype=BF16)) * r")
    with torch.no_grad():
        fused = fuse_eagerly(layer, strict=True)
        for rows in (M, 4, 5):
            given = {**layer.given, **{name: layer.given[name][:rows] for name in ("x", "rs", "r")}}
            layer.given = given
            close(fused(*given.values()), layer.exact())
    assert fused.fusion_report.chains == (2, 2)


def test_an_operand_with_a_gradient_ends_the_chain() -> None:
    """Calls of 8 bits have no gradients; without gradients it is an operand like others."""
    layer = Layer("torch.relu(mm(x, w.t(), rs, cs, out_dtype=BF16)) + learned")
    found, report = layer.fused()
    assert found.requires_grad and report.sites[0].formula == "relu(acc)", report
    z, exact = layer.exact() - layer.learned.double(), layer.exact()
    # A rounding of the call's result, and of the sum's.
    bound = 2.0**-8 * 1.01 * (z.abs() + exact.abs()) + 1e-4
    assert bool(((found.double() - exact).abs() <= bound).all())
    (gradient,) = torch.autograd.grad(found.sum(), layer.learned)
    assert torch.equal(gradient, torch.full((N,), float(M), dtype=BF16))
    with torch.no_grad():
        _, report = layer.fused()
    assert report.sites[0].formula == "relu(acc) + c1", report


def test_a_comparison_with_what_has_a_gradient() -> None:
    text = "torch.where(mm(x, w.t(), rs, cs, out_dtype=BF16) > learned, 1.0, -1.0).bfloat16()"
    layer = Layer(text)
    assert torch.equal(layer.fused()[0], layer(*layer.given.values()))


def test_norms_stay() -> None:
    text = "F.batch_norm(mm(x, w.t(), rs, cs, out_dtype=FP32), bw, bw * bw)"
    layer = Layer(text)
    found, report = layer.fused()
    close(found, layer.exact())
    assert report.sites[0].formula == "acc" and "behind a product of 8 bits" in report.sites[0].notes[0]
    training = Layer("F.batch_norm(mm(x, w.t(), rs, cs, out_dtype=FP32), None, None, training=True)")
    close(training.fused()[0], training.exact())


def test_a_scale_that_is_written_on_the_way() -> None:
    """A chain is computed where it ends, and would read another number there."""
    layer = Layer("[mm(x, w.t(), s.clone(), t, out_dtype=BF16), s.mul_(2)][0].relu()")
    expected = layer(*layer.given.values())
    layer.given["s"] /= 2
    assert torch.equal(layer.fused()[0], expected)
    shared = Layer("(lambda z: [z, s.mul_(2)][0].relu())(mm(x, w.t(), s, t, out_dtype=BF16))")
    expected = shared(*shared.given.values())
    shared.given["s"] /= 2
    found, report = shared.fused()
    assert torch.equal(found, expected) and "writes to memory" in report.sites[0].notes[0]


# --- results that are quantised --------------------------------------------------------------------------------------

VALUES = {
    "F.gelu(mm(x, w.t(), rs, cs, bias=b, out_dtype=BF16)).float()": "gelu(acc + c1)",
    "(mm(x, w.t(), s, t, out_dtype=BF16).relu() * r).float()": "relu(acc) * m1",
    "torch.tanh(mm(x, w.t(), rs, cs, out_dtype=FP32) + bw) * rw": "tanh(acc + c1) * m1",
    "mm(x, w.t(), rs, cs, bias=b, out_dtype=BF16).float()": "acc + c1",
    "(own(x.view(2, 3, -1), w.t(), rs.view(2, 3, 1), cs).relu() + 1).float()": "relu(acc) + 1",
}
QUANTISED = [
    "({} / q).clamp(-448, 448).to(E4M3)",
    "torch.clamp({} / q.view(1, 1), min=-448.0, max=448.0).to(dtype=E4M3)",
    "torch.div({}, q).clamp_(-448, 448).to(E4M3)",
]
# Of which the epilogue computes all but the cast.
IN_EPILOGUE = {
    "({} / q).clamp(-240, 240).to(E4M3)": "e4m3(clamp({} / s1, -240, 240))",
    "({} * q).clamp(-448, 448).to(E4M3)": "e4m3(clamp({} * s1, -448, 448))",
    "({} / 0.03).clip(0, 448).to(E4M3)": "e4m3(clamp({} / 0.03, 0, 448))",
    "torch.clamp({} / rs, -448, 448).to(E4M3)": "e4m3(clamp({} / r1, -448, 448))",
}
NOT_QUANTISED = [
    "({} / q).to(E4M3)",  # not saturated
    "({} / q).clamp(max=448).to(E4M3)",
    "({} / q).clamp(-448, 1e3).to(E4M3)",
    "({}.bfloat16() / q).clamp(-448, 448).to(E4M3)",  # a quotient in 16 bits
    "({} / q).clamp(-448, 448).to(torch.float8_e5m2)",
    "(lambda z: [z.clamp(-448, 448).to(E4M3), z])({} / q)",
    "({} / q).clamp(-448, 448).half().to(E4M3)",
]


@pytest.mark.parametrize(("value", "text"), in_turn([*VALUES], QUANTISED), ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_quantised_results(value: str, text: str, backend: str) -> None:
    """Within a rounding of e4m3; the bits are those of PyTorch where nothing was rounded before."""
    layer = Layer(text.format(value))
    found, report = layer.fused(backend=backend)
    expected = layer(*layer.given.values())
    assert found.dtype is E4M3 and found.shape == expected.shape and found.stride() == expected.stride()
    (site,) = report.sites
    assert site.formula == f"e4m3(({VALUES[value]}) / scale)" and report.chains == (1, 1), report
    check_quantised(found, Layer(value.replace(".float()", "")).exact(), 0.03)
    if "BF16" not in value and "own" not in value:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "text"), in_turn(["BF16", "FP32"], [*IN_EPILOGUE]), ids=str)
@torch.no_grad()
def test_other_scales_are_of_the_epilogue(dtype: str, text: str) -> None:
    value = f"torch.relu(mm(x, w.t(), s, t, out_dtype={dtype})).float()"
    layer = Layer(text.format(value))
    found, report = layer.fused()
    formula = IN_EPILOGUE[text].format("relu(acc)" if dtype == "FP32" else "copy(relu(acc))")
    assert [each.formula for each in report.sites] == [formula], report
    exact = Layer(text.format(value.replace(".float()", "")).replace(".to(E4M3)", "")).exact()
    check_quantised(found, exact, 1.0)


@pytest.mark.parametrize("text", NOT_QUANTISED)
@torch.no_grad()
def test_other_quantisations_stay(text: str) -> None:
    """The product is a fused call, whose result PyTorch quantises."""
    layer = Layer(text.format("torch.relu(mm(x, w.t(), s, t, out_dtype=FP32))"))
    found, report = layer.fused()
    expected = layer(*layer.given.values())
    (site,) = report.sites
    assert "e4m3" not in site.formula and "relu(acc)" in site.formula, report
    for got, wanted in zip(
        *((each if isinstance(each, list) else [each]) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


# With the formulas of the fused calls: what is read elsewhere, written on the way, or made of the product itself stays.
AROUND = {
    "(lambda z: [z.float(), z.view(2, 3, -1).float()])(({} / q).clamp(-448, 448).to(E4M3))": ["e4m3(({}) / scale)"],
    "({}.t() / q).clamp(-448, 448).to(E4M3).float()": ["e4m3(({}) / scale)"],
    "(lambda z: z.div_(q).clamp_(-448, 448).to(E4M3).float())({})": ["e4m3(({}) / scale)"],
    "({} * mm(x, w.t(), rs, cs, out_dtype=FP32) / q).clamp(-448, 448).to(E4M3).float()":
        ["{}", "e4m3((m1 * acc) / scale)"],
    "(lambda z: [(z / q).clamp(-448, 448).to(E4M3).float(), z])({})": ["{}"],
    "(lambda z: [z, q.mul_(2)][0].to(E4M3).float())(({} / q).clamp(-448, 448))": ["{}"],
    "(lambda z: [z, q.mul_(2)][0].clamp(-448, 448).to(E4M3).float())({} / q)": ["{}"],
    "(lambda z: (z / z.abs().amax()).clamp(-448, 448).to(E4M3).float())({})": ["{}"],
    "(lambda z: (z / z[0, 0]).clamp(-448, 448).to(E4M3).float())({})": ["{}"],
}  # fmt: skip


@pytest.mark.parametrize("text", AROUND)
@torch.no_grad()
def test_what_is_around_a_quantisation(text: str) -> None:
    value, formula = "torch.relu(mm(x, w.t(), s, t, out_dtype=FP32))", "relu(acc)"
    layer, plain = Layer(text.format(value)), Layer(text.format(value))
    found, report = layer.fused()
    expected = plain(*plain.given.values())
    assert [each.formula for each in report.sites] == [each.format(formula) for each in AROUND[text]], report
    for got, wanted in zip(
        *((each if isinstance(each, list) else [each]) for each in (found, expected)), strict=True
    ):
        # Another order of the sums may make a number the next one in 8 bits.
        torch.testing.assert_close(got, wanted, rtol=2.0**-3, atol=1e-5)
        assert got.stride() == wanted.stride()
    assert torch.equal(layer.given["q"], plain.given["q"])


@torch.no_grad()
def test_a_result_that_the_next_product_reads() -> None:
    text = "(lambda z: mm(z.view(M, N), w[:, :N].contiguous().t(), q, s, out_dtype=BF16))"
    value = QUANTISED[0].format("F.gelu(mm(x, w.t(), s, t, out_dtype=BF16)).float()")
    layer = Layer(f"{text}({value})".replace("M, N", f"{M}, {N}").replace(":N", f":{N}"))
    found, report = layer.fused()
    assert [each.formula for each in report.sites] == ["e4m3((gelu(acc)) / scale)", "acc"], report
    one = Layer(value)
    quantised = one.fused()[0].double() @ layer.given["w"][:, :N].double().t() * 0.03 * 0.2
    close(found, quantised)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_hopper_computes_what_follows(dtype: torch.dtype, hopper: Tensor) -> None:
    """A kernel for the chain, as an H200 that is described has it; a product alone stays PyTorch's."""
    x, weight = torch.empty(256, 64, dtype=E4M3), torch.empty(128, 64, dtype=E4M3)
    scales = torch.ones(256, 1), torch.ones(1, 128)

    def chained(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        z = _torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=dtype, use_fast_accum=True)
        return F.gelu(z)

    def quantised(*given: Tensor) -> Tensor:
        return (chained(*given).float() / given[2][0]).clamp(-448, 448).to(E4M3)

    for function, result in ((chained, dtype), (quantised, E4M3)):
        call = profit.call_of(chain_of(function, x, weight, *scales))
        assert call.eight_bits is not None and call.dtype is result and call.order.name == "fast"
        judged = profit.judged_there(call, hopper)
        assert (judged.why_not, judged.way) == ("", Way.FUSED)
    alone = chain_of(
        lambda x, w, s, t: _torch._scaled_mm(x, w.t(), s, t, out_dtype=dtype), x, weight, *scales
    )
    assert profit.judged(alone).why_not == profit.SLOWER
