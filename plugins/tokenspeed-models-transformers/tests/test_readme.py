"""The README lists the models that the tests run."""

from __future__ import annotations

from pathlib import Path

from tiny_models import MODELS, MORE

README = Path(__file__).parents[1] / "README.md"


def test_readme_lists_the_tested_models() -> None:
    _, _, rest = README.read_text().partition("<!-- models -->")
    listed, _, _ = rest.partition("<!-- /models -->")
    assert listed.split() == [f"`{name}`" for name in sorted({*MODELS, *MORE})]
    assert len(MODELS) >= 20
