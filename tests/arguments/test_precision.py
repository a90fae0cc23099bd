"""Which arithmetic an fp32 call gets from torch's two settings APIs, from both at once, and from its own argument."""

from __future__ import annotations

import pytest
import torch

import epigemm
from epigemm.arguments import precision
from tests.support import reference
from tests.support.arithmetic import FP32, TF32
from tests.support.cases import Operands
from tests.support.threads import at_once
from tests.support.untyped import backends

MATMUL = backends.cuda.matmul


def state() -> tuple[str, str, str]:
    return MATMUL.fp32_precision, backends.fp32_precision, backends.mkldnn.matmul.fp32_precision


def configure(matmul: str, widest: str, old: str | None = None) -> None:
    """CUDA's own setting and that of all backends; the CPU's follows the latter."""
    if old is not None:
        torch.set_float32_matmul_precision(old)
    backends.mkldnn.matmul.fp32_precision = "none"
    backends.fp32_precision = widest
    MATMUL.fp32_precision = matmul


def order(wish: str, device: str) -> precision.Order:
    """In which arithmetics a call is tried."""
    return precision.order(wish, device)


ACCEPTED = {"highest": "split", "ieee": "ieee", "high": "scaled", "medium": "scaled", "tf32": "tf32"}


@pytest.mark.parametrize(
    ("old", "new", "default"),
    [
        ("highest", None, "split"),
        ("high", None, "scaled"),
        ("medium", None, "scaled"),
        (None, ("ieee", "none"), "split"),
        (None, ("tf32", "none"), "scaled"),
        (None, ("none", "none"), "split"),
        (None, ("none", "tf32"), "scaled"),
        ("highest", ("tf32", "none"), "scaled"),
    ],
)
def test_the_first_arithmetic(old: str | None, new: tuple[str, str] | None, default: str) -> None:
    """The call's own wish wins over whatever torch is set to, by either of its APIs (`new`: CUDA's, all backends')."""
    if old is not None:
        torch.set_float32_matmul_precision(old)
    if new is not None:
        configure(*new)
    assert order("default", "cuda").fused[0] == default
    assert precision.ARITHMETIC == ACCEPTED
    for value, arithmetic in ACCEPTED.items():
        assert order(value, "cuda").fused[0] == arithmetic
        is_coarser = default == "scaled" and MATMUL.fp32_precision == "tf32"
        assert precision.order(value, "cuda").overrides == (is_coarser and arithmetic in ("split", "ieee"))


def test_bf16_of_a_cpu_asks_for_no_more_than_ten_bits() -> None:
    backends.mkldnn.matmul.fp32_precision = "bf16"
    assert order("default", "cpu").fused[0] == "scaled"


def test_mixing_both_apis_never_raises() -> None:
    """Reading torch's legacy flag after the new one was written raises; a call must not."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    for old in ("highest", "high", "medium"):
        for new in ("ieee", "tf32", "none"):
            torch.set_float32_matmul_precision(old)
            MATMUL.fp32_precision = new
            for wish in (None, *ACCEPTED):
                epigemm.linear_relu(x, weight, precision=wish)
            expected = "scaled" if new == "tf32" else "split"
            assert order("default", "cuda").fused[0] == expected or new == "none"


@pytest.mark.parametrize("setting", ["none", "ieee", "tf32"])
def test_what_runs_in_which_order(setting: str) -> None:
    """Where torch's GEMM keeps to IEEE, a call that would do with TF32 is tried on the split before."""
    MATMUL.fp32_precision = setting
    allowed = setting == "tf32"
    scaled = ("scaled", "tf32") if allowed else ("scaled", "tf32", "split")
    expected = {
        "highest": (("split", "ieee"), False),
        "ieee": (("ieee",), False),
        "high": (scaled, allowed),
        "medium": (scaled, allowed),
        "tf32": (("tf32",), allowed),
        "default": (scaled, True) if allowed else (("split", "ieee"), False),
    }
    for wish, each in expected.items():
        found = order(wish, "cuda")
        assert (found.fused, found.tf32_allowed) == each, wish


@pytest.mark.parametrize("wish", [None, *ACCEPTED])
def test_calls_leave_the_settings_as_they_were(wish: str | None, device: torch.device) -> None:
    x, weight = torch.randn(5, 7, device=device), torch.randn(3, 7, device=device)
    for matmul in ("ieee", "tf32", "none"):
        for widest in ("ieee", "tf32", "none"):
            if device.type == "cuda" and matmul == widest == "tf32":
                continue  # set or inherited: torch tells nobody which, and the call takes it for inherited
            other = "tf32" if widest == "ieee" else "ieee"
            configure(matmul, widest)
            before = state()
            backends.fp32_precision = other
            changed = state()
            configure(matmul, widest)
            epigemm.linear_relu(x, weight, precision=wish)
            assert state() == before
            # Not only equal now: a setting that followed a wider one must go on following it.
            backends.fp32_precision = other
            assert state() == changed


def test_settings_are_restored_when_the_call_fails() -> None:
    MATMUL.fp32_precision = "tf32"
    backends.mkldnn.matmul.fp32_precision = "tf32"
    before = state()
    for device_type in ("cuda", "cpu"):
        with pytest.raises(ZeroDivisionError), precision.switched(device_type, precision.IEEE):
            raise ZeroDivisionError
    assert state() == before


def test_what_one_call_switches_no_other_call_goes_by() -> None:
    """Another thread's call must not take the switched setting for torch's, least of all remember it."""
    MATMUL.fp32_precision = "tf32"
    for _ in range(2):
        with precision.switched("cuda", precision.IEEE):
            assert MATMUL.fp32_precision == "ieee"
            assert precision.torch_setting("cuda") == "tf32"
            assert precision.order("ieee", "cuda").overrides
            with precision.switched("cuda", "tf32"):
                assert precision.torch_setting("cuda") == "tf32"
            assert MATMUL.fp32_precision == "ieee"
        assert precision.torch_setting("cuda") == "tf32"
    MATMUL.fp32_precision = "ieee"
    assert precision.torch_setting("cuda") == "ieee"


def test_overrides_from_several_threads_restore_the_setting() -> None:
    """Two calls that switch the process-wide setting at once must not restore each other's value."""
    MATMUL.fp32_precision = "tf32"
    seen: set[str] = set()

    def work(_: int) -> None:
        for _ in range(300):
            with precision.switched("cuda", precision.IEEE):
                seen.add(MATMUL.fp32_precision)

    at_once(4, work)
    assert seen == {"ieee"}
    assert MATMUL.fp32_precision == "tf32"


def test_ieee_is_ieee_whatever_the_setting(device: torch.device) -> None:
    """Values with 12 bits: TF32 would round them, so every product must come out exactly."""
    x = torch.full((64, 64), 1 + 2.0**-12, device=device)
    weight = torch.eye(64, device=device)
    torch.set_float32_matmul_precision("medium")
    if device.type == "cpu":
        backends.mkldnn.matmul.fp32_precision = "bf16"
    for wish in ("ieee", "highest"):
        assert torch.equal(epigemm.linear(x, weight, precision=wish), x)


@pytest.mark.gpu
def test_the_setting_reaches_the_kernel() -> None:
    """On a GPU "high" must be worse than fp32 and no worse than TF32, "highest" fp32: measured, not believed."""
    x, weight = torch.rand(256, 512, device="cuda"), torch.rand(256, 512, device="cuda")
    bounds = {
        arithmetic.name: reference.linear("bias", x, weight, Operands(), arithmetic, second_path=True)
        for arithmetic in (FP32, TF32)
    }
    for setting, arithmetic in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
        torch.set_float32_matmul_precision(setting)
        actual = epigemm.linear(x, weight)
        reference.assert_within(actual, bounds[arithmetic])
        error = (actual.double() - bounds["ieee"].expected).abs()
        assert bool((error > bounds["ieee"].tolerance).any()) == (arithmetic == "tf32")
        reference.assert_within(epigemm.linear(x, weight, precision="ieee"), bounds["ieee"])
