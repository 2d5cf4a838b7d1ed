"""Flags of `tokenspeed serve` on the bench command line, as keywords of `LLM`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from tokenspeed_bench.errors import BenchError

NUMBER = re.compile(r"-\d")
REPEATED = {"kernel_backend", "backend_option"}  # flags of pairs, which one text may hold


def keywords(words: Sequence[str]) -> dict[str, Any]:
    """Return keywords for flags: `--max-num-seqs 8` becomes `max_num_seqs="8"`.

    A flag without a value is true, `--no-enable-x` is `enable_x=False`, and `--attention-backend.decode a` adds to a
    mapping. Raises BenchError for a stray word and for a flag given twice.
    """
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        at += 1
        if not flag.startswith("--"):
            raise BenchError(
                f"{flag}: unexpected argument. Put the model first: `bench latency MODEL --flag`."
            )
        given: Any = value if equals else True
        if (
            not equals
            and at < len(words)
            and (not words[at].startswith("-") or NUMBER.match(words[at]))
        ):
            given, at = words[at], at + 1
        name = flag[2:].replace("-", "_")
        if name.startswith("no_enable_") and given is True:
            name, given = name[3:], False
        _put(found, name, given, flag)
    return found


def _put(found: dict[str, Any], name: str, value: Any, flag: str) -> None:
    name, dot, key = name.partition(".")
    if dot:
        before = found.get(name, {})
        mapping = dict(before) if isinstance(before, dict) else {"default": before}
        if key in mapping:
            raise BenchError(f"{flag}: given twice")
        found[name] = {**mapping, key: value}
    elif isinstance(found.get(name), dict):
        found[name] = {"default": value, **found[name]}
    elif name in found and name in REPEATED:
        found[name] += f" {value}"
    elif name in found:
        raise BenchError(f"{flag}: given twice")
    else:
        found[name] = value


def check_spelling(words: Iterable[str], own: Sequence[str], command: str) -> None:
    """Reject a flag that is nearly one of the command's own options. Raises BenchError."""
    for word in words:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, own, n=1, cutoff=0.85) if flag.startswith("--") else []
        if near:
            raise BenchError(f"{flag}: no such option of `{command}`; did you mean {near[0]}?")
