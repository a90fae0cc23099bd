"""PyTorch's own sample inputs: its OpInfo database, imported without what the import does to the process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings

from tests.support.untyped import backends


def _op_db() -> list[Any]:
    # The import freezes the flags of torch.backends, which other tests set, adds variables and warning filters, and
    # replaces the profile of hypothesis that conftest.py has loaded.
    flags, frozen = backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag"
    allowed, environment = flags[frozen], dict(os.environ)
    try:
        with warnings.catch_warnings():
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        flags[frozen] = allowed
        settings.load_profile("epigemm")
        for added in os.environ.keys() - environment.keys():
            del os.environ[added]
    return list(op_db)


_ALL = _op_db()


@dataclass(frozen=True)
class Sample:
    """One call that PyTorch tests its operator with: `op(x, *args, **kwargs)`."""

    x: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def infos(name: str) -> list[Any]:
    """The entries of an operator, one for each variant; there is at least one."""
    found = [info for info in _ALL if info.name == name]
    assert found, f"torch has no OpInfo called {name}"
    return found


def samples(
    name: str,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    requires_grad: bool = False,
    reference: bool = False,
) -> Iterator[Sample]:
    """The samples of all variants of an operator, each as it is and with tensors that are not contiguous.

    Args:
        name: of the operator in `op_db`.
        dtype: of the tensors.
        device: of the tensors.
        requires_grad: whether the tensors do.
        reference: take the larger set of `reference_inputs`: more layouts, extremal values.
    """
    for info in infos(name):
        torch.manual_seed(0)
        make = info.reference_inputs if reference else info.sample_inputs
        for drawn in make(device, dtype, requires_grad=requires_grad):
            for each in (drawn, drawn.noncontiguous()):
                yield Sample(each.input, tuple(each.args), dict(each.kwargs))
