"""Requests with grammars for engines of `drafted`. No subprocess tries the grammars first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from drafted import Reply
from tokenspeed_testing.requests import request

from tokenspeed_core.api.grammars import Vocabulary
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.engine.grammars import Grammars
from tokenspeed_core.engine.grammars.backend import GrammarBackend, find_backend
from tokenspeed_core.engine.grammars.pool import CompilePool
from tokenspeed_core.engine.messages import Grammar, Submit
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.worker.local import LocalRunner

PATTERN = "(abab|cdcd|abcd){2,5}f"
BACKENDS = [entry.name for entry in Catalog.discover().entries("grammars")]


def soaks(grammars: str, num_requests: int) -> pytest.MarkDecorator:
    """Return the cases of a test of random requests: a few with one backend, before releases many with each backend."""
    return pytest.mark.parametrize(
        ("grammars", "num_requests"),
        [
            (grammars, num_requests),
            *(pytest.param(each, 5000, marks=pytest.mark.release) for each in BACKENDS),
        ],
    )


class Unchecked:
    """Accepts all grammars without a subprocess that tries them."""

    def check(self, kind: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def characters(vocab_size: int, first: str) -> Vocabulary:
    """Return a vocabulary of single characters from `first` on, of which the last two are a pad and an end token."""
    code = ord(first)
    return Vocabulary(
        (*(bytes([code + i]) for i in range(vocab_size - 2)), b"<pad>", b"<end>"),
        frozenset({vocab_size - 2, vocab_size - 1}),
        (vocab_size - 1,),
        lambda text: [byte - code for byte in text.encode()],
    )


def grammar_backend(
    name: str, catalog: Catalog, runner: LocalRunner, vocabulary: Vocabulary | None = None
) -> GrammarBackend:
    """Return a grammar backend for a runner's model, by default with the vocabulary of its tokenizer."""
    entry, spec = find_backend(name, catalog) or pytest.fail(f"no grammar backend {name}")
    checkpoint, vocab_size = runner.resolved.checkpoint, runner.resolved.limits.vocab_size
    eos_ids = checkpoint.info.eos_token_ids if vocabulary is None else vocabulary.eos_ids
    backend = GrammarBackend(entry, spec, checkpoint.path, vocab_size, eos_ids)
    backend._vocabulary = vocabulary
    return backend


def grammars_of(backend: GrammarBackend) -> Callable[[Scheduler], Grammars]:
    """Return the argument `grammars` of `make_engine`."""
    return lambda scheduler: Grammars(
        scheduler, backend, CompilePool(backend.compiler, Unchecked, backend.vocab_size)
    )


def grammar_requests(backend: GrammarBackend, prompts: Sequence[Sequence[int]]) -> list[Submit]:
    """Return a request for each prompt. All outputs must match `PATTERN`."""
    stops = np.asarray(backend.vocabulary.eos_ids, np.int32)
    return [
        request(
            i,
            prompt,
            max_tokens=24,
            temperature=i % 3,
            logprobs=i % 2 - 1,
            grammar=Grammar("regex", PATTERN),
            stop_token_ids=stops,
        )
        for i, prompt in enumerate(prompts)
    ]


def num_matches(backend: GrammarBackend, replies: Iterable[tuple[Submit, Reply]]) -> int:
    """Return the number of outputs that ended with their grammar. Fails if one does not match it."""
    tokens = backend.vocabulary.tokens
    texts = [
        b"".join(tokens[token] for token in reply.token_ids[:-1]).decode()
        for submit, reply in replies
        if submit.grammar is not None and reply.finish == FinishReason.STOP
    ]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    return len(texts)
