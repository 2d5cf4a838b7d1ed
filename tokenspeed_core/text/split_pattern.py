"""Reads the split pattern of a tiktoken vocabulary from the checkpoint's Python file, which is parsed, never run."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.files import read_text

SOURCES = "tokenization_*.py"
MAX_SOURCE_CHARS = 1024 * 1024
_ESCAPE = re.compile(r"\\.")
# Anchors, which match at every line in Oniguruma, and possessive {m,n}+, which Oniguruma reads as a repetition.
_NOT_PORTABLE = re.compile(r"\$|(?<!\[)\^|\{\d+,?\d*\}\+")


def read_split_pattern(folder: Path) -> str:
    """Return the regular expression that splits a text into the pieces that are encoded one by one.

    It is the first assignment to `pat_str` in a tokenization_*.py, on a class or at the top: a string, a sum of
    strings, or `"|".join` of a list of strings. Raises CheckpointError if there is none, or if tokenizers, which
    uses Oniguruma, would read the expression differently than tiktoken.
    """
    for file in sorted(folder.glob(SOURCES)):
        value = _assigned(_parse(file))
        if value is None:
            continue
        try:
            pattern = _text(value)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{file}, line {value.lineno}: pat_str is not a constant string"
            ) from error
        found = _NOT_PORTABLE.search(_ESCAPE.sub("", pattern))
        if found:
            raise CheckpointError(
                f"{file}, line {value.lineno}: pat_str contains {found[0]!r}, which is not supported. "
                "Convert the tokenizer to tokenizer.json."
            )
        return pattern
    raise CheckpointError(
        f"{folder} has no {SOURCES} that assigns pat_str, the split pattern of tiktoken.model. "
        "Copy that file from the model's repository."
    )


def _parse(file: Path) -> ast.Module:
    source = read_text(file)
    if len(source) > MAX_SOURCE_CHARS:
        raise CheckpointError(f"{file} has more than {MAX_SOURCE_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other strings
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def _assigned(tree: ast.Module) -> ast.expr | None:
    """Return the first value that the source assigns to `pat_str`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="pat_str")], value=value):
                return value
            case ast.AnnAssign(target=ast.Name(id="pat_str"), value=ast.expr() as value):
                return value
    return None


def _text(node: ast.expr) -> str:
    """Return the value of a constant expression. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value="|"), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
            keywords=[],
        ):
            return "|".join([_text(part) for part in parts])
    raise ValueError("not a constant string")
