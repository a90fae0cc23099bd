"""In place of the entry: answers, and what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from epigemm.calls import entry
from epigemm.linker import loader
from epigemm.planner import plans


class Answers:
    """Answers of one of the entry's functions, one after the other. Linking succeeds, and kernels run anywhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, *answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.linked: list[str] = []
        self._answers: Iterator[Any] = iter(answers)
        monkeypatch.setattr(entry, function, self.ask)
        monkeypatch.setattr(loader, "link", self.link)
        monkeypatch.setattr(plans, "has_gpu_kernels", lambda x: True)

    def ask(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return next(self._answers)

    def link(self, epilogue: Any, missing: str, device: torch.device) -> str:
        self.linked.append(missing)
        return ""
