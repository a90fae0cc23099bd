"""How NVRTC and nvJitLink are called, and how their errors are reported; the libraries are fakes."""

from __future__ import annotations

import pytest

from epigemm.linker.cubins import architecture
from epigemm.linker.libraries import CompileError, LinkError, compile_functor, link
from tests.linker.fakes import BAD_IR, BAD_SOURCE, KERNEL_IR, SOURCE, SYMBOL, FakeNvJitLink, FakeNvrtc

Fakes = tuple[FakeNvrtc, FakeNvJitLink]


def test_compile(fake: Fakes) -> None:
    assert compile_functor(SOURCE, "sm_90a") == b"ir of " + SOURCE.encode()
    assert fake[0].calls == ["-arch=sm_90a -dlto --std=c++17"]
    assert not fake[0].alive


def test_a_source_that_is_refused(fake: Fakes) -> None:
    with pytest.raises(CompileError, match="did not compile the epilogue for sm_90a") as caught:
        compile_functor(BAD_SOURCE, "sm_90a")
    assert caught.value.log == "epilogue.cu(1): error: #error directive: \ufffd"
    assert caught.value.log in str(caught.value)
    assert not fake[0].alive


def test_link(fake: Fakes) -> None:
    cubin = link(KERNEL_IR, b"the functor's", SYMBOL, "sm_90a")
    assert cubin.startswith(b"\x7fELF" + KERNEL_IR + b"the functor's")
    (options,) = fake[1].calls
    assert options == f"-arch=sm_90a -lto -O3 -kernels-used={SYMBOL} -optimize-unused-variables"
    assert not fake[1].alive


@pytest.mark.parametrize(("ir", "kind"), [(KERNEL_IR, 3), (b"\x50\xed\x55\xba" + KERNEL_IR, 4)])
def test_code_in_a_fatbin_is_told_from_code_alone(
    ir: bytes, kind: int, fake: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []

    def add(linker: object, kind: int, *rest: object) -> int:
        kinds.append(kind)
        return 0

    monkeypatch.setattr(fake[1], "nvJitLinkAddData", add)
    link(ir, b"functor", SYMBOL, "sm_90a")
    assert kinds == [kind, 3]


def test_code_that_is_refused(fake: Fakes) -> None:
    with pytest.raises(LinkError, match=f"did not link {SYMBOL}") as caught:
        link(BAD_IR, b"functor", SYMBOL, "sm_90a")
    assert caught.value.log == "parse Malformed block"
    assert not fake[1].alive
    with pytest.raises(LinkError, match="does not take its options for sm_999"):
        link(KERNEL_IR, b"functor", SYMBOL, "sm_999")
    fake[1].drops_the_kernel = True
    with pytest.raises(LinkError, match=f"the code has no kernel {SYMBOL}"):
        link(KERNEL_IR, b"functor", SYMBOL, "sm_90a")


@pytest.mark.parametrize(
    ("symbol", "capability", "expected"),
    [
        ("epigemm_open_sm90_tma_bfloat16_0", (9, 0), "sm_90a"),
        ("epigemm_open_elementwise_float32", (9, 0), "sm_90a"),
        ("epigemm_open_elementwise_float32", (8, 0), "sm_80"),
        ("epigemm_open_elementwise_float32", (8, 9), "sm_89"),
        ("epigemm_open_elementwise_float32", (12, 0), "sm_120"),
        ("epigemm_open_elementwise_float32", (7, 5), None),
        ("epigemm_open_sm90_tma_bfloat16_0", (10, 0), None),
        ("epigemm_open_sm90_tma_bfloat16_0", (8, 0), None),
    ],
)
def test_architecture(symbol: str, capability: tuple[int, int], expected: str | None) -> None:
    if expected:
        assert architecture(symbol, capability) == expected
    else:
        with pytest.raises(ValueError, match="does not run on GPUs of compute capability"):
            architecture(symbol, capability)
