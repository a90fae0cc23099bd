"""What forwards written by hand are made of, and what is expected of each: programs that `fuzz.check` compares.

A line is a forward of (self, x, y); `; ` separates its statements. Each is compared in values, gradients, types,
strides, and in what it writes and what shares memory.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.fusion.forwards import WIDTH, Base, Program

SQUARE = (WIDTH, WIDTH)
"""Rows of two calls: an axis that is taken for another one gives other numbers, and no error."""

torch.library.define("epigemm_tests::write", "(Tensor(a!) x) -> ()")
torch.library.define("epigemm_tests::twice", "(Tensor x) -> Tensor")
torch.library.impl("epigemm_tests::write", "CompositeExplicitAutograd", lambda x: x.mul_(3) and None)
torch.library.impl("epigemm_tests::twice", "CompositeExplicitAutograd", lambda x: x * 2)
torch.library.register_fake("epigemm_tests::write", lambda x: None)
torch.library.register_fake("epigemm_tests::twice", torch.empty_like)


class Count:
    """Neither a tensor nor a constant."""

    def __init__(self, value: int) -> None:
        self.value = value

    def grow(self) -> None:
        self.value += 1


class Members(Base):
    """What the forwards read besides what random ones do."""

    divisor: Tensor
    checkpoint = staticmethod(checkpoint)
    dual_level = forward_ad.dual_level
    dual, unpack = staticmethod(forward_ad.make_dual), staticmethod(forward_ad.unpack_dual)

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.tall = nn.Parameter(torch.rand(WIDTH, 1) + 0.5), nn.Parameter(torch.randn(WIDTH, 16))
        self.slope, self.learned = nn.Parameter(torch.rand(1)), nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("divisor", torch.tensor(-4.0))
        self.same = nn.Identity()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def block(self, x: Tensor) -> Tensor:
        """A residual layer."""
        found: Tensor = x + self.fc0(nn.functional.layer_norm(x, (WIDTH,)))
        return found

    def two(self, x: Tensor) -> list[Tensor]:
        return [x, x + 1]

    def count(self, x: Tensor) -> Count:
        return Count(len(x))


@dataclass(frozen=True)
class Row:
    """A forward, and what is expected of it.

    Attributes:
        source: its statements.
        chains: how many chains the first graph has, and how many are taken; None: not asked.
        sites: how many fused calls, if that is asked.
        formula: of the first fused call; empty: not asked.
        says: what the report has in it.
        says_not: what it has not.
        rows: of the inputs of each call.
        axes: how many the inputs have.
        learns: what has gradients: "all", with the same report; "parameters"; or "nothing", as PyTorch refuses them.
        backends: that PyTorch itself computes it with.
    """

    source: str
    chains: tuple[int, int] | None = None
    sites: int | None = None
    formula: str = ""
    says: str = ""
    says_not: str = "nothing like this"
    rows: tuple[int, ...] = (WIDTH, 5)
    axes: int = 3
    learns: str = "all"
    backends: tuple[str, ...] = ("eager", "aot_eager")

    def __str__(self) -> str:
        return self.source.removeprefix("return ")

    def program(self, **settings: Any) -> Program:
        """It, with settings of a program's."""
        lines = "\n".join(f"    {line}" for line in self.source.split("; "))
        learns = self.learns != "nothing", self.learns == "all", self.learns == "all"
        made = Program(
            zlib.crc32(self.source.encode()),
            f"def forward(self, x, y):\n{lines}\n",
            learns,
            self.rows,
            self.axes == 3,
            is_strided=False,
            changes=("pass",) * 2,
            is_coarse="half" in self.source or "16" in self.source,
            base=Members,
        )
        return replace(made, **settings)


def rows(text: str) -> list[Row]:
    """A row of each line. A line with `#` has what is expected of those behind it; one with `##` is a comment."""
    made, expected = list[Row](), dict[str, Any]()
    for line in text.strip().splitlines():
        if line.startswith("#"):
            expected = expected if line[1:2] == "#" else eval(f"dict({line[1:]})", {"SQUARE": SQUARE})
        else:
            made.append(Row(line, **expected))
    return made
