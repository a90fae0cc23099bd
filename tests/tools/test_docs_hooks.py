"""What the site changes in pages: the targets of links, and columns of tables that stay on one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tools import docs_hooks as hooks


@pytest.mark.parametrize(
    ("page", "markdown", "expected"),
    [
        ("README.md", "[a](docs/models.md#figures)", "[a](models.md#figures)"),
        (
            "README.md",
            "![a](benchmarks/results/coverage.json)",
            "![a](repository/benchmarks/results/coverage.json)",
        ),
        ("docs/models.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/models.md", "[a](../examples/no_such_file.py)", "[a](../examples/no_such_file.py)"),
        ("docs/models.md", "[a](https://a/b.md)", "[a](https://a/b.md)"),
    ],
)
def test_links_lead_to_files_of_the_site(page: str, markdown: str, expected: str) -> None:
    of = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(hooks.ROOT / page)))
    assert hooks.on_page_markdown(markdown, of) == expected


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<code>random-51</code>", '<code class="name">random-51</code>'),
        ("<code>z + bias</code>", "<code>z + bias</code>"),
        ('<code class="x">a</code>', '<code class="x">a</code>'),
        ("<td>64 x 1024 x 8</td>", "<td>64&nbsp;x&nbsp;1024&nbsp;x&nbsp;8</td>"),
        ("<p>64 x 1024</p>", "<p>64 x 1024</p>"),
        ("<td>\nU x 2 x V</td>", "<td>\nU x 2 x V</td>"),
    ],
)
def test_names_and_sizes_stay_on_one_line(html: str, expected: str) -> None:
    assert hooks.on_page_content(html) == expected
