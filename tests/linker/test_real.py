"""With NVRTC and nvJitLink themselves, where they are, and a kernel of nvcc's, where that is. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epigemm.linker import libraries
from epigemm.linker.cubins import Job, build_cubins, cubin
from epigemm.linker.libraries import CompileError, LinkError, LinkingError, compile_functor, link

pytestmark = pytest.mark.skipif(
    bool(libraries.unavailable()), reason=libraries.unavailable().partition(";")[0]
)

ROOT = Path(__file__).parents[2]
SYMBOL = "epigemm_open_test"
KERNEL = """
#include "open/contract.h"
extern "C" __global__ void epigemm_open_test(const float* x, const float* bias, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float c0 = epigemm_operand(0) ? bias[i % n] : 0.f;
  y[i] = epigemm_apply(x[i], c0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}
extern "C" __global__ void epigemm_open_unused(float* y) { y[0] = 1; }
"""
APPLY = (
    'extern "C" __device__ float epigemm_apply(float acc, float c0, float c1, float c2, float c3, float s0, '
    "float s1, float s2, float s3, float r0, float r1, float m0, float m1)"
)


def functor(body: str, reads_bias: bool = False) -> str:
    operand = (
        f'extern "C" __device__ int epigemm_operand(int slot) {{ return slot == 0 ? {reads_bias:d} : 0; }}'
    )
    return f"{operand}\n{APPLY} {{ {body} }}\n"


PLAIN = functor("return acc;")


@pytest.fixture(scope="module")
def irs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The kernel's code by nvcc: for Hopper, for Ampere and later, and this in a fatbin."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    folder = tmp_path_factory.mktemp("ir")
    source = folder / "kernel.cu"
    source.write_text(KERNEL)
    found = {}
    kinds = {"hopper": ("lto_90a", "-ltoir"), "any": ("lto_80", "-ltoir"), "fatbin": ("lto_80", "-fatbin")}
    for name, (target, kind) in kinds.items():
        made = folder / name
        command = [nvcc, f"-arch={target}", "-dlto", "-dc", kind, "-gen-opt-lto", "-std=c++17", "-I"]
        subprocess.run([*command, ROOT / "csrc", source, "-o", made], check=True, capture_output=True)
        found[name] = made.read_bytes()
    return found


@pytest.mark.parametrize("body", ["return acc +;", "return no_such(acc);", "#error here\n", "}"])
def test_nvrtc_says_where_the_error_is(body: str) -> None:
    with pytest.raises(CompileError, match=r"epilogue\.cu\([23]\): .*error") as caught:
        compile_functor(functor(body), "sm_90a")
    assert "\0" not in caught.value.log


def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(LinkingError, match="gpu-architecture") as caught:
        compile_functor(PLAIN, "sm_999")
    assert not isinstance(caught.value, CompileError)  # it is not the epilogue's fault


def test_a_functor_is_linked_in(irs: dict[str, bytes]) -> None:
    plain = link(irs["hopper"], compile_functor(PLAIN, "sm_90a"), SYMBOL, "sm_90a")
    with_bias = functor("return fmaxf(acc + c0, 0.f);", reads_bias=True)
    relu = link(irs["hopper"], compile_functor(with_bias, "sm_90a"), SYMBOL, "sm_90a")
    assert plain.startswith(b"\x7fELF") and len(plain) < len(relu)
    # Inlined, and nothing of the kernel that was not asked for.
    assert b"epigemm_apply" not in relu and b"epigemm_open_unused" not in relu


@pytest.mark.parametrize("kind", ["any", "fatbin"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_one_code_for_every_gpu(kind: str, architecture: str, irs: dict[str, bytes]) -> None:
    code = link(irs[kind], compile_functor(PLAIN, architecture), SYMBOL, architecture)
    assert code.startswith(b"\x7fELF")


def test_what_nvjitlink_refuses(irs: dict[str, bytes]) -> None:
    plain = compile_functor(PLAIN, "sm_90a")
    with pytest.raises(LinkError, match="arch newer than target"):
        link(irs["hopper"], compile_functor(PLAIN, "sm_80"), SYMBOL, "sm_80")
    with pytest.raises(LinkError, match="the code has no kernel no_such"):
        link(irs["hopper"], plain, "no_such", "sm_90a")
    with pytest.raises(LinkError, match="the code has no kernel epigemm_open_te"):
        link(irs["hopper"], plain, "epigemm_open_te", "sm_90a")
    with pytest.raises(LinkError, match="did not link"):
        link(irs["hopper"][: len(irs["hopper"]) // 2], plain, SYMBOL, "sm_90a")
    with pytest.raises(LinkError, match="does not match type"):
        link(irs["hopper"], b"hello" * 100, SYMBOL, "sm_90a")
    half = compile_functor(PLAIN.partition("\n")[0], "sm_90a")
    with pytest.raises(LinkError, match="Unresolved extern function 'epigemm_apply'"):
        link(irs["hopper"], half, SYMBOL, "sm_90a")
    with pytest.raises(LinkError, match="does not take its options"):
        link(irs["hopper"], plain, SYMBOL, "sm_999")


def test_threads_compile_and_link_what_one_does(irs: dict[str, bytes]) -> None:
    """Both libraries in many threads at once: the same bytes as one after the other."""
    sources = [functor(f"return tanhf(acc) * {index}.5f;") for index in range(12)]

    def make(source: str) -> bytes:
        return link(irs["hopper"], compile_functor(source, "sm_90a"), SYMBOL, "sm_90a")

    with ThreadPoolExecutor(6) as pool:
        side_by_side = list(pool.map(make, sources))
    assert side_by_side == [make(source) for source in sources]


def test_through_the_cache(irs: dict[str, bytes], folder: Path) -> None:
    jobs = [Job(PLAIN, SYMBOL, irs["any"], capability) for capability in ((8, 6), (9, 0), (12, 0))]
    codes = build_cubins(jobs)
    assert len(set(codes)) == len(list(folder.iterdir())) == 3
    assert [cubin(*job) for job in jobs] == codes
