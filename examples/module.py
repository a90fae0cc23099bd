"""A fused layer over the parameters of an existing one, in training.

`python examples/module.py`
"""

from __future__ import annotations

import torch
from torch import nn

import epigemm


def main() -> None:
    """Replace one layer of a model and go on training it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    linear, head = nn.Linear(64, 128).to(device), nn.Linear(128, 1).to(device)
    optimiser = torch.optim.Adam([*linear.parameters(), *head.parameters()], lr=1e-2)

    # It shares linear.weight and linear.bias: the optimiser above trains it.
    layer = epigemm.nn.LinearReLU.from_linear(linear)

    x = torch.randn(256, 64, device=device)
    target = x.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(50):
        loss = nn.functional.mse_loss(head(layer(x)), target)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.2f} before, {losses[-1]:.2f} after 50 steps")
    if not losses[-1] < losses[0]:
        raise RuntimeError("the model has learned nothing")


if __name__ == "__main__":
    main()
