"""Epilogues of your own: each is one Python function, and runs in one kernel with the product where there is one.

`python examples/custom_epilogue.py`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm


@epigemm.epilogue
def swiglu(acc: Tensor, bias: epigemm.PerColumn, value: epigemm.Matrix) -> Tensor:
    """The gate of a SwiGLU layer: `value` is what the layer's other product gave."""
    return F.silu(acc + bias) * value


@epigemm.epilogue
def layer_scale(
    acc: Tensor, bias: epigemm.PerColumn, gamma: epigemm.PerColumn, residual: epigemm.Matrix
) -> Tensor:
    """The end of a transformer's block: bias, a learned factor for each column, residual."""
    return residual + gamma * (acc + bias)


@epigemm.epilogue
def limited(acc: Tensor, bias: epigemm.PerColumn, limit: epigemm.Scalar = 6.0) -> Tensor:
    """A clamp whose bounds are chosen at each call: a new limit compiles nothing."""
    return torch.clamp(acc + bias, -limit, limit)


def check(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raises where the two are not the same up to rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    print(f"{what}: as PyTorch has it, {list(actual.shape)}")


def main() -> None:
    """Call each by hand and as a layer, compare with PyTorch, and ask which kernels would run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(1024, 512, device=device)
    weight, bias = torch.randn(256, 512, device=device) / 512**0.5, torch.randn(256, device=device)
    other, gamma = torch.randn(1024, 256, device=device), torch.rand(256, device=device)
    z = F.linear(x, weight, bias)

    check("swiglu", swiglu(x, weight, bias, other), F.silu(z) * other)
    check("layer_scale", layer_scale(x, weight, bias, gamma=gamma, residual=other), other + gamma * z)
    for limit in (0.5, 1.5):
        check(f"limited to {limit}", limited(x, weight, bias, limit=limit), z.clamp(-limit, limit))
    # A tensor of one number stays where it is: the kernel reads it.
    on_device = torch.tensor(2.5, device=device)
    check("limited to 2.5", limited(x, weight, bias, limit=on_device), z.clamp(-2.5, 2.5))

    # Without a product: of a tensor that is there already.
    check("elementwise", swiglu.elementwise(x, torch.zeros(512, device=device), x), F.silu(x) * x)

    # As a layer, in training: its bias is the operand of that name.
    layer = epigemm.nn.Linear(512, 256, epilogue=limited, device=device)
    result = layer(x, limit=1.0)
    torch.autograd.backward(result.square().mean())
    assert layer.weight.grad is not None
    check("layer", result.detach(), F.linear(x, layer.weight, layer.bias).detach().clamp(-1.0, 1.0))

    lines = str(epigemm.explain(swiglu, x, weight, bias, other)).splitlines()
    print("\n".join(lines[:4]))


if __name__ == "__main__":
    main()
