"""Trains an MLP with BatchNorm in fp32, as it is and with fused layers, and compares the speeds.

`python examples/batch_norm.py`; with `--quick` a small model and few steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import epigemm


class Sizes(NamedTuple):
    """Of the model, and of its training."""

    batch: int
    features: int
    layers: int
    steps: int


def mlp(sizes: Sizes) -> nn.Sequential:
    """Layers of Linear, BatchNorm1d and ReLU, and a Linear with one column."""
    layers: list[nn.Module] = []
    for _ in range(sizes.layers):
        layers += [nn.Linear(sizes.features, sizes.features), nn.BatchNorm1d(sizes.features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes.features, 1))


def with_fused_layers(model: nn.Sequential) -> nn.Sequential:
    """The same model made of fused layers, which share the parameters and buffers."""
    fused: list[nn.Module] = []
    for each in model:
        if isinstance(each, nn.BatchNorm1d):
            linear = fused.pop()
            assert isinstance(linear, nn.Linear)
            fused.append(epigemm.nn.LinearBatchNormReLU.from_layers(linear, each))
        elif not isinstance(each, nn.ReLU):
            fused.append(each)
    return nn.Sequential(*fused)


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int) -> tuple[list[float], float]:
    """The losses, and the milliseconds of a step. The first steps count for the losses alone: they load kernels."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1 / x.shape[1])
    losses: list[Tensor] = []
    begin, warm = 0.0, max(1, steps // 5)
    for step in range(steps):
        if step == warm:
            begin = now(x.device)
        loss = nn.functional.mse_loss(model(x), target)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(loss.detach())
    took = now(x.device) - begin
    return torch.stack(losses).tolist(), 1e3 * took / (steps - warm)


def now(device: torch.device) -> float:
    """Seconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both, and print what they have learned in which time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    quick = parser.parse_args(arguments).quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(256, 128, 2, 20) if quick or device.type == "cpu" else Sizes(16384, 4096, 3, 50)
    torch.manual_seed(0)
    model = mlp(sizes).to(device)
    x = torch.randn(sizes.batch, sizes.features, device=device)
    target = x.mean(dim=1, keepdim=True)

    fused = with_fused_layers(copy.deepcopy(model))
    print(epigemm.explain(fused, x)["0"])  # which kernels run in the first layer

    losses, speeds = {}, {}
    for name, each in (("eager", model), ("epigemm", fused)):
        losses[name], speeds[name] = train(each, x, target, sizes.steps)
        print(f"{name}: {speeds[name]:.2f} ms a step, loss {losses[name][0]:.4f} to {losses[name][-1]:.4f}")
    print(f"eager takes {speeds['eager'] / speeds['epigemm']:.2f} times as long")
    for found in losses.values():
        if not found[-1] < found[0]:
            raise RuntimeError("a model has learned nothing")


if __name__ == "__main__":
    main()
