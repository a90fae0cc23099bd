"""What `explain` says of calls, as text: each line of `asked.txt`, and below it the answers.

A line of `asked.txt` is a place and a program: on this CPU, or on one that stands for a GPU. Times, tiles and digests
are left out, as is what was compared: `plans.txt` holds plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn
from epigemm._native import ops
from epigemm.linker import loader  # noqa: F401 # of asked.txt
from epigemm.planner.gpus import KNOWN
from tests.gemm.query import Query, is_one_kernel
from tests.net import errors
from tests.support import norm_calls, splitting  # noqa: F401 # which registers an operator
from tests.support.pieces import watched
from tests.support.pretended import describe, explain_as_on


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, other: Matrix) -> tuple[Tensor, ...]:
    """Results of every kind."""
    z = acc + bias
    y = F.gelu(z) * other
    return y, z, y.sum(0), (z * z).sum(0), z.float(), *torch.var_mean(z, 1)


@epigemm.epilogue
def beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
    """Two matrices that one kernel may store."""
    z = acc + bias
    return F.gelu(z), z, z.sum(0)


@epigemm.epilogue
def of_squares(acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a matrix that is no result."""
    return acc, (acc * acc).sum(0), acc.var(1)


@epigemm.epilogue
def of_rows(acc: Tensor) -> tuple[Tensor, Tensor]:
    """Without a matrix."""
    return acc.sum(1), acc.amax(1)


@epigemm.epilogue
def twice(acc: Tensor) -> tuple[Tensor, Tensor]:
    """The product alone."""
    return acc, acc


@epigemm.epilogue
def own(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
    """Of one result."""
    return torch.tanh(acc + bias) * other


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        """The function's call, with the layers ahead of what it is given."""
        return self.function(*self.children(), *args)


_H200 = (-1, *KNOWN["H200"].numbers)


def lines() -> list[str]:
    """The programs with their answers."""
    found = list[str]()
    for line in errors.written("asked"):
        place, _, program = line.partition(": ")
        answers = list[str]()
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch, _PLACES[place](patch) as road:
            exec(compile(program, "<asked>", "exec"), {**globals(), **_names(answers), "road": road})
        found += [line, *(f"    {each}" for answer in answers for each in answer.splitlines())]
    return found


def _names(answers: list[str]) -> dict[str, Any]:
    """What programs read: `explain`, `plan`, `alone` and `dry` note answers; tensors are small, or empty."""

    def explain(*args: Any, **kwargs: Any) -> None:
        try:
            found: Any = epigemm.explain(*args, **kwargs)
        except RuntimeError as error:
            found = f"RuntimeError: {error}"
        each = found if isinstance(found, epigemm.ModuleExplanation) else ()
        answers.extend(map(_masked, (str(found), *map(str, each))))

    def plan(**changed: Any) -> None:
        try:
            found = Query(**changed).plan()
        except RuntimeError as error:
            answers.append(f"RuntimeError: {error}")
            return
        kinds = sorted({f"{each['family']}, {each['schedule']}" for each in found["candidates"]})
        answers.append(_masked(f"{found['why_not'] or 'fused'} | {'; '.join(kinds) or 'no kernel'}"))

    def dry(*, fp32: int = 0, gpu: tuple[int, ...] = _H200, plan: tuple[int, ...] | None = None) -> None:
        tensors = (torch.empty(3, 8), torch.empty(4, 8), None, None, None, None)
        try:
            ops._dry_linear("bias", *tensors, fp32, 0, 0, False, False, gpu, plan, False)
        except RuntimeError as error:
            answers.append(f"RuntimeError: {error}")

    def alone(dtype: str, tf32: bool, multiprocessors: int, *sizes: tuple[int, int, int]) -> None:
        gpu, found = (90, multiprocessors) if multiprocessors else (), {True: list[str](), False: list[str]()}
        for size in sizes:
            found[is_one_kernel(*size, dtype, tf32, gpu)].append("x".join(map(str, size)))
        words = {True: "one kernel", False: "apart"}
        answers.extend(f"{words[one]}: {', '.join(each)}" for one, each in found.items() if each)

    sizes = {"x": (6, 16), "weight": (8, 16), "row": (8,), "matrix": (6, 8)}
    return {
        "explain": explain,
        "plan": plan,
        "alone": alone,
        "dry": dry,
        "empty": lambda *size, dtype=torch.bfloat16: torch.empty(size, dtype=dtype),
        "learnt": lambda tensor: tensor.clone().requires_grad_(),
        "fp32": torch.float32,
        "fp64": torch.float64,
        "bf16": torch.bfloat16,
        **{name: torch.ones(size) for name, size in sizes.items()},
    }


def _masked(text: str) -> str:
    text = re.sub(r"\n  compared: .*?(?=\n  backward)", "", text, flags=re.DOTALL)
    text = re.sub(r"tile [0-9x]+,(.*? by elements)?.*?swizzle \d+(, K in \d+ parts)?", r"tile\1", text)
    text = re.sub(r"\.[0-9a-f]{8,}|(?<=tile )[0-9x]+(?=, ep)", "", text)
    return re.sub(
        r" *[0-9.]+(e\+\d+)? us", " _ us", re.sub(r"of \d+ fused kernels", "of fused kernels", text)
    )


@contextmanager
def _on_h200(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors count as lying on one, where nothing is launched."""
    describe(patch)
    norm_calls.pretended(patch)
    yield


@contextmanager
def _on_linked(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, and all kernels are there."""
    explain_as_on(patch, elementwise=True)
    yield


_PLACES: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[Any]]] = {
    "cpu": lambda patch: nullcontext(),
    "h200": _on_h200,
    "h200, linked": _on_linked,
    "pretended": lambda patch: watched(torch.device("cpu"), patch),
}
