"""What a forward writes in place is seen, and left behind, as without fusion: in aliases, views, buffers, arguments.

Everything that has the same memory is returned: a write that is lost, done twice or done at another time shows.
"""

from __future__ import annotations

import copy
import linecache
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epigemm import fusion
from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn, is_thorough

ROWS, WIDTH = 6, 24
_operator: Any = operator


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    """What every operator takes for its right side."""
    return torch.randint(1, 4, shape).to(dtype)


class Lists(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x + 1]


class Count:
    """Neither a tensor nor a constant."""

    def __init__(self, value: int) -> None:
        self.value = value

    def grow(self) -> None:
        self.value += 1


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Count:
        return Count(len(x))


class Base(nn.Module):
    """Layers, and buffers of the type `kind` to write and to write with."""

    kind = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.same = nn.ReLU(inplace=True), nn.Identity()
        self.lists, self.counts = Lists(), Counts()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        self.register_buffer("vector", drawn(self.kind, WIDTH))
        self.register_buffer("other", drawn(self.kind, WIDTH))
        self.register_buffer("square", drawn(self.kind, WIDTH, WIDTH))


def made(forward: Callable[..., Any], **members: Any) -> Any:
    torch.manual_seed(3)
    return type("Model", (Base,), {"forward": forward, **members})().eval()


# --- the roads --------------------------------------------------------------------------------------------------------


def by_fuse(model: Any) -> tuple[Any, fusion.FusionReport]:
    fused = fuse_eagerly(model, inplace=True)
    return fused, fused.fusion_report


def by_backend(model: Any) -> tuple[Any, fusion.FusionReport]:
    report = fusion.FusionReport()
    return torch.compile(
        model, backend="epigemm", options={"backend": "aot_eager", "report": report.add}
    ), report


COMPILED = [by_backend]


def left_behind(call: Any, model: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """What two calls give and leave behind, and gradients; None for what is an error."""
    torch.manual_seed(1)
    given = [argument.clone() for argument in arguments]
    seen: list[Any] = []
    results: tuple[Tensor, ...] = ()
    try:
        for _ in range(2):
            results = call(*given)
            seen += [value.detach().clone() for value in (*results, *given, *model.buffers())]
    except RuntimeError:
        return [value.detach().clone() for value in (*given, *model.buffers())], None
    learning = [result for result in results if result.requires_grad]
    total = sum((result.square().mean() for result in learning), torch.zeros(()))
    try:
        return seen, torch.autograd.grad(total, [*model.parameters()], allow_unused=True)
    except RuntimeError:  # also where nothing learns
        return seen, None


def compare(
    road: Callable[[Any], Any], model: Any, *arguments: Tensor, modes: Sequence[bool] = (False, True)
) -> fusion.FusionReport:
    """What was fused, after both gave and left behind the same; `modes`: without gradients, with them."""
    torch._dynamo.reset()
    plain = copy.deepcopy(model)
    called, report = road(model)
    # torch's own compiler gives another gradient where a buffer is written, or an error where there is none.
    for learns in (False,) if road in COMPILED else modes:
        with torch.set_grad_enabled(learns):
            expected, gradients = left_behind(plain, plain, arguments)
            actual, found = left_behind(called, model, arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert found is not None or gradients is None
        for mine, other in zip(found or (), gradients or (), strict=False):
            assert (mine is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert isinstance(report, fusion.FusionReport)
    return report


# --- augmented assignments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An augmented assignment, the right sides that it is tried with, and the type of its left side."""

    sign: str
    operands: tuple[str, ...]
    kind: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.sign


NUMBER_BUFFER_COMPUTED = ("2", "self.other", "z.sum(0).abs() + 1")
OPERATORS = [
    *(Operator(sign, NUMBER_BUFFER_COMPUTED) for sign in ("+=", "-=", "*=", "/=", "//=", "%=")),
    Operator("**=", ("2", "self.other")),
    Operator("@=", ("self.square",)),
    *(Operator(sign, NUMBER_BUFFER_COMPUTED, torch.int32) for sign in ("&=", "|=", "^=", "<<=", ">>=")),
]
# What stands before, what is written, and all that has its memory.
PLACES = {
    "nothing_else": ("", "h", "h"),
    "alias": ("kept = h", "h", "h, kept"),
    "written_alias": ("kept = h", "kept", "h, kept"),
    "view": ("view = h.view(-1)", "h", "h, view"),
    "row": ("row = h[0]", "row", "h, row"),
    "slice": ("rows = h[1:]", "rows", "h, rows"),
    "unpacked": (
        "left, right = h.chunk(2, 0)",
        "left",
        "h, left, right",
    ),  # an error where there are gradients
    "buffer": ("buffer = self.vector", "buffer", "h, buffer, self.vector"),
    "row_of_a_buffer": ("row = self.square[0]", "row", "h, row, self.square"),
    "argument": ("kept = y", "y", "h, y, kept"),
    "row_of_an_argument": ("row = y[0]", "row", "h, y, row"),
    "data_of_an_argument": ("data = y.data", "data", "h, y, data"),
    "before_the_product": ("kept = z = y", "y", "h, y, kept"),
}


def assigning(place: str, ops: Sequence[Operator], position: int) -> Any:
    before, target, seen = PLACES[place]
    cast, back = ("", "") if ops[0].kind.is_floating_point else (".int()", ".float()")
    writes = "\n    ".join(f"{target} {op.sign} {op.operands[position]}" for op in ops)
    source = f"""
def forward(self, x, y):
    z = h = self.fc(x){cast}
    {before}
    {writes}
    last = torch.relu(self.second(h{back})) + torch.relu(self.fc(y{back}))
    return last, {seen}
"""
    file, scope = f"<{place} {writes}>", {"torch": torch, "__name__": __name__}
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope["forward"]


def arguments_of(op: Operator) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(ROWS, WIDTH), drawn(op.kind, ROWS, WIDTH)


# The same third of the places for every third operator, so that all pairs with a right side stay.
PAIRS = [
    (place, op, (p // 3 + o // 3) % len(op.operands))
    for p, place in enumerate(PLACES)
    for o, op in enumerate(OPERATORS)
    if is_thorough() or p % 3 == o % 3
]


@pytest.mark.parametrize(("pair", "learns"), in_turn(PAIRS, [False, True]), ids=str)
def test_augmented_assignments(pair: tuple[str, Operator, int], learns: bool) -> None:
    """Pairs of place, operator and right side; all triples would take minutes."""
    place, op, position = pair
    model = made(assigning(place, [op], position), kind=op.kind)
    report = compare(by_fuse, model, *arguments_of(op), modes=(learns,))
    is_error = learns and place == "unpacked"
    assert len(report.sites) >= 2 or is_error or not op.kind.is_floating_point, str(report)


@pytest.mark.parametrize(
    ("place", "ops"), in_turn([*PLACES], [OPERATORS[:7], OPERATORS[7:8], OPERATORS[8:]]), ids=str
)
def test_augmented_assignments_compiled(place: str, ops: list[Operator]) -> None:
    """All of one type after each other."""
    model = made(assigning(place, ops, 0), kind=ops[0].kind)
    assert compare(by_backend, model, *arguments_of(ops[0])).sites


# --- other forms ------------------------------------------------------------------------------------------------------


def example(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    skip = h
    h += 1.0
    return (torch.relu(self.second(h)) + skip,)


def gate(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h += 2.0 * torch.sigmoid(h)
    return h, kept


def scale(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h *= self.vector
    return self.second(h), kept


def scale_is_written(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    vector = self.vector
    vector += 1.0
    return (h * self.vector,)


def divides_a_relu(self: Any, x: Tensor, y: Tensor) -> Any:
    h = torch.relu(self.fc(x))
    kept = h
    h /= 2.0
    return self.second(h), kept


def adds_to_a_fused_result(self: Any, x: Tensor, y: Tensor) -> Any:
    h = torch.relu(self.fc(x)) / 2.0
    kept = h
    h += y
    return self.second(h), kept


def adds_itself(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h += h
    return torch.relu(h), kept


def one_tensor_twice(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    pair = [h, h]
    for part in pair:
        part += 1.0
    return torch.relu(self.second(h)), *pair


def through_an_identity(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = self.same(h)
    h += 1.0
    return torch.relu(self.second(h)), kept


def in_a_nested_function(self: Any, x: Tensor, y: Tensor) -> Any:
    def add(z: Tensor) -> None:
        z += 1.0

    h = self.fc(x)
    add(h)
    return torch.relu(self.second(h)), h


def a_number_becomes_a_tensor(self: Any, x: Tensor, y: Tensor) -> Any:
    total: Any = 0
    total += self.fc(x)
    kept = total
    total += x
    return torch.relu(self.second(total)), kept


def sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    rows: Any = x.shape[0]
    shape: Any = x.shape
    was, shape_was = rows, shape
    rows *= 2
    shape += (1,)
    return (torch.relu(self.fc(x)).view(shape).view(shape_was) * rows + was,)


def result_of_a_child(self: Any, x: Tensor, y: Tensor) -> Any:
    found = self.lists(self.fc(x))
    kept = found
    found += [y]
    return torch.relu(self.second(kept[0])) + kept[2], found[2]


def functions_of_operator(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    _operator.iadd(h, 1.0)
    _operator.isub(h, y)
    _operator.imul(h, 2.0)
    _operator.itruediv(h, 4.0)
    return torch.relu(self.second(h)), kept


def methods(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h.add_(1.0).mul_(y)
    h[0].zero_()
    self.vector.add_(h.detach().sum(0))
    y.clamp_(max=2.0)
    return torch.relu(self.second(h)), kept


def functions(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    F.relu(h, inplace=True)
    torch.sigmoid_(y)
    F.dropout(h, 0.5, True, True)
    return torch.relu(self.second(h)), kept


def out(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = y
    torch.add(h.detach(), 1.0, out=y)
    torch.mul(self.vector, 2.0, out=self.vector)
    return torch.relu(self.second(y)), kept


def modules(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    self.act(h)
    self.act(y)
    return torch.relu(self.second(h)), kept, self.net(y), y


def attributes_read_before(self: Any, x: Tensor, y: Tensor) -> Any:
    h = torch.relu(self.fc(x))
    shape, turned = h.shape, h.T
    h.unsqueeze_(0)
    h.transpose_(1, 2)
    return h.reshape(shape), turned


def gradients_asked_before(self: Any, x: Tensor, y: Tensor) -> Any:
    h = torch.zeros_like(x)
    learns = h.requires_grad
    h += torch.relu(self.fc(x))
    return h * learns, h


def object_of_a_child(self: Any, x: Tensor, y: Tensor) -> Any:
    count = self.counts(x)
    was = count.value
    count.grow()
    return torch.relu(self.fc(x)) * was, y + count.value


def attribute_is_written(self: Any, x: Tensor, y: Tensor) -> Any:
    self.vector += 1.0
    return (torch.relu(self.fc(x)) * self.vector,)


def item(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h[...] = y
    return torch.relu(self.second(h)), kept


def augmented_item(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    h[0] += 1.0
    return torch.relu(self.second(h)), kept


def item_of_a_buffer(self: Any, x: Tensor, y: Tensor) -> Any:
    self.vector[:2] = x.sum()
    return (torch.relu(self.fc(x)) * self.vector,)


def item_of_an_argument(self: Any, x: Tensor, y: Tensor) -> Any:
    y[:, 1:3] *= 2.0
    return (torch.relu(self.fc(y)),)


def unknown_function_of_operator(self: Any, x: Tensor, y: Tensor) -> Any:
    h = self.fc(x)
    kept = h
    _operator.ifloordiv(h, 2.0)
    return torch.relu(self.second(h)), kept


WRITTEN: list[Callable[..., Any]] = [
    *(example, gate, scale, scale_is_written, divides_a_relu, adds_to_a_fused_result, adds_itself),
    *(one_tensor_twice, through_an_identity, in_a_nested_function, a_number_becomes_a_tensor, sizes),
    *(result_of_a_child, functions_of_operator, methods, functions, out, modules),
    *(attributes_read_before, gradients_asked_before, object_of_a_child),
    *(attribute_is_written, item, augmented_item, item_of_a_buffer, item_of_an_argument),
    unknown_function_of_operator,
]


@pytest.mark.parametrize(
    ("forward", "road"), in_turn(WRITTEN, [by_fuse, *COMPILED]), ids=lambda f: f.__name__
)
def test_other_forms(forward: Callable[..., Any], road: Any) -> None:
    model = made(forward)
    report = compare(road, model, torch.randn(ROWS, WIDTH), drawn(torch.float32, ROWS, WIDTH))
    assert report.sites or "another shape in place" in str(report)


def test_augmented_assignments_join_a_chain() -> None:
    """Where nothing else has the memory, they are as good as the others."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        h = torch.relu(self.fc(x))
        h /= 2.0
        return h, self.second(h)

    model = made(forward)
    report = compare(by_fuse, model, torch.randn(ROWS, WIDTH), torch.zeros(1))
    assert [site.formula for site in report.sites[:1]] == ["relu(acc + c1) / 2"]


def test_sizes_that_vary() -> None:
    """Numbers that a compiler follows as symbols."""
    for road in (by_fuse, *COMPILED):
        torch._dynamo.reset()
        model = made(sizes)
        plain, (called, _) = copy.deepcopy(model), road(model)
        for rows in (4, 6, 7):
            x = torch.randn(rows, WIDTH)
            torch.testing.assert_close(called(x, x), plain(x, x), rtol=1e-4, atol=1e-4)


def test_an_operand_that_is_written_later() -> None:
    """A fused call saves it for its derivative, a sum of PyTorch's does not."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        residual = y * 2.0
        z = self.fc(x) + residual
        residual += 1.0
        return z, residual

    report = compare(by_fuse, made(forward), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert sorted(site.formula for site in report.sites) == ["(acc + c1) + m1", "acc + c1"]


def test_a_matrix_that_the_product_adds_is_written_later() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        added = self.second(y)
        z = torch.addmm(added, x, self.square)
        added += 1.0
        return z, added

    report = compare(by_fuse, made(forward), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    assert "what it adds is written before its derivative would read it again" in str(report)
