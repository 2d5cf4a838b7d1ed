"""Chooses the grammar backend, and makes its compiler for the model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from tokenspeed_core.api.grammars import GrammarCompiler, GrammarRanking, GrammarSpec, Vocabulary
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer

AUTO, NONE = "auto", "none"


class GrammarBackend:
    """A grammar backend for one model. Its compiler is made on first use. Thread-safe."""

    def __init__(
        self,
        entry: Entry,
        spec: GrammarSpec,
        folder: Path,
        vocab_size: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        """`folder` has the tokenizer, `vocab_size` is the model's, `eos_ids` are the tokens that end an output."""
        self.entry = entry
        self.vocab_size = vocab_size
        self.bounds_time = spec.bounds_time
        self._spec = spec
        self._folder = folder
        self._eos_ids = eos_ids
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens. Raises CheckpointError."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(
                    load_tokenizer(self._folder), self.vocab_size, self._eos_ids
                )
            return self._vocabulary

    def compiler(self) -> GrammarCompiler:
        """Return the compiler. Raises PluginError or CheckpointError."""
        vocabulary = self.vocabulary
        with self._lock:
            if self._compiler is None:
                self._compiler = make(
                    self.entry,
                    self._spec.load,
                    lambda: self._spec.make(vocabulary),
                    GrammarCompiler,  # type: ignore[type-abstract]
                )
            return self._compiler

    def to_wire(self) -> dict[str, Any]:
        """Return the arguments with which a subprocess makes the same compiler, as plain data."""
        return {
            "spec": self.entry.value,
            "folder": str(self._folder),
            "vocab_size": self.vocab_size,
            "eos_ids": list(self._eos_ids),
        }


def find_backend(name: str, catalog: Catalog) -> tuple[Entry, GrammarSpec] | None:
    """Return the backend that `--grammar-backend` names; for "auto", the first of the measured ranking.

    None if it is "none", or if no measured backend is installed. Raises PluginError.
    """
    if name == NONE:
        return None
    if name != AUTO:
        entry = catalog.get("grammars", name, flag="--grammar-backend")
        return entry, catalog.need(entry, GrammarSpec)
    installed = {entry.name: entry for entry in catalog.entries("grammars")}
    for measured in _ranked(catalog):
        if measured in installed:
            spec = catalog.load(installed[measured], GrammarSpec)
            if spec is not None:
                return installed[measured], spec
    return None


def _ranked(catalog: Catalog) -> list[str]:
    """Return the measured backends, the fastest first."""
    return [
        name
        for entry in catalog.entries("rankings")
        for each in catalog.load(entry, tuple) or ()
        if isinstance(each, GrammarRanking)
        for name, _ in each.figures
    ]


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> Vocabulary:
    """Return the tokens of a model. Its vocabulary may be larger or smaller than the tokenizer's."""
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(i) for i in range(vocab_size)),
        special_ids=frozenset(i for i in tokenizer.special_ids if i < vocab_size),
        eos_ids=tuple(i for i in eos_ids if i < vocab_size),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).tolist(),
    )
