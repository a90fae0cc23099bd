"""One layer and what may follow it, in every spelling that fusion should recognise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epigemm.epilogues.registry import fold_batch_norm_reference
from tests.support import reference
from tests.support.arithmetic import Arithmetic
from tests.support.cases import Operands

ROWS, IN, OUT = 9, 24, 16
SCALE = -2.0  # of the sigmoid; its reciprocal is exact, as that of DIVISOR
DIVISOR = -4.0


class Layer(nn.Module):
    """Everything that the spellings use; each reads its own part."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, OUT)
        self.gemm = nn.Linear(IN, OUT, bias=False)
        self.matrix = nn.Parameter(torch.randn(IN, OUT) / IN**0.5)
        self.bias = nn.Parameter(torch.randn(OUT))
        self.scale = nn.Parameter(torch.randn(OUT))
        self.factor = nn.Parameter(torch.tensor(SCALE))
        self.register_buffer("divisor", torch.tensor(DIVISOR))
        self.number = SCALE
        self.bn = nn.BatchNorm1d(OUT)
        self.relu = nn.ReLU()
        self.relu_in_place = nn.ReLU(inplace=True)
        self.sigmoid = nn.Sigmoid()
        self.same = nn.Identity()
        with torch.no_grad():
            assert self.bn.running_mean is not None and self.bn.running_var is not None
            self.bn.running_mean.normal_()
            self.bn.running_var.uniform_(0.5, 2.0)
            self.bn.weight.normal_()
            self.bn.bias.normal_()


@dataclass(frozen=True)
class Spelling:
    """One way to write what `function` computes."""

    name: str
    function: str
    forward: Callable[[Any, Tensor], Tensor]
    weight: str = "fc"
    bias: str = "fc"

    def make(self) -> Layer:
        """A layer, in eval mode, with this spelling for its forward."""
        kind = type("Spelled", (Layer,), {"forward": self.forward})
        layer: Layer = kind()
        return layer.eval()

    def check(self, actual: Tensor, layer: Layer, x: Tensor, arithmetic: Arithmetic) -> None:
        """Against float64, within the bounds that the project derives."""
        weight = {"fc": layer.fc.weight, "gemm": layer.gemm.weight, "matrix": layer.matrix.t()}[self.weight]
        bias = {"fc": layer.fc.bias, "bias": layer.bias, "": None}[self.bias]
        epilogue, operands = _operands(self.function, layer, bias)
        bounded = reference.linear(
            epilogue,
            x,
            weight,
            operands,
            arithmetic,
            second_path=True,
            apart=layer.bias if self.bias == "bias" else None,
        )
        reference.assert_within(actual, bounded)


def _operands(function: str, layer: Layer, bias: Tensor | None) -> tuple[str, Operands]:
    if function == "linear_relu":
        return "bias_relu", Operands(bias)
    if function == "linear_relu_div":
        return "relu_div", Operands(bias, scalars=[DIVISOR])
    if function == "linear_sigmoid_scale_residual":
        return "sigmoid_scale_residual", Operands(bias, scalars=[SCALE])
    vectors: list[Tensor | None] = [bias, layer.scale, None, None, None, None]
    if function == "linear_scale_batch_norm":
        vectors[2:] = [layer.bn.running_mean, layer.bn.running_var, layer.bn.weight, layer.bn.bias]
    wide = [None if vector is None else vector.detach().double() for vector in vectors]
    folded = fold_batch_norm_reference(torch.empty((), dtype=torch.float64), wide, layer.bn.eps)
    return "scale_batch_norm", Operands(tensors=list(folded.unbind(0)))


RELU, RELU_DIV = "linear_relu", "linear_relu_div"
RESIDUAL = "linear_sigmoid_scale_residual"
LINEAR_SCALE, NORM = "linear_scale", "linear_scale_batch_norm"


def _z_in_place(self: Any, x: Tensor) -> Tensor:
    z = self.fc(x)
    z += torch.sigmoid(z) * SCALE
    return z  # type: ignore[no-any-return]


def _scaled_in_place(self: Any, x: Tensor) -> Tensor:
    z = self.fc(x)
    return z.sigmoid().mul_(self.number).add_(z)  # type: ignore[no-any-return]


def _residual(term: Callable[[Any, Tensor], Tensor], total: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.fc(x)
        return total(z, term(self, z))

    return forward


def _norm(self: Any, z: Tensor, *eps: float) -> Tensor:
    bn = self.bn
    return F.batch_norm(z, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, *eps)


SPELLINGS = [
    # --- the product and the bias, followed by the simplest epilogue ---
    Spelling("modules", RELU, lambda self, x: self.relu(self.fc(x))),
    Spelling("in_place_module", RELU, lambda self, x: self.relu_in_place(self.fc(x))),
    Spelling("identity_between", RELU, lambda self, x: self.relu(self.same(self.fc(x)))),
    Spelling("torch_relu", RELU, lambda self, x: torch.relu(self.fc(x))),
    Spelling("torch_relu_", RELU, lambda self, x: torch.relu_(self.fc(x))),
    Spelling("F_relu", RELU, lambda self, x: F.relu(self.fc(x))),
    Spelling("F_relu_in_place", RELU, lambda self, x: F.relu(self.fc(x), inplace=True)),
    Spelling("method", RELU, lambda self, x: self.fc(x).relu()),
    Spelling("method_", RELU, lambda self, x: self.fc(x).relu_()),
    Spelling("F_linear", RELU, lambda self, x: F.relu(F.linear(x, self.fc.weight, self.fc.bias))),
    Spelling(
        "F_linear_names", RELU, lambda self, x: F.relu(F.linear(x, weight=self.gemm.weight)), "gemm", ""
    ),
    Spelling("no_bias", RELU, lambda self, x: self.relu(self.gemm(x)), "gemm", ""),
    Spelling("added_bias", RELU, lambda self, x: torch.relu(self.gemm(x) + self.bias), "gemm", "bias"),
    Spelling("bias_first", RELU, lambda self, x: torch.relu(self.bias + self.gemm(x)), "gemm", "bias"),
    Spelling("bias_add", RELU, lambda self, x: torch.add(self.gemm(x), self.bias).relu(), "gemm", "bias"),
    Spelling("bias_add_", RELU, lambda self, x: self.gemm(x).add_(self.bias).relu_(), "gemm", "bias"),
    Spelling("at", RELU, lambda self, x: torch.relu(x @ self.fc.weight.T + self.fc.bias)),
    Spelling("at_t", RELU, lambda self, x: torch.relu(x @ self.fc.weight.t() + self.fc.bias)),
    Spelling("matmul", RELU, lambda self, x: torch.matmul(x, self.gemm.weight.mT).relu(), "gemm", ""),
    Spelling("mm", RELU, lambda self, x: torch.mm(x, self.gemm.weight.transpose(0, 1)).relu(), "gemm", ""),
    Spelling("mm_method", RELU, lambda self, x: x.mm(torch.t(self.gemm.weight)).relu(), "gemm", ""),
    Spelling("kn", RELU, lambda self, x: torch.relu(x @ self.matrix + self.bias), "matrix", "bias"),
    Spelling("addmm", RELU, lambda self, x: torch.addmm(self.fc.bias, x, self.fc.weight.T).relu()),
    Spelling("addmm_method", RELU, lambda self, x: self.bias.addmm(x, self.matrix).relu(), "matrix", "bias"),
    # --- relu and a division ---
    Spelling("div", RELU_DIV, lambda self, x: self.relu(self.fc(x)) / DIVISOR),
    Spelling("div_", RELU_DIV, lambda self, x: self.fc(x).relu_().div_(DIVISOR)),
    Spelling("torch_div", RELU_DIV, lambda self, x: torch.div(self.fc(x).relu(), DIVISOR)),
    Spelling("div_tensor", RELU_DIV, lambda self, x: torch.relu(self.fc(x)) / self.divisor),
    Spelling("times_reciprocal", RELU_DIV, lambda self, x: (1 / DIVISOR) * self.fc(x).relu()),
    Spelling(
        "at_div", RELU_DIV, lambda self, x: (x @ self.matrix + self.bias).relu() / DIVISOR, "matrix", "bias"
    ),
    # --- z + scale * sigmoid(z) ---
    Spelling(
        "after", RESIDUAL, _residual(lambda self, z: torch.sigmoid(z) * self.number, lambda z, s: s + z)
    ),
    Spelling(
        "before", RESIDUAL, _residual(lambda self, z: self.number * self.sigmoid(z), lambda z, s: z + s)
    ),
    Spelling(
        "alpha", RESIDUAL, _residual(lambda self, z: z.sigmoid(), lambda z, s: torch.add(z, s, alpha=SCALE))
    ),
    Spelling("minus", RESIDUAL, _residual(lambda self, z: F.sigmoid(z) * -SCALE, lambda z, s: z - s)),
    Spelling("divided", RESIDUAL, _residual(lambda self, z: torch.sigmoid(z) / (1 / SCALE), torch.add)),
    Spelling("learned", RESIDUAL, _residual(lambda self, z: torch.sigmoid(z) * self.factor, torch.add)),
    Spelling("in_place", RESIDUAL, _z_in_place),
    Spelling("all_in_place", RESIDUAL, _scaled_in_place),
    # --- scale and BatchNorm ---
    Spelling("scale", LINEAR_SCALE, lambda self, x: self.fc(x) * self.scale),
    Spelling("scale_first", LINEAR_SCALE, lambda self, x: torch.mul(self.scale, self.fc(x))),
    Spelling("scale_", LINEAR_SCALE, lambda self, x: self.gemm(x).mul_(self.scale), "gemm", ""),
    Spelling("norm", NORM, lambda self, x: self.bn(self.fc(x) * self.scale)),
    Spelling(
        "added_norm", NORM, lambda self, x: self.bn((self.gemm(x) + self.bias) * self.scale), "gemm", "bias"
    ),
    Spelling("F_norm", NORM, lambda self, x: _norm(self, self.scale * (x @ self.matrix)), "matrix", ""),
    Spelling("F_norm_eps", NORM, lambda self, x: _norm(self, self.fc(x) * self.scale, 1e-5)),
]
