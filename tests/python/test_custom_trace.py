"""A Python function becomes an epilogue: what it declares, what it may do, and what its functor and reference give."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epigemm import custom
from epigemm.custom import Matrix, OperandSpec, PerColumn, PerRow, Scalar, Traced, kernel_source, trace
from epigemm.functor_source import describe_compile_error, number_text, prelude
from tests.support.functors import COMPILER, Functors

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def swish_clamp(
    acc: Tensor,
    bias: PerColumn,
    residual: custom.Matrix,
    gain: PerRow,
    limit: Scalar = 6.0,  # type: ignore[assignment]
) -> Tensor:
    z = acc + bias  # type: ignore[operator]
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) * gain + residual  # type: ignore[operator]


def draw(operand: OperandSpec, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    shape = {"per_column": (columns,), "per_row": (rows, 1), "scalar": (), "matrix": (rows, columns)}[
        operand.kind
    ]
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(traced: Traced, rows: int = 6, columns: int = 9) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    acc = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return acc, [draw(operand, rows, columns, generator) for operand in traced.operands]


def test_declaration() -> None:
    traced = trace(swish_clamp)
    assert traced.name == "swish_clamp"
    assert traced.operands == (
        OperandSpec("per_column", "bias"),
        OperandSpec("matrix", "residual"),
        OperandSpec("per_row", "gain"),
        OperandSpec("scalar", "limit", 6.0),
    )
    assert traced.slots == (0, 10, 8, 4)
    assert traced.reads == (True, True, True, True)
    assert traced.is_transcendental
    assert not trace(lambda acc: acc * 2.0).is_transcendental


def test_source_holds_no_name_of_the_users() -> None:
    def odd(acc: Tensor, operator: PerColumn, delete: Scalar) -> Tensor:
        return acc * operator + delete  # type: ignore[operator]

    source = trace(odd).source
    assert "delete" not in source and "operator" not in source
    assert re.search(r"const T v0 = acc \* c0;\n    const T v1 = v0 \+ s0;\n    return v1;", source)


def test_digest_is_of_what_is_computed() -> None:
    def other_name(acc: Tensor, b: PerColumn) -> Tensor:
        return torch.relu(acc + b)  # type: ignore[operator]

    first = trace(lambda_with_bias())
    assert first.digest == trace(other_name).digest
    assert first.digest != trace(lambda acc: torch.relu(acc)).digest
    code = (
        "from epigemm.custom import PerColumn, trace\nimport torch\nimport sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.python.test_custom_trace import lambda_with_bias\nprint(trace(lambda_with_bias()).digest)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == first.digest


def lambda_with_bias() -> Callable[..., Tensor]:
    def biased(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.relu(acc + bias)  # type: ignore[operator]

    return biased


def test_importing_the_package_does_not_import_the_tracer() -> None:
    code = "import sys, epigemm, epigemm.custom; print('torch.fx.experimental.proxy_tensor' in sys.modules)"
    before = "import sys, torch; print('torch.fx.experimental.proxy_tensor' in sys.modules)"
    answers = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, before)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reference(dtype: torch.dtype) -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced)
    operands[3] = operands[3].abs()
    acc, *operands = (value.to(dtype) for value in (acc, *operands))
    expected = swish_clamp(acc, *operands)  # type: ignore[arg-type]
    torch.testing.assert_close(traced.reference(acc, *operands), expected)
    torch.testing.assert_close(traced.reference(acc, *operands[:3], float(operands[3])), expected)
    with pytest.raises(TypeError, match="got 1 operands; accepted are 4"):
        traced.reference(acc, operands[0])


def test_reference_is_differentiable_twice_by_everything() -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced, 3, 4)
    inputs = [value.requires_grad_() for value in (acc, *operands)]
    inputs[4].data.abs_().add_(0.37)
    assert torch.autograd.gradcheck(traced.reference, inputs)
    assert torch.autograd.gradgradcheck(traced.reference, inputs)


def test_reference_under_vmap_and_compile() -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced)
    batch = torch.stack([acc, -acc])
    mapped = torch.vmap(lambda one: traced.reference(one, *operands))(batch)
    torch.testing.assert_close(mapped, torch.stack([traced.reference(one, *operands) for one in batch]))
    compiled = torch.compile(traced.reference, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(acc, *operands), traced.reference(acc, *operands))


def test_scalars_stay_run_time() -> None:
    def scalars(acc: Tensor, low: Scalar, high: Scalar) -> Tensor:
        wide: Any = high
        return torch.where(acc > low, acc * (wide - low) ** 2, torch.full_like(acc, wide)) / abs(wide)

    traced = trace(scalars)
    acc, _ = arguments(traced)
    for low, high in ((-0.5, 0.25), (0.75, -2.0), (0.0, 1.0)):
        expected = torch.where(acc > low, acc * (high - low) ** 2, torch.full_like(acc, high)) / abs(high)
        torch.testing.assert_close(traced.reference(acc, low, high), expected)


def test_unread_operands_are_seen() -> None:
    def unread(acc: Tensor, bias: PerColumn, other: PerColumn) -> Tensor:
        return acc + other + 0.0 * 2.0  # type: ignore[operator]

    traced = trace(unread)
    assert traced.reads == (False, True)
    text = traced.kernel_source((1, 2))
    assert "if (slot == 0)" not in text and "if (slot == 1) return 2;" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "T(0.5)"),
        (-0.0, "T(-0.0)"),
        (0.1, "T(0.1)"),
        (1 / 3, "T(0x1.5555555555555p-2)"),
        (math.inf, "T(epigemm::math::infinity())"),
        (-math.inf, "T(-epigemm::math::infinity())"),
        (math.nan, "T(epigemm::math::not_a_number())"),
        (1e300, "T(0x1.7e43c8800759cp+996)"),
    ],
)
def test_numbers_are_written_exactly(value: float, text: str) -> None:
    assert number_text(value) == text


def test_prelude_is_one_text() -> None:
    lines = prelude().splitlines()
    assert not [line for line in lines if line.startswith("#include") and '"' in line]
    depth = 0  # standard headers stand inside of a condition that NVRTC does not meet
    for line in lines:
        depth += line.startswith("#if")
        depth -= line.startswith("#endif")
        assert not line.startswith("#include <") or depth >= 1, line


def test_kernel_source_has_what_is_asked_for() -> None:
    traced = trace(swish_clamp)
    text = kernel_source(
        traced, (1, 1, 2, 2), ("operand", "apply_16", "slope", "slope_double", "apply_double")
    )
    for name in ("int epigemm_operand(int", "float epigemm_apply(float", "float epigemm_slope(float"):
        assert text.count(f'extern "C" __device__ {name}') == 1
    assert "epigemm::Rounded(c0)" in text and text.count("double epigemm_slope_double(double acc") == 1
    assert "epigemm_slope" not in kernel_source(traced, (1, 1, 2, 2))
    for parts in (("apply", "apply_16"), ("other",)):
        with pytest.raises(ValueError, match="parts: got"):
            kernel_source(traced, (1, 1, 2, 2), parts)
    with pytest.raises(ValueError, match="elements: got"):
        kernel_source(traced, (1, 1, 2))


def test_compile_errors_name_the_users_line() -> None:
    traced = trace(swish_clamp)
    text = kernel_source(traced, (1, 1, 2, 2))
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "clamp(v" in line)
    log = f'user.cu({number}): error: identifier "x" is undefined\n\n1 error detected'
    line = inspect.getsourcelines(swish_clamp)[1] + inspect.getsource(swish_clamp).split("\n").index(
        next(part for part in inspect.getsource(swish_clamp).split("\n") if "torch.clamp" in part)
    )
    message = describe_compile_error(traced.program, text, log)
    assert message == f'{__file__}:{line}: identifier "x" is undefined'


# What no epilogue does: each with a part of its message. The line of the body's last statement is named.


def reduction(acc: Tensor) -> Tensor:
    return acc - acc.sum(-1, keepdim=True)


def softmax(acc: Tensor) -> Tensor:
    return acc.softmax(-1)


def index(acc: Tensor) -> Tensor:
    return acc + acc[0]


def strided(acc: Tensor) -> Tensor:
    return acc + acc[:, :1]


def branch_on_values(acc: Tensor) -> Tensor:
    return acc if acc.sum() > 0 else -acc


def branch_on_element(acc: Tensor) -> Tensor:
    return acc if acc[0, 0] > 0 else -acc


def item(acc: Tensor) -> Tensor:
    return acc * acc.max().item()


def branch_on_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc if s > 0 else -acc  # type: ignore[operator]


def float_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * float(s)  # type: ignore[arg-type]


def math_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * math.exp(s)  # type: ignore[arg-type]


def branch_on_shape(acc: Tensor) -> Tensor:
    return acc if acc.shape[0] > 3 else -acc


def shape_as_number(acc: Tensor) -> Tensor:
    return acc * acc.shape[1]


def literal_shape(acc: Tensor) -> Tensor:
    return acc * torch.ones(7)


def branch_on_dtype(acc: Tensor) -> Tensor:
    return acc if acc.dtype == torch.float32 else -acc


def epsilon_of_dtype(acc: Tensor) -> Tensor:
    return acc + torch.finfo(acc.dtype).eps


def device(acc: Tensor) -> Tensor:
    return acc if acc.device.type == "cuda" else -acc


def in_place(acc: Tensor) -> Tensor:
    return acc.add_(1.0)


def in_place_of_a_copy(acc: Tensor) -> Tensor:
    return (acc * 2.0).relu_()


def in_place_argument(acc: Tensor) -> Tensor:
    return F.relu(acc, inplace=True)


def out_argument(acc: Tensor) -> Tensor:
    return torch.add(acc, 1.0, out=acc)


def random_numbers(acc: Tensor) -> Tensor:
    return acc * torch.rand_like(acc)


def dropout(acc: Tensor) -> Tensor:
    return F.dropout(acc, 0.5)


def product(acc: Tensor) -> Tensor:
    return acc @ acc.t()


def transposed(acc: Tensor) -> Tensor:
    return acc.t().t()


def concatenated(acc: Tensor) -> Tensor:
    return torch.cat([acc, acc], 1)


def no_tensor(acc: Tensor) -> Any:
    return (acc, acc)


def nothing(acc: Tensor) -> Any:
    acc = acc + 1.0


def number(acc: Tensor) -> Any:
    return 1.0


def vector(acc: Tensor, bias: PerColumn) -> Any:
    return bias


def boolean(acc: Tensor) -> Tensor:
    return acc > 0


def integers(acc: Tensor) -> Tensor:
    return acc.int() * 2.0


def double(acc: Tensor) -> Tensor:
    return acc.double().float()


def unsupported(acc: Tensor) -> Tensor:
    return torch.nextafter(acc, acc)


def fails(acc: Tensor) -> Tensor:
    return acc.no_such_method()  # type: ignore[operator, no-any-return]


def without_gradient(acc: Tensor) -> Tensor:
    with torch.no_grad():
        return acc * 2.0


WEIGHT = torch.ones(7)
LIST = [1.0]


def global_tensor(acc: Tensor) -> Tensor:
    return acc * WEIGHT


def global_list(acc: Tensor) -> Tensor:
    return acc * LIST[0]


def attribute_tensor(acc: Tensor) -> Tensor:
    return acc * hidden.weight


class hidden:
    weight = torch.ones(())


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (reduction, NotImplementedError, "sum is a reduction"),
        (softmax, NotImplementedError, "_softmax is a reduction"),
        (index, NotImplementedError, "its result has the shape \\[N\\]|select is an index"),
        (strided, NotImplementedError, "slice"),
        (branch_on_values, NotImplementedError, "use torch.where"),
        (branch_on_element, NotImplementedError, "use torch.where"),
        (item, NotImplementedError, "use torch.where"),
        (branch_on_scalar, NotImplementedError, "the value of a scalar operand decides"),
        (float_of_scalar, NotImplementedError, "no float\\(\\) or math function"),
        (math_of_scalar, NotImplementedError, "no float\\(\\) or math function"),
        (branch_on_shape, NotImplementedError, "the shape of a tensor decides"),
        (shape_as_number, NotImplementedError, "the size of a tensor is used as a number"),
        (literal_shape, NotImplementedError, "the shape of a tensor decides"),
        (branch_on_dtype, NotImplementedError, "dtype decides"),
        (epsilon_of_dtype, NotImplementedError, "dtype decides"),
        (device, NotImplementedError, "the device is read"),
        (in_place, NotImplementedError, "add_ writes in place; use add"),
        (in_place_of_a_copy, NotImplementedError, "relu_ writes in place; use relu"),
        (in_place_argument, NotImplementedError, "relu_ writes in place; use relu"),
        (out_argument, NotImplementedError, "writes in place"),
        (random_numbers, NotImplementedError, "draws random numbers"),
        (dropout, NotImplementedError, "draws random numbers"),
        (product, NotImplementedError, "shape \\[N, M\\]|permute|mm"),
        (transposed, NotImplementedError, "shape \\[N, M\\]|permute|t is not supported"),
        (concatenated, NotImplementedError, "shape"),
        (no_tensor, TypeError, "it returns tuple; an epilogue returns one tensor"),
        (nothing, TypeError, "it returns NoneType"),
        (number, TypeError, "it returns float"),
        (vector, NotImplementedError, "its result has the shape \\[N\\], not \\[M, N\\]"),
        (boolean, NotImplementedError, "its result is of torch.bool"),
        (integers, NotImplementedError, "a cast to integers|torch.int32"),
        (double, NotImplementedError, "its result is of torch.float64"),
        (unsupported, NotImplementedError, "nextafter is not supported; supported are"),
        (fails, TypeError, "no attribute 'no_such_method'"),
        (without_gradient, NotImplementedError, "no_grad is not supported"),
        (global_tensor, NotImplementedError, "'WEIGHT' is a captured tensor of shape \\[7\\]"),
        (global_list, TypeError, "'LIST' is captured, and a list may change unseen"),
        (attribute_tensor, NotImplementedError, "captured tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refusals(function: Callable[..., Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        trace(function)
    first = function.__code__.co_firstlineno
    last = first + len(inspect.getsource(function).rstrip().split("\n")) - 1
    named = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert named is not None and first <= int(named[1]) <= last, str(caught.value)
    assert function.__name__ in str(caught.value)


def too_many(kind: type, count: int) -> Callable[..., Tensor]:
    names = [f"a{number}" for number in range(count)]
    namespace: dict[str, Any] = {}
    exec(f"def many(acc, {', '.join(names)}):\n    return acc + {' + '.join(names)}", namespace)
    many = namespace["many"]
    many.__annotations__ = dict.fromkeys(names, kind)
    assert callable(many)
    return many  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "most"), [(PerColumn, 4), (Scalar, 4), (PerRow, 2), (Matrix, 2)])
def test_limits(kind: type, most: int) -> None:
    assert len(trace(too_many(kind, most)).operands) == most
    with pytest.raises(ValueError, match=f"got {most + 1} operands of kind .*; accepted are at most {most}"):
        trace(too_many(kind, most + 1))


def _star(acc: Tensor, *others: PerColumn) -> Tensor:
    return acc


def _keywords(acc: Tensor, **others: PerColumn) -> Tensor:
    return acc


def _keyword_only(acc: Tensor, *, bias: PerColumn) -> Tensor:
    return acc


def _unannotated(acc, bias):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    return acc


def _unknown(acc: Tensor, bias: float) -> Tensor:
    return acc


def _accumulator(acc: PerColumn) -> Any:
    return acc


def _default_vector(acc: Tensor, bias: PerColumn = None) -> Tensor:  # type: ignore[assignment]
    return acc


def _default_text(acc: Tensor, s: Scalar = "1") -> Tensor:  # type: ignore[assignment]
    return acc


def _empty() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_star, r"\*others is not supported"),
        (_keywords, r"\*others is not supported"),
        (_keyword_only, "'bias' is keyword-only"),
        (_unannotated, "'bias' has no annotation; accepted is PerColumn"),
        (_unknown, "'bias' has 'float'; accepted is PerColumn"),
        (_accumulator, "'acc' is the accumulator"),
        (_default_vector, "'bias' has a default"),
        (_default_text, "'s' has a default"),
        (_empty, "takes no argument"),
        (print, "got builtin_function_or_method; accepted is a Python function"),
    ],
)
def test_signatures(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        trace(function)


LIMIT = 2.0


def test_a_changed_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slope = 0.5

    def uses(acc: Tensor) -> Tensor:
        return acc * slope + helper(acc)

    def helper(acc: Tensor) -> Tensor:
        return acc * LIMIT

    traced = trace(uses)
    traced.check_unchanged()
    slope = 0.25
    with pytest.raises(RuntimeError, match="'slope' has changed"):
        traced.check_unchanged()
    slope = 0.5
    traced.check_unchanged()
    monkeypatch.setitem(globals(), "LIMIT", 3.0)
    with pytest.raises(RuntimeError, match="'LIMIT' has changed"):
        traced.check_unchanged()
    monkeypatch.undo()
    traced.check_unchanged()
    uses.__code__ = (lambda acc: (acc * slope, helper)[0]).__code__
    with pytest.raises(RuntimeError, match="has changed"):
        traced.check_unchanged()


# Random expressions of three operands.

UNARY: list[Callable[[Any], Any]] = [
    *(
        torch.tanh,
        torch.sigmoid,
        torch.relu,
        torch.abs,
        torch.sin,
        torch.atan,
        F.gelu,
        F.silu,
        F.softplus,
        torch.floor,
    ),
    *(
        torch.neg,
        F.hardswish,
        lambda x: torch.exp(-x * x),
        lambda x: torch.sqrt(torch.abs(x) + 1.0),
        torch.sign,
    ),
    *(
        lambda x: torch.clamp(x, -1.5, 2.0),
        lambda x: x.half().float(),
        lambda x: F.leaky_relu(x, 0.125),
        torch.erf,
    ),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, torch.maximum, torch.fmin, torch.logaddexp),
    *(
        lambda a, b: a / (1.0 + b * b),
        lambda a, b: torch.where(a > b, a, b * 0.5),
        lambda a, b: torch.lerp(a, b, 0.25),
    ),
]
Expression = Callable[[Any, Any, Any, Any], Any]


def _leaf(place: int) -> Expression:
    return lambda *given: given[place]


def _unary(function: Callable[[Any], Any], inner: Expression) -> Expression:
    return lambda *given: function(inner(*given))


def _binary(function: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    return lambda *given: function(left(*given), right(*given))


EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(
    st.sampled_from([_leaf(0), _leaf(0), _leaf(1), _leaf(2)]),
    lambda inner: (
        st.builds(_unary, st.sampled_from(UNARY), inner)
        | st.builds(_binary, st.sampled_from(BINARY), inner, inner)
        | st.builds(lambda one: _binary(torch.mul, one, lambda *given: given[0] * 0.0 + given[3]), inner)
    ),
    max_leaves=6,
)
COUNT = 300


@pytest.fixture(scope="module")
def trees() -> dict[str, tuple[Traced, Expression]]:
    found: dict[str, tuple[Traced, Expression]] = {}

    @settings(
        max_examples=COUNT, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(EXPRESSIONS)
    def collect(expression: Expression) -> None:
        def tree(acc: Tensor, column: PerColumn, matrix: Matrix, scalar: Scalar) -> Tensor:
            result = expression(acc, column, matrix, scalar) + acc * 0.5
            assert isinstance(result, Tensor)
            return result

        found[f"tree{len(found)}"] = trace(tree), expression

    collect()
    assert len(found) >= 0.9 * COUNT  # hypothesis draws no expression twice
    return found


@pytest.fixture(scope="module")
def tree_functors(
    trees: dict[str, tuple[Traced, Expression]], tmp_path_factory: pytest.TempPathFactory
) -> Functors:
    return Functors({name: one for name, (one, _) in trees.items()}, tmp_path_factory.mktemp("trees"), "-O0")


@needs_compiler
@pytest.mark.slow
def test_random_expressions(trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors) -> None:
    """Functor and reference, fp32 and fp64; and both against the function itself."""
    generator = torch.Generator().manual_seed(5)
    acc = torch.randn(8, 16, generator=generator, dtype=torch.float64) * 2
    column, matrix = (
        torch.randn(16, generator=generator).double(),
        torch.randn(8, 16, generator=generator).double(),
    )
    scalar = torch.tensor(0.7, dtype=torch.float64)
    for name, (traced, expression) in trees.items():
        for dtype in (torch.float32, torch.float64):
            given = [value.to(dtype) for value in (acc, column, matrix, scalar)]
            actual, reference = tree_functors.values(name, *given), traced.reference(*given)
            assert reference.dtype == dtype
            plain = expression(*given) + given[0] * 0.5
            # A step (floor, sign, a cast to fp16) passes on a last bit as a whole one: few elements may.
            for one, other in ((actual, reference), (reference, plain)):
                tolerance = 256 * torch.finfo(dtype).eps
                off = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
                assert off.double().mean() <= 0.02, f"{name}, {dtype}:\n{traced.source}"


@needs_compiler
@pytest.mark.slow
def test_derivatives_of_random_expressions(
    trees: dict[str, tuple[Traced, Expression]], tree_functors: Functors
) -> None:
    generator = torch.Generator().manual_seed(6)
    shapes = ((8, 16), (16,), (8, 16), ())
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    for name, (traced, _) in trees.items():
        # One gradient for every element: the operands are broadcast first.
        wide = [value.detach().expand(8, 16).clone().requires_grad_() for value in inputs]
        result = traced.graph(wide[0], *wide[1:])
        gradients = torch.autograd.grad(result.sum(), wide, allow_unused=True)
        rounds = "to_half" in traced.source  # torch rounds a gradient through the cast, too
        for which, gradient in enumerate(gradients):
            expected = torch.zeros(8, 16, dtype=torch.float64) if gradient is None else gradient
            actual = tree_functors.slopes(name, which, *[value.detach() for value in wide])
            tolerance = 2e-2 if rounds else 1e-10
            off = ~torch.isclose(actual, expected, rtol=tolerance, atol=tolerance)
            assert off.double().mean() <= 0.02, f"{name}, {which}:\n{traced.source}"
