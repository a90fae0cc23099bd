"""In place of the entry: answers, and what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epigemm.calls import entry
from epigemm.linker import loader
from epigemm.planner import plans


class Answers:
    """Answers of one of the entry's functions, one after the other. Linking succeeds, and kernels run anywhere.

    `linear`: of the module's, which all of them call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, *answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.linked: list[str] = []
        self._answers: Iterator[Any] = iter(answers)
        if function == "linear":
            monkeypatch.setattr(entry, "_module", SimpleNamespace(linear=self.ask, sees=entry._module.sees))
        else:
            monkeypatch.setattr(entry, function, self.ask)
        monkeypatch.setattr(loader, "link", self.link)
        monkeypatch.setattr(plans, "has_gpu_kernels", lambda x: True)

    def ask(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return next(self._answers)

    def link(self, epilogue: Any, missing: str, device: torch.device) -> str:
        self.linked.append(missing)
        return ""
