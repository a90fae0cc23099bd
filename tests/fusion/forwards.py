"""Random forwards for `fuzz.py`: a seed is a model, its inputs, and what changes between its calls.

Statements draw from a pool of values, old ones included, so that gates, aliases and writes meet in any order. All
values have one of a few shapes, by which the operators that fit are drawn.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, PLANES = 8, 2
FULL, ROW, COLUMN, SCALAR, FLAT = "full", "row", "column", "scalar", "flat"
"""[..., R, W], [..., R, 1], [W], [] and all elements of a full one in a line."""


class Base(nn.Module):
    """Layers, parameters, buffers and attributes that forwards read."""

    factor, flag = 2.0, True

    def __init__(self) -> None:
        super().__init__()
        self.fc0, self.fc1, self.fc2 = (nn.Linear(WIDTH, WIDTH, bias=n != 2) for n in range(3))
        self.row, self.wide = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.weight, self.column = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 3),
            nn.Parameter(torch.rand(WIDTH)),
        )
        self.register_buffer("vector", torch.rand(WIDTH))
        self.register_buffer("square", torch.randn(WIDTH, WIDTH) / 3)
        self.plain, self.number = torch.rand(WIDTH), torch.tensor(1.5)


def listed(text: str) -> tuple[str, ...]:
    """What semicolons separate."""
    return tuple(" ".join(text.split()).split("; "))


CHANGES = listed("""
    model.factor = 3.0; model.factor = -0.0; model.flag = not model.flag; model.fc0.weight.data.mul_(0.5);
    model.fc2.weight.data = model.fc2.weight.data + 0.1; model.fc0.bias = None;
    model.fc1 = nn.Linear(8, 8, bias=False); model.column = nn.Parameter(model.column.detach() * 2);
    model.vector = model.vector * 2; model.plain = model.plain + 1; model.number = torch.tensor(-0.5);
    model.fc0.register_forward_hook(lambda module, given, result: result * 2);
    model.fc0.requires_grad_(False); model.weight.data = model.weight.data.t();
    model.weight.detach().add_(0.1)
""")


@dataclass(frozen=True)
class Program:
    """One model and its calls.

    Attributes:
        seed: what it was made of.
        source: of its forward.
        learns: whether it is called with gradients on, and which of `x` and `y` need some.
        rows: of the inputs, for each call.
        is_batch: whether the inputs have three axes.
        is_strided: whether they lie in memory with gaps.
        changes: statements between the calls.
        is_coarse: whether it rounds to 16 bits on the way.
        dtype: of the model and the inputs.
        training: whether the model is in training mode.
        base: what the model's class is made of.
        is_special: whether x has NaN and infinities.
    """

    seed: int
    source: str
    learns: tuple[bool, bool, bool]
    rows: tuple[int, ...]
    is_batch: bool
    is_strided: bool
    changes: tuple[str, ...]
    is_coarse: bool
    dtype: torch.dtype = torch.float32
    training: bool = False
    base: type[Base] = Base
    is_special: bool = False

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: rows {self.rows}{', three axes' * self.is_batch}{', strided' * self.is_strided}; "
            f"{self.dtype}{', training' * self.training}; "
            f"gradients, of x, of y: {self.learns}; between the calls: {'; '.join(self.changes) or 'nothing'}\n"
            f"{self.source}"
        )

    def model(self) -> Any:
        """A new one, always the same."""
        scope: dict[str, Any] = {"torch": torch, "F": F, "__name__": __name__}
        file = f"<forward {self.seed}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        exec(compile(self.source, file, "exec"), scope)
        torch.manual_seed(self.seed)
        made = type("Model", (self.base,), {"forward": scope["forward"]})().eval()
        made.batch_norm.running_mean.normal_()
        made.batch_norm.running_var.uniform_(0.5, 2)
        return self._cast(made.train(self.training))

    def _cast(self, model: Any) -> Any:
        model.plain = model.plain.to(self.dtype)
        return model.to(self.dtype)

    def inputs(self, call: int) -> list[Tensor]:
        torch.manual_seed(self.seed + call)
        shape = [PLANES] * self.is_batch + [self.rows[call], WIDTH]
        made = [torch.randn(*shape, 2)[..., 0] if self.is_strided else torch.randn(shape) for _ in "xy"]
        if self.is_special:
            for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
                made[0][..., place, place] = value
        grad, *each = self.learns
        cast = [tensor if tensor.dtype is self.dtype else tensor.to(self.dtype) for tensor in made]
        return [tensor.requires_grad_(grad and learns) for tensor, learns in zip(cast, each, strict=True)]

    def change(self, model: Any, call: int) -> None:
        """What happens to the model before a call."""
        if call:
            torch.manual_seed(self.seed + 100)
            exec(self.changes[call - 1], {"torch": torch, "nn": nn, "model": model})
            self._cast(model)


def program(seed: int) -> Program:
    """The forward of a seed."""
    draw = random.Random(seed)
    writer = _Writer(draw, is_batch=draw.random() < 0.3, learns=draw.random() < 0.6)
    writer.product(PRODUCTS[:8])
    for _ in range(draw.randint(2, 12)):
        writer.statement()
    calls = draw.choice((1, 2, 2, 3))
    rows = tuple(draw.choice((1, 2, 3, 5, 5, 5)) if draw.random() < 0.3 else 5 for _ in range(calls))
    return Program(
        seed,
        writer.finished(),
        (writer.learns, draw.random() < 0.4, draw.random() < 0.2),
        rows,
        writer.is_batch,
        draw.random() < 0.15,
        tuple(draw.choice(CHANGES) for _ in rows[1:]),
        writer.is_coarse,
    )


# --- statements -------------------------------------------------------------------------------------------------------

UNARY = listed("""
    torch.relu({0}); F.relu({0}); {0}.sigmoid(); torch.tanh({0}); F.gelu({0}); F.silu({0});
    F.leaky_relu({0}, 0.1); F.hardtanh({0}); F.softplus({0}); -{0}; {0}.abs(); {0} * 0.5; 1 - {0}; {0} / 3;
    {0} * self.factor; {0} * self.number; ({0}.abs() + 1).sqrt(); {0}.clamp(-1, 2); {0}.clone();
    {0}.square().clamp(max=4); F.dropout({0}, 0.5, self.training); self.drop({0}); F.dropout({0}, 0.0);
    F.prelu({0}, self.vector[:1]); {0}.masked_fill({0} <= 0, 0.0); {0}.double().mul(2).float();
    {0}.detach(); torch.zeros_like({0}) + {0}
""")
ALIASES = listed("""
    {0}; {0}.contiguous(); {0}.view_as({0}); {0}.to(torch.float32); {0}.unsqueeze(0).squeeze(0)
""")
COARSE = ("{0}.to(torch.bfloat16).float()", "{0}.half().sigmoid().float()")
BINARY = listed("""
    {0} + {1}; {0} - {1}; {0} * {1}; {1} * {0}; {0} * torch.sigmoid({1}); {0} / ({1}.abs() + 1);
    torch.add({0}, {1}, alpha=2); torch.maximum({0}, {1}); torch.where({0} > 0, {0}, {1});
    torch.where({1} > 0, {0}, 0.5); torch.addcmul({0}, {1}, {1}, value=0.5);
    torch.lerp({0}, {1} + torch.zeros_like({0}), 0.3); {0} * (1 + {1})
""")
PRODUCTS = listed("""
    self.fc0({0}); self.fc1({0}); self.fc2({0}); F.linear({0}, self.weight, self.vector);
    {0} @ self.weight.t(); {0}.matmul(self.square); torch.matmul({0}, self.weight) + self.column;
    F.linear({0}, self.fc1.weight, self.column); {0} @ (self.weight * 2);
    ({0} @ {0}.transpose(-1, -2)).tanh() @ {0}; F.glu(self.wide({0}), -1)
""")
OF_TWO_AXES = listed("""
    torch.addmm(self.column, {0}, self.weight); torch.mm({0}, self.square); self.batch_norm(self.fc0({0}));
    torch.addmm(self.fc1({0}), {0}, self.weight);
    torch.addmm(self.column, {0}, self.square, beta=2, alpha=0.5); F.prelu(self.fc1({0}), self.column)
""")
OTHERS = ("F.softmax({0}, -1)", "self.norm({0})", "{0}.flip(-1)", "{0}.cumsum(-1) * 0.3", "{0}.roll(1, -1)")
IN_PLACE = listed("""
    {0} += {1}; {0} -= 0.5 * {1}; {0} *= {1}; {0}.add_({1}); {0}.mul_(0.5); {0}.sub_({1}, alpha=2);
    F.relu({0}, inplace=True); self.act({0}); torch.sigmoid_({0}); {0}.clamp_(max=1.5); {0}.copy_({1} * 2);
    {0}[0] = 0.25; {0}[..., 1:3] *= 2; {0}[..., 0] += {1}[..., 0]; {0}.view(-1)[1:4].zero_();
    torch.mul({0}, 2, out={0}); F.dropout({0}, 0.5, False, True)
""")
ON_BUFFERS = listed("""
    self.vector.add_({0}.detach().mean()); self.vector += 0.5;
    self.vector.copy_({0}.detach().reshape(-1, 8)[0]); self.square.mul_(0.9);
    self.vector[:2] = {0}.detach().sum(); self.vector = self.vector * 0.5;
    self.plain = {0}.detach().reshape(-1, 8).mean(0)
""")
ON_INPUTS = ("x.mul_(0.5)", "y += 1", "y[..., :2].zero_()", "y.copy_({0}.detach())")
COLUMNS = ("self.column", "self.vector", "self.plain", "self.fc0.bias", "self.square[0]", "self.weight[:, 0]")


@dataclass
class _Writer:
    """Collects the statements of one forward."""

    draw: random.Random
    is_batch: bool
    learns: bool
    is_coarse: bool = False
    lines: list[str] = field(default_factory=list)
    pool: dict[str, list[str]] = field(default_factory=lambda: {FULL: ["x", "y"]})

    def statement(self) -> None:
        """One more."""
        writes = 0.5 if self.learns else 1.0  # many are errors where there are gradients
        ways: list[tuple[float, Callable[[], None]]] = [
            (3.0, self.product),
            (3.0, self._pointwise),
            (3.0, self._gate),
            (1.0, self._two_products),
            (1.5, self._row),
            (2.0 * writes, self._in_place),
            (1.5, self._view),
            (0.5, self._column),
            (0.5, self._other),
            (0.5 * writes, self._written_member),
            (0.4, self._branch),
            (0.2, self._coarse),
        ]
        self.draw.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()

    def finished(self) -> str:
        """The forward; it gives what was made last, and some of the rest."""
        kinds = [name for names in self.pool.values() for name in names]
        results = [kinds[-1], *self.pool[FULL][-1:]]
        results += self.draw.sample(kinds, min(len(kinds), self.draw.choice((0, 0, 1, 2))))
        given = ", ".join(dict.fromkeys(results))
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def forward(self, x, y):\n{body}\n    return ({given},)\n"

    # --- values ---

    def _any(self, kind: str = FULL) -> str:
        names = self.pool[kind]
        if self.draw.random() < 0.6:
            names = names[-3:]
        return self.draw.choice(names)

    def _new(self, kind: str, expression: str) -> str:
        name = f"h{len([line for line in self.lines if ' = ' in line])}_{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.pool.setdefault(kind, []).append(name)
        return name

    def _operand(self) -> str:
        """Something that a full value is combined with; at times a product that is written in its place."""
        roll = self.draw.random()
        if roll < 0.15:
            return self._column_name()
        if roll < 0.3 and self.pool.get(ROW):
            return self._any(ROW)
        if roll < 0.4:
            return f"self.row({self._any()})"
        if roll < 0.5:
            return f"self.fc{self.draw.randint(0, 2)}({self._any()})"
        if roll < 0.55 and self.pool.get(SCALAR):
            return self._any(SCALAR)
        return self._any()

    def _column_name(self) -> str:
        return self.draw.choice([*COLUMNS, *self.pool.get(COLUMN, [])])

    # --- statements ---

    def product(self, forms: tuple[str, ...] = PRODUCTS) -> None:
        if forms is PRODUCTS and not self.is_batch:
            forms += OF_TWO_AXES
        self._new(FULL, self.draw.choice(forms).format(self._any()))

    def _pointwise(self) -> None:
        kind = self.draw.choice([each for each in (FULL, FULL, FULL, ROW, FLAT) if self.pool.get(each)])
        name = self._any(kind)
        for _ in range(self.draw.randint(1, 3)):
            name = self._new(kind, self.draw.choice(UNARY).format(name))

    def _gate(self) -> None:
        self._new(FULL, self.draw.choice(BINARY).format(self._any(), self._operand()))

    def _two_products(self) -> None:
        """Two that meet, each read later at times, the second one a row at times."""
        one, other = self._any(), self._any()
        self.product()
        first, is_row = self.pool[FULL][-1], self.draw.random() < 0.4
        if is_row:
            second = self._new(ROW, f"self.row({other})")
        else:
            second = self._new(FULL, self.draw.choice(PRODUCTS).format(one))
        if self.draw.random() < 0.4:
            second = self._new(ROW if is_row else FULL, self.draw.choice(UNARY).format(second))
        self._new(FULL, self.draw.choice(BINARY).format(first, second))

    def _row(self) -> None:
        form = self.draw.choice(("self.row({0})", "self.row({0}).sigmoid()", "{0}.sum(-1, keepdim=True)"))
        self._new(ROW, form.format(self._any()))

    def _in_place(self) -> None:
        names = [name for name in self.pool[FULL] if name not in ("x", "y")]
        if names:
            target = self.draw.choice(names[-3:])
            other = self._any() if self.draw.random() < 0.7 else self._column_name()
            self.lines.append(self.draw.choice(IN_PLACE).format(target, other))

    def _view(self) -> None:
        roll = self.draw.random()
        if roll < 0.4:
            self._new(FULL, self.draw.choice(ALIASES).format(self._any()))
        elif roll < 0.6:
            self._new(FLAT, f"{self._any()}.{self.draw.choice(('reshape(-1)', 'flatten()'))}")
        elif roll < 0.7 and self.pool.get(FLAT):
            self._new(FULL, f"{self._any(FLAT)}.view(x.shape)")
        elif roll < 0.8:
            turned = f"{self._any()}.transpose(-1, -2)"
            self._new(FULL, f"({self.draw.choice(UNARY[:10]).format(turned)}).transpose(-1, -2)")
        elif roll < 0.9:
            half = f"self.wide({self._any()}).chunk(2, -1)"
            one, other = self._new(FULL, f"{half}[0]"), self._any()
            self._new(FULL, f"{one} * torch.sigmoid({other})")
        else:
            self._new(SCALAR, f"{self._any()}{self.draw.choice(('.sum()', '.mean()', '[..., 0, 0].sum()'))}")

    def _column(self) -> None:
        self._new(COLUMN, f"{self._any()}.reshape(-1, 8){self.draw.choice(('.mean(0)', '[0]', '.amax(0)'))}")

    def _other(self) -> None:
        self._new(FULL, self.draw.choice(OTHERS).format(self._any()))

    def _written_member(self) -> None:
        forms = ON_BUFFERS if self.draw.random() < 0.7 else ON_INPUTS
        self.lines.append(self.draw.choice(forms).format(self._any()))

    def _branch(self) -> None:
        name = self._any()
        if self.draw.random() < 0.5:
            made = self._new(FULL, f"{name} * 1")
            self.lines += ["if self.flag:", f"    {made} = {self.draw.choice(UNARY).format(made)}"]
        else:
            made = f"n{len(self.lines)}"
            self.lines += ["with torch.no_grad():", f"    {made} = {self.draw.choice(UNARY).format(name)}"]
            self.pool[FULL].append(made)

    def _coarse(self) -> None:
        self.is_coarse = True
        self._new(FULL, self.draw.choice(COARSE).format(self._any()))
