"""Who wants to know what ran unfused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

watchers: list[list[tuple[str, str]]] = []


@contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Collect (product or model, reason) for all that runs unfused in calls of fused models in the block.

    Calls of what `torch.compile` made with the backend are not seen: their reports tell.

    Example:
        >>> with epigemm.fusion.watch() as unfused:
        ...     model(x)
        >>> unfused
        []
    """
    seen: list[tuple[str, str]] = []
    watchers.append(seen)
    try:
        yield seen
    finally:
        watchers[:] = [each for each in watchers if each is not seen]


def tell(name: str, reason: str) -> None:
    """Tell whoever watches that something ran unfused."""
    for seen in watchers:
        seen.append((name, reason))
