"""Mermaid blocks of the pages as SVG, drawn when the site is built: a page that is read fetches no script for them.

mkdocs.yml names `draw` as the format of such a block.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

_CONFIG = {
    "theme": "neutral",
    "themeVariables": {"fontSize": "14px", "xyChart": {"plotColorPalette": "#7986cb"}},
    "xyChart": {"width": 820, "height": 260},
    "flowchart": {
        "nodeSpacing": 18,
        "rankSpacing": 40,
        "padding": 8,
        "wrappingWidth": 180,
        "subGraphTitleMargin": {"top": 4, "bottom": 8},
    },
}
_ID = "my-svg"
"""Of every figure that mermaidx draws. Its styles begin with it."""


def draw(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """One block as HTML: the format of a fence of `pymdownx.superfences`.

    Raises:
        SuperFencesException: Mermaid does not understand the source. The build fails then.
    """
    from pymdownx.superfences import SuperFencesException

    try:
        return f'<div class="{css_class}">{svg(source)}</div>'
    except RuntimeError as error:
        raise SuperFencesException(f"{language}: {error}: {source}") from error


@functools.cache
def svg(source: str) -> str:
    """The figure, with an id of its own on the page.

    Raises:
        RuntimeError: Mermaid does not understand the source.
    """
    import mermaidx  # type: ignore[import-not-found, import-untyped, unused-ignore]

    drawn: str = mermaidx.render(source, config=_CONFIG).svg()
    name = "figure-" + hashlib.sha256(source.encode()).hexdigest()[:8]
    return drawn.replace(_ID, name)
