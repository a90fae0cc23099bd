"""Loading the native module: what is said where it is missing or does not load, and its operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epigemm import _native


def test_a_missing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_LIBRARY", tmp_path / "_C.so")
    with pytest.raises(ImportError, match=r"_C\.so is missing.*pip install \."):
        _native._load()


def test_a_module_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "_C.so"
    file.write_text("no library")
    monkeypatch.setattr(_native, "_LIBRARY", file)
    with pytest.raises(ImportError, match=rf"does not load under torch {torch.__version__.split('+')[0]}"):
        _native._load()


def test_an_operator_without_the_layer_above_it() -> None:
    x, out = torch.linspace(-3, 3, 32).view(2, 16), torch.empty(2, 16)
    arguments: tuple[Any, ...] = "sigmoid", x, None, [], []
    _native.operator("_elementwise_out")(*arguments, out)
    torch.testing.assert_close(out, torch.sigmoid(x))
    with pytest.raises(AttributeError, match="no_such"):
        _native.operator("no_such")


def test_a_device_without_kernels_has_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert _native.cuda_status(0)
