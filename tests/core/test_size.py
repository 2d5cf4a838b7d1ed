"""The core stays small: lines of code, counted from tokens, without blanks, comments and docstrings."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree

ROOT = Path(__file__).parents[2]
CORE = ROOT / "tokenspeed_core"
MOST_LINES_OF_A_FILE = 400
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def num_lines_of_code(source: str) -> int:
    """Return the lines that hold code; one that holds several statements still counts once."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def size_of(*folders: Path, without: tuple[str, ...] = ()) -> int:
    return sum(
        num_lines_of_code(path.read_text()) for folder in folders for path in folder.rglob("*.py")
        if not set(without) & set(path.relative_to(folder).parts)
    )


def test_only_code_is_counted() -> None:
    source = '"""Doc\nstring."""\n\n# why\nx = (\n    1,\n)  # three\n\n\ndef f():\n    "doc"\n    return """a\nb"""\n'
    assert num_lines_of_code(source) == 3 + 1 + 2


def test_scheduler_and_kv_manager_and_registry_are_small() -> None:
    assert 500 < size_of(CORE / "scheduler", CORE / "kv", CORE / "kernels") < 3000


def test_the_core_is_small() -> None:
    assert 2000 < size_of(CORE, without=("testing",)) < 9000


def test_no_file_of_a_package_is_long() -> None:
    sources = [
        path for folder in ("tokenspeed_*", "plugins") for path in ROOT.glob(f"{folder}/**/*.py")
        if not {"build", "dist"} & set(path.relative_to(ROOT).parts)
    ]
    assert len(sources) > 100
    long = {str(path.relative_to(ROOT)): num for path in sources
            if (num := len(path.read_text().splitlines())) > MOST_LINES_OF_A_FILE}
    assert long == {}
