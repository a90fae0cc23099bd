"""One function in place of two: `relu(linear(x))`.

`python examples/functional.py`
"""

from __future__ import annotations

import torch

import epigemm


def main() -> None:
    """Compare both, and ask which kernels would run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(1024, 512, device=device)
    weight, bias = torch.randn(256, 512, device=device), torch.randn(256, device=device)

    before = torch.relu(torch.nn.functional.linear(x, weight, bias))
    after = epigemm.linear_relu(x, weight, bias)

    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3)
    print(epigemm.explain(epigemm.linear_relu, x, weight, bias))


if __name__ == "__main__":
    main()
