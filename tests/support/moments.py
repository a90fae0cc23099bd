"""Column statistics against those of the same stored numbers in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(z: Tensor, mean: Tensor, variance: Tensor) -> None:
    """`mean` and the biased `variance` of the columns of z, as accurate as sums of 64 deviations are.

    The error of a sum of deviations grows with the largest one, and that of a mean with the mean.
    """
    exact = z.double()
    of_variance, of_mean = torch.var_mean(exact, 0, correction=0)
    largest = (exact - of_mean).abs().amax(0)
    epsilon = torch.finfo(mean.dtype).eps
    mean_error, variance_error = (mean.double() - of_mean).abs(), (variance.double() - of_variance).abs()
    # What float64 loses is far below, except where float64 is tested.
    least = 64 * torch.finfo(torch.float64).eps * of_mean.abs()
    bound = 2 * epsilon * of_mean.abs() + 16 * epsilon * largest + least
    wrong = ~(mean_error <= bound)
    assert not wrong.any(), f"mean: {int(wrong.sum())} columns, first {wrong.nonzero()[0].tolist()}"
    bound = 64 * epsilon * largest**2 + 4 * epsilon * of_mean.abs() * largest + least * largest + least**2
    wrong = ~(variance_error <= bound)
    assert not wrong.any(), f"variance: {int(wrong.sum())} columns, first {wrong.nonzero()[0].tolist()}"


def poison_free_memory(device: torch.device, mebibytes: int = 64) -> None:
    """Fill memory with NaN that the next tensors may get."""
    for size in (1 << 9, 1 << 14, 1 << 19, mebibytes << 18):
        torch.full((size,), float("nan"), device=device)
