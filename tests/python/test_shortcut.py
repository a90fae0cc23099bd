"""Calls that torch's one kernel answers: what is remembered of them, and that nothing else goes that way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import epigemm
from epigemm import packs, plans, shortcut, split
from epigemm.epilogues import BIAS, BIAS_RELU, RELU_DIV
from epigemm.precision import DEFAULT
from tests.python.pieces import Road
from tests.support.cases import fused_unavailable

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REMEMBER = shortcut.remember
"""The road replaces it."""


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


def draw(device: str, dtype: torch.dtype, m: int = 8, n: int = 16, k: int = 32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*size, device=device).to(dtype) for size in ((m, k), (n, k), (n,)))


def test_nothing_on_a_cpu_has_a_key() -> None:
    x, weight, bias = draw("cpu", torch.float32)
    assert shortcut.key_of(BIAS_RELU, x, weight, bias, (), DEFAULT, packs.FIND) is None
    assert shortcut.answer_for(None) is None
    shortcut.remember(None, BIAS_RELU, x, weight, bias, (), (), DEFAULT, x)
    assert not shortcut._answers


def test_forgetting_and_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "_is_torchs", lambda *_: True)
    monkeypatch.setattr(shortcut, "_REMEMBERED", 3)
    x, weight, bias = draw("cpu", torch.float32)
    for number in range(5):
        shortcut.remember((number,), BIAS, x, weight, bias, (), (), DEFAULT, x)
        assert shortcut.answer_for((number,)) and len(shortcut._answers) <= 3
    plans.forget()
    assert shortcut.answer_for((4,)) is None


@pytest.mark.parametrize("narrower", [0, 1, 2, 3])
@pytest.mark.parametrize("kept", [False, True], ids=["split", "kept"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_a_padded_result_comes_the_same_way_every_time(
    has_bias: bool, kept: bool, narrower: int, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On pieces, by the long road, which copies it; only where nothing is padded is the call remembered."""
    monkeypatch.setattr(shortcut, "remember", REMEMBER)
    if road.device.type == "cpu":
        monkeypatch.setattr(shortcut, "key_of", lambda *_: ("the call",))
    x, weight = road.x(), road.weight()[narrower:]
    bias = torch.zeros(weight.shape[0], device=road.device) if has_bias else None
    given: Any = epigemm.pack(weight) if kept else weight
    results = [epigemm.linear(x, given, bias) for _ in range(3)]
    sizes = (x.shape[0], *weight.shape)
    launched = [(launch.packed, launch.arithmetic, launch.shape) for launch in road.take()]
    assert launched == [(kept, "split", sizes)] * 3
    assert all(torch.equal(results[0], result) for result in results[1:])
    road.check(results[0], x, weight)
    remembered = [isinstance(answer, shortcut.OnPieces) for answer in shortcut._answers.values()]
    assert remembered == [narrower == 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["linear", "linear_relu"])
def test_a_remembered_call_gives_the_same_result(function: str, dtype: torch.dtype) -> None:
    run: Any = getattr(epigemm, function)
    x, weight, bias = draw("cuda", dtype, 256, 1024, 1024)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = expected.relu() if function == "linear_relu" else expected
    shortcut._answers.clear()
    first = run(x, weight, bias)
    assert len(shortcut._answers) == 1
    for key in shortcut._answers:
        shortcut._answers[key] = shortcut._TORCHS
    second = run(x, weight, bias)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-9}[dtype]
    for result in (first, second):
        assert result.dtype == dtype and result.is_contiguous()
        assert bool(((result.double() - expected).abs() <= bound * (expected.abs() + 32)).all())


@pytest.mark.gpu
def test_what_is_never_torchs() -> None:
    x, weight, bias = draw("cuda", torch.bfloat16)
    assert shortcut.key_of(RELU_DIV, x, weight, bias, (), DEFAULT, packs.FIND) is None
    assert shortcut.key_of(BIAS, x, weight, None, (), DEFAULT, packs.FIND) is None
    assert not shortcut._is_torchs(BIAS_RELU, x, weight[:1], bias[:1], DEFAULT, x[:, :1].contiguous())
    if not fused_unavailable():
        x, weight, bias = draw("cuda", torch.bfloat16, 16384, 4096, 1024)
        assert not shortcut._is_torchs(BIAS_RELU, x, weight, bias, DEFAULT, x @ weight.t()), (
            "the fused kernel is faster there"
        )


ON_PIECES = shortcut.OnPieces("split", 2, (8, 16, 32), None, shortcut.Form((2, 0, 0, 1, 1), 1 << 20))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "answer"),
    [*((dtype, shortcut._TORCHS) for dtype in DTYPES), (torch.float32, ON_PIECES)],
    ids=["bfloat16", "float16", "float32", "on pieces"],
)
def test_bad_input_is_refused_on_the_shortcut_too(
    dtype: torch.dtype, answer: shortcut.Torchs | shortcut.OnPieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortcut, "_answers", defaultdict(lambda: answer))
    x, weight, bias = draw("cuda", dtype)
    for arguments, message in (
        ((x[:, :31], weight, bias), "x: got shape"),
        ((x, weight.double(), bias), "weight: got dtype"),
        ((x, weight, bias.cpu()), "bias: got device"),
    ):
        with pytest.raises(RuntimeError, match=message):
            epigemm.linear_relu(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(bool(fused_unavailable()), reason="no fused kernels here")
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("kept", [False, True], ids=["split", "kept"])
def test_a_remembered_call_on_pieces_launches_what_the_first_one_did(
    kept: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = draw("cuda", torch.float32, 2048, 4096, 4096)
    given: Any = epigemm.pack(weight, precision=precision) if kept else weight
    launches: list[tuple[Any, ...]] = []
    real = split.launch

    def record(*args: Any) -> None:
        launches.append(args)
        real(*args)

    monkeypatch.setattr(split, "launch", record)
    results = []
    for _ in range(3):
        torch.empty(2048, 4096, device="cuda").fill_(float("nan"))
        results.append(epigemm.linear_relu(x, given, bias, precision=precision))
    assert any(isinstance(answer, shortcut.OnPieces) for answer in shortcut._answers.values())
    assert len(launches) == 3 and all(torch.equal(results[0], result) for result in results[1:])
    for later in launches[1:]:
        for first_argument, argument in zip(launches[0], later, strict=True):
            if isinstance(argument, torch.Tensor):
                assert argument.shape == first_argument.shape and argument.dtype == first_argument.dtype
            else:
                assert argument == first_argument
    assert all((arguments[3] is not None) is kept for arguments in launches)


@pytest.mark.gpu
@pytest.mark.skipif(bool(fused_unavailable()), reason="no fused kernels here")
def test_a_weight_that_changes_is_split_again_though_its_calls_are_remembered() -> None:
    x, weight, bias = draw("cuda", torch.float32, 2048, 4096, 4096)
    packed = epigemm.pack(weight)
    for step in range(4):
        weight.mul_(-1.5)
        expected = torch.relu(torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
        scale = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        for _ in range(2):
            result = epigemm.linear_relu(x, packed, bias)
            assert bool(((result.double() - expected).abs() <= 2**-20 * scale).all()), step


@pytest.mark.gpu
@pytest.mark.skipif(bool(fused_unavailable()), reason="no fused kernels here")
def test_three_dimensions_and_scalars_on_the_shortcut() -> None:
    x, weight, bias = draw("cuda", torch.float32, 2048, 4096, 4096)
    batches = x.view(4, 512, 4096)
    half = torch.tensor(0.5, device="cuda")
    z = torch.nn.functional.linear(batches.double(), weight.double(), bias.double())
    expected = z + 0.5 * torch.sigmoid(z)
    scale_of_sums = torch.nn.functional.linear(
        batches.double().abs(), weight.double().abs(), bias.double().abs()
    )
    for scale in (0.5, half, 0.5, half):
        result = epigemm.linear_sigmoid_scale_residual(batches, weight, bias, scale)
        assert result.shape == expected.shape and result.is_contiguous()
        assert bool(((result.double() - expected).abs() <= 2**-20 * scale_of_sums).all())


@pytest.mark.gpu
@pytest.mark.skipif(bool(fused_unavailable()), reason="no fused kernels here")
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "shape", [(16, 4096, 4096), (3, 64, 64), (64, 4096, 4096), (512, 1024, 64), (256, 1024, 4096)], ids=str
)
@pytest.mark.parametrize("kept", [False, True], ids=["split", "kept"])
def test_remembered_calls_give_the_bits_of_the_first(
    kept: bool, shape: tuple[int, int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes them: pieces, the TF32 kernel, torch's GEMM with a kernel behind it."""
    m, n, k = shape
    x, weight, bias = draw("cuda", torch.float32, m, n, k)
    torch.set_float32_matmul_precision(precision)
    try:
        given: Any = epigemm.pack(weight) if kept else weight
        calls: list[tuple[Any, ...]] = [
            (epigemm.linear_sigmoid_scale_residual, x, given, bias, 2.0),
            (epigemm.linear, x.view(1, m, k), given),
            (epigemm.linear, x, given, bias),
            (epigemm.linear_scale, x, given, None, bias),
        ]
        for function, *arguments in calls:
            remembered = function(*arguments), function(*arguments)
            with monkeypatch.context() as patch:
                patch.setattr(shortcut, "key_of", lambda *_: None)
                first = function(*arguments)
            assert all(torch.equal(first, result) for result in remembered)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        sums = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        bound = 2**-20 if precision == "highest" else 2**-9
        assert bool(((epigemm.linear(x, given, bias).double() - expected).abs() <= bound * sums).all())
    finally:
        torch.set_float32_matmul_precision("highest")
