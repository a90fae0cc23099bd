"""How far a run has come, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_FEW_STEPS = 200


@contextlib.contextmanager
def shown_progress(total: int) -> Iterator[Any]:
    """A progress display on standard error: a bar on a terminal, plain lines elsewhere."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    started = time.monotonic()
    if not console.is_terminal:
        done, shown = 0, started

        def plain(text: str, finished: bool) -> None:
            nonlocal done, shown
            done += finished
            now = time.monotonic()
            # Of many short steps, one line a second.
            if finished and (total <= _FEW_STEPS or done == total or now - shown >= 1.0):
                print(f"[{now - started:6.1f} s] {done}/{total} {text}", file=sys.stderr, flush=True)
                shown = now

        yield plain
        return
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, finished: bar.update(task, description=text, advance=int(finished))
