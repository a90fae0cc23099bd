"""The benchmark's models at small sizes, and some more, with the functions that fusion is to find in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import networks, workloads
from benchmarks.models.workloads import Workload

KERNELBENCH = Path(__file__).parents[2] / "examples" / "kernelbench"
CPU = torch.device("cpu")


class PatchResMLP(nn.Module):
    """The residual block of image MLPs: a linear layer across patches and two across channels, and a gain."""

    def __init__(self, patches: int = 16, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Linear(patches, patches)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        h: Tensor = self.fc2(self.act(self.fc1(self.norm2(x))))
        return x + h * self.gain


@dataclass(frozen=True)
class Example:
    """A model, its inputs, and the functions that fusion finds in it, layer by layer; `trained` in training mode.

    `fuse` reports one for each layer, whatever the mode; Dynamo's graphs hold the mode.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    functions: tuple[str, ...]
    trained: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def found(self, training: bool) -> tuple[str, ...]:
        """What is found in a graph that is made in one of the modes."""
        return self.trained if training else self.functions


def deep_mlp(layers: int = 16, width: int = 32) -> nn.Module:
    return networks.MLP(layers, width)


def of_workload(workload: Workload[Any], *functions: str, trained: tuple[str, ...] | None = None) -> Example:
    """A workload of the benchmark, small, its weights always the same and its inputs others at every call."""
    batch = workload.small_batches[0]

    def inputs() -> tuple[Tensor, ...]:
        seed = int(torch.randint(0, 2**31, ()))
        return workload.inputs(batch, small=True, device=CPU, seed=seed)

    def make() -> nn.Module:
        return workload.model(small=True, device=CPU, seed=0)

    return Example(workload.name, make, inputs, functions, functions if trained is None else trained)


def relu_vit() -> Workload[Any]:
    """A transformer with ReLU in place of GELU."""
    return Workload(
        "vit_relu",
        "",
        lambda size: networks.VisionTransformer(size, nn.ReLU),
        workloads.VIT.draw,
        workloads.VIT.real,
        workloads.VIT.small,
        workloads.VIT.batches,
        workloads.VIT.small_batches,
    )


BY_NAME = {workload.name: workload for workload in workloads.WORKLOADS}
# Attention's two and the MLP's two layers in each block.
_VIT_BLOCK = ("linear",) * 4
_RELU_VIT_BLOCK = ("linear", "linear", "linear_relu", "linear")

# Problem 39 is 33 with a larger batch.
PROBLEMS = [
    of_workload(BY_NAME["problem_76"], "linear_relu"),
    of_workload(BY_NAME["problem_70"], "linear_sigmoid_scale_residual"),
    of_workload(BY_NAME["problem_33"], "linear_scale_batch_norm", trained=("linear_scale",)),
    of_workload(BY_NAME["problem_63"], "linear_relu_div"),
    of_workload(BY_NAME["problem_21"]),
]
MODELS = [
    of_workload(BY_NAME["mlp"], *("linear_relu",) * 4),
    of_workload(BY_NAME["mlp_batch_norm"], *("linear_scale_batch_norm",) * 4, trained=("linear",) * 4),
    of_workload(BY_NAME["resmlp"], *("linear_relu", "linear") * 2),
    of_workload(BY_NAME["dlrm"], *("linear_relu",) * 4, "linear"),
    of_workload(BY_NAME["vit"], *_VIT_BLOCK * 2, "linear"),
    of_workload(relu_vit(), *_RELU_VIT_BLOCK * 2, "linear"),
    Example(
        "patch_resmlp",
        PatchResMLP,
        lambda: (torch.randn(4, 16, 32),),
        ("linear", "linear_relu", "linear_scale"),
        ("linear", "linear_relu", "linear_scale"),
    ),
]
EVERYTHING = [*PROBLEMS, *MODELS]
